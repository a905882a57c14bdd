"""Layouts to try for a model on a number of ranks, by size only: many of them fail some check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from megatron5d.config.convert import Change
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.registry import find_schedule

MODES = ("none", "selective", "full")  # of recompute; the first one keeps most
SCHEDULES = (  # (schedule, chunks per rank)
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zb_h1", 1),
    ("zb_v", 1),
    ("dualpipe_v", 1),
)
MIN_SLICE = 4096  # tokens of a sequence on one rank, with cp
MAX_PP = 32
MAX_EXPERTS = 32  # of one rank
MICRO_BATCHES = (1, 2, 4, 8, 16)
BATCH_KEYS = ("train.mbs", "recompute.mode")


class Proposals:
    """Combinations of values to try; many of them fail some check.

    Args:
        config: gives the model, and the values of fixed keys.
        world: number of ranks.
        node: ranks that share fast links; tp is not larger.
        fixed: keys whose values are not changed.
    """

    def __init__(self, config: Config, world: int, node: int, fixed: Iterable[str] = ()) -> None:
        self.config, self.world, self.node, self.fixed = config, world, node, set(fixed)

    def _free(self, key: str, values: Sequence[Any]) -> Sequence[Any]:
        """Values to try for a key: `values`, or only the configured one if it is fixed."""
        group, name = key.split(".")
        return [getattr(getattr(self.config, group), name)] if key in self.fixed else values

    def shapes(self) -> Iterator[Change]:
        """Combinations of sizes of the axes and ZeRO stages."""
        model, world = self.config.model, self.world
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        tps = [n for n in divisors if n <= self.node and model.num_heads % n == 0]
        cps = [n for n in divisors if n == 1 or self.config.train.seq_len // n >= MIN_SLICE]
        pps = [n for n in divisors if n <= min(MAX_PP, model.num_layers)]
        experts = [
            n
            for n in divisors
            if model.num_experts % n == 0 and n * MAX_EXPERTS >= model.num_experts
        ]
        for tp, cp, pp in product(
            *(self._free(f"parallel.{n}", v) for n, v in (("tp", tps), ("cp", cps), ("pp", pps)))
        ):
            if world % (tp * cp * pp):
                continue
            shards = world // (tp * pp)
            axes = {
                "parallel.sp": [tp > 1],
                "parallel.ep": [n for n in experts if shards * tp % n == 0]
                if model.num_experts
                else [1],
                "parallel.etp": [1 if model.num_experts else self.config.parallel.etp],
                "parallel.zero": [0] if shards == 1 else [1, 3] if pp == 1 else [1],
            }
            for values in product(*(self._free(key, values) for key, values in axes.items())):
                yield {
                    "parallel.tp": tp,
                    "parallel.cp": cp,
                    "parallel.pp": pp,
                    **dict(zip(axes, values)),
                }

    def batches(self, dp: int) -> Iterator[Change]:
        """Combinations of micro-batch sizes and recompute modes.

        Args:
            dp: data-parallel ranks.
        """
        sizes = [n for n in MICRO_BATCHES if self.config.train.gbs % (n * dp) == 0]
        for values in product(*map(self._free, BATCH_KEYS, (sizes, MODES))):
            yield dict(zip(BATCH_KEYS, values))

    def schedules(self, pp: int) -> list[Change]:
        """Combinations of schedules and chunks per rank, for pp pipeline ranks."""
        deepest = self.config.model.num_layers // pp
        pairs = [
            (name, vpp)
            for name, vpp in SCHEDULES
            if pp > 1 and max(vpp, find_schedule(name).chunks) <= deepest
        ] or SCHEDULES[:1]
        changes = [{"pipeline.schedule": name, "parallel.vpp": vpp} for name, vpp in pairs]
        fixed = {key: self._free(key, ())[0] for key in changes[0] if key in self.fixed}
        matching = [change for change in changes if change | fixed == change]
        return matching or [changes[0] | fixed]

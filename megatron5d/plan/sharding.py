"""What data parallelism sends for some units: whose gradients are reduced, whose weights are gathered, and when.

The formulas are those of data_parallel/grad_sync.py and zero.py; n ranks share a bucket, of Ψ elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.program import Program
from megatron5d.plan.work import Unit

Transfers = Mapping[tuple[str, str], float]
"""(axis, operation) -> bytes that this rank sends."""

_WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2}


class Sharding:
    """ZeRO of one layout.

    Args:
        config: parallel and precision.
        sizes: axis name -> ranks; the lines of pairs among them where mirrored pipeline ranks hold everything together.
    """

    def __init__(self, config: Config, sizes: Mapping[str, int]) -> None:
        parallel, dtype = config.parallel, config.precision.dtype
        self.zero, self.sizes, pair = parallel.zero, sizes, "_pair" if "dp_cp_pair" in sizes else ""
        self._wholes = f"dp_cp{pair}", f"edp{pair}"
        cut, copied = (pair, "") if self.zero == 1 else ("", pair)  # as data_parallel.grad_sync.data_axes
        self.shards = {False: f"dp_shard_cp{cut}", True: f"edp_shard{cut}"}  # experts' or not -> axis
        self._replicas = {False: f"dp_replicate{copied}", True: f"edp_replicate{copied}"}
        self.weight, self.grad = _WIDTHS[dtype], 8 if dtype == "fp64" else _WIDTHS[config.precision.grad_dtype]
        masters = 4 if dtype == "bf16" and config.precision.master_weights else 0
        wide = 8 if dtype == "fp64" else 4
        self.optimizer, self.moment = (0, 0) if config.optim.offload else (masters + 2 * wide, wide)
        self.reduces_each = self.zero >= 2 and parallel.reduce == "per_microbatch"
        self.gathers_each = self.zero == 3 and parallel.regather == "per_microbatch"

    def beside(self, units: Iterable[Unit], op: str) -> Transfers:
        """What is sent beside each pass of a stage."""
        units, sent = list(units), defaultdict[tuple[str, str], float](float)
        if self.gathers_each and op != "W":
            sent |= self._gather(units)
        if self.reduces_each and op in "BW":
            sent |= self._scatter(units)
        return sent

    def reduced(self, units: Iterable[Unit]) -> Transfers:
        """At the end of a step: what is not reduced beside the passes, and sums over replicas and over copies."""
        units, sent = list(units), defaultdict[tuple[str, str], float](float)
        for unit in units:
            for axis, elements in unit.copied.items():
                n, share = self.sizes[axis], self.sizes[self.shards[False]] if self.zero else 1
                sent[axis, "all_reduce"] += 2 * (n - 1) / n * elements / share * self.grad
        if self.zero == 0:
            for whole, elements in zip(self._wholes, (_dense(units), _expert(units))):
                n = self.sizes[whole]
                sent[whole, "all_reduce"] += 2 * (n - 1) / n * elements * self.grad
            return sent
        if not self.reduces_each:
            sent |= self._scatter(units)
        for shard, replicas, elements in self._lines(units):
            n = self.sizes[replicas]
            sent[replicas, "all_reduce"] += 2 * (n - 1) / n * elements / self.sizes[shard] * self.grad
        return sent

    def gathered(self, units: Iterable[Unit]) -> Transfers:
        """What gathering weights sends once a step, if they stay whole or are gathered once."""
        return {} if self.zero == 0 or self.gathers_each else self._gather(list(units))

    def turned(self, units: Sequence[Unit], program: Program) -> Transfers:
        """What a rank without a pipeline saves, because the unit between forward and backward stays whole: below 0."""
        if not self.gathers_each or program.num_ranks > 1:
            return {}
        m, sent = program.num_microbatches, defaultdict[tuple[str, str], float](float)
        for unit, times in ((units[-1], m), (units[0], m - 1)):
            for key, num_bytes in self._gather([unit]).items():
                sent[key] -= times * num_bytes
        return sent

    def owned(self, units: Iterable[Unit]) -> float:
        """Elements that this rank's optimiser updates."""
        units = list(units)
        if self.zero == 0:
            return _dense(units) + _expert(units)
        return sum(elements / self.sizes[shard] for shard, _, elements in self._lines(units))

    def owned_matrices(self, units: Iterable[Unit]) -> float:
        """Elements of this rank's matrices that Muon updates."""
        found = [matrix for unit in units for matrix in unit.matrices]
        shards = {expert: self.sizes[axis] if self.zero else 1 for expert, axis in self.shards.items()}
        return sum(matrix.elements / shards[matrix.expert] for matrix in found)

    def state_bytes(self, units: Iterable[Unit]) -> float:
        """Bytes of weights, gradients and optimiser state that stay, without temporary buffers and padding."""
        units = list(units)
        lines = [(elements, self.sizes[shard]) for shard, _, elements in self._lines(units)]
        per_element = {"weights": (self.weight, 3), "gradients": (self.grad, 2), "optimizer": (self.optimizer, 1)}
        whole = sum(
            elements * width / (n if self.zero >= cut else 1)
            for elements, n in lines
            for width, cut in per_element.values()
        )
        return whole - self.owned_matrices(units) * self.moment  # Muon has one

    def _lines(self, units: Sequence[Unit]) -> Sequence[tuple[str, str, int]]:
        elements = {False: _dense(units), True: _expert(units)}
        return [(self.shards[expert], self._replicas[expert], elements[expert]) for expert in elements]

    def _gather(self, units: Sequence[Unit]) -> dict[tuple[str, str], float]:
        return {
            (shard, "all_gather"): (self.sizes[shard] - 1) / self.sizes[shard] * elements * self.weight
            for shard, _, elements in self._lines(units)
        }

    def _scatter(self, units: Sequence[Unit]) -> dict[tuple[str, str], float]:
        return {
            (shard, "reduce_scatter"): (self.sizes[shard] - 1) / self.sizes[shard] * elements * self.grad
            for shard, _, elements in self._lines(units)
        }


def _dense(units: Iterable[Unit]) -> int:
    return sum(unit.dense for unit in units)


def _expert(units: Iterable[Unit]) -> int:
    return sum(unit.expert for unit in units)

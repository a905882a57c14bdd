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
_Sums = defaultdict[tuple[str, str], float]

WHOLE = "whole"  # stands for an axis of one rank, where nothing is sharded
_WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2}


class Sharding:
    """ZeRO of one layout.

    Args:
        config: parallel and precision.
        sizes: axis name -> ranks; with the lines of pairs where mirrored pipeline ranks hold parameters together.
        shared: which ones they hold together: all, tied or none.
    """

    def __init__(self, config: Config, sizes: Mapping[str, int], shared: str = "none") -> None:
        parallel, dtype = config.parallel, config.precision.dtype
        self.zero, self.sizes = parallel.zero, {**sizes, WHOLE: 1}
        pair = "_pair" if shared == "all" else ""
        self._dense = _data_axes("dp_cp", "dp_shard_cp", "dp_replicate", self.zero, pair)
        self._expert = _data_axes("edp", "edp_shard", "edp_replicate", self.zero, pair)
        self._tied = _data_axes("dp_cp", "dp_shard_cp", "dp_replicate", self.zero, "_pair")
        self.shards = {False: self._dense[0], True: self._expert[0]}  # experts' or not -> axis
        self.weight, self.grad = _WIDTHS[dtype], 8 if dtype == "fp64" else _WIDTHS[config.precision.grad_dtype]
        masters = 4 if dtype == "bf16" and config.precision.master_weights else 0
        wide = 8 if dtype == "fp64" else 4
        self.optimizer, self.moment = (0, 0) if config.optim.offload else (masters + 2 * wide, wide)
        self.reduces_each = self.zero >= 2 and parallel.reduce == "per_microbatch"
        self.gathers_each = self.zero == 3 and parallel.regather == "per_microbatch"

    def beside(self, units: Iterable[Unit], op: str) -> Transfers:
        """What is sent beside each pass of a stage."""
        units, sent = list(units), _Sums(float)
        if self.gathers_each and op != "W":
            borrowed = sum(unit.borrowed_after(before) for unit, before in zip(units, [None, *units]))
            self._gather(units, borrowed, sent)
        if self.reduces_each and op in "BW":
            self._scatter(units, sum(unit.borrowed_after(None) for unit in units), sent)
        return sent

    def reduced(self, units: Iterable[Unit], *, last: bool = False) -> Transfers:
        """At the end of a step: what is not reduced beside the passes, and sums over replicas and over copies.

        Args:
            units: whose gradients.
            last: also what is reduced beside the last pass.
        """
        units, sent = list(units), _Sums(float)
        for unit in units:
            for axis, elements in unit.copied.items():
                n, share = self.sizes[axis], self.sizes[self.shards[False]]
                sent[axis, "all_reduce"] += 2 * (n - 1) / n * elements / share * self.grad
        if last or not self.reduces_each:
            self._scatter(units, 0, sent)
        for shard, replicas, elements in self._lines(units):
            n = self.sizes[replicas]
            sent[replicas, "all_reduce"] += 2 * (n - 1) / n * elements / self.sizes[shard] * self.grad
        return sent

    def gathered(self, units: Iterable[Unit]) -> Transfers:
        """What gathering weights sends once a step, if they stay whole or are gathered once."""
        sent = _Sums(float)
        if not self.gathers_each:
            self._gather(list(units), 0, sent)
        return sent

    def turned(self, units: Sequence[Unit], program: Program) -> Transfers:
        """What a rank without a pipeline saves, because the unit between forward and backward stays whole: below 0."""
        if not self.gathers_each or program.num_ranks > 1:
            return {}
        m, saved = program.num_microbatches, _Sums(float)
        for unit, times in ((units[-1], m), (units[0], m - 1)):
            of_one = _Sums(float)
            self._gather([unit], unit.borrowed_after(None), of_one)
            for key, num_bytes in of_one.items():
                saved[key] -= times * num_bytes
        return saved

    def owned(self, units: Iterable[Unit]) -> float:
        """Elements that this rank's optimiser updates."""
        return sum(elements / self.sizes[shard] for shard, _, elements in self._lines(list(units)))

    def owned_matrices(self, units: Iterable[Unit]) -> float:
        """Elements of this rank's matrices that Muon updates."""
        found = [matrix for unit in units for matrix in unit.matrices]
        return sum(matrix.elements / self.sizes[self.shards[matrix.expert]] for matrix in found)

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
        """(ranks that own a slice each, ranks that own the same slice, elements) of what is reduced alike."""
        elements = [
            (self._dense, sum(unit.dense for unit in units)),
            (self._expert, sum(unit.expert for unit in units)),
            (self._tied, sum(unit.tied for unit in units)),
        ]
        return [(*axes, count) for axes, count in elements if count]

    def _gather(self, units: Sequence[Unit], borrowed: int, sent: _Sums) -> None:
        """Adds what gathering some units' parameters sends, and dense ones that they read of another unit."""
        for shard, _, elements in (*self._lines(units), (*self._dense, borrowed)):
            sent[shard, "all_gather"] += (1 - 1 / self.sizes[shard]) * elements * self.weight

    def _scatter(self, units: Sequence[Unit], borrowed: int, sent: _Sums) -> None:
        """Adds what reducing their gradients sends."""
        for shard, _, elements in (*self._lines(units), (*self._dense, borrowed)):
            sent[shard, "reduce_scatter"] += (1 - 1 / self.sizes[shard]) * elements * self.grad


def _data_axes(whole: str, shard: str, replicate: str, zero: int, pair: str) -> tuple[str, str]:
    """The axes that own one slice each, and the same slice; as data_parallel.grad_sync.data_axes."""
    if zero == 0:
        return WHOLE, whole + pair
    return (shard + pair, replicate) if zero == 1 else (shard, replicate + pair)

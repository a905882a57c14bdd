"""What data parallelism sends for some units: whose gradients are reduced, whose weights are gathered, and when.

The formulas are those of data_parallel/grad_sync.py and zero.py; n ranks share a bucket, of Ψ elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.planning.work import Unit

Transfers = Mapping[tuple[str, str], float]
"""(axis, operation) -> bytes that this rank sends."""
_Sums = defaultdict[tuple[str, str], float]

WHOLE = "whole"  # stands for an axis of one rank, where nothing is sharded


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
        self.weight = ELEMENT_BYTES[dtype]
        self.grad = 8 if dtype == "fp64" else ELEMENT_BYTES[config.precision.grad_dtype]
        masters = 4 if dtype == "bf16" and config.precision.master_weights else 0
        wide = 8 if dtype == "fp64" else 4
        self.optimizer, self.moment = (0, 0) if config.optim.offload else (masters + 2 * wide, wide)
        self.reduces_each = self.zero >= 2 and parallel.reduce == "per_microbatch"
        self.gathers_each = self.zero == 3 and parallel.regather == "per_microbatch"
        self._gathers_eight_bits = self.zero == 3 and config.precision.fp8_gather

    def beside(self, units: Sequence[Unit], op: str, gathered: tuple[float, float] | None = None) -> Transfers:
        """What is sent beside each pass of a stage.

        Args:
            units: of the stage.
            op: the pass.
            gathered: bytes of dense parameters, and of experts', that it gathers; None = of all that the units read.
        """
        sent, borrowed = _Sums(float), sum(unit.borrowed_elements for unit in units)
        if self.gathers_each and op != "W":
            if gathered is None:
                dense, expert = self.whole_bytes(units)
                gathered = dense + borrowed * self.weight, expert
            self._add(sent, "all_gather", self._by_kind(gathered))
        if self.reduces_each and op in "BW":
            self._scatter(units, borrowed, sent)
        return sent

    def whole_bytes(self, units: Iterable[Unit]) -> tuple[float, float]:
        """Bytes of what the units' own dense parameters, and their experts', are gathered as."""
        units, saved = list(units), self.weight - 1 if self._gathers_eight_bits else 0
        dense, expert = (sum(unit.eight_bits[kind] for unit in units) * saved for kind in (False, True))
        return (
            sum(unit.dense + unit.tied for unit in units) * self.weight - dense,
            sum(unit.expert for unit in units) * self.weight - expert,
        )

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
            units = list(units)
            lines = [(shard, elements * self.weight) for shard, _, elements in self._lines(units)]
            self._add(sent, "all_gather", self._by_kind(self.whole_bytes(units)) if self.zero == 3 else lines)
        return sent

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

    def _by_kind(self, both: tuple[float, float]) -> list[tuple[str, float]]:
        """(ranks that own a slice each, bytes) of dense and of experts' parameters."""
        return list(zip(self.shards.values(), both))

    def _scatter(self, units: Sequence[Unit], borrowed: int, sent: _Sums) -> None:
        """Adds what reducing the units' gradients sends, and those of dense elements that they borrow."""
        lines = [(shard, elements) for shard, _, elements in self._lines(units)]
        parts = [(shard, elements * self.grad) for shard, elements in (*lines, (self._dense[0], borrowed))]
        self._add(sent, "reduce_scatter", parts)

    def _add(self, sent: _Sums, operation: str, parts: Iterable[tuple[str, float]]) -> None:
        """Adds what a collective sends of so many bytes, over the ranks that own a slice each."""
        for shard, num_bytes in parts:
            sent[shard, operation] += (1 - 1 / self.sizes[shard]) * num_bytes


def _data_axes(whole: str, shard: str, replicate: str, zero: int, pair: str) -> tuple[str, str]:
    """The axes that own one slice each, and the same slice; as data_parallel.grad_sync.data_axes."""
    if zero == 0:
        return WHOLE, whole + pair
    return (shard + pair, replicate) if zero == 1 else (shard, replicate + pair)

"""What data parallelism sends and an optimiser moves, of some units; n ranks share a bucket, of Ψ
elements.

Which ranks these are, data_parallel/bucketing.py says (`data_axes`). How often ZeRO-3 gathers a
unit depends on the order of the actions: the `GatheredWeights` that trains counts it, on buckets
without memory.

Under Muon a rank makes one matrix of each round orthogonal (optim/muon.py), and every round takes
as long as its largest matrix. With `optim.offload` gradients travel to the host, which updates, and
weights back; nothing hides that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from megatron5d.comm.collectives import Pending
from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.data_parallel.bucketing import data_axes
from megatron5d.data_parallel.weight_gather import GatheredWeights
from megatron5d.pipeline_parallel.program import Action, Program
from megatron5d.planning.time.work import Elements, Matrix, Unit
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import SharedRanks
from megatron5d.topology.mesh import NO_SHARED_RANKS, Mesh

Transfers = Mapping[tuple[str, str], float]
"""(axis, operation) -> bytes that this rank sends."""
_Sums = defaultdict[tuple[str, str], float]


class Sharding:
    """ZeRO of one layout.

    Args:
        config: parallel, precision and optim.
        mesh: axes of a rank that holds the embedding.
        shared: which pipeline ranks hold parameters together.
    """

    def __init__(self, config: Config, mesh: Mesh, shared: SharedRanks = NO_SHARED_RANKS) -> None:
        parallel, dtype = config.parallel, config.precision.dtype
        self.zero, self.mesh = parallel.zero, mesh
        pair = "pair" if "pair" in shared else ""
        dense, expert = (data_axes(mesh, self.zero, pair, kind) for kind in (False, True))
        tied = data_axes(mesh, self.zero, "tied") if "tied" in shared else dense
        self._axes = Elements(dense, expert, tied)  # (shard, replicate) of each kind of parameters
        # experts' or not -> the ranks that own a slice each
        self.shards = {False: dense[0], True: expert[0]}
        self.weight = ELEMENT_BYTES[dtype]
        self.grad = 8 if dtype == "fp64" else ELEMENT_BYTES[config.precision.grad_dtype]
        masters = 4 if dtype == "bf16" and config.precision.master_weights else 0
        wide = 8 if dtype == "fp64" else 4
        self.optimizer, self.moment = (0, 0) if config.optim.offload else (masters + 2 * wide, wide)
        self.reduces_each = self.zero >= 2 and parallel.grad_reduce == "per_microbatch"
        self.gathers_each = self.zero == 3 and parallel.zero3_gather == "per_microbatch"
        self._gathers_fp8 = self.zero == 3 and config.precision.fp8_gather

    def beside(
        self, units: Sequence[Unit], op: str, gathered: tuple[float, float] | None = None
    ) -> Transfers:
        """Returns what is sent beside each pass of a stage.

        Args:
            units: of the stage.
            op: the pass.
            gathered: bytes of dense parameters, and of experts', that it gathers; None = of all
                that the units read.
        """
        sent = _Sums(float)
        if self.gathers_each and op != "W":
            if gathered is None:
                dense, expert = self.whole_bytes(units)
                gathered = (
                    dense + self.weight * sum(unit.borrowed_elements() for unit in units),
                    expert,
                )
            self._add(sent, "all_gather", zip(self.shards.values(), gathered))
        if self.reduces_each and op in "BW":
            self._scatter(units, sent)
            borrowed = sum(unit.borrowed_elements(trained=True) for unit in units)
            self._add(sent, "reduce_scatter", [(self.shards[False], borrowed * self.grad)])
        return sent

    def whole_bytes(self, units: Iterable[Unit]) -> tuple[float, float]:
        """Returns bytes of what the units' own dense parameters, and their experts', are gathered
        as."""
        units, saved = list(units), self.weight - 1 if self._gathers_fp8 else 0
        dense = sum(
            (unit.held.dense + unit.held.tied) * self.weight - unit.fp8.dense * saved
            for unit in units
        )
        return dense, sum(
            unit.held.expert * self.weight - unit.fp8.expert * saved for unit in units
        )

    def reduced(self, units: Iterable[Unit], *, last: bool = False) -> Transfers:
        """Returns what the end of a step sends: reductions beside no pass, sums over replicas and
        over copies.

        Args:
            units: whose gradients.
            last: also what is reduced beside the last pass.
        """
        units, sent = list(units), _Sums(float)
        for axis, elements in (
            (self.mesh[name], count) for unit in units for name, count in unit.copied.items()
        ):
            self._all_reduce(sent, axis, elements / self.shards[False].size)
        if last or not self.reduces_each:
            self._scatter(units, sent)
        for shard, replicate, elements in self._split(units, trained=True):
            self._all_reduce(sent, replicate, elements / shard.size)
        return sent

    def gathered(self, units: Iterable[Unit]) -> Transfers:
        """Returns what gathering weights sends once a step, if they stay whole or are gathered
        once."""
        units, sent = list(units), _Sums(float)
        if self.zero == 3 and not self.gathers_each:
            self._add(sent, "all_gather", zip(self.shards.values(), self.whole_bytes(units)))
        elif not self.gathers_each:
            parts = [(shard, elements * self.weight) for shard, _, elements in self._split(units)]
            self._add(sent, "all_gather", parts)
        return sent

    def owned(self, units: Iterable[Unit]) -> float:
        """Returns the elements that this rank's optimiser updates."""
        return sum(elements / shard.size for shard, _, elements in self._split(units, trained=True))

    def owned_matrices(self, units: Iterable[Unit]) -> float:
        """Returns the elements of this rank's matrices that Muon updates."""
        found = [matrix for unit in units for matrix in unit.matrices]
        return sum(matrix.elements / self.shards[matrix.expert].size for matrix in found)

    def state_bytes(self, units: Iterable[Unit]) -> float:
        """Returns bytes of weights, gradients and optimiser state that stay, without temporary
        buffers and padding."""
        units = list(units)

        def whole(width: int, least_zero: int, trained: bool) -> float:
            parts = self._split(units, trained=trained)
            return sum(
                n * width / (shard.size if self.zero >= least_zero else 1) for shard, _, n in parts
            )

        state = (
            whole(self.weight, 3, False)
            + whole(self.grad, 2, True)
            + whole(self.optimizer, 1, True)
        )
        return state - self.owned_matrices(units) * self.moment  # Muon has one

    def _split(
        self, units: Iterable[Unit], *, trained: bool = False
    ) -> list[tuple[Axis, Axis, int]]:
        """Returns (ranks that own a slice each, ranks that own the same slice, elements) of what is
        reduced alike."""
        totals = map(sum, zip(*(unit.trained if trained else unit.held for unit in units)))
        return [(*axes, count) for axes, count in zip(self._axes, totals) if count]

    def _scatter(self, units: Sequence[Unit], sent: _Sums) -> None:
        """Adds what reducing the units' gradients sends."""
        parts = [(shard, count * self.grad) for shard, _, count in self._split(units, trained=True)]
        self._add(sent, "reduce_scatter", parts)

    def _all_reduce(self, sent: _Sums, axis: Axis, elements: float) -> None:
        sent[axis.name, "all_reduce"] += 2 * (axis.size - 1) / axis.size * elements * self.grad

    def _add(self, sent: _Sums, operation: str, parts: Iterable[tuple[Axis, float]]) -> None:
        """Adds what a collective sends of a number of bytes, over the ranks that own a slice
        each."""
        for shard, num_bytes in parts:
            sent[shard.name, operation] += (1 - 1 / shard.size) * num_bytes


Pass = tuple[str, int]
"""(op, stage)."""


class _Part:
    """A bucket without memory: the parameters of a unit, or one that several units read."""

    shards_weights, format = True, None

    def __init__(self, dense: float, expert: float) -> None:
        self.bytes, self.weights, self.whole, self.gathers = (
            (dense, expert),
            torch.empty(0, device="meta"),
            False,
            0,
        )

    def holds(self, wide: bool) -> bool:
        return self.whole

    def start_gather(self, wide: bool = False) -> Pending:
        self.whole, self.gathers = True, self.gathers + 1
        return Pending(self.weights)

    def drop_weights(self) -> None:
        self.whole = False


def gathered_bytes(
    program: Program, rank: int, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """Returns bytes of dense parameters and of experts that ZeRO-3 gathers beside each pass, on
    average over a step.

    Args:
        program: of a step.
        rank: the pipeline rank.
        stages: units of every stage.
        sharding: of the layout.
    """
    held = {stage: stages[stage] for _, stage in program.placement.stages_of(rank) if stages[stage]}
    parts, uses = dict[Any, _Part](), dict[Any, list[Any]]()  # a unit stands for its phases
    for stage, units in held.items():
        for place, unit in enumerate(units):
            dense, expert = sharding.whole_bytes([unit])
            parts[stage, place] = _Part(dense - unit.lent_elements * sharding.weight, expert)
            parts |= {
                name: _Part(elements * sharding.weight, 0) for name, elements in unit.read.items()
            }
            uses[stage, place] = [(stage, place), *unit.read]
    index: dict[Any, int] = {part: number for number, part in enumerate(parts)}
    numbers: dict[Any, list[int]] = {
        unit: [index[part] for part in read] for unit, read in uses.items()
    }
    buckets: list[Any] = list(parts.values())
    weights = GatheredWeights(
        buckets, numbers, {unit: number for number, unit in enumerate(uses)}, per_step=False
    )
    orders: dict[int, list[Any]] = {
        stage: [(stage, place) for place in range(len(own))] for stage, own in held.items()
    }
    for order in orders.values():
        weights.register(order)
    return _gathers(program, rank, orders, weights, buckets)


def _gathers(
    program: Program,
    rank: int,
    orders: Mapping[int, list[Any]],
    weights: GatheredWeights,
    parts: Sequence[_Part],
) -> Mapping[Pass, tuple[float, float]]:
    """Walks through a step as the executor does; arguments and result as in `gathered_bytes`."""
    gathered = defaultdict[Pass, list[tuple[float, float]]](list)

    def run(action: Action) -> Iterator[bool]:
        forward, order = action.op == "F", orders[action.stage]
        dense = expert = 0.0
        for phase in order if forward else order[::-1]:
            before = [part.gathers for part in parts]
            weights.before(phase, forward)
            weights.after(phase, forward)
            new = [part.bytes for part, count in zip(parts, before) if part.gathers > count]
            dense, expert = dense + sum(d for d, _ in new), expert + sum(e for _, e in new)
            yield True
        gathered[action.op, action.stage].append((dense, expert))

    slots = [
        tuple(a for a in slot if a.op != "W" and a.stage in orders) for slot in program.ranks[rank]
    ]
    slots = [slot for slot in slots if slot]
    for slot, after in zip(slots, [*slots[1:], ()]):
        for action in after:
            weights.prefetch(orders[action.stage][0 if action.op == "F" else -1], action.op == "F")
        running = [run(action) for action in slot]
        while running:
            running = [each for each in running if next(each, None)]
    return {
        each: (fmean(d for d, _ in both), fmean(e for _, e in both))
        for each, both in gathered.items()
    }


def mean_gathered(
    program: Program, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """Returns the same of every pass of a Program, on average over the ranks that hold its
    stage."""
    found = defaultdict[Pass, list[tuple[float, float]]](list)
    for rank in range(program.num_ranks):
        for each, both in gathered_bytes(program, rank, stages, sharding).items():
            found[each].append(both)
    return {
        each: (fmean(a for a, _ in both), fmean(b for _, b in both)) for each, both in found.items()
    }


# Bytes that an update reads and writes an element, with masters in fp32 and weights in 16 bits.
# AdamW, one kernel: gradient twice (its norm), master and two moments read and written, the weight
# written.
ADAMW_BYTES = 34
# Muon, line by line: gradient's norm 4, momentum 20, direction 18, six copies on the way to the
# whole matrix and back 24, decay 8, update 10, weight 6.
MUON_BYTES = 90


@dataclass(frozen=True)
class Round:
    """Matrices that the ranks of two axes make orthogonal side by side, one a rank, the largest
    first.

    Args:
        shard, cut: ranks that share a local parameter, ranks that each have one.
        matrices: at most as many as there are ranks.
    """

    shard: Axis
    cut: Axis
    matrices: Sequence[Matrix]

    def sent(self, width: int) -> Transfers:
        """Returns (axis, operation) -> bytes that the first rank sends, which has a matrix in every
        round.

        Args:
            width: bytes of an element in a collective.
        """
        size = self.shard.size
        share = sum(matrix.elements for matrix in self.matrices) / size
        local = sum(matrix.elements for matrix in self.matrices[::size])
        return {
            (self.shard.name, "all_to_all"): (share + local) * (size - 1) / size * width,
            (self.cut.name, "all_to_all"): 2 * local * (self.cut.size - 1) / self.cut.size * width,
        }


def rounds(units: Sequence[Unit], sharding: Sharding) -> Iterator[Round]:
    """Yields the rounds in which Muon gathers the matrices of a rank's units."""
    for expert, name in ((False, "tp"), (True, "etp")):
        shard, cut = sharding.shards[expert], sharding.mesh[name]
        matrices = [matrix for unit in units for matrix in unit.matrices if matrix.expert is expert]
        matrices.sort(key=lambda matrix: -matrix.elements)
        together = shard.size * cut.size
        for start in range(0, len(matrices), together):
            yield Round(shard, cut, matrices[start : start + together])


def passed_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Returns the bytes that a rank's update reads and writes, without Muon's iteration."""
    muon = sharding.owned_matrices(units)
    return (sharding.owned(units) - muon) * ADAMW_BYTES + muon * MUON_BYTES


def offload_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Returns the bytes between device and host with `optim.offload`: gradients there and weights
    back; for Muon's matrices also what is orthogonalised, and the result."""
    muon = sharding.owned_matrices(units)
    return sharding.owned(units) * (sharding.grad + sharding.weight) + muon * 2 * sharding.weight

"""Bytes that data parallelism sends and the optimizer moves, for some units of layers.

`data_axes` of data_parallel/bucketing.py gives the ranks that share a bucket. How often ZeRO-3
gathers a unit depends on the order of the actions: the `GatheredWeights` of training counts it, on
buckets without memory.

With Muon a rank orthogonalizes one matrix in each round (optim/muon.py), and a round takes as long
as its largest matrix. With `optim.offload` gradients are copied to the host, which updates, and
weights back; nothing hides these copies.
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
"""(axis, collective) -> bytes that this rank sends."""
_Sums = defaultdict[tuple[str, str], float]


class Sharding:
    """ZeRO of one layout.

    Args:
        config: parallel, precision and optim.
        mesh: axes of a rank that holds the embedding.
        shared: pipeline ranks that share parameters.
    """

    def __init__(self, config: Config, mesh: Mesh, shared: SharedRanks = NO_SHARED_RANKS) -> None:
        parallel, dtype = config.parallel, config.precision.dtype
        self.zero, self.mesh = parallel.zero, mesh
        pair = "pair" if "pair" in shared else ""
        dense, expert = (data_axes(mesh, self.zero, pair, kind) for kind in (False, True))
        tied = data_axes(mesh, self.zero, "tied") if "tied" in shared else dense
        self._axes = Elements(dense, expert, tied)  # (shard, replicate) of each kind of parameters
        # whether of experts -> the ranks that each own a slice
        self.shards = {False: dense[0], True: expert[0]}
        self.weight = ELEMENT_BYTES[dtype]
        self.grad = 8 if dtype == "fp64" else ELEMENT_BYTES[config.precision.grad_dtype]
        masters = 4 if dtype == "bf16" and config.precision.master_weights else 0
        wide = 8 if dtype == "fp64" else 4
        self.optimizer, self.moment = (0, 0) if config.optim.offload else (masters + 2 * wide, wide)
        self.reduces_each = self.zero >= 2 and parallel.grad_reduce == "per_microbatch"
        self.gathers_each = self.zero == 3 and parallel.zero3_gather == "per_microbatch"
        self._gathers_fp8 = self.zero == 3 and config.precision.fp8_gather

    def sent_in_pass(
        self, units: Sequence[Unit], op: str, gathered: tuple[float, float] | None = None
    ) -> Transfers:
        """What ZeRO-2 and 3 send during each pass of a stage.

        Args:
            units: of the stage.
            op: the pass.
            gathered: bytes of dense parameters and of experts that the pass gathers; None = of all
                parameters that the units read.
        """
        sent = _Sums(float)
        if self.gathers_each and op != "W":
            if gathered is None:
                dense, expert = self.gather_bytes(units)
                borrowed = sum(unit.borrowed_elements() for unit in units)
                gathered = dense + self.weight * borrowed, expert
            self._add(sent, "all_gather", zip(self.shards.values(), gathered))
        if self.reduces_each and op in "BW":
            self._scatter(units, sent)
            borrowed = sum(unit.borrowed_elements(trained=True) for unit in units)
            self._add(sent, "reduce_scatter", [(self.shards[False], borrowed * self.grad)])
        return sent

    def gather_bytes(self, units: Iterable[Unit]) -> tuple[float, float]:
        """Bytes of the units' own gathered weights: dense parameters, and experts."""
        saved = self.weight - 1 if self._gathers_fp8 else 0
        dense = expert = 0.0
        for unit in units:
            dense += (unit.params.dense + unit.params.tied) * self.weight - unit.fp8.dense * saved
            expert += unit.params.expert * self.weight - unit.fp8.expert * saved
        return dense, expert

    def reduced(self, units: Iterable[Unit], *, last: bool = False) -> Transfers:
        """What the end of a step sends: reductions outside of passes, sums over replicas or copies.

        Args:
            last: include the reductions of the last pass.
        """
        units, sent = list(units), _Sums(float)
        for unit in units:
            for name, elements in unit.copied.items():
                self._all_reduce(sent, self.mesh[name], elements / self.shards[False].size)
        if last or not self.reduces_each:
            self._scatter(units, sent)
        for shard, replicate, elements in self._split(units, trained=True):
            self._all_reduce(sent, replicate, elements / shard.size)
        return sent

    def gathered(self, units: Iterable[Unit]) -> Transfers:
        """What gathering weights sends once a step, if passes do not gather them."""
        units, sent = list(units), _Sums(float)
        if self.zero == 3 and not self.gathers_each:
            self._add(sent, "all_gather", zip(self.shards.values(), self.gather_bytes(units)))
        elif not self.gathers_each:
            groups = [(shard, elements * self.weight) for shard, _, elements in self._split(units)]
            self._add(sent, "all_gather", groups)
        return sent

    def owned(self, units: Iterable[Unit]) -> float:
        """Number of elements that this rank's optimizer updates."""
        return sum(elements / shard.size for shard, _, elements in self._split(units, trained=True))

    def owned_matrices(self, units: Iterable[Unit]) -> float:
        """Number of elements of this rank that Muon updates."""
        matrices = [matrix for unit in units for matrix in unit.matrices]
        return sum(matrix.elements / self.shards[matrix.expert].size for matrix in matrices)

    def state_bytes(self, units: Iterable[Unit]) -> float:
        """Bytes of resident weights, gradients and optimizer state, without padding."""
        units = list(units)
        total = 0.0
        for width, zero, trained in (
            (self.weight, 3, False),
            (self.grad, 2, True),
            (self.optimizer, 1, True),
        ):
            for shard, _, elements in self._split(units, trained=trained):
                total += elements * width / (shard.size if self.zero >= zero else 1)
        # Muon has one moment, AdamW two.
        return total - self.owned_matrices(units) * self.moment

    def _split(
        self, units: Iterable[Unit], *, trained: bool = False
    ) -> list[tuple[Axis, Axis, int]]:
        """(ranks that each own a slice, ranks that own the same slice, elements) by group."""
        totals = map(sum, zip(*(unit.trained if trained else unit.params for unit in units)))
        return [(*axes, count) for axes, count in zip(self._axes, totals) if count]

    def _scatter(self, units: Sequence[Unit], sent: _Sums) -> None:
        """Adds the reduce-scatter of the units' gradients."""
        groups = [(shard, n * self.grad) for shard, _, n in self._split(units, trained=True)]
        self._add(sent, "reduce_scatter", groups)

    def _all_reduce(self, sent: _Sums, axis: Axis, elements: float) -> None:
        sent[axis.name, "all_reduce"] += 2 * (axis.size - 1) / axis.size * elements * self.grad

    def _add(self, sent: _Sums, collective: str, groups: Iterable[tuple[Axis, float]]) -> None:
        """Adds a collective over the ranks that each own a slice of a number of bytes."""
        for shard, num_bytes in groups:
            sent[shard.name, collective] += (1 - 1 / shard.size) * num_bytes


Pass = tuple[str, int]
"""(op, stage)."""


class _Bucket:
    """A bucket without memory: the parameters of a unit, or one that several units read."""

    shards_weights, format = True, None

    def __init__(self, dense: float, expert: float) -> None:
        self.bytes, self.weights = (dense, expert), torch.empty(0, device="meta")
        self.has_weights, self.num_gathers = False, 0

    def is_gathered(self, in_model_dtype: bool) -> bool:
        return self.has_weights

    def start_gather(self, in_model_dtype: bool = False) -> Pending:
        self.has_weights, self.num_gathers = True, self.num_gathers + 1
        return Pending(self.weights)

    def drop_weights(self) -> None:
        self.has_weights = False


def gathered_bytes(
    program: Program, rank: int, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """Bytes of dense parameters and of experts that ZeRO-3 gathers in each pass, mean of a step.

    Args:
        program: of a step.
        rank: the pipeline rank.
        stages: units of every stage.
        sharding: of the layout.
    """
    local = {stage: stages[stage] for _, stage in program.placement.stages_of(rank)}
    local = {stage: units for stage, units in local.items() if units}
    weights, buckets = _gathered_weights(local, sharding)
    orders: dict[int, list[Any]] = {
        stage: [(stage, index) for index in range(len(units))] for stage, units in local.items()
    }
    for order in orders.values():
        weights.register(order)
    return _gathers(program, rank, orders, weights, buckets)


def _gathered_weights(
    stages: Mapping[int, Sequence[Unit]], sharding: Sharding
) -> tuple[GatheredWeights, Sequence[_Bucket]]:
    """Gathering of the units (stage, index), which stand for their phases, and its buckets."""
    buckets, uses = dict[Any, Any](), dict[Any, list[Any]]()
    for stage, units in stages.items():
        for index, unit in enumerate(units):
            key, weight = (stage, index), sharding.weight
            dense, expert = sharding.gather_bytes([unit])
            buckets[key] = _Bucket(dense - unit.lent_elements * weight, expert)
            buckets |= {name: _Bucket(elements * weight, 0) for name, elements in unit.read.items()}
            uses[key] = [key, *unit.read]
    indices = {key: index for index, key in enumerate(buckets)}
    bucket_uses: dict[Any, list[int]] = {
        unit: [indices[key] for key in keys] for unit, keys in uses.items()
    }
    unit_of: dict[Any, int] = {unit: number for number, unit in enumerate(uses)}
    in_order = list(buckets.values())
    return GatheredWeights(in_order, bucket_uses, unit_of, per_step=False), in_order


def _gathers(
    program: Program,
    rank: int,
    orders: Mapping[int, list[Any]],
    weights: GatheredWeights,
    buckets: Sequence[_Bucket],
) -> Mapping[Pass, tuple[float, float]]:
    """Walks through a step as the executor does; arguments and result as in `gathered_bytes`."""
    gathered = defaultdict[Pass, list[tuple[float, float]]](list)

    def run(action: Action) -> Iterator[bool]:
        forward, order = action.op == "F", orders[action.stage]
        dense = expert = 0.0
        for phase in order if forward else order[::-1]:
            before = [bucket.num_gathers for bucket in buckets]
            weights.before(phase, forward)
            weights.after(phase, forward)
            for bucket, count in zip(buckets, before):
                if bucket.num_gathers > count:
                    dense, expert = dense + bucket.bytes[0], expert + bucket.bytes[1]
            yield True
        gathered[action.op, action.stage].append((dense, expert))

    slots = [
        tuple(a for a in slot if a.op != "W" and a.stage in orders) for slot in program.ranks[rank]
    ]
    slots = [slot for slot in slots if slot]
    for slot, following in zip(slots, [*slots[1:], ()]):
        for action in following:
            order, forward = orders[action.stage], action.op == "F"
            weights.prefetch(order[0 if forward else -1], forward)
        running = [run(action) for action in slot]
        while running:
            running = [steps for steps in running if next(steps, None)]
    return _means(gathered)


def mean_gathered(
    program: Program, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """`gathered_bytes` of every pass of a Program, mean over the ranks that hold its stage."""
    gathered = defaultdict[Pass, list[tuple[float, float]]](list)
    for rank in range(program.num_ranks):
        for key, num_bytes in gathered_bytes(program, rank, stages, sharding).items():
            gathered[key].append(num_bytes)
    return _means(gathered)


def _means(pairs: Mapping[Pass, list[tuple[float, float]]]) -> Mapping[Pass, tuple[float, float]]:
    return {
        key: (fmean(dense for dense, _ in values), fmean(expert for _, expert in values))
        for key, values in pairs.items()
    }


# Bytes per element that an update reads and writes, with masters in fp32 and weights in 16 bits.
# AdamW in one kernel: gradient read twice (once for its norm), master and two moments read and
# written, weight written.
ADAMW_BYTES = 34
# Muon: norm of the gradient 4, momentum 20, direction 18, six copies to the full matrix and back
# 24, decay 8, update 10, weight 6.
MUON_BYTES = 90


@dataclass(frozen=True)
class Round:
    """Matrices that the ranks of two axes orthogonalize at once, one per rank, largest first.

    Args:
        shard: ranks that share a local parameter.
        cut: ranks that each have a part of the matrix.
        matrices: no more than there are ranks.
    """

    shard: Axis
    cut: Axis
    matrices: Sequence[Matrix]

    def sent(self, width: int) -> Transfers:
        """Bytes that the first rank sends, which has a matrix in every round.

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
    """Rounds in which Muon gathers the matrices of a rank's units."""
    for expert, name in ((False, "tp"), (True, "etp")):
        shard, cut = sharding.shards[expert], sharding.mesh[name]
        matrices = [matrix for unit in units for matrix in unit.matrices if matrix.expert is expert]
        matrices.sort(key=lambda matrix: -matrix.elements)
        num_ranks = shard.size * cut.size
        for start in range(0, len(matrices), num_ranks):
            yield Round(shard, cut, matrices[start : start + num_ranks])


def update_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes that a rank's update reads and writes, without Muon's iteration."""
    muon = sharding.owned_matrices(units)
    return (sharding.owned(units) - muon) * ADAMW_BYTES + muon * MUON_BYTES


def offload_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes between device and host with `optim.offload`: gradients there and weights back.

    Muon's matrices add the matrix to orthogonalize, and the result.
    """
    muon = sharding.owned_matrices(units)
    return sharding.owned(units) * (sharding.grad + sharding.weight) + muon * 2 * sharding.weight

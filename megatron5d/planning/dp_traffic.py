"""What data parallelism sends for some units: whose gradients are reduced, whose weights are gathered, and when.

The formulas are those of data_parallel/grad_sync.py and weight_gather.py; n ranks share a bucket, of Ψ elements.

How much ZeRO-3 gathers for the passes of a pipeline rank: the rules of data_parallel/weight_gather.py, unit by unit.

A unit that one action reads last and the next one first stays whole between them, so the order of the actions counts.
What is whole when a slot begins are the first units of its actions, whatever came before. So what is gathered during a
slot depends on the slot and the one after it alone, and each such pair is followed once.

What the optimiser adds to a step: passes over the elements that a rank owns, Muon's whole matrices, the host's part.

Under Muon a rank makes one matrix of each round orthogonal (optim/matrix_gather.py), and every round takes as long as
its largest matrix. With `optim.offload` gradients travel to the host, which updates, and weights back; nothing hides
that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.pipeline_parallel.program import Program
from megatron5d.planning.work import Matrix, Unit

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


Pass = tuple[str, int]
"""(op, stage)."""
Part = tuple[int, int] | str
"""What is gathered together: (stage, unit), or the name of a parameter that several units read."""
Gathers = Mapping[Pass, Counter[Part]]
"""How often each part is gathered for the passes that read it."""


def gathered_bytes(
    program: Program, rank: int, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """For each pass, bytes of dense parameters and of experts that are gathered for it, on average over a step.

    Args:
        program: of a step.
        rank: the pipeline rank.
        stages: units of every stage.
        sharding: of the layout.
    """
    reading = [tuple((a.op, a.stage) for a in slot if a.op != "W" and stages[a.stage]) for slot in program.ranks[rank]]
    slots = [slot for slot in reading if slot]
    counts = Counter(each for slot in slots for each in slot)
    times = defaultdict[Pass, Counter[Part]](Counter)
    for (slot, after), count in Counter(zip([(), *slots], [*slots, ()])).items():
        for each, parts in _gathers(slot, after, stages).items():
            times[each].update({part: count * gathers for part, gathers in parts.items()})
    return {each: _bytes(times[each], count, stages, sharding) for each, count in counts.items()}


def mean_gathered(
    program: Program, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> Mapping[Pass, tuple[float, float]]:
    """The same of every pass of a Program, on average over the ranks that hold its stage."""
    found = defaultdict[Pass, list[tuple[float, float]]](list)
    for rank in range(program.num_ranks):
        for each, both in gathered_bytes(program, rank, stages, sharding).items():
            found[each].append(both)
    return {each: (fmean(a for a, _ in both), fmean(b for _, b in both)) for each, both in found.items()}


def _bytes(
    times: Counter[Part], count: int, stages: Sequence[Sequence[Unit]], sharding: Sharding
) -> tuple[float, float]:
    """(dense, experts') bytes of one of `count` passes."""
    dense = expert = 0.0
    for part, gathers in times.items():
        if isinstance(part, str):
            elements = next(unit.read[part] for units in stages for unit in units if part in unit.read)
            dense += gathers * elements * sharding.weight
        else:
            unit = stages[part[0]][part[1]]
            of_dense, of_experts = sharding.whole_bytes([unit])
            dense += gathers * (of_dense - unit.lent_elements * sharding.weight)
            expert += gathers * of_experts
    return dense / count, expert / count


def _gathers(slot: Sequence[Pass], after: Sequence[Pass], stages: Sequence[Sequence[Unit]]) -> Gathers:
    """What is gathered while a slot runs, and the slot after it waits."""
    walk = _Walk(stages, after)
    for each in slot:
        walk.reserve(each, walk.order(each)[0])
    walk.gathers.clear()
    running = [walk.run(each) for each in slot]
    while running:
        running = [each for each in running if next(each, None) is not None]
    walk.look_ahead()
    return walk.gathers


class _Walk:
    """Who holds which parts while the actions of a slot take turns."""

    def __init__(self, stages: Sequence[Sequence[Unit]], after: Sequence[Pass]) -> None:
        self.stages, self.after = stages, after
        self.gathers = defaultdict[Pass, Counter[Part]](Counter)
        self._users = Counter[Part]()
        self._reserved: set[tuple[Part, bool]] = set()

    def order(self, each: Pass) -> range:
        """The places of a stage's units, as a pass reads them."""
        places = range(len(self.stages[each[1]]))
        return places if each[0] == "F" else places[::-1]

    def reserve(self, each: Pass, place: int) -> None:
        """Holds what a unit reads, for a pass that will read it."""
        for part in self._parts(each[1], place):
            if (part, each[0] == "F") not in self._reserved:
                self._reserved.add((part, each[0] == "F"))
                self.gathers[each][part] += self._users[part] == 0
                self._users[part] += 1

    def run(self, each: Pass) -> Iterator[bool]:
        """One action, unit by unit."""
        order = self.order(each)
        for place, ahead in zip(order, [*order[1:], None]):
            self.reserve(each, place)
            parts = self._parts(each[1], place)
            self._reserved -= {(part, each[0] == "F") for part in parts}
            if ahead is None:
                self.look_ahead()
            else:
                self.reserve(each, ahead)
            yield True
            self._users.subtract(parts)

    def look_ahead(self) -> None:
        """Holds the first units of the slot after this one."""
        for each in self.after:
            self.reserve(each, self.order(each)[0])
        self.after = ()

    def _parts(self, stage: int, place: int) -> list[Part]:
        return [(stage, place), *self.stages[stage][place].read]


# Bytes that an update reads and writes an element, with masters in fp32 and weights in 16 bits.
# AdamW, one kernel: gradient twice (its norm), master and two moments read and written, the weight written.
ADAMW_BYTES = 34
# Muon, line by line: gradient's norm 4, momentum 20, direction 18, six copies on the way to the whole matrix and back
# 24, decay 8, update 10, weight 6.
MUON_BYTES = 90


@dataclass(frozen=True)
class Round:
    """Matrices that the ranks of two axes make orthogonal side by side, one a rank, the largest first.

    Args:
        shard, cut: axes: ranks that share a local parameter, ranks that each have one.
        size: of `shard`, in ranks; 1 where nothing is sharded.
        matrices: at most as many as there are ranks.
    """

    shard: str
    cut: str
    size: int
    matrices: Sequence[Matrix]

    def sent(self, cut_size: int, width: int) -> Transfers:
        """(axis, operation) -> bytes that the first rank sends, which has a matrix in every round.

        Args:
            cut_size: ranks of `cut`.
            width: bytes of an element on its way.
        """
        share = sum(matrix.elements for matrix in self.matrices) / self.size
        local = sum(matrix.elements for matrix in self.matrices[:: self.size])
        return {
            (self.shard, "all_to_all"): (share + local) * (self.size - 1) / self.size * width,
            (self.cut, "all_to_all"): 2 * local * (cut_size - 1) / cut_size * width,
        }


def rounds(units: Sequence[Unit], sharding: Sharding) -> Iterator[Round]:
    """The rounds in which Muon assembles the matrices of a rank's units."""
    for expert, cut in ((False, "tp"), (True, "etp")):
        shard = sharding.shards[expert]
        matrices = [matrix for unit in units for matrix in unit.matrices if matrix.expert is expert]
        matrices.sort(key=lambda matrix: -matrix.elements)
        size = sharding.sizes[shard]
        together = size * sharding.sizes[cut]
        for start in range(0, len(matrices), together):
            yield Round(shard, cut, size, matrices[start : start + together])


def assembled(units: Sequence[Unit], sharding: Sharding) -> Transfers:
    """What assembling Muon's matrices, and sending the updates back, sends in a step."""
    sent = defaultdict[tuple[str, str], float](float)
    for each in rounds(units, sharding):
        for key, num_bytes in each.sent(sharding.sizes[each.cut], sharding.weight).items():
            sent[key] += num_bytes
    return sent


def passed_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes that a rank's update reads and writes, without Muon's iteration."""
    muon = sharding.owned_matrices(units)
    return (sharding.owned(units) - muon) * ADAMW_BYTES + muon * MUON_BYTES


def carried_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes between device and host with `optim.offload`: gradients there and weights back; for Muon's matrices also
    what is orthogonalised, and the result."""
    muon = sharding.owned_matrices(units)
    return sharding.owned(units) * (sharding.grad + sharding.weight) + muon * 2 * sharding.weight

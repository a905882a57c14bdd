"""How much ZeRO-3 gathers for the passes of a pipeline rank: the rules of data_parallel/weight_gather.py, unit by unit.

A unit that one action reads last and the next one first stays whole between them, so the order of the actions counts.
What is whole when a slot begins are the first units of its actions, whatever came before. So what is gathered during a
slot depends on the slot and the one after it alone, and each such pair is followed once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from megatron5d.pipeline_parallel.program import Program
from megatron5d.planning.dp_traffic import Sharding
from megatron5d.planning.work import Unit

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

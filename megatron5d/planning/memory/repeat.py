"""What a rank does again and again in the middle of a step: slots that do not have to be walked
through one by one."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from megatron5d.pipeline_parallel.messages import SLOTS_AHEAD, Flow, completed_sends, output_of
from megatron5d.pipeline_parallel.program import Program


@dataclass(frozen=True)
class Repeat:
    """Slots of a rank that do the same as the period before them, with later micro-batches, and end
    in the same state.

    Args:
        start: the first of these slots.
        length: slots of a period.
        times: how many periods there are.
        shift: micro-batches by which each one is ahead of the one before it.
        passes: stage -> its forwards in all of them.
        sends: flow -> what is sent in all of them.
    """

    start: int
    length: int
    times: int
    shift: int
    passes: Mapping[int, int]
    sends: Mapping[Flow, int]

    @property
    def stop(self) -> int:
        """The first slot after them."""
        return self.start + self.length * self.times


class _Line:
    """The slots of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.slots, self.proofs = (
            program,
            program.ranks[rank],
            completed_sends(program, rank),
        )

    def does_the_same(
        self, place: int, length: int, shift: int, sends: Mapping[Flow, int] | None = None
    ) -> bool:
        """Returns whether a slot and the one a period later do the same and, given what a period
        sends, prove it."""
        slot, later = self.slots[place], self.slots[place + length]
        if len(slot) != len(later):
            return False
        way = self.program.direction
        for one, two in zip(slot, later):
            if (
                one[:2] != two[:2]
                or one.microbatch + shift != two.microbatch
                or way[one[2]] != way[two[2]]
            ):
                return False
            if sends is not None:
                proven = [(flow, count + sends[flow]) for flow, count in self.proofs.get(one, ())]
                if proven != self.proofs.get(two, []):
                    return False
        return True

    def periods(self) -> Iterator[tuple[int, int]]:
        """Yields (slots, micro-batches) of what may be a period around the middle, the shortest
        first."""
        middle, stages = (
            len(self.slots) // 2,
            [action[:2] for action in self.slots[len(self.slots) // 2]],
        )
        for length in range(1, len(self.slots) // 4):
            later = self.slots[middle + length]
            shift = later[0].microbatch - self.slots[middle][0].microbatch
            if shift <= 0 or [action[:2] for action in later] != stages:
                continue
            if all(
                self.does_the_same(place, length, shift) for place in range(middle, middle + length)
            ):
                yield length, shift

    def states(self, first: int, length: int) -> Iterator[tuple[dict[int, int], Counter[Flow]]]:
        """Yields micro-batch -> bits of what is done, of those begun and not ended, and flow ->
        messages proven to have arrived, before slot `first` and each `length` slots later."""
        passes = sorted({action[:2] for slot in self.slots for action in slot})
        bits = {key: 1 << number for number, key in enumerate(passes)}
        done, whole, proven = Counter[int](), Counter[int](), Counter[Flow]()
        for action in (action for slot in self.slots for action in slot):
            whole[action.microbatch] += bits[action[:2]]
        for place, slot in enumerate(self.slots):
            if place >= first and (place - first) % length == 0:
                yield {m: each for m, each in done.items() if each != whole[m]}, proven.copy()
            for action in slot:
                done[action.microbatch] += bits[action[:2]]
                for flow, count in self.proofs.get(action, ()):
                    proven[flow] = max(proven[flow], count)


def find_repeat(program: Program, rank: int) -> Repeat | None:
    """Finds the slots of a verified Program that repeat those before them: in passes, and in
    messages posted, sent and proven.

    The period before them does the same too, and so does the one after them: what looks a few slots
    back or ahead sees no difference.
    """
    line = _Line(program, rank)
    middle = len(line.slots) // 2
    for length, shift in line.periods():
        period = [action for slot in line.slots[middle : middle + length] for action in slot]
        sends = Counter(
            message.flow for action in period if (message := output_of(program, action))
        )
        if not all(
            line.does_the_same(place, length, shift, sends)
            for place in range(middle, middle + length)
        ):
            continue
        first, last = middle, middle + length
        while first and line.does_the_same(first - 1, length, shift, sends):
            first -= 1
        while last + length < len(line.slots) and line.does_the_same(last, length, shift, sends):
            last += 1
        start, stop = first + 2 * length, last + length - max(length, SLOTS_AHEAD)
        for (begun, proven), (later, proven_later) in pairwise(line.states(first + length, length)):
            times = (stop - start) // length
            if times < 1:
                break
            if {
                m + shift: each for m, each in begun.items()
            } == later and proven_later - proven == sends:
                forwards = Counter(action.stage for action in period if action.op == "F")
                passes = {stage: times * count for stage, count in forwards.items()}
                return Repeat(
                    start,
                    length,
                    times,
                    shift,
                    passes,
                    {flow: times * n for flow, n in sends.items()},
                )
            start += length
    return None

"""Finds the periodic part of a schedule, so that a walk through it visits one period only."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from megatron5d.pipeline_parallel.messages import SLOTS_AHEAD, Flow, completed_sends, output_of
from megatron5d.pipeline_parallel.program import Program


@dataclass(frozen=True)
class Repeat:
    """Slots of a rank that do the same as the period before them, with later micro-batches.

    They also end in the same state.

    Args:
        start: the first of these slots.
        length: slots of a period.
        times: number of periods.
        shift: micro-batches by which each period is later than the one before it.
        passes: stage -> its forwards in all periods.
        sends: flow -> its messages in all periods.
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


class _RankSlots:
    """The slots of one rank."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.slots = program, program.ranks[rank]
        self.completed = completed_sends(program, rank)

    def is_same(
        self, index: int, length: int, shift: int, sends: Mapping[Flow, int] | None = None
    ) -> bool:
        """Whether a slot and the one a period later do the same.

        Args:
            sends: messages of a period; if given, both slots must also prove the same arrivals.
        """
        slot, later = self.slots[index], self.slots[index + length]
        if len(slot) != len(later):
            return False
        direction = self.program.direction
        for one, two in zip(slot, later):
            if one[:2] != two[:2] or one.microbatch + shift != two.microbatch:
                return False
            if direction[one[2]] != direction[two[2]]:
                return False
            if sends is not None:
                arrivals = self.completed.get(one, ())
                arrivals = [(flow, count + sends[flow]) for flow, count in arrivals]
                if arrivals != self.completed.get(two, []):
                    return False
        return True

    def periods(self) -> Iterator[tuple[int, int]]:
        """(slots, micro-batches) of possible periods around the middle, the shortest first."""
        middle = len(self.slots) // 2
        passes = [action[:2] for action in self.slots[middle]]
        for length in range(1, len(self.slots) // 4):
            later = self.slots[middle + length]
            shift = later[0].microbatch - self.slots[middle][0].microbatch
            if shift <= 0 or [action[:2] for action in later] != passes:
                continue
            if all(self.is_same(index, length, shift) for index in range(middle, middle + length)):
                yield length, shift

    def states(self, first: int, length: int) -> Iterator[tuple[dict[int, int], Counter[Flow]]]:
        """State before slot `first` and every `length` slots later.

        Yields:
            micro-batch -> bits of its completed passes, if it has begun and not ended; and flow ->
            messages proven to have arrived.
        """
        passes = sorted({action[:2] for slot in self.slots for action in slot})
        bits = {key: 1 << number for number, key in enumerate(passes)}
        done, complete, arrived = Counter[int](), Counter[int](), Counter[Flow]()
        for action in (action for slot in self.slots for action in slot):
            complete[action.microbatch] += bits[action[:2]]
        for index, slot in enumerate(self.slots):
            if index >= first and (index - first) % length == 0:
                in_flight = {m: passed for m, passed in done.items() if passed != complete[m]}
                yield in_flight, arrived.copy()
            for action in slot:
                done[action.microbatch] += bits[action[:2]]
                for flow, count in self.completed.get(action, ()):
                    arrived[flow] = max(arrived[flow], count)

    def steady(
        self, first: int, length: int, shift: int, sends: Mapping[Flow, int]
    ) -> Iterator[bool]:
        """Whether each period from slot `first` ends in the state in which it began, shifted."""
        for (in_flight, arrived), (later, arrived_later) in pairwise(self.states(first, length)):
            shifted = {m + shift: passed for m, passed in in_flight.items()}
            yield shifted == later and arrived_later - arrived == sends


def find_repeat(program: Program, rank: int) -> Repeat | None:
    """The slots of a verified Program that repeat those before them.

    They repeat passes, and messages that are posted, sent and proven. The periods before and after
    them do the same, so that nothing that depends on a few slots before or after is different.
    """
    slots = _RankSlots(program, rank)
    middle = len(slots.slots) // 2
    for length, shift in slots.periods():
        period = [action for slot in slots.slots[middle : middle + length] for action in slot]
        messages = [output_of(program, action) for action in period]
        sends = Counter(message.flow for message in messages if message)

        def is_same(index: int, length=length, shift=shift, sends=sends) -> bool:
            return slots.is_same(index, length, shift, sends)

        if not all(map(is_same, range(middle, middle + length))):
            continue
        first, last = middle, middle + length
        while first and is_same(first - 1):
            first -= 1
        while last + length < len(slots.slots) and is_same(last):
            last += 1
        # what does the same in the period before it, and in the one after it
        start, stop = first + 2 * length, last + length - max(length, SLOTS_AHEAD)
        for is_steady in slots.steady(first + length, length, shift, sends):
            times = (stop - start) // length
            if times < 1:
                break
            if is_steady:
                forwards = Counter(action.stage for action in period if action.op == "F")
                passes = {stage: times * count for stage, count in forwards.items()}
                all_sends = {flow: times * count for flow, count in sends.items()}
                return Repeat(start, length, times, shift, passes, all_sends)
            start += length
    return None

"""Schedules written as phases: a pattern of slots and how often each rank repeats it."""

from collections.abc import Iterable, Sequence

from megatron5d.pipeline_parallel.program import Action, Slot

Phase = tuple[int, str]
"""How often, and the slots in the order in which they run, such as `(3, "F0&B1 F1&B0")`."""


def unroll(phases: Iterable[Phase], stages: Sequence[int], microbatches: Sequence[range]) -> list[Slot]:
    """Returns the slots that a rank runs.

    In a pattern, `F1` is the next forward of the rank's chunk 1, `I1` and `B1` its next backward, `F0&B1` an
    overlapped pair, `W1` the oldest deferred weight gradient of chunk 1 and `W` the oldest of any chunk.

    Args:
        phases: the phases in order. What lies beyond the last micro-batch is left out.
        stages: the stage of each of the rank's chunks.
        microbatches: the micro-batches of each chunk.
    """
    forwards, backwards = [0] * len(stages), [0] * len(stages)
    deferred: list[tuple[int, Action]] = []

    def action(text: str) -> Action | None:
        op, chunk = text[0], int(text[1:]) if text[1:] else None
        if op == "W":
            found = next(item for item in deferred if chunk in (None, item[0]))
            deferred.remove(found)
            return found[1]
        assert chunk is not None, f"{text} names no chunk"
        counter = forwards if op == "F" else backwards
        index = counter[chunk]
        counter[chunk] += 1
        real = index < len(microbatches[chunk])
        microbatch = microbatches[chunk][index] if real else -1
        if op == "I":
            deferred.append((chunk, Action("W", stages[chunk], microbatch)))
        return Action(op, stages[chunk], microbatch) if real else None

    slots = []
    for times, pattern in phases:
        for _ in range(times):
            for cell in pattern.split():
                slot = tuple(filter(None, map(action, cell.split("&"))))
                slots.append(tuple(part for part in slot if part.microbatch >= 0))
    return [slot for slot in slots if slot]

"""DualPipe and DualPipeV: forward and backward of two micro-batches overlap, so that one hides the
other's all-to-all.

Both have the same eight phases over a chunk 0 that runs away from the rank nearest to the turn and
a chunk 1 that comes back. In DualPipe the two chunks are two copies of the model in opposite
directions; DualPipeV folds one copy.

Schedules written as phases: a pattern of slots and how often each rank repeats it.
"""

from collections.abc import Iterable, Sequence

from megatron5d.pipeline_parallel.program import (
    Action,
    Program,
    Slot,
    make_program,
    mirrored_placement,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import schedule

Phase = tuple[int, str]
"""How often, and the slots in the order in which they run, such as `(3, "F0&B1 F1&B0")`."""


def unroll(
    phases: Iterable[Phase], stages: Sequence[int], microbatches: Sequence[range]
) -> list[Slot]:
    """Returns the slots that a rank runs.

    In a pattern, `F1` is the next forward of the rank's chunk 1, `I1` and `B1` its next backward,
    `F0&B1` an overlapped pair, `W1` the oldest deferred weight gradient of chunk 1 and `W` the
    oldest of any chunk.

    Args:
        phases: the phases in order. What lies beyond the last micro-batch is left out.
        stages: the stage of each of the rank's chunks.
        microbatches: the micro-batches of each chunk.
    """
    forwards, backwards = [0] * len(stages), [0] * len(stages)
    deferred: list[tuple[int, Action | None]] = []

    def action(op: str, chunk: int | None) -> Action | None:
        if op == "W":
            return deferred.pop(
                next(i for i, (other, _) in enumerate(deferred) if chunk in (None, other))
            )[1]
        assert chunk is not None, f"{op} names no chunk"
        counter, own = forwards if op == "F" else backwards, microbatches[chunk]
        index = counter[chunk]
        counter[chunk] += 1
        real = index < len(own)
        if op == "I":
            deferred.append((chunk, Action("W", stages[chunk], own[index]) if real else None))
        return Action(op, stages[chunk], own[index]) if real else None

    slots = []
    for times, pattern in phases:
        cells = [
            [(part[0], int(part[1:]) if part[1:] else None) for part in cell.split("&")]
            for cell in pattern.split()
        ]
        for _ in range(times):
            slots += [[action(*part) for part in cell] for cell in cells]
    return [slot for cell in slots if (slot := tuple(part for part in cell if part))]


@schedule("dualpipe")
def dualpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns DualPipe: bidirectional, two copies of each stage on mirrored ranks.

    Bubble (p/2 − 1)(F&B + B − 3W), B = I + W; activations p + 1; two copies of the parameters.
    Source: DeepSeek-V3 (2412.19437), §3.2.1, Table 2; phase counts as in
        github.com/deepseek-ai/DualPipe.

    Raises ValueError: an odd number of ranks or of micro-batches, or fewer than two micro-batches
    per rank.
    """
    if num_ranks % 2:
        raise ValueError(
            f"pipeline.schedule=dualpipe mirrors ranks in pairs, but parallel.pp={num_ranks} is odd; "
            f"set parallel.pp={num_ranks + 1}"
        )
    _check_microbatches("dualpipe", num_ranks, num_microbatches, even=True)
    half, last = num_microbatches // 2, num_ranks - 1
    ways = range(half), range(half, num_microbatches)

    def line(rank: int) -> list[Slot]:
        from_end = min(rank, last - rank)
        phases = _phases(num_ranks // 2, from_end, half)
        if rank == from_end:
            return unroll(phases, (rank, last - rank), ways)
        return unroll(phases, (last - rank, rank), ways[::-1])

    direction = [0] * half + [1] * half
    return make_program(
        "dualpipe", mirrored_placement(num_ranks), direction, map(line, range(num_ranks))
    )


@schedule("dualpipe_v", chunks=2)
def dualpipe_v(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns DualPipeV: DualPipe cut in half and folded into a V, so that one copy of the
    parameters is enough.

    Bubble as DualPipe's with p counted in stages: (p − 1)(F&B + B − 3W) over half-rank costs on p
    ranks, B = I + W; activations p + 1/2.
    Source: github.com/deepseek-ai/DualPipe (DualPipeV); the "cut in half" of Sea AI Lab's analysis.

    Raises ValueError: fewer than two micro-batches per rank.
    """
    _check_microbatches("dualpipe_v", num_ranks, num_microbatches, even=False)

    def line(rank: int) -> list[Slot]:
        phases = _phases(num_ranks, rank, num_microbatches)
        return unroll(phases, (rank, 2 * num_ranks - 1 - rank), [range(num_microbatches)] * 2)

    placement = zigzag_placement(num_ranks)
    return make_program(
        "dualpipe_v", placement, [0] * num_microbatches, map(line, range(num_ranks))
    )


def _phases(length: int, from_end: int, num_microbatches: int) -> list[Phase]:
    """Returns the phases of one rank.

    Args:
        length: ranks between an end and the turn.
        from_end: how far this rank is from the end at which its chunk 0 begins.
        num_microbatches: micro-batches of one chunk.
    """
    to_turn = length - 1 - from_end
    main = num_microbatches - 2 * length + from_end + 1
    # the turn's first F is awaited: it does not wait for a B
    at_turn = [(1, "F0 B1 F1&B0"), (main - 1, "F0&B1 F1&B0")]
    last_backwards = ["B1", "B0"] * (from_end + 1)
    split = from_end + 1
    last_backwards[split:] = [cell.replace("B", "I") for cell in last_backwards[split:]]
    return [
        (2 * to_turn, "F0"),
        (from_end + 1, "F0 F1"),
        (to_turn, "I1 W F1"),
        *(at_turn if to_turn == 0 else [(main, "F0&B1 F1&B0")]),
        (to_turn, "B1 F1&B0"),
        (1, " ".join(last_backwards)),
        (to_turn, "W I0"),
        (from_end + 1, "W"),
    ]


def _check_microbatches(name: str, num_ranks: int, num_microbatches: int, even: bool) -> None:
    least = 2 * num_ranks
    if num_microbatches < least or (even and num_microbatches % 2):
        legal = max(least, num_microbatches + num_microbatches % 2)
        needed = f"at least 2·pp = {least} micro-batches{', an even number' if even else ''}"
        raise ValueError(
            f"pipeline.schedule={name} with parallel.pp={num_ranks} needs {needed}, but num_microbatches="
            f"{num_microbatches}; the nearest legal value is {legal}"
        )

"""DualPipe and DualPipeV: forward and backward of two micro-batches overlap, so that one hides the
other's all-to-all.

Both have the same eight sections, over a chunk 0 that leads away from the rank at an end of the
pipeline to the turn and a chunk 1 that comes back. In DualPipe the two chunks are two copies of the
model in opposite directions; DualPipeV folds one copy. A section is a pattern of slots and how
often a rank repeats it.
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

Section = tuple[int, str]
"""Number of repetitions, and the slots in order, such as `(3, "F0&B1 F1&B0")`."""


def unroll(
    sections: Iterable[Section], stages: Sequence[int], microbatches: Sequence[range]
) -> list[Slot]:
    """Unrolls the sections of a rank into its slots.

    In a pattern, `F1` is the next forward of the rank's chunk 1, `I1` and `B1` its next backward,
    `F0&B1` an overlapped pair, `W1` the oldest deferred weight gradient of chunk 1 and `W` the
    oldest of any chunk.

    Args:
        sections: in order. Actions beyond the last micro-batch are left out.
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
        assert chunk is not None, f"{op} requires a chunk"
        counter, numbers = forwards if op == "F" else backwards, microbatches[chunk]
        index = counter[chunk]
        counter[chunk] += 1
        exists = index < len(numbers)
        if op == "I":
            weight = Action("W", stages[chunk], numbers[index]) if exists else None
            deferred.append((chunk, weight))
        return Action(op, stages[chunk], numbers[index]) if exists else None

    cells = []
    for repetitions, pattern in sections:
        codes = [
            [(code[0], int(code[1:]) if code[1:] else None) for code in cell.split("&")]
            for cell in pattern.split()
        ]
        for _ in range(repetitions):
            cells += [[action(*code) for code in cell] for cell in codes]
    return [slot for cell in cells if (slot := tuple(filter(None, cell)))]


@schedule("dualpipe")
def dualpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """DualPipe: bidirectional, two copies of each stage on mirrored ranks.

    Bubble (p/2 − 1)(F&B + B − 3W), B = I + W; activations p + 1; two copies of the parameters.
    Source: DeepSeek-V3 (2412.19437), §3.2.1, Table 2; phase counts as in
        github.com/deepseek-ai/DualPipe.

    Raises:
        ValueError: an odd number of ranks or of micro-batches, or fewer than two micro-batches per
            rank.
    """
    if num_ranks % 2:
        raise ValueError(
            f"pipeline.schedule=dualpipe mirrors ranks in pairs, but parallel.pp={num_ranks} is "
            f"odd; set parallel.pp={num_ranks + 1}"
        )
    _check_microbatches("dualpipe", num_ranks, num_microbatches, even=True)
    half, last = num_microbatches // 2, num_ranks - 1
    halves = range(half), range(half, num_microbatches)

    def line(rank: int) -> list[Slot]:
        from_end = min(rank, last - rank)
        sections = _sections(num_ranks // 2, from_end, half)
        if rank == from_end:
            return unroll(sections, (rank, last - rank), halves)
        return unroll(sections, (last - rank, rank), halves[::-1])

    direction = [0] * half + [1] * half
    return make_program(
        "dualpipe", mirrored_placement(num_ranks), direction, map(line, range(num_ranks))
    )


@schedule("dualpipe_v", chunks=2)
def dualpipe_v(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """DualPipeV: DualPipe cut in half and folded into a V, with one copy of the parameters.

    Bubble as DualPipe's with p counted in stages: (p − 1)(F&B + B − 3W) over half-rank costs on p
    ranks, B = I + W; activations p + 1/2.
    Source: github.com/deepseek-ai/DualPipe (DualPipeV); the "cut in half" of Sea AI Lab's analysis.

    Raises:
        ValueError: fewer than two micro-batches per rank.
    """
    _check_microbatches("dualpipe_v", num_ranks, num_microbatches, even=False)

    def line(rank: int) -> list[Slot]:
        sections = _sections(num_ranks, rank, num_microbatches)
        return unroll(sections, (rank, 2 * num_ranks - 1 - rank), [range(num_microbatches)] * 2)

    placement = zigzag_placement(num_ranks)
    return make_program(
        "dualpipe_v", placement, [0] * num_microbatches, map(line, range(num_ranks))
    )


def _sections(length: int, from_end: int, num_microbatches: int) -> list[Section]:
    """The sections of one rank.

    Args:
        length: number of ranks between an end and the turn.
        from_end: distance of this rank from the end at which its chunk 0 begins.
        num_microbatches: of one chunk.
    """
    to_turn = length - 1 - from_end
    main = num_microbatches - 2 * length + from_end + 1
    # At the turn, the first F of chunk 1 follows its F of chunk 0 at once and cannot overlap a B.
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
    minimum = 2 * num_ranks
    if num_microbatches < minimum or (even and num_microbatches % 2):
        legal = max(minimum, num_microbatches + num_microbatches % 2)
        needed = f"at least 2·pp = {minimum} micro-batches{', an even number' if even else ''}"
        raise ValueError(
            f"pipeline.schedule={name} with parallel.pp={num_ranks} needs {needed}, but "
            f"num_microbatches={num_microbatches}; the nearest legal value is {legal}"
        )

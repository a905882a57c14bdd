"""1F1B: each rank runs a number of forwards early, then alternates forwards and backwards. GPipe:
all forwards, then all backwards, so that it holds the activations of every micro-batch."""

from megatron5d.pipeline_parallel.program import Action, Program, Slot, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import schedule


@schedule("1f1b")
def one_forward_one_backward(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """1F1B (PipeDream-Flush).

    Bubble (p − 1)(F + B); activations p.
    Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training (2104.04473),
        §2.2.1.
    """

    def line(rank: int) -> list[Slot]:
        passes = depth_first(rank, num_ranks, num_microbatches, 1)
        return _alternate(*passes, num_warmup=num_ranks - 1 - rank)

    return make_program(
        "1f1b", loop_placement(num_ranks), [0] * num_microbatches, map(line, range(num_ranks))
    )


@schedule("interleaved", chunks=2, any_chunks=True)
def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Interleaved (depth-first) 1F1B: v chunks per rank, alternating by groups of about p
    micro-batches.

    Bubble (p − 1)(F + B)/v where p divides m; activations p(1 + (p − 1)/(pv)).
    Source: Narayanan et al. 2021 (2104.04473), §2.2.2.
    """

    def line(rank: int) -> list[Slot]:
        first_group = group_sizes(num_ranks, num_microbatches)[0]
        num_warmup = (chunks - 1) * first_group + 2 * (num_ranks - 1 - rank)
        return _alternate(*depth_first(rank, num_ranks, num_microbatches, chunks), num_warmup)

    placement = loop_placement(num_ranks, chunks)
    return make_program(
        "interleaved", placement, [0] * num_microbatches, map(line, range(num_ranks))
    )


@schedule("interleaved_overlap", chunks=2, any_chunks=True)
def interleaved_overlap(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Interleaved 1F1B that overlaps the forward and the backward of its steady state.

    Bubble (p − 1)(F + B)/v where p divides m, and each pair hides the all-to-all of one under the
    compute of the other. It runs one more forward in its warm-up than `interleaved`, because an
    overlapped F ends only when its B ends: activations p(1 + (p − 1)/(pv)) + 1/v.
    Source: Megatron-Core's 1F1B with expert all-to-all overlap; Narayanan et al. 2021 (2104.04473)
        for the order.
    """

    def line(rank: int) -> list[Slot]:
        first_group = group_sizes(num_ranks, num_microbatches)[0]
        num_warmup = (chunks - 1) * first_group + 2 * (num_ranks - 1 - rank) + 1
        forwards, backwards = depth_first(rank, num_ranks, num_microbatches, chunks)
        num_warmup = min(num_warmup, len(forwards))
        pairs: list[Slot] = list(zip(forwards[num_warmup:], backwards))
        warmup: list[Slot] = [(forward,) for forward in forwards[:num_warmup]]
        return warmup + pairs + [(backward,) for backward in backwards[len(pairs) :]]

    placement = loop_placement(num_ranks, chunks)
    return make_program(
        "interleaved_overlap", placement, [0] * num_microbatches, map(line, range(num_ranks))
    )


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Numbers of micro-batches that pass one chunk before the next chunk takes over.

    Groups have p micro-batches where p divides m. Otherwise all have at least p, their sizes differ
    by one at most, and the larger ones come first, so that no rank waits for a group shorter than
    the pipeline. One group where m < p.
    """
    rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, rounds)
    return [size + (index < larger) for index in range(rounds)]


def depth_first(
    rank: int, num_ranks: int, num_microbatches: int, chunks: int, backward: str = "B"
) -> tuple[list[Action], list[Action]]:
    """The forwards and the backwards of one rank, in order: group by group, chunks alternating."""
    forwards, backwards, first = [], [], 0
    for size in group_sizes(num_ranks, num_microbatches):
        group = range(first, first + size)
        forwards += [
            Action("F", chunk * num_ranks + rank, i) for chunk in range(chunks) for i in group
        ]
        backwards += [
            Action(backward, chunk * num_ranks + rank, i)
            for chunk in reversed(range(chunks))
            for i in group
        ]
        first += size
    return forwards, backwards


def _alternate(forwards: list[Action], backwards: list[Action], num_warmup: int) -> list[Slot]:
    """Warm-up forwards, then a forward and a backward alternating, then the other backwards."""
    num_warmup = min(num_warmup, len(forwards))
    slots: list[Slot] = [(action,) for action in forwards[:num_warmup]]
    for forward, backward in zip(forwards[num_warmup:], backwards):
        slots += [(forward,), (backward,)]
    return slots + [(action,) for action in backwards[len(forwards) - num_warmup :]]


@schedule("gpipe")
def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """GPipe: all forwards, then all backwards.

    Bubble (p − 1)(F + B); activations m.
    Source: Huang et al. 2019, GPipe (1811.06965), §2.3.
    """
    return _all_forward("gpipe", num_ranks, num_microbatches, chunks)


@schedule("bfs", chunks=2, any_chunks=True)
def breadth_first(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """The breadth-first schedule: all micro-batches pass one chunk before any passes the next.

    Bubble (p − 1)(F + B)/v where m ≥ p; activations m. It gathers and reduces each chunk's weights
    once a step.
    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (2211.05953), §4.
    """
    return _all_forward("bfs", num_ranks, num_microbatches, chunks)


def _all_forward(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    def line(rank: int) -> list[Slot]:
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        forward: list[Slot] = [
            (Action("F", stage, i),) for stage in stages for i in range(num_microbatches)
        ]
        backward: list[Slot] = [
            (Action("B", stage, i),) for stage in stages[::-1] for i in range(num_microbatches)
        ]
        return forward + backward

    return make_program(
        name, loop_placement(num_ranks, chunks), [0] * num_microbatches, map(line, range(num_ranks))
    )

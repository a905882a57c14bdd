"""All forwards, then all backwards: the simplest schedules, which hold the activations of every micro-batch."""

from megatron5d.pipeline_parallel.program import Action, Program, Slot, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import schedule


@schedule("gpipe")
def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns GPipe: all forwards, then all backwards.

    Bubble (p − 1)(F + B); activations m.
    Source: Huang et al. 2019, GPipe (1811.06965), §2.3.
    """
    return _all_forward("gpipe", num_ranks, num_microbatches, chunks)


@schedule("bfs", chunks=2, any_chunks=True)
def breadth_first(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns the breadth-first schedule: all micro-batches through one chunk before any goes through the next.

    Bubble (p − 1)(F + B)/v where m ≥ p; activations m. It gathers and reduces each chunk's weights once a step.
    Source: Lamy-Poirier 2022, Breadth-First Pipeline Parallelism (2211.05953), §4.
    """
    return _all_forward("bfs", num_ranks, num_microbatches, chunks)


def _all_forward(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    def line(rank: int) -> list[Slot]:
        stages = [chunk * num_ranks + rank for chunk in range(chunks)]
        forward: list[Slot] = [(Action("F", stage, i),) for stage in stages for i in range(num_microbatches)]
        backward: list[Slot] = [(Action("B", stage, i),) for stage in stages[::-1] for i in range(num_microbatches)]
        return forward + backward

    return make_program(name, loop_placement(num_ranks, chunks), [0] * num_microbatches, map(line, range(num_ranks)))

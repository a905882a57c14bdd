"""What a search returns."""

from dataclasses import dataclass

import numpy as np

from megatron5d.pipeline_parallel.program import Program


@dataclass(frozen=True)
class SearchResult:
    """The best Program found, verified; times in the unit of the costs.

    Args:
        program: called `auto`, or by its name where a named schedule is the best.
        makespan: from the first action's start to the last one's end.
        overhead: makespan − the compute of the busiest rank.
        bubble: overhead / makespan.
        peak: `[num_ranks]` activations, in micro-batches of one rank's layers.
        lower_bound: an overhead below which no Program of this placement goes with so many activations.
        placement: name of the placement.
        evaluations: list schedules tried.
        elapsed_s: time taken.
        compiled: whether numba was there; without it a list schedule takes a hundred times as long.
        named: the best named schedule that fits, and its makespan; None where none does.
        split: which of several ways to deal the layers to stages it is for.
    """

    program: Program
    makespan: float
    overhead: float
    bubble: float
    peak: np.ndarray
    lower_bound: float
    placement: str
    evaluations: int
    elapsed_s: float
    compiled: bool
    named: tuple[str, float] | None
    split: int = 0

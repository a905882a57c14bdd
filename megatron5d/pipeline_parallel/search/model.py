"""Who says what a stage costs: the search asks for every placement that it tries."""

from typing import Protocol

import numpy as np

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Placement


class CostModel(Protocol):
    """Gives the costs of every stage of any placement; `Costs` is one, for stages that are alike."""

    def of(self, placement: Placement) -> StageCosts: ...


def are_equal(one: StageCosts, other: StageCosts) -> bool:
    """Whether two ways to deal the layers to stages come to the same."""
    return all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(other).values()))


def is_even(model: CostModel) -> bool:
    """Whether all stages are alike, so that fewer ranks make a pipeline like it."""
    return isinstance(model, Costs) and model.stage_scale is None

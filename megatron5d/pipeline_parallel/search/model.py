"""Who says what a stage costs: the search asks for every placement that it tries."""

from typing import Protocol

from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Placement


class CostModel(Protocol):
    """Gives the costs of every stage of any placement; `Costs` is one, for stages that are alike."""

    def of(self, placement: Placement) -> StageCosts: ...


def costs_on(model: CostModel | StageCosts, placement: Placement) -> StageCosts | None:
    """Return the costs of the stages of a placement; None where measured ones are for another number of stages."""
    if not isinstance(model, StageCosts):
        return model.of(placement)
    return model if model.compute.shape[1] == placement.num_stages else None


def is_even(model: CostModel | StageCosts) -> bool:
    """Whether all stages are alike, so that fewer ranks make a pipeline like it."""
    return isinstance(model, Costs) and model.stage_scale is None

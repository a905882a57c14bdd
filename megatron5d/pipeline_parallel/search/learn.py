"""Evolution of one policy for long, to be shipped: where every later search starts."""

import numpy as np

from megatron5d.pipeline_parallel.search.arms import Arm
from megatron5d.pipeline_parallel.search.list_scheduler import STUCK
from megatron5d.pipeline_parallel.search.policy import Shipped, policy_of, starting_points
from megatron5d.pipeline_parallel.search.problem import Clock, CostModel, Problem, placement_called
from megatron5d.pipeline_parallel.simulate import simulate

DECIMALS = 6
"""Of the numbers that are kept."""


def learn(
    name: str, pp: int, num_microbatches: int, costs: CostModel, memory: float, seed: int, clock: Clock
) -> Shipped:
    """Returns the best policy found for a placement, starting from those shipped already.

    Args:
        name: of the placement, such as `mirrored`.
        pp: pipeline ranks.
        num_microbatches: of one step.
        costs: of a rank's share.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers.
        seed: of all chance.
        clock: what may be spent.

    Raises:
        ValueError: An unknown placement, or a memory under which every policy gets stuck.
    """
    placement = placement_called(name, pp)
    problem = Problem(name, placement, num_microbatches, costs.of(placement), np.full(pp, memory))
    arm = Arm(problem, starting_points(problem.num_lanes), (seed,), clock)
    while clock.share() < 1:
        arm.generation()
    numbers = arm.elites[0][1].round(DECIMALS)
    program = problem.program(numbers) if arm.best < STUCK else None
    if program is None:
        raise ValueError(f"no policy holds at most {memory:g} micro-batches at pp={pp}; raise --memory")
    overhead = simulate(program, problem.costs).overhead
    return Shipped(name, str(costs), pp, num_microbatches, memory, overhead, policy_of(numbers, problem.num_lanes))

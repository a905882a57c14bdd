"""The named schedules as a floor under the search: what it returns is never worse than the best of them that fits."""

from collections.abc import Collection, Iterator

import numpy as np

from megatron5d.pipeline_parallel.catalogue import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.search.model import CostModel
from megatron5d.pipeline_parallel.search.placements import called
from megatron5d.pipeline_parallel.simulate import simulate

LARGE = 1 << 14
"""pp · num_microbatches beyond which the named schedules are compared at 4·pp micro-batches, and the best one built."""


def best_named(
    pp: int, num_microbatches: int, costs: CostModel, memory: np.ndarray, placements: Collection[str]
) -> Program | None:
    """Returns the fastest named schedule that fits; None where none does.

    Args:
        pp: pipeline ranks.
        num_microbatches: of one step.
        costs: of every placement.
        memory: `[pp]` the most activations a rank may hold.
        placements: names of those that may be used.
    """
    few = min(num_microbatches, 4 * pp) if pp * num_microbatches > LARGE else num_microbatches
    ranking = sorted(
        ((makespan, name, chunks) for makespan, name, chunks in _all(pp, few, costs, memory, placements)),
        key=lambda found: found[0],
    )
    for _, name, chunks in ranking:
        for _, program in _built(name, pp, num_microbatches, chunks, costs, memory):
            return program
    return None


def _all(pp, num_microbatches, costs, memory, placements) -> Iterator[tuple[float, str, int]]:
    wanted = sorted({int(name.partition(":")[2] or 1) for name in placements})
    for name in schedule_names():
        schedule = find_schedule(name)
        fitting = [n for n in wanted if n > 1] if schedule.any_chunks else {schedule.chunks}.intersection(wanted)
        for chunks in fitting:
            for makespan, program in _built(name, pp, num_microbatches, chunks, costs, memory):
                if called(program.placement) in placements:
                    yield makespan, name, chunks


def _built(name, pp, num_microbatches, chunks, costs, memory) -> Iterator[tuple[float, Program]]:
    """Yields the Program of one schedule with its makespan, or nothing where the sizes or the memory refuse it."""
    try:
        program = build_program(name, pp, num_microbatches, chunks)
        stage_costs = costs.of(program.placement)
    except ValueError:
        return
    result = simulate(program, stage_costs)
    if (result.peak_activations <= memory + 1e-9).all():
        yield result.makespan, program

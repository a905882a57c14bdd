"""`pipeline.schedule=auto`: the fastest Program found for this model, on the placements that it admits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron5d.config.schema import Config
from megatron5d.model.partition import at_both_ends, layout_of, shared_by_mirror
from megatron5d.model.stage_costs import ModelCosts
from megatron5d.pipeline_parallel.costs import Costs, parse_costs
from megatron5d.pipeline_parallel.program import Placement, Program, loop_placement
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.search.named import best_named
from megatron5d.pipeline_parallel.search.placements import candidates, placement_called
from megatron5d.pipeline_parallel.simulate import peak_memory


def searched_programs(config: Config, counts: Sequence[int]) -> dict[int, Program]:
    """A verified Program for each number of micro-batches, all with one placement.

    The same on every rank and machine with the same packages: the search is ended by a count, not by a clock.

    Args:
        config: model, pipeline and parallel.
        counts: micro-batches of a step, ascending; the placement is chosen for the last one.

    Raises:
        ValueError: no schedule fits the memory or the layers.
    """
    # numba takes a second to import and more to compile, and only this schedule needs it
    from megatron5d.pipeline_parallel.search.search import search_program

    pipeline, pp = config.pipeline, config.parallel.pp
    costs, names = _costs(config), _placements(config)
    programs: dict[int, Program] = {}
    for m in reversed(counts):
        result = search_program(
            pp,
            m,
            costs,
            memory=_cap(config, costs, m),
            copies=pipeline.copies,
            seconds=None,
            evaluations=pipeline.evaluations,
            placements=names,
        )
        programs[m] = result.program
        names = [name for name in names if placement_called(name, pp) == programs[counts[-1]].placement]
    return programs


def known_programs(config: Config, counts: Sequence[int]) -> dict[int, Program]:
    """The best named schedule for each number of micro-batches: what the search is never worse than, at once.

    Raises:
        ValueError: none fits the memory and the layers.
    """
    costs, names, pp = _costs(config), _placements(config), config.parallel.pp
    found = {}
    for m in counts:
        cap = _cap(config, costs, m)
        program = best_named(pp, m, costs, np.full(pp, cap), names)
        if program is None:
            raise ValueError(
                f"pipeline.schedule = auto: no schedule for parallel.pp = {pp} holds at most pipeline.memory = "
                f"{config.pipeline.memory:g} times the {cap / config.pipeline.memory:g} micro-batches that 1F1B holds; "
                f"set pipeline.memory=1.0"
            )
        found[m] = program
    return found


def _costs(config: Config) -> Costs | ModelCosts:
    return parse_costs(config.pipeline.costs) if config.pipeline.costs else ModelCosts(config)


def _placements(config: Config) -> list[str]:
    """Names of the placements that the model admits."""
    pp = config.parallel.pp
    return [name for name in candidates(pp, config.pipeline.copies) if _admits(config, placement_called(name, pp))]


def _admits(config: Config, placement: Placement) -> bool:
    """Whether the model can be laid out so, with as many chunks as the user asks for."""
    if config.parallel.vpp > 1 and placement.chunks != config.parallel.vpp:
        return False
    try:
        layout_of(config, placement.num_stages)
        shared_by_mirror(placement, at_both_ends(config.model))
    except ValueError:
        return False
    return True


def _cap(config: Config, costs: Costs | ModelCosts, num_microbatches: int) -> float:
    """The most activations of a rank, in micro-batches of one rank's layers."""
    program = build_program("1f1b", config.parallel.pp, num_microbatches)
    held = peak_memory(program, costs.of(loop_placement(config.parallel.pp)))[0]
    return config.pipeline.memory * float(held.max())

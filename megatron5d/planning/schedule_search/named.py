"""Placements by name, and the best named schedule under a memory cap: the search never returns a
slower one."""

import re
from collections.abc import Collection
from typing import Protocol

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import (
    Placement,
    Program,
    loop_placement,
    mirrored_placement,
    placement_name,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.simulate import simulate

DEFAULT = ("loop:1", "loop:2", "loop:4", "zigzag:2", "zigzag:4", "mirrored")
"""What is tried where the user names nothing; as far as copies and the number of ranks admit."""
PAIRS = ("F&I", "F&W", "I&W", "F&F", "I&I")
"""Which two actions may overlap; two weight gradients have nothing to hide."""
LARGE = 1 << 14
"""pp · num_microbatches beyond which named schedules are compared at 4·pp micro-batches."""


class CostModel(Protocol):
    """Gives the costs of every stage of any placement; `Costs` is one, for equal stages."""

    def of(self, placement: Placement) -> StageCosts: ...


def placement_called(name: str, num_ranks: int) -> Placement:
    """Returns the placement of a name.

    Raises:
        ValueError: An unknown name, or a number of chunks or ranks that it does not admit.
    """
    found = re.fullmatch(r"mirrored|(loop|zigzag):([1-9]\d*)", name)
    if not found:
        raise ValueError(
            f"placement {name!r} is none of loop:<chunks>, zigzag:<chunks>, mirrored; such as loop:4"
        )
    if name != "mirrored":
        return (loop_placement if found[1] == "loop" else zigzag_placement)(
            num_ranks, int(found[2])
        )
    if num_ranks % 2:
        raise ValueError(
            f"placement mirrored pairs ranks, but parallel.pp={num_ranks} is odd; set parallel.pp={num_ranks + 1}"
        )
    return mirrored_placement(num_ranks)


def called(placement: Placement) -> str:
    """Returns the name that `placement_called` takes, or the number of chunks where a placement has
    none."""
    kind = placement_name(placement).partition(" ")[0]
    return kind if kind == "mirrored" else f"{kind}:{placement.chunks}"


def candidates(num_ranks: int, copies: int) -> list[str]:
    """Returns the names of the default placements that need no more copies and that this number of
    ranks admits."""
    return [name for name in DEFAULT if name != "mirrored" or (copies >= 2 and num_ranks % 2 == 0)]


def best_named(
    pp: int,
    num_microbatches: int,
    costs: CostModel,
    memory: np.ndarray,
    placements: Collection[str],
) -> Program | None:
    """Returns the fastest named schedule that fits; None where none does.

    Args:
        pp, num_microbatches, costs: the pipeline, one step, and what it costs on any placement.
        memory: `[pp]` the most activations a rank may hold.
        placements: names of those that may be used.
    """

    def fitting(name: str, chunks: int, count: int) -> tuple[float, Program] | None:
        try:
            program = build_program(name, pp, count, chunks)
            stage_costs = costs.of(program.placement)
        except ValueError:
            return None
        result = simulate(program, stage_costs)
        fits = (
            called(program.placement) in placements
            and (result.peak_activations <= memory + 1e-9).all()
        )
        return (result.makespan, program) if fits else None

    few = min(num_microbatches, 4 * pp) if pp * num_microbatches > LARGE else num_microbatches
    wanted = {int(name.partition(":")[2] or 1) for name in placements}
    ranking = []
    for name in schedule_names():
        schedule = find_schedule(name)
        for chunks in sorted(wanted - {1} if schedule.any_chunks else wanted & {schedule.chunks}):
            found = fitting(name, chunks, few)
            ranking += [(found[0], name, chunks)] if found else []
    for _, name, chunks in sorted(ranking, key=lambda entry: entry[0]):
        best = fitting(name, chunks, num_microbatches)
        if best:
            return best[1]
    return None

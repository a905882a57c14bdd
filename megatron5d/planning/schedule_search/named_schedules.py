"""Placements by name, and the best named schedule under a memory cap.

The search never returns a slower Program than that one.
"""

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

PLACEMENTS = ("loop:1", "loop:2", "loop:4", "zigzag:2", "zigzag:4", "mirrored")
"""The placements that a search tries by default."""
PAIRS = ("F&I", "F&W", "I&W", "F&F", "I&I")
"""Which two actions may overlap; two weight gradients have no communication to hide."""
LARGE = 1 << 14
"""pp · num_microbatches beyond which named schedules are compared at 4·pp micro-batches."""


class CostModel(Protocol):
    """Gives the costs of every stage of any placement; `Costs` is one, for equal stages."""

    def of(self, placement: Placement) -> StageCosts: ...


def placement_by_name(name: str, num_ranks: int) -> Placement:
    """The placement with this name.

    Raises:
        ValueError: an unknown name, or a number of chunks or ranks that it does not admit.
    """
    match = re.fullmatch(r"mirrored|(loop|zigzag):([1-9]\d*)", name)
    if not match:
        raise ValueError(
            f"placement {name!r} must be loop:<chunks>, zigzag:<chunks> or mirrored, such as loop:4"
        )
    if name != "mirrored":
        make = loop_placement if match[1] == "loop" else zigzag_placement
        return make(num_ranks, int(match[2]))
    if num_ranks % 2:
        raise ValueError(
            f"placement mirrored pairs ranks, but parallel.pp={num_ranks} is odd; "
            f"set parallel.pp={num_ranks + 1}"
        )
    return mirrored_placement(num_ranks)


def name_of_placement(placement: Placement) -> str:
    """The name that `placement_by_name` takes; custom:<chunks> for a placement without one."""
    kind = placement_name(placement).partition(" ")[0]
    return kind if kind == "mirrored" else f"{kind}:{placement.chunks}"


def default_placements(num_ranks: int, copies: int) -> list[str]:
    """Names of the PLACEMENTS that this number of ranks and of copies admits."""
    admits_mirrored = copies >= 2 and num_ranks % 2 == 0
    return [name for name in PLACEMENTS if name != "mirrored" or admits_mirrored]


def best_named_program(
    pp: int,
    num_microbatches: int,
    costs: CostModel,
    memory: np.ndarray,
    placements: Collection[str],
) -> Program | None:
    """The fastest named schedule that fits the memory; None if none does.

    Args:
        pp: pipeline ranks.
        num_microbatches: of one step.
        costs: on any placement.
        memory: `[pp]` the most activations a rank may hold.
        placements: names of those that may be used.
    """

    def fit(name: str, chunks: int, count: int) -> tuple[float, Program] | None:
        try:
            program = build_program(name, pp, count, chunks)
            stage_costs = costs.of(program.placement)
        except ValueError:
            return None
        result = simulate(program, stage_costs)
        fits = (
            name_of_placement(program.placement) in placements
            and (result.peak_activations <= memory + 1e-9).all()
        )
        return (result.makespan, program) if fits else None

    few = min(num_microbatches, 4 * pp) if pp * num_microbatches > LARGE else num_microbatches
    all_chunks = {int(name.partition(":")[2] or 1) for name in placements}
    ranking = []
    for name in schedule_names():
        schedule = find_schedule(name)
        for chunks in sorted(
            all_chunks - {1} if schedule.any_chunks else all_chunks & {schedule.chunks}
        ):
            if fitting := fit(name, chunks, few):
                ranking.append((fitting[0], name, chunks))
    for _, name, chunks in sorted(ranking, key=lambda entry: entry[0]):
        if fitting := fit(name, chunks, num_microbatches):
            return fitting[1]
    return None

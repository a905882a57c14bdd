"""`pipeline.schedule=auto`: the fastest Program found for this model, on the placements that it
admits.

And what is wrong with the pipeline of a configuration, whatever its schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron5d.config.checks import run_checks
from megatron5d.config.checks.check import divisors
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.model.partition import layers_per_stage, shared_parameters, stage_specs
from megatron5d.pipeline_parallel.program import Placement, Program, loop_placement
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.simulate import peak_memory, simulate
from megatron5d.pipeline_parallel.verify import ProgramError
from megatron5d.planning.schedule_search.named import best_named, candidates, placement_called
from megatron5d.planning.schedule_search.stage_costs import run_costs
from megatron5d.topology.all_ranks import on_rank_0
from megatron5d.topology.process import Process
from megatron5d.train.pipeline_layout import (
    PipelineLayout,
    micro_batch_counts,
    named_programs,
    pipeline_layout,
    sequences_at_once,
    verified,
)

if TYPE_CHECKING:  # numba takes a second to import
    from megatron5d.planning.schedule_search.search import SearchResult

PIPELINE_KNOBS = (
    *(f"pipeline.{key}" for key in ("schedule", "layout", "balance", "memory", "costs", "copies")),
    *("parallel.pp", "parallel.vpp", "model.tie_embeddings", "model.num_mtp_layers"),
)


@dataclass(frozen=True)
class Found:
    """Verified Programs of `pipeline.schedule=auto`, all with one placement.

    Args:
        config: with the split of the layers that they are for.
        programs: number of micro-batches -> Program.
        results: what the search says of them; empty where the named schedules alone were asked.
    """

    config: Config
    programs: dict[int, Program]
    results: dict[int, SearchResult] = field(default_factory=dict)


def searched(config: Config, counts: Sequence[int]) -> Found:
    """Returns the fastest Program for each number of micro-batches, all with one placement and one
    split of the layers.

    It is kept beside the run's checkpoints (or its log), so that a run that continues does so with
    the same one. The search ends after `pipeline.evaluations` schedules; only where
    `pipeline.search_s` ends it earlier does the result depend on the machine.

    Args:
        config: model, pipeline and parallel.
        counts: micro-batches of a step, ascending; placement and split are chosen for the last one.

    Raises:
        ValueError: no schedule fits the memory or the layers.
    """
    # numba takes a second to import and more to compile, and only this schedule needs it
    from megatron5d.planning.schedule_search.search import search_program

    pipeline, pp = config.pipeline, config.parallel.pp
    splits, names = _splits(config), _placements(config)
    folder = config.checkpoint.dir or config.log.dir
    results: dict[int, SearchResult] = {}
    for m in reversed(counts):
        results[m] = search_program(
            pp,
            m,
            [run_costs(split) for split in splits],
            memory=_cap(config, m),
            copies=pipeline.copies,
            seconds=pipeline.search_s,
            evaluations=pipeline.evaluations,
            placements=names,
            cache=Path(folder) / "schedules" if folder else None,
        )
        if m == counts[-1]:
            names = [
                name for name in names if placement_called(name, pp) == results[m].program.placement
            ]
            splits = [splits[results[m].split]]
    return Found(splits[0], {m: result.program for m, result in results.items()}, results)


def known_programs(config: Config, counts: Sequence[int]) -> Found:
    """Returns the best named schedule for each number of micro-batches: what the search is never
    worse than, at once.

    Raises:
        ValueError: none fits the memory and the layers.
    """
    splits, names, pp = _splits(config), _placements(config), config.parallel.pp
    found: dict[int, Program] = {}
    for m in reversed(counts):
        cap = _cap(config, m)
        best: list[tuple[float, int, Program]] = []
        for index, split in enumerate(splits):
            program = best_named(pp, m, run_costs(split), np.full(pp, cap), names)
            if program is not None:
                makespan = simulate(program, run_costs(split).of(program.placement)).makespan
                best.append((round(makespan, 9), index, program))
        if not best:
            raise ValueError(
                f"pipeline.schedule = auto: no schedule for parallel.pp = {pp} holds at most pipeline.memory = "
                f"{config.pipeline.memory:g} times the {cap / config.pipeline.memory:g} micro-batches that 1F1B holds; "
                f"set pipeline.memory=1.0"
            )
        _, index, found[m] = min(best, key=lambda item: item[:2])
        if m == counts[-1]:
            names = [name for name in names if placement_called(name, pp) == found[m].placement]
            splits = [splits[index]]
    return Found(splits[0], found)


def quick_layout(config: Config, world: int, check: bool = True) -> PipelineLayout:
    """Lays out the pipeline of a run that is only asked about: `auto` takes the best named
    schedule, unsearched.

    Args:
        config: a valid configuration.
        world: number of ranks.
        check: verify a named schedule's Program.

    Raises:
        ValueError: as `pipeline_layout`.
    """
    return _layout(config, world, known_programs, check)


def searched_layout(config: Config, world: int) -> PipelineLayout:
    """Lays out the pipeline of a run in one process; `auto` searches, which takes seconds. Raises
    as `quick_layout`."""
    return _layout(config, world, searched)


def _layout(
    config: Config, world: int, find: Callable[[Config, Sequence[int]], Found], check: bool = True
) -> PipelineLayout:
    if config.pipeline.schedule != "auto" or config.parallel.pp == 1:
        return pipeline_layout(config, world, named_programs(config, check))
    return layout_of(find(config, micro_batch_counts(config, world)), world)


def layout_of(found: Found, world: int) -> PipelineLayout:
    """Lays out the pipeline for Programs that were found."""
    return pipeline_layout(found.config, world, found.programs.__getitem__)


def agreed_layout(config: Config, process: Process) -> PipelineLayout:
    """Lays out the pipeline of a run. If a schedule must be searched for, rank 0 does so, and all
    read what it found.

    Args:
        config: a valid configuration.
        process: this rank.

    Raises:
        ValueError: on every rank, if no schedule fits.

    Comm: with `pipeline.schedule = auto` a broadcast of the Programs over the world.
    """
    counts = micro_batch_counts(config, process.world)
    results: dict[int, SearchResult] = {}
    if config.pipeline.schedule == "auto" and config.parallel.pp > 1:

        def search() -> list[Any]:
            found = searched(config, counts)
            results.update(found.results)
            pipeline = found.config.pipeline
            texts = [
                [m, program.name, write_program(program)] for m, program in found.programs.items()
            ]
            return [pipeline.split, pipeline.balance, texts]

        split, balance, texts = on_rank_0(search)
        config = replace(config, pipeline=replace(config.pipeline, split=split, balance=balance))
        programs = {
            m: verified(read_program(text, name, config.parallel.pp, m)) for m, name, text in texts
        }
        layout = layout_of(Found(config, programs), process.world)
    else:
        layout = pipeline_layout(config, process.world)
    if config.parallel.pp == 1 or process.rank != 0:
        return layout
    return replace(
        layout, note=prediction(config, layout.program_of(counts[-1]), results.get(counts[-1]))
    )


def prediction(config: Config, program: Program, result: SearchResult | None) -> str:
    """Returns a line for the log: what the schedule is expected to cost, and what the search made
    of it.

    Args:
        config: whose pipeline it is, with the split of the layers that the Program is for.
        program: of the last number of micro-batches.
        result: of the search that found it; None where none was needed.
    """
    found = simulate(program, run_costs(config).of(program.placement))
    text = (
        f"pipeline: {program.name}, {program.num_stages} stages, {program.num_microbatches} micro-batches: predicted "
        f"bubble {100 * found.bubble:.1f} %, activations of {found.peak_activations.max():.3g} micro-batches at most"
    )
    if result is None:
        return text
    text += (
        f"; {result.placement}, {result.evaluations:,} schedules tried in {result.elapsed_s:.1f} s"
    )
    if config.pipeline.layout is None:
        text += f", layers dealt with pipeline.split={config.pipeline.split} pipeline.balance={config.pipeline.balance}"
    if result.named is not None:
        name, makespan = result.named
        text += f", {100 * (makespan / found.makespan - 1):.1f} % faster than {name}, the best named one that fits"
    return (
        text
        if find_spec("numba")
        else f"{text}; without numba, which would try a hundred times as many"
    )


def _splits(config: Config) -> list[Config]:
    """Returns the configuration with every way to deal the layers to stages that the search may
    choose, as it says first.

    Who says how, or what the ends count for, leaves to choose only what is evened. Times that
    `pipeline.costs` gives are those of any split.
    """
    pipeline = config.pipeline
    if pipeline.balance != "auto" or pipeline.layout is not None or pipeline.costs:
        return [config]
    ways = [(pipeline.split, "stages"), (pipeline.split, "ranks")]
    if pipeline.split == "even" and not pipeline.embedding_layers and not pipeline.head_layers:
        ways = [("even", "stages"), ("cost", "stages"), ("cost", "ranks")]
    if pipeline.copies == 2:
        ways += [(ways[-1][0], "late"), (ways[-1][0], "ends")]
    return [
        replace(config, pipeline=replace(pipeline, split=split, balance=balance))
        for split, balance in ways
    ]


def _placements(config: Config) -> list[str]:
    """Returns names of the placements that the model admits.

    Raises:
        ValueError: it admits none.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    usual = candidates(pp, config.pipeline.copies)
    names = usual if vpp == 1 else [f"loop:{vpp}", f"zigzag:{vpp}"]
    faults = {
        name: [_why_not(split, placement_called(name, pp)) for split in _splits(config)]
        for name in names
    }
    admitted = [name for name, why_not in faults.items() if None in why_not]
    if not admitted:
        raise ValueError(
            f"pipeline.schedule = auto finds no placement of stages for parallel.pp = {pp}, parallel.vpp = {vpp}: "
            f"{next(iter(faults.values()))[0]}"
        )
    return admitted


def _why_not(config: Config, placement: Placement) -> str | None:
    """Returns why the model cannot be laid out so; None where it can."""
    try:
        shared_parameters(
            placement, stage_specs(layers_per_stage(config, placement), config.model), config.model
        )
    except ValueError as error:
        return str(error)
    return None


def _cap(config: Config, num_microbatches: int) -> float:
    """Returns the most activations of a rank, in micro-batches of one rank's layers."""
    costs = run_costs(config)
    program = build_program("1f1b", config.parallel.pp, num_microbatches)
    held = peak_memory(program, costs.of(loop_placement(config.parallel.pp)))[0]
    return config.pipeline.memory * float(held.max())


def pipeline_faults(config: Config, world: int) -> list[Fault]:
    """Returns what is wrong with the pipeline of a configuration that passes the checks of
    config/checks."""
    try:
        run_costs(config)
        quick_layout(config, world)
    except ValueError as error:
        reason, fix = _reason_and_fix(config, error)
        knobs = [knob for knob in PIPELINE_KNOBS if knob in str(error)] or ["pipeline.schedule"]
        if found := re.search(r"num_microbatches=(\d+)", reason):
            unit = sequences_at_once(config, world)
            batch = int(found[1]) * unit
            knobs.append("train.gbs" if batch == config.train.gbs else "train.gbs_ramp")
            reason = f"{reason} = {knobs[-1]} / (train.mbs·dp) = {batch} / {unit}"
            fix = (
                (_nearest_batch(config, world) or fix)
                if batch == config.train.gbs
                else "train.gbs_ramp=null"
            )
        elif config.pipeline.schedule == "dualpipe" and config.parallel.pp % 2:
            fix = _pairs_of_ranks(config, world)
        elif (
            not fix and config.pipeline.schedule.startswith("file:") and knobs != ["pipeline.costs"]
        ):
            fix = _nearest_batch(config, world) or (
                "pipeline.schedule=1f1b, or file:PATH of a program that tools/schedule.py verify accepts"
            )
        elif not fix and isinstance(error, ProgramError):
            fix = f"pipeline.schedule={_another_schedule(config)}"
        return [Fault("pipeline", tuple(knobs), reason, fix or "pipeline.costs=null")]
    return []


def _reason_and_fix(config: Config, error: ValueError) -> tuple[str, str]:
    """Splits a message before its last clause, which is the fix; what is said of a Program has
    none."""
    whole, schedule = str(error), config.pipeline.schedule
    # what is said of a program begins with its name, or its path
    if whole.startswith(schedule.removeprefix("file:")):
        whole = f"pipeline.schedule = {'file:' if schedule.startswith('file:') else ''}{whole}"
    if isinstance(error, ProgramError) or "; " not in whole:
        return whole, ""
    reason, _, fix = whole.rpartition("; ")
    return reason, fix.removeprefix("set ").removeprefix("nearest legal: ")


def _another_schedule(config: Config) -> str:
    """Returns a schedule with a right order, for one of ours that has none."""
    for name in (name for name in ("1f1b", "gpipe") if name != config.pipeline.schedule):
        with suppress(ValueError):
            verified(build_program(name, config.parallel.pp, 2 * config.parallel.pp))
            return name
    return "file:PATH of a program that tools/schedule.py verify accepts"


def _nearest_batch(config: Config, world: int) -> str | None:
    """Returns the override that gives the schedule a number of micro-batches it admits; None where
    none is near."""
    unit, program_of = sequences_at_once(config, world), named_programs(config)
    now = config.train.gbs // unit
    for m in sorted(range(1, now + 4 * config.parallel.pp + 1), key=lambda m: (abs(m - now), m)):
        with suppress(ValueError):
            program_of(m)
            return f"train.gbs={m * unit}"
    return None


def _pairs_of_ranks(config: Config, world: int) -> str:
    """Returns the override of the nearest even pp with which all else can stay, or of a schedule
    that takes an odd one."""
    p, now = config.parallel, config.parallel.pp
    sizes = [pp for pp in divisors(world // (p.tp * p.cp)) if pp % 2 == 0]
    for pp in sorted(sizes, key=lambda pp: (abs(pp - now), pp)):
        paired = replace(config, parallel=replace(p, pp=pp))
        if not (run_checks(paired, world, files=False) or pipeline_faults(paired, world)):
            return f"parallel.pp={pp}"
    folded = replace(config, pipeline=replace(config.pipeline, schedule="dualpipe_v"))
    return f"pipeline.schedule={'1f1b' if pipeline_faults(folded, world) else 'dualpipe_v'}"

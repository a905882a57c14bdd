"""`pipeline.schedule=auto`: the fastest Program found for a model, on the placements it admits.

And the faults in the pipeline of a configuration, whatever its schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from megatron5d.planning.schedule_search.named_schedules import (
    best_named_program,
    default_placements,
    placement_by_name,
)
from megatron5d.planning.schedule_search.stage_costs import costs_are_known, run_costs
from megatron5d.topology.all_ranks import on_rank_0
from megatron5d.topology.process import Process
from megatron5d.train.pipeline_layout import (
    PipelineLayout,
    concurrent_sequences,
    micro_batch_counts,
    named_programs,
    pipeline_layout,
    verified_program,
)

if TYPE_CHECKING:  # numba takes a second to import
    from megatron5d.planning.schedule_search.search import SearchResult

PIPELINE_KNOBS = (
    *(f"pipeline.{key}" for key in ("schedule", "layout", "balance", "memory", "costs", "copies")),
    *("parallel.pp", "parallel.vpp", "model.tie_embeddings", "model.num_mtp_layers"),
)


@dataclass(frozen=True)
class AutoPrograms:
    """Verified Programs of `pipeline.schedule=auto`, all with one placement.

    Args:
        config: with the split of the layers that they are for.
        programs: number of micro-batches -> Program.
        results: of the search; empty if only named schedules were compared.
    """

    config: Config
    programs: dict[int, Program]
    results: dict[int, SearchResult]


def search_programs(config: Config, counts: Sequence[int]) -> AutoPrograms:
    """Searches the fastest Program for each number of micro-batches, with one placement and split.

    Results are stored in the folder of the run's checkpoints (or its log), so that a resumed run
    uses the same ones. The search ends after `pipeline.evaluations` schedules; only if
    `pipeline.search_s` ends it earlier does the result depend on the machine.

    Args:
        config: model, pipeline and parallel.
        counts: micro-batches of a step, ascending; placement and split are chosen for the last one.

    Raises:
        ValueError: no schedule fits the memory or the layers.
    """
    # numba takes a second to import and more to compile, and only this schedule needs it
    from megatron5d.planning.schedule_search.search import search_program

    pipeline, folder = config.pipeline, config.checkpoint.dir or config.log.dir
    results: dict[int, SearchResult] = {}

    def search(m: int, splits: list[Config], placements: list[str]) -> tuple[int, Program]:
        results[m] = search_program(
            config.parallel.pp,
            m,
            [run_costs(split) for split in splits],
            memory=_cap(config, m),
            copies=pipeline.copies,
            seconds=pipeline.search_s,
            evaluations=pipeline.evaluations,
            placements=placements,
            cache=Path(folder) / "schedules" if folder else None,
        )
        return results[m].split, results[m].program

    split, programs = _choose(config, counts, search)
    return AutoPrograms(split, programs, results)


def best_named_programs(config: Config, counts: Sequence[int]) -> AutoPrograms:
    """The best named schedule for each number of micro-batches, without a search.

    A search never returns a slower one.

    Args:
        config: as in `search_programs`.
        counts: as in `search_programs`.

    Raises:
        ValueError: no named schedule fits the memory and the layers.
    """
    pp = config.parallel.pp

    def best(m: int, splits: list[Config], placements: list[str]) -> tuple[int, Program]:
        cap = _cap(config, m)
        fitting: list[tuple[float, int, Program]] = []
        for index, split in enumerate(splits):
            costs = run_costs(split)
            program = best_named_program(pp, m, costs, np.full(pp, cap), placements)
            if program is not None:
                makespan = simulate(program, costs.of(program.placement)).makespan
                fitting.append((round(makespan, 9), index, program))
        if not fitting:
            memory = config.pipeline.memory
            raise ValueError(
                f"pipeline.schedule = auto: no schedule for parallel.pp = {pp} holds at most "
                f"pipeline.memory = {memory:g} times the {cap / memory:g} micro-batches that 1F1B "
                "holds; set pipeline.memory=1.0"
            )
        return min(fitting, key=lambda entry: entry[:2])[1:]

    return AutoPrograms(*_choose(config, counts, best), {})


Choice = Callable[[int, list[Config], list[str]], tuple[int, Program]]
"""(number of micro-batches, splits, placements) -> index of the split, Program."""


def _choose(
    config: Config, counts: Sequence[int], choice: Choice
) -> tuple[Config, dict[int, Program]]:
    """Chooses split and placement for the last count, then Programs for the others with these."""
    splits, placements = _splits(config), _placements(config)
    programs: dict[int, Program] = {}
    for m in reversed(counts):
        index, programs[m] = choice(m, splits, placements)
        if m == counts[-1]:
            placement = programs[m].placement
            placements = [
                name
                for name in placements
                if placement_by_name(name, config.parallel.pp) == placement
            ]
            splits = [splits[index]]
    return splits[0], programs


def quick_layout(config: Config, world: int, check: bool = True) -> PipelineLayout:
    """Lays out a pipeline for a prediction: `auto` takes the best named schedule, without a search.

    Args:
        config: a valid configuration.
        world: number of ranks.
        check: verify a named schedule's Program.

    Raises:
        ValueError: as `pipeline_layout`.
    """
    return _layout(config, world, best_named_programs, check)


def searched_layout(config: Config, world: int) -> PipelineLayout:
    """Lays out the pipeline of a run in one process; `auto` searches, which takes seconds.

    Raises:
        ValueError: as `pipeline_layout`.
    """
    return _layout(config, world, search_programs)


def _layout(
    config: Config,
    world: int,
    find: Callable[[Config, Sequence[int]], AutoPrograms],
    check: bool = True,
) -> PipelineLayout:
    if config.pipeline.schedule != "auto" or config.parallel.pp == 1:
        return pipeline_layout(config, world, named_programs(config, check))
    return layout_of(find(config, micro_batch_counts(config, world)), world)


def layout_of(auto: AutoPrograms, world: int) -> PipelineLayout:
    """Lays out the pipeline for Programs of `auto`."""
    return pipeline_layout(auto.config, world, auto.programs.__getitem__)


def agreed_layout(config: Config, process: Process) -> PipelineLayout:
    """Lays out the pipeline of a run. If it needs a search, rank 0 searches for all ranks.

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
            auto = search_programs(config, counts)
            results.update(auto.results)
            pipeline = auto.config.pipeline
            texts = [
                [m, program.name, write_program(program)] for m, program in auto.programs.items()
            ]
            return [pipeline.split, pipeline.balance, texts]

        split, balance, texts = on_rank_0(search)
        config = replace(config, pipeline=replace(config.pipeline, split=split, balance=balance))
        programs = {
            m: verified_program(read_program(text, name, config.parallel.pp, m))
            for m, name, text in texts
        }
        layout = layout_of(AutoPrograms(config, programs, {}), process.world)
    else:
        layout = pipeline_layout(config, process.world)
    if config.parallel.pp == 1 or process.rank != 0:
        return layout
    program = layout.program_of(counts[-1])
    result = results.get(counts[-1])
    return replace(layout, note=prediction(config, program, result, process.device.type))


def prediction(
    config: Config, program: Program, result: SearchResult | None, device_type: str = "cuda"
) -> str:
    """A line for the log: the predicted bubble and memory of a schedule, and its search.

    On a CPU whose costs are not known it has the bubble of a search only, for which it names the
    machine.

    Args:
        config: with the split of the layers that the Program is for.
        program: of the last number of micro-batches.
        result: of the search that found it; None if there was none.
        device_type: that the run uses, such as `cpu`.
    """
    simulated = simulate(program, run_costs(config).of(program.placement))
    bubble = f"predicted bubble {100 * simulated.bubble:.1f} %, "
    if not costs_are_known(config, device_type):
        machine = f"on GPUs (pipeline.flops_per_byte={config.pipeline.flops_per_byte:g}), "
        bubble = f"{bubble[:-2]} {machine}" if result else ""
    plural = "" if program.num_microbatches == 1 else "es"
    text = (
        f"pipeline: {program.name}, {program.num_stages} stages, {program.num_microbatches} "
        f"micro-batch{plural}: {bubble}peak activations "
        f"{simulated.peak_activations.max():.3g} micro-batches"
    )
    if result is None:
        return text
    text += (
        f"; {result.placement}, {result.evaluations:,} schedules tried in {result.elapsed_s:.1f} s"
    )
    pipeline = config.pipeline
    if pipeline.layout is None:
        text += (
            f", layers divided with pipeline.split={pipeline.split} "
            f"pipeline.balance={pipeline.balance}"
        )
    if result.named is not None:
        name, makespan = result.named
        faster = 100 * (makespan / simulated.makespan - 1)
        text += f", {faster:.1f} % faster than {name}, the best named schedule that fits"
    if not find_spec("numba"):
        text += "; without numba, which would try a hundred times more"
    return text


def _splits(config: Config) -> list[Config]:
    """The configuration with each division of layers over stages among which the search chooses.

    The user's own split is the first. If the user gives the balance, the layout or the costs, it is
    the only one; if the user weighs the ends, only the balance is chosen.
    """
    pipeline = config.pipeline
    if pipeline.balance != "auto" or pipeline.layout is not None or pipeline.costs:
        return [config]
    choices = [(pipeline.split, "stages"), (pipeline.split, "ranks")]
    if pipeline.split == "even" and not pipeline.embedding_layers and not pipeline.head_layers:
        choices = [("even", "stages"), ("cost", "stages"), ("cost", "ranks")]
    if pipeline.copies == 2:
        choices += [(choices[-1][0], "late"), (choices[-1][0], "ends")]
    return [
        replace(config, pipeline=replace(pipeline, split=split, balance=balance))
        for split, balance in choices
    ]


def _placements(config: Config) -> list[str]:
    """Names of the placements that the model admits.

    Raises:
        ValueError: it admits none.
    """
    pp, vpp = config.parallel.pp, config.parallel.vpp
    names = default_placements(pp, config.pipeline.copies)
    if vpp > 1:
        names = [f"loop:{vpp}", f"zigzag:{vpp}"]
    reasons = {
        name: [_why_not(split, placement_by_name(name, pp)) for split in _splits(config)]
        for name in names
    }
    admitted = [name for name, reasons_of_splits in reasons.items() if None in reasons_of_splits]
    if not admitted:
        raise ValueError(
            f"pipeline.schedule = auto finds no placement of stages for parallel.pp = {pp}, "
            f"parallel.vpp = {vpp}: {next(iter(reasons.values()))[0]}"
        )
    return admitted


def _why_not(config: Config, placement: Placement) -> str | None:
    """Why the model does not fit a placement; None if it does."""
    try:
        specs = stage_specs(layers_per_stage(config, placement), config.model)
        shared_parameters(placement, specs, config.model)
    except ValueError as error:
        return str(error)
    return None


def _cap(config: Config, num_microbatches: int) -> float:
    """The most activations of a rank, in micro-batches of one rank's layers."""
    costs = run_costs(config)
    program = build_program("1f1b", config.parallel.pp, num_microbatches)
    memory = peak_memory(program, costs.of(loop_placement(config.parallel.pp)))
    return config.pipeline.memory * float(memory.peak_activations.max())


def pipeline_faults(config: Config, world: int) -> list[Fault]:
    """The faults in the pipeline of a configuration that passes the checks of config/checks."""
    try:
        run_costs(config)
        quick_layout(config, world)
    except ValueError as error:
        return [_fault(config, world, error)]
    return []


def _fault(config: Config, world: int, error: ValueError) -> Fault:
    """Names the keys that an error is about, and a fix that works."""
    schedule = config.pipeline.schedule
    reason, fix = _reason_and_fix(config, error)
    knobs = [knob for knob in PIPELINE_KNOBS if knob in str(error)] or ["pipeline.schedule"]
    if match := re.search(r"num_microbatches=(\d+)", reason):
        unit = concurrent_sequences(config, world)
        batch = int(match[1]) * unit
        knob = "train.gbs" if batch == config.train.gbs else "train.gbs_ramp"
        knobs.append(knob)
        reason = f"{reason} = {knob} / (train.mbs·dp) = {batch} / {unit}"
        fix = _nearest_batch(config, world) or fix if knob == "train.gbs" else "train.gbs_ramp=null"
    elif schedule == "dualpipe" and config.parallel.pp % 2:
        fix = _pairs_of_ranks(config, world)
    elif not fix and schedule.startswith("file:") and knobs != ["pipeline.costs"]:
        otherwise = "pipeline.schedule=1f1b, or file:PATH that tools/schedule.py verify accepts"
        fix = _nearest_batch(config, world) or otherwise
    elif not fix and isinstance(error, ProgramError):
        fix = f"pipeline.schedule={'gpipe' if schedule == '1f1b' else '1f1b'}"
    return Fault("pipeline", tuple(knobs), reason, fix or "pipeline.costs=null")


def _reason_and_fix(config: Config, error: ValueError) -> tuple[str, str]:
    """Splits a message before its last clause, which is the fix; a ProgramError has none."""
    text, schedule = str(error), config.pipeline.schedule
    # A message about a Program begins with its name, or with the path of its file.
    if text.startswith(schedule.removeprefix("file:")):
        text = f"pipeline.schedule = {'file:' if schedule.startswith('file:') else ''}{text}"
    if isinstance(error, ProgramError) or "; " not in text:
        return text, ""
    reason, _, fix = text.rpartition("; ")
    return reason, fix.removeprefix("set ").removeprefix("nearest legal: ")


def _nearest_batch(config: Config, world: int) -> str | None:
    """The override of the nearest batch that the schedule admits; None if none is near."""
    unit, program_of = concurrent_sequences(config, world), named_programs(config)
    now = config.train.gbs // unit
    for m in sorted(range(1, now + 4 * config.parallel.pp + 1), key=lambda m: (abs(m - now), m)):
        with suppress(ValueError):
            program_of(m)
            return f"train.gbs={m * unit}"
    return None


def _pairs_of_ranks(config: Config, world: int) -> str:
    """The override of the nearest even pp that works, or of a schedule that takes an odd one."""
    p, now = config.parallel, config.parallel.pp
    sizes = [pp for pp in divisors(world // (p.tp * p.cp)) if pp % 2 == 0]
    for pp in sorted(sizes, key=lambda pp: (abs(pp - now), pp)):
        paired = replace(config, parallel=replace(p, pp=pp))
        if not (run_checks(paired, world, files=False) or pipeline_faults(paired, world)):
            return f"parallel.pp={pp}"
    folded = replace(config, pipeline=replace(config.pipeline, schedule="dualpipe_v"))
    return f"pipeline.schedule={'1f1b' if pipeline_faults(folded, world) else 'dualpipe_v'}"

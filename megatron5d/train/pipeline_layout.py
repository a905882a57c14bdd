"""From the configuration to the pipeline's Programs and to what each rank holds of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from megatron5d.comm.p2p import Form
from megatron5d.config.checks import run_checks
from megatron5d.config.checks.check import data_parallel, divisors
from megatron5d.config.derived import batch_sizes
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.model.block_inputs import DTYPES
from megatron5d.model.partition import (
    StageSpec,
    layers_per_stage,
    shared_by_mirror,
    stage_specs,
    two_embeddings_knob,
)
from megatron5d.pipeline_parallel.program import Placement, Program
from megatron5d.pipeline_parallel.registry import build_program, find_schedule
from megatron5d.pipeline_parallel.schedule_csv import read_file
from megatron5d.pipeline_parallel.verify import ProgramError, verify
from megatron5d.planning.auto_schedule import Found, known_programs, prediction, run_costs, searched
from megatron5d.topology.all_ranks import on_rank_0
from megatron5d.topology.process import Process

PIPELINE_KNOBS = (
    "pipeline.schedule",
    "pipeline.layout",
    "pipeline.balance",
    "pipeline.memory",
    "pipeline.costs",
    "pipeline.copies",
    "parallel.pp",
    "parallel.vpp",
    "model.tie_embeddings",
    "model.num_mtp_layers",
)


@dataclass(frozen=True)
class PipelinePlan:
    """How the pipeline of a run is laid out; the same on every rank.

    Args:
        program_of: number of micro-batches of a step -> verified Program.
        placement: of all of them.
        layout: layers per stage.
        shared: which parameters mirrored ranks hold together: all, tied or none.
        note: what the schedule is expected to cost, for the log of rank 0.
    """

    program_of: Callable[[int], Program]
    placement: Placement
    layout: tuple[int, ...]
    shared: str
    note: str = ""

    def stage_specs(self, pp_rank: int) -> dict[int, StageSpec]:
        """What a pipeline rank holds of the model, by stage."""
        specs = stage_specs(self.layout)
        return {stage: specs[stage] for _, stage in self.placement.stages_of(pp_rank)}


def plan_pipeline(config: Config, world: int, found: Found | None = None) -> PipelinePlan:
    """Lays out the pipeline of a lawful configuration, without communication.

    Args:
        config: model, pipeline, parallel and train.
        world: number of ranks.
        found: for `pipeline.schedule = auto`; None = search now, which takes seconds.

    Raises:
        ValueError: the schedule, the number of micro-batches, the layers or the tied embedding do not fit together.
    """
    counts = micro_batch_counts(config, world)
    if config.pipeline.schedule == "auto" and config.parallel.pp > 1:
        found = found or searched(config, counts)
        config, program_of = found.config, found.programs.__getitem__
    else:
        program_of = cache(_programs(config))
    programs = [program_of(m) for m in counts]
    placement = programs[-1].placement
    if any(program.placement != placement for program in programs):
        raise ValueError(
            f"pipeline.schedule = {config.pipeline.schedule} lays its stages out differently for the numbers of "
            f"micro-batches that train.gbs_ramp = {config.train.gbs_ramp} passes through; set train.gbs_ramp=null"
        )
    layout = layers_per_stage(config, placement)
    shared = shared_by_mirror(placement, two_embeddings_knob(config.model))
    return PipelinePlan(program_of, placement, tuple(layout), shared)


def planned_pipeline(config: Config, world: int) -> PipelinePlan:
    """`plan_pipeline` for a run that is only asked about: instead of a search, it takes the best named schedule."""
    known = None
    if config.pipeline.schedule == "auto" and config.parallel.pp > 1:
        known = known_programs(config, micro_batch_counts(config, world))
    return plan_pipeline(config, world, known)


def agreed_plan(config: Config, process: Process) -> PipelinePlan:
    """The plan of a run. If a schedule must be searched for, rank 0 does so and broadcasts the result.

    Comm: with `pipeline.schedule = auto` a broadcast of the Programs over the world.
    """
    if config.parallel.pp == 1:
        return plan_pipeline(config, process.world)
    counts = micro_batch_counts(config, process.world)
    found = on_rank_0(lambda: searched(config, counts)) if config.pipeline.schedule == "auto" else None
    plan = plan_pipeline(config, process.world, found)
    if process.rank != 0:
        return plan
    split, results = (found.config, found.results) if found else (config, {})
    return replace(plan, note=prediction(split, plan.program_of(counts[-1]), results.get(counts[-1])))


def pipeline_faults(config: Config, world: int) -> list[Fault]:
    """What is wrong with the pipeline of a configuration that breaks no law, before any process group is made."""
    try:
        run_costs(config)
        planned_pipeline(config, world)
    except ValueError as error:
        reason, fix = _reason_and_fix(config, error)
        knobs = [knob for knob in PIPELINE_KNOBS if knob in str(error)] or ["pipeline.schedule"]
        if "num_microbatches" in reason:
            knobs.append("train.gbs")
            reason = f"{reason} = train.gbs / (train.mbs·dp) = {config.train.gbs} / {_sequences_at_once(config, world)}"
            fix = _nearest_batch(config, world) or fix
        elif config.pipeline.schedule == "dualpipe" and config.parallel.pp % 2:
            fix = _pairs_of_ranks(config, world)
        elif not fix and config.pipeline.schedule.startswith("file:") and knobs != ["pipeline.costs"]:
            fix = _nearest_batch(config, world) or (
                "pipeline.schedule=1f1b, or file:PATH of a program that tools/schedule.py verify accepts"
            )
        elif not fix and isinstance(error, ProgramError):
            fix = f"pipeline.schedule={_another_schedule(config)}"
        return [Fault("pipeline", tuple(knobs), reason, fix or "pipeline.costs=null")]
    return []


def _reason_and_fix(config: Config, error: ValueError) -> tuple[str, str]:
    """Splits a message before its last clause, which is the fix; what is said of a Program has none."""
    whole, schedule = str(error), config.pipeline.schedule
    if whole.startswith(schedule.removeprefix("file:")):  # what is said of a program begins with its name, or its path
        whole = f"pipeline.schedule = {'file:' if schedule.startswith('file:') else ''}{whole}"
    if isinstance(error, ProgramError) or "; " not in whole:
        return whole, ""
    reason, _, fix = whole.rpartition("; ")
    return reason, fix.removeprefix("set ").removeprefix("nearest legal: ")


def _another_schedule(config: Config) -> str:
    """A schedule with a right order, for one of ours that has none."""
    for name in (name for name in ("1f1b", "gpipe") if name != config.pipeline.schedule):
        with suppress(ValueError):
            _verified(build_program(name, config.parallel.pp, 2 * config.parallel.pp))
            return name
    return "file:PATH of a program that tools/schedule.py verify accepts"


def _nearest_batch(config: Config, world: int) -> str | None:
    """The override that gives the schedule a number of micro-batches it admits; None where none is near."""
    unit, program_of = _sequences_at_once(config, world), _programs(config)
    now = config.train.gbs // unit
    for m in sorted(range(1, now + 4 * config.parallel.pp + 1), key=lambda m: (abs(m - now), m)):
        with suppress(ValueError):
            program_of(m)
            return f"train.gbs={m * unit}"
    return None


def _pairs_of_ranks(config: Config, world: int) -> str:
    """The override of the nearest even pp with which all else can stay, or of a schedule that takes an odd one."""
    p, now = config.parallel, config.parallel.pp
    sizes = [pp for pp in divisors(world // (p.tp * p.cp)) if pp % 2 == 0]
    for pp in sorted(sizes, key=lambda pp: (abs(pp - now), pp)):
        paired = replace(config, parallel=replace(p, pp=pp))
        if not (run_checks(paired, world, files=False) or pipeline_faults(paired, world)):
            return f"parallel.pp={pp}"
    folded = replace(config, pipeline=replace(config.pipeline, schedule="dualpipe_v"))
    return f"pipeline.schedule={'1f1b' if pipeline_faults(folded, world) else 'dualpipe_v'}"


def _sequences_at_once(config: Config, world: int) -> int:
    """Sequences of one micro-batch on all data-parallel ranks: train.mbs·dp."""
    return config.train.mbs * data_parallel(config, world)


def micro_batch_counts(config: Config, world: int) -> list[int]:
    """Micro-batches per step and data-parallel rank: every number that the run will see, ascending."""
    return [size // _sequences_at_once(config, world) for size in batch_sizes(config)]


def _programs(config: Config) -> Callable[[int], Program]:
    """Number of micro-batches -> Program, from a named schedule or a file; a single rank needs no schedule."""
    name, pp = config.pipeline.schedule, config.parallel.pp
    if name.startswith("file:"):
        path = Path(name.removeprefix("file:"))
        return lambda m: _verified(read_file(path, pp, m))
    if name != "auto":
        find_schedule(name)
    if pp == 1:
        return lambda m: build_program("1f1b", 1, m)
    # parallel.vpp = 1 is the default, under which the schedule decides
    chunks = config.parallel.vpp if config.parallel.vpp > 1 else None
    return lambda m: _verified(build_program(name, pp, m, chunks))


def _verified(program: Program) -> Program:
    verify(program)
    return program


def boundary_form(config: Config, device) -> Form:
    """What is sent between stages: hidden states `[s/cp/tp, b, h]`, or `[s/cp, b, h]` without sp."""
    p, t = config.parallel, config.train
    rows = t.seq_len // p.cp // (p.tp if p.sp else 1)
    return Form((rows, t.mbs, config.model.hidden_size), DTYPES[config.precision.dtype], device)

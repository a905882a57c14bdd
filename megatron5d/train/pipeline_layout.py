"""Lays out the layers of a run over its pipeline, by named schedules and files.

planning/schedule_search/ finds the Programs of `auto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron5d.comm.p2p import TensorMeta
from megatron5d.config.derived import batch_sizes
from megatron5d.config.schema import Config
from megatron5d.model.block_inputs import DTYPES
from megatron5d.model.partition import StageSpec, layers_per_stage, shared_parameters, stage_specs
from megatron5d.pipeline_parallel.program import Placement, Program
from megatron5d.pipeline_parallel.registry import build_program, find_schedule
from megatron5d.topology.grid import SharedRanks

Programs = Callable[[int], Program]
"""Number of micro-batches of a step -> verified Program."""


@dataclass(frozen=True)
class PipelineLayout:
    """The pipeline of a run; the same on every rank."""

    program_of: Programs
    placement: Placement
    specs: tuple[StageSpec, ...]
    shared: SharedRanks  # which pipeline ranks hold parameters together
    note: str = ""  # predicted cost of the schedule, for the log of rank 0

    @property
    def layers(self) -> tuple[int, ...]:
        """Number of layers of each stage, as `layers_per_stage` counts them."""
        return tuple(len(spec.layers) + (0 if spec.head else len(spec.mtp)) for spec in self.specs)

    def stage_specs(self, pp_rank: int) -> dict[int, StageSpec]:
        """The parts of the model on a pipeline rank, by stage."""
        return {stage: self.specs[stage] for _, stage in self.placement.stages_of(pp_rank)}


def pipeline_layout(
    config: Config, world: int, program_of: Programs | None = None
) -> PipelineLayout:
    """Lays out the pipeline of a valid configuration, without communication.

    Args:
        config: a valid configuration.
        world: number of ranks.
        program_of: Programs for `pipeline.schedule = auto`; None = a named schedule, or a file.

    Raises:
        ValueError: the schedule, the number of micro-batches and the layers do not fit together.
    """
    program_of = cache(program_of or named_programs(config))
    programs = [program_of(m) for m in micro_batch_counts(config, world)]
    placement = programs[-1].placement
    if any(program.placement != placement for program in programs):
        raise ValueError(
            f"pipeline.schedule = {config.pipeline.schedule} places its stages differently for the "
            "numbers of micro-batches of "
            f"train.gbs_ramp = {','.join(config.train.gbs_ramp or [])}; set train.gbs_ramp=null"
        )
    specs = stage_specs(layers_per_stage(config, placement), config.model)
    shared = shared_parameters(placement, specs, config.model)
    return PipelineLayout(program_of, placement, tuple(specs), shared)


def named_programs(config: Config, check: bool = True) -> Programs:
    """The Programs of a named schedule or of a file; a single rank runs 1F1B whatever its schedule.

    Args:
        config: pipeline and parallel.
        check: verify a named schedule's Program; those of files are always verified.

    Raises:
        ValueError: no schedule has this name.
    """
    name, pp = config.pipeline.schedule, config.parallel.pp
    # parallel.vpp = 1 is the default, under which the schedule decides
    chunks = config.parallel.vpp if config.parallel.vpp > 1 else None
    if name.startswith("file:"):
        from megatron5d.pipeline_parallel.schedule_csv import read_file

        path = Path(name.removeprefix("file:"))
        return lambda m: verified_program(read_file(path, pp, m, chunks))
    if name != "auto":
        find_schedule(name)
    if pp == 1:
        return lambda m: build_program("1f1b", 1, m)
    return lambda m: verified_program(build_program(name, pp, m, chunks), check)


def verified_program(program: Program, check: bool = True) -> Program:
    """The same Program, verified if `check`.

    Raises:
        ProgramError: its order is wrong.
    """
    if check:
        # A pipeline of one rank does without numpy.
        from megatron5d.pipeline_parallel.verify import verify

        verify(program)
    return program


def concurrent_sequences(config: Config, world: int) -> int:
    """Sequences of one micro-batch on all data-parallel ranks: train.mbs·dp."""
    p = config.parallel
    return config.train.mbs * max(1, world // (p.tp * p.cp * p.pp))


def micro_batch_counts(config: Config, world: int) -> list[int]:
    """Every number of micro-batches per step and data-parallel rank of the run, ascending."""
    return [size // concurrent_sequences(config, world) for size in batch_sizes(config)]


def boundary_form(config: Config, device, states: int = 1) -> TensorMeta:
    """Shape and dtype of what is sent between stages: hidden states.

    `[s/cp/tp, b, h]` with sp, `[s/cp, b, h]` without.

    Args:
        config: model, parallel, train and precision.
        device: of the messages.
        states: number of hidden states that are concatenated (`StageSpec.num_states`).
    """
    p, t = config.parallel, config.train
    rows = states * (t.seq_len // p.cp // (p.tp if p.sp else 1))
    return TensorMeta(
        (rows, t.mbs, config.model.hidden_size), DTYPES[config.precision.dtype], device
    )

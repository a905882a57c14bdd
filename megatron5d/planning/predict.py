"""The expected time of a step of a run: its layers' work, its Program and its axes, priced on a cluster.

What a step is expected to take and to send, shown beside what the first steps have taken and sent.

Configurations of runs that are only asked about, for tools/plan.py and tools/parity.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron5d.checkpoint.hf.weights import model_config_from_hf
from megatron5d.comm.collectives import all_reduce
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.model.flops import flops_per_token
from megatron5d.model.partition import stage_specs
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.registry import schedule_faults
from megatron5d.pipeline_parallel.simulate import kept_between_slots, simulate, waiting_shares
from megatron5d.planning.auto_schedule import run_costs
from megatron5d.planning.clusters import Cluster, cluster_of
from megatron5d.planning.dp_traffic import Sharding
from megatron5d.planning.memory_forecast import Target
from megatron5d.planning.rank_memory import least_needed
from megatron5d.planning.step_time import Prices, StepCost, sent_bytes, step_cost
from megatron5d.planning.workload import Workloads
from megatron5d.topology.mesh import lines_of, pair_lines_of
from megatron5d.train.build import Run, sizes_of
from megatron5d.train.pipeline_layout import PipelinePlan, micro_batch_counts, pipeline_faults, planned_pipeline
from megatron5d.train.step import StepResult


class Estimator:
    """Times of any layouts of one model on one cluster.

    Args:
        cluster: on which.
        imbalance: rows that the busiest rank's experts are sent, of an even share.
    """

    def __init__(self, cluster: Cluster, imbalance: float = 1.0) -> None:
        self.cluster = cluster
        self.workloads = Workloads(Target(cluster.architecture, imbalance))

    def step(self, config: Config, world: int, plan: PipelinePlan | None = None) -> StepCost:
        """The time of a step.

        Args:
            config: a lawful configuration.
            world: number of ranks.
            plan: of the pipeline; None = made here, without the search that `pipeline.schedule = auto` will make.

        Raises:
            ValueError: it has something of which nothing is known (`check_predictable`).
        """
        check_predictable(config)
        plan = plan or planned_pipeline(config, world)
        program = plan.program_of(micro_batch_counts(config, world)[-1])
        lines = _lines(config, world, plan)
        stages = self.workloads.stages(config, stage_specs(plan.layout), plan.shared)
        flops = flops_per_token(config.model, config.train.seq_len)
        return step_cost(Prices(self.cluster, config, lines, plan.shared), program, stages, world, flops)

    def least_bytes(self, config: Config, world: int, plan: PipelinePlan | None = None) -> list[float]:
        """For each pipeline rank, bytes that it needs at least: its state, and what passes keep between two slots.

        What the forecast counts besides, temporary tensors and messages above all, is left out.

        Args:
            config: a lawful configuration.
            world: number of ranks.
            plan: as in `step`.
        """
        plan = plan or planned_pipeline(config, world)
        program = plan.program_of(micro_batch_counts(config, world)[-1])
        lines = _lines(config, world, plan)
        sharding = Sharding(config, {name: len(ranks) for name, ranks in lines.items()}, plan.shared)
        stages = self.workloads.stages(config, stage_specs(plan.layout), plan.shared)
        kept = np.array([sum(unit.passes["F"].kept_bytes for unit in units) for units in stages])
        allocated = kept_between_slots(program, kept)
        for rank in range(program.num_ranks):
            mine = [unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]]
            allocated[rank] += sharding.state_bytes(mine)
        return [least_needed(each) for each in allocated.tolist()]


def bytes_on(config: Config, world: int, plan: PipelinePlan) -> tuple[Mapping[str, int], ...]:
    """For each pipeline rank: axis -> bytes that it sends in a step, of experts that are evenly loaded.

    Args:
        config: a lawful configuration.
        world: number of ranks.
        plan: of its pipeline.
    """
    program = plan.program_of(micro_batch_counts(config, world)[-1])
    lines = _lines(config, world, plan)
    sharding = Sharding(config, {name: len(ranks) for name, ranks in lines.items()}, plan.shared)
    stages = Workloads(Target()).stages(config, stage_specs(plan.layout), plan.shared)
    return sent_bytes(config, sharding, program, stages)


def _lines(config: Config, world: int, plan: PipelinePlan) -> dict[str, tuple[int, ...]]:
    """Those of rank 0 by axis; of pairs, too, where mirrored pipeline ranks hold parameters together."""
    sizes = sizes_of(config, world)
    lines = lines_of(sizes, 0, config.model.num_kv_heads)
    return lines | pair_lines_of(sizes, 0) if plan.shared != "none" else lines


def check_predictable(config: Config) -> None:
    """
    Raises:
        ValueError: of products wider than 16 bits nothing is known.
    """
    if config.precision.dtype != "bf16":
        raise ValueError(
            f"precision.dtype = {config.precision.dtype}: what share of its peak a device reaches is known in 16 bits "
            "alone; set precision.dtype=bf16"
        )


def step_on(device: str, config: Config, world: int, plan: PipelinePlan) -> StepCost | str | None:
    """The time of a step of a run that begins, for its log.

    Args:
        device: as CUDA calls it.
        config: of the run.
        world: number of ranks.
        plan: of its pipeline.

    Returns:
        The time, with MFU of `log.peak_tflops` where that is given, as it is measured; why there is no time; or None
        where the device is not known, the batch grows or parameters are frozen.
    """
    cluster = cluster_of(device)
    if cluster is None or config.train.gbs_ramp is not None or config.optim.freeze:
        return None
    try:
        cost = Estimator(cluster).step(config, world, plan)
    except Exception as error:  # a layer that needs values cannot be counted; it trains all the same
        return f"the time of a step is not predicted: {error}"
    peak = config.log.peak_tflops
    return cost if peak is None else replace(cost, mfu=cost.tflops_per_gpu / peak)


_SMALL = 1e-3  # of all bytes: an axis that carries less carries counts and norms, which nobody predicts


class Expectation:
    """Predicts steps, and compares.

    Args:
        run: whose steps are meant.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.cost: StepCost | None = None
        self.bubble: Sequence[float] = ()  # by pipeline rank, see `waiting_shares`
        self.sent: Sequence[Mapping[str, int]] = ()  # by pipeline rank: axis -> bytes

    def predict(self) -> str | None:
        """Predicts a step; what to tell of it. On rank 0; nothing where the batch grows or parameters are frozen.

        Times are predicted of GPUs that planning/clusters.py knows; elsewhere the bubble is of passes that take as long
        as their FLOPs.
        """
        run, config = self.run, self.run.config
        if config.train.gbs_ramp is not None or config.optim.freeze:
            return None
        program = run.plan.program_of(micro_batch_counts(config, run.process.world)[-1])
        if config.parallel.pp > 1:
            self.bubble = expected_bubble(config, run.plan, program)
        try:
            self.sent = bytes_on(config, run.process.world, run.plan)
        except Exception as error:  # a layer that needs values cannot be counted; it trains all the same
            return f"what a step sends is not predicted: {type(error).__name__}: {error}"
        if run.process.device.type != "cuda":
            return None
        cost = step_on(torch.cuda.get_device_name(run.process.device), config, run.process.world, run.plan)
        if not isinstance(cost, StepCost):
            return cost
        self.cost, self.bubble = cost, cost.bubble
        return f"predicted: {cost.step_s:.3g} s a step, MFU {cost.mfu:.1%}; experts evenly loaded (docs/planning.md)"

    def record(self) -> dict[str, Any]:
        """What stands in every record beside what is measured."""
        found: dict[str, Any] = {}
        if self.cost is not None:
            found |= {"step_time_predicted_s": self.cost.step_s, "mfu_predicted": self.cost.mfu}
        if self.bubble and self.run.config.parallel.pp > 1:
            found["bubble_predicted"] = self.bubble[self.run.mesh["pp"].rank]
        return found

    def beside(self, result: StepResult, sent: Mapping[str, int]) -> str | None:
        """What one step has taken and sent, beside what was predicted; None where nothing was. On every rank.

        Args:
            result: of the step.
            sent: axis -> bytes that this rank has sent in it.

        Comm: all_reduce over the world of a number for every pipeline rank, where there are several.
        """
        run, pp = self.run, self.run.mesh["pp"]
        bubble = torch.zeros(pp.size, dtype=torch.float64, device=run.process.device)
        if pp.size > 1:
            bubble[pp.rank] = result.bubble * pp.size / run.process.world
            bubble = all_reduce(bubble, run.mesh["world"])
        lines = []
        if self.sent and (axes := _told(sent, self.sent[pp.rank])):
            lines.append(f"  bytes that rank 0 sent: {axes}")
        if self.bubble and pp.size > 1:
            each = ", ".join(f"{found:.1%} ({told:.1%})" for found, told in zip(bubble.tolist(), self.bubble))
            lines.append(f"  bubble by pipeline rank: {each}{self._in_turns()}")
        return "\n".join([f"measured of step {run.progress.step} (predicted):", *lines]) if lines else None

    def _in_turns(self) -> str:
        """Why ranks on a CPU wait longer than their schedule makes them."""
        cores, process = os.cpu_count() or 1, self.run.process
        if process.device.type == "cuda" or cores >= process.world:
            return ""
        return f"; {process.world} ranks take turns on {cores} core{'' if cores == 1 else 's'}"


def expected_bubble(config: Config, plan: PipelinePlan, program: Program) -> list[float]:
    """Of every pipeline rank, see `waiting_shares`.

    Args:
        config: of the run.
        plan: deals the layers; `pipeline.schedule=auto` may have found another split than the configuration has.
        program: of a step.
    """
    dealt = replace(config, pipeline=replace(config.pipeline, layout=list(plan.layout)))
    return waiting_shares(program, simulate(program, run_costs(dealt).of(program.placement)))


def _told(sent: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Axis by axis, the one that carries the most first."""
    least = _SMALL * sum(sent.values())
    axes = [axis for axis in {*sent, *predicted} if max(sent.get(axis, 0), predicted.get(axis, 0)) > least]
    axes.sort(key=lambda axis: (-sent.get(axis, 0), axis))
    return ", ".join(f"{axis} {_size(sent.get(axis, 0))} ({_size(predicted.get(axis, 0))})" for axis in axes)


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def planned_config(overrides: Sequence[str], world: int, files: bool = False) -> Config:
    """What pretrain.py would make of a command line.

    Args:
        overrides: as pretrain.py takes them.
        world: number of ranks.
        files: whether the files of such a run are checked; they need not be there.

    Raises:
        ConfigError: it could not run.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(
        overrides,
        world=world,
        model_from_hf=model_config_from_hf,
        options=[schedule_faults],
        checks=[pipeline_faults],
        files=files,
    )


def unplanned_config(overrides: Sequence[str], world: int) -> Config:
    """What a command line says, before anybody has asked whether it could run: a layout is still to be found.

    Args:
        overrides, world: as in `planned_config`.

    Raises:
        ConfigError: it is spelled wrong.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(overrides, model_from_hf=model_config_from_hf)


def _check_world(world: int) -> None:
    if world < 1:
        raise ValueError(f"--world {world}: a run has at least 1 rank")

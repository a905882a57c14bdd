"""Predicts the step time of a run: the work of its layers, its Program and its axes on a cluster.

A run logs the same predictions (`prediction_of`) beside the measurements of its first steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron5d.config.schema import Config, LogConfig
from megatron5d.model.flops import flops_per_token
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.simulate import idle_fractions, peak_between_slots, simulate
from megatron5d.planning.clusters import Cluster, cluster_of
from megatron5d.planning.fit import device_bytes, shortage, target_here
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import minimum_needed, table
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.schedule_search.stage_costs import costs_are_known, run_costs
from megatron5d.planning.time.dp_traffic import Sharding
from megatron5d.planning.time.step_time import Prices, StepCost, sent_bytes, step_cost, used_ops
from megatron5d.planning.time.work import message_bytes
from megatron5d.planning.time.workload import Workloads
from megatron5d.topology.mesh import Mesh, planned_mesh
from megatron5d.topology.process import Process
from megatron5d.train.build import sizes_of
from megatron5d.train.monitoring.report import Prediction
from megatron5d.train.pipeline_layout import PipelineLayout, micro_batch_counts


class Estimator:
    """Times of any layouts of one model on one cluster.

    Args:
        cluster: hardware.
        imbalance: rows that the busiest rank's experts receive, relative to an even share.
    """

    def __init__(self, cluster: Cluster, imbalance: float = 1.0) -> None:
        self.cluster = cluster
        self.workloads = Workloads(Target(cluster.architecture, imbalance))

    def step(self, config: Config, world: int, layout: PipelineLayout | None = None) -> StepCost:
        """Predicted cost of a step.

        Args:
            config: a valid configuration.
            world: number of ranks.
            layout: of the pipeline; None = one without the search of `pipeline.schedule = auto`.

        Raises:
            ValueError: the time cannot be predicted (`check_predictable`).
        """
        check_predictable(config)
        layout = layout or quick_layout(config, world)
        program = layout.program_of(micro_batch_counts(config, world)[-1])
        stages = self.workloads.stages(config, layout, used_ops(program))
        flops = flops_per_token(config.model, config.train.seq_len)
        prices = Prices(self.cluster, config, _mesh(config, world, layout), layout)
        return step_cost(prices, program, stages, world, flops)

    def min_bytes(
        self, config: Config, world: int, layout: PipelineLayout | None = None
    ) -> list[float]:
        """Lower bound of each pipeline rank's bytes: its state, and what passes keep between slots.

        It excludes what else the forecast counts, above all temporary tensors and messages.

        Args:
            config: a valid configuration.
            world: number of ranks.
            layout: as in `step`.
        """
        layout = layout or quick_layout(config, world)
        program = layout.program_of(micro_batch_counts(config, world)[-1])
        sharding = Sharding(config, _mesh(config, world, layout), layout.shared)
        ops = used_ops(program).replace("B", "")  # B keeps nothing
        stages = self.workloads.stages(config, layout, ops)
        stored_bytes = {
            op: np.array([sum(unit.passes[op].kept_bytes for unit in units) for units in stages])
            for op in ops
        }
        stash = stored_bytes["F"] + stored_bytes["I"] if "I" in ops else 0.0
        allocated = peak_between_slots(program, stored_bytes["F"], stash)
        for rank in range(program.num_ranks):
            local = [stages[stage] for _, stage in program.placement.stages_of(rank)]
            allocated[rank] += sharding.state_bytes(unit for units in local for unit in units)
        return [minimum_needed(num_bytes) for num_bytes in allocated.tolist()]


def bytes_on(
    config: Config, world: int, layout: PipelineLayout, workloads: Workloads | None = None
) -> tuple[Mapping[str, int], ...]:
    """For each pipeline rank, axis -> bytes that it sends in a step, with evenly loaded experts.

    Args:
        config: a valid configuration.
        world: number of ranks.
        layout: of its pipeline.
        workloads: of the model, shared with other layouts.
    """
    program = layout.program_of(micro_batch_counts(config, world)[-1])
    sharding = Sharding(config, _mesh(config, world, layout), layout.shared)
    stages = (workloads or Workloads(Target())).stages(config, layout, used_ops(program))
    return sent_bytes(message_bytes(config, layout.specs), sharding, program, stages)


def _mesh(config: Config, world: int, layout: PipelineLayout) -> Mesh:
    """Axes of rank 0."""
    return planned_mesh(
        sizes_of(config, world), num_kv_heads=config.model.num_kv_heads, shared=layout.shared
    )


def check_predictable(config: Config) -> None:
    """Checks that step times of a configuration can be predicted.

    Raises:
        ValueError: its dtype has more than 16 bits, for which no efficiency is known.
    """
    if config.precision.dtype != "bf16":
        raise ValueError(
            "predicting a step requires precision.dtype=bf16, "
            f"because no efficiency is known for other dtypes (got {config.precision.dtype})"
        )


def prediction_of(config: Config, process: Process, layout: PipelineLayout) -> Prediction:
    """Predictions that `train` logs beside its measurements; ranks above 0 only get the peak.

    Step times are predicted for GPUs of planning/clusters.py; elsewhere the bubble assumes that
    passes take as long as their FLOPs. On a CPU it is predicted with costs of the user's only.
    While the batch grows, only memory is predicted.

    Args:
        config: of a run that begins.
        process: this rank.
        layout: of its pipeline.
    """
    prediction = Prediction(peak_tflops(config.log, process.device))
    if process.rank != 0:
        return prediction
    if config.train.gbs_ramp is None:
        cluster = _cluster_here(process.device)
        prediction = _with_step(prediction, config, process, layout, cluster)
    if config.log.memory_check == "off":
        return prediction
    return _with_memory(prediction, config, process.world, layout)


def peak_tflops(log: LogConfig, device: torch.device) -> float | None:
    """Peak of one device for MFU; None where it is not known (a CPU)."""
    cluster = _cluster_here(device)
    return log.peak_tflops or (None if cluster is None else cluster.flops / 1e12)


def _cluster_here(device: torch.device) -> Cluster | None:
    return cluster_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _with_step(
    prediction: Prediction,
    config: Config,
    process: Process,
    layout: PipelineLayout,
    cluster: Cluster | None,
) -> Prediction:
    bubble: Sequence[float] = ()
    world = process.world
    if config.parallel.pp > 1 and costs_are_known(config, process.device.type):
        program = layout.program_of(micro_batch_counts(config, world)[-1])
        bubble = expected_bubble(config, layout, program)
    if world == 1 and cluster is None:
        return replace(prediction, sent=({},))
    # A layer that needs values cannot be traced; the run trains without the prediction.
    try:
        sent = bytes_on(config, world, layout)
    except Exception as error:
        report = [f"bytes sent in a step are not predicted: {_error_text(error)}"]
        return replace(prediction, bubble=bubble, report=report)
    prediction = replace(prediction, bubble=bubble, sent=sent)
    if cluster is None:
        return prediction
    try:
        cost = Estimator(cluster).step(config, world, layout)
    except Exception as error:
        return replace(prediction, report=[f"the time of a step is not predicted: {error}"])
    mfu = cost.tflops_per_gpu / (prediction.peak_tflops or cluster.flops / 1e12)
    figures = f"{cost.step_s:.3g} s a step, MFU {mfu:.1%}"
    report = [f"predicted: {figures}; experts evenly loaded (docs/planning.md)"]
    return replace(prediction, step_s=cost.step_s, mfu=mfu, bubble=cost.bubble, report=report)


def _with_memory(
    prediction: Prediction, config: Config, world: int, layout: PipelineLayout
) -> Prediction:
    report = list(prediction.report)
    try:
        ranks = Forecaster(config, world, target_here(config), layout).ranks()
    except Exception as error:  # as in `_with_step`
        report.append(f"memory is not predicted: {_error_text(error)}")
        return replace(prediction, report=report)
    report.append(f"predicted memory of each rank, by pipeline rank:\n{table(ranks)}")
    capacity = device_bytes(config)
    if capacity is not None and (reason := shortage(ranks, capacity)):
        report.append(f"WARNING: this will not fit: {reason}")
    memory = [ranks[rank].allocated for rank in range(len(ranks))]
    return replace(prediction, memory=memory, report=report)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def expected_bubble(config: Config, layout: PipelineLayout, program: Program) -> list[float]:
    """Bubble of every pipeline rank, see `idle_fractions`.

    Args:
        config: of the run.
        layout: has the division of layers; `pipeline.schedule=auto` may have found another one than
            the configuration has.
        program: of a step.
    """
    divided = replace(config, pipeline=replace(config.pipeline, layout=list(layout.layers)))
    return idle_fractions(program, simulate(program, run_costs(divided).of(program.placement)))

"""The expected time of a step of a run: its layers' work, its Program and its axes, priced on a
cluster.

A run is told the same of its first steps (`prediction_of`), to show it beside what they have taken
and sent.
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
from megatron5d.planning.schedule_search.stage_costs import run_costs
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
        cluster: on which.
        imbalance: rows that the busiest rank's experts are sent, of an even share.
    """

    def __init__(self, cluster: Cluster, imbalance: float = 1.0) -> None:
        self.cluster = cluster
        self.workloads = Workloads(Target(cluster.architecture, imbalance))

    def step(self, config: Config, world: int, layout: PipelineLayout | None = None) -> StepCost:
        """Returns the time of a step.

        Args:
            config: a valid configuration.
            world: number of ranks.
            layout: of the pipeline; None = made here, without the search that `pipeline.schedule =
                auto` will make.

        Raises:
            ValueError: it has something of which nothing is known (`check_predictable`).
        """
        check_predictable(config)
        layout = layout or quick_layout(config, world)
        program = layout.program_of(micro_batch_counts(config, world)[-1])
        stages = self.workloads.stages(config, layout, used_ops(program))
        flops = flops_per_token(config.model, config.train.seq_len)
        prices = Prices(self.cluster, config, _mesh(config, world, layout), layout)
        return step_cost(prices, program, stages, world, flops)

    def least_bytes(
        self, config: Config, world: int, layout: PipelineLayout | None = None
    ) -> list[float]:
        """Returns the bytes each pipeline rank needs at least: its state, and what passes keep
        between two slots.

        What the forecast counts besides, temporary tensors and messages above all, is left out.

        Args:
            config: a valid configuration.
            world: number of ranks.
            layout: as in `step`.
        """
        layout = layout or quick_layout(config, world)
        program = layout.program_of(micro_batch_counts(config, world)[-1])
        sharding = Sharding(config, _mesh(config, world, layout), layout.shared)
        ops = used_ops(program).replace("B", "")  # of which only the price asks
        stages = self.workloads.stages(config, layout, ops)
        kept = {
            op: np.array([sum(unit.passes[op].kept_bytes for unit in units) for units in stages])
            for op in ops
        }
        allocated = peak_between_slots(
            program, kept["F"], kept["F"] + kept["I"] if "I" in ops else 0.0
        )
        for rank in range(program.num_ranks):
            mine = [
                unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]
            ]
            allocated[rank] += sharding.state_bytes(mine)
        return [minimum_needed(each) for each in allocated.tolist()]


def bytes_on(config: Config, world: int, layout: PipelineLayout) -> tuple[Mapping[str, int], ...]:
    """Returns, for each pipeline rank, axis -> bytes that it sends in a step, of experts that are
    evenly loaded.

    Args:
        config: a valid configuration.
        world: number of ranks.
        layout: of its pipeline.
    """
    program = layout.program_of(micro_batch_counts(config, world)[-1])
    sharding = Sharding(config, _mesh(config, world, layout), layout.shared)
    stages = Workloads(Target()).stages(config, layout, used_ops(program))
    return sent_bytes(message_bytes(config, layout.specs), sharding, program, stages)


def _mesh(config: Config, world: int, layout: PipelineLayout) -> Mesh:
    """Returns the axes of rank 0."""
    return planned_mesh(
        sizes_of(config, world), num_kv_heads=config.model.num_kv_heads, shared=layout.shared
    )


def check_predictable(config: Config) -> None:
    """
    Raises:
        ValueError: the speed of GEMMs wider than 16 bits is not known.
    """
    if config.precision.dtype != "bf16":
        raise ValueError(
            f"precision.dtype = {config.precision.dtype}: what share of its peak a device reaches is known in 16 bits "
            "alone; set precision.dtype=bf16"
        )


def prediction_of(config: Config, process: Process, layout: PipelineLayout) -> Prediction:
    """Predicts what `train` writes beside its measurements; all but the peak on rank 0 alone.

    Times are predicted of GPUs that planning/clusters.py knows; elsewhere the bubble is of passes
    that take as long as their FLOPs. Where the batch grows, memory alone is predicted.

    Args:
        config: of a run that begins.
        process: this rank.
        layout: of its pipeline.
    """
    cluster = _cluster_here(process.device)
    found = Prediction(peak_tflops(config.log, process.device))
    if process.rank != 0:
        return found
    if config.train.gbs_ramp is None:
        found = _with_step(found, config, process.world, layout, cluster)
    return (
        found
        if config.log.memory_check == "off"
        else _with_memory(found, config, process.world, layout)
    )


def peak_tflops(log: LogConfig, device: torch.device) -> float | None:
    """Returns the peak of one device for MFU; None where it is not known (a CPU)."""
    cluster = _cluster_here(device)
    return log.peak_tflops or (None if cluster is None else cluster.flops / 1e12)


def _cluster_here(device: torch.device) -> Cluster | None:
    return cluster_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def _with_step(
    found: Prediction, config: Config, world: int, layout: PipelineLayout, cluster: Cluster | None
) -> Prediction:
    bubble: Sequence[float] = ()
    if config.parallel.pp > 1:
        bubble = expected_bubble(
            config, layout, layout.program_of(micro_batch_counts(config, world)[-1])
        )
    if world == 1 and cluster is None:
        return replace(found, sent=({},))
    try:
        sent = bytes_on(config, world, layout)
    except (
        Exception
    ) as error:  # a layer that needs values cannot be counted; it trains all the same
        return replace(
            found, bubble=bubble, report=[f"what a step sends is not predicted: {_named(error)}"]
        )
    found = replace(found, bubble=bubble, sent=sent)
    if cluster is None:
        return found
    try:
        cost = Estimator(cluster).step(config, world, layout)
    except Exception as error:
        return replace(found, report=[f"the time of a step is not predicted: {error}"])
    mfu = cost.tflops_per_gpu / (found.peak_tflops or cluster.flops / 1e12)
    said = f"predicted: {cost.step_s:.3g} s a step, MFU {mfu:.1%}; experts evenly loaded (docs/planning.md)"
    return replace(found, step_s=cost.step_s, mfu=mfu, bubble=cost.bubble, report=[said])


def _with_memory(
    found: Prediction, config: Config, world: int, layout: PipelineLayout
) -> Prediction:
    try:
        ranks = Forecaster(config, world, target_here(config), layout).ranks()
    except Exception as error:  # as above
        return replace(
            found, report=[*found.report, f"memory could not be predicted: {_named(error)}"]
        )
    have = device_bytes(config)
    lack = None if have is None else shortage(ranks, have)
    report = [*found.report, f"predicted memory of each rank, by pipeline rank:\n{table(ranks)}"]
    report += [] if lack is None else [f"WARNING: this will not fit: {lack}"]
    return replace(
        found, memory=[ranks[rank].allocated for rank in range(len(ranks))], report=report
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def expected_bubble(config: Config, layout: PipelineLayout, program: Program) -> list[float]:
    """Returns the bubble of every pipeline rank, see `idle_fractions`.

    Args:
        config: of the run.
        layout: deals the layers; `pipeline.schedule=auto` may have found another split than the
            configuration has.
        program: of a step.
    """
    dealt = replace(config, pipeline=replace(config.pipeline, layout=list(layout.layers)))
    return idle_fractions(program, simulate(program, run_costs(dealt).of(program.placement)))

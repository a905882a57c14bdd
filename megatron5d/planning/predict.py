"""The expected time of a step of a run: its layers' work, its Program and its axes, priced on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from megatron5d.config.schema import Config
from megatron5d.model.flops import flops_per_token
from megatron5d.model.partition import stage_specs
from megatron5d.pipeline_parallel.simulate import kept_between_slots
from megatron5d.plan.traffic import sent_bytes
from megatron5d.planning.clusters import Cluster, cluster_of
from megatron5d.planning.dp_traffic import Sharding
from megatron5d.planning.memory_forecast import Target
from megatron5d.planning.rank_memory import least_needed
from megatron5d.planning.step_time import Prices, StepCost, step_cost
from megatron5d.planning.workload import Workloads
from megatron5d.topology.mesh import lines_of, pair_lines_of
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import PipelinePlan, micro_batch_counts, planned_pipeline


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
        where the device is not known or the batch grows.
    """
    cluster = cluster_of(device)
    if cluster is None or config.train.gbs_ramp is not None:
        return None
    try:
        cost = Estimator(cluster).step(config, world, plan)
    except Exception as error:  # a layer that needs values cannot be counted; it trains all the same
        return f"the time of a step is not predicted: {error}"
    peak = config.log.peak_tflops
    return cost if peak is None else replace(cost, mfu=cost.tflops_per_gpu / peak)

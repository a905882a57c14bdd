"""Forecasts the memory of every rank of a run by building and running its layers on meta tensors.

The model, data parallelism and the optimizer are those of training (train/build.py), on tensors
with sizes but without memory. One micro-batch passes through each kind of layer (trace.py), and the
pipeline's Program determines how many are in flight (peak.py). No rank is started, so that any
layout of any world can be forecast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron5d.config.schema import Config
from megatron5d.data.batch import SequenceSharding, make_micro_batch
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.kernels.tuning import planned
from megatron5d.model.embedding_head import loss_terms
from megatron5d.model.gpt import GPT
from megatron5d.model.moe import MoEDispatch
from megatron5d.optim.optimizer import Optimizer, build_optimizer, global_square_sum
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.pipeline_parallel.executor import passes_of
from megatron5d.planning.memory.peak import Moment, Replay, find_peak
from megatron5d.planning.memory.rank_memory import (
    ALLOCATOR_BLOCK,
    Peak,
    RankMemory,
    gemm_workspace,
    outside_bytes,
)
from megatron5d.planning.memory.repeat import find_repeat
from megatron5d.planning.memory.trace import BOUNDARY, MemoryWatch, StageTrace, Tracer, empty_trace
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.time.work import message_bytes
from megatron5d.precision.fp8_recipes import is_quantized, quantized_copies
from megatron5d.topology.grid import dense_grid
from megatron5d.topology.mesh import Mesh, planned_mesh
from megatron5d.topology.shard_spec import state_of, without_memory
from megatron5d.train.build import build_sync, rounding_seed, sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout, boundary_form, micro_batch_counts


@dataclass(frozen=True)
class Target:
    """Hardware and load of a forecast.

    Args:
        architecture: of a GPU, for example sm_90; None = the CPU, whose plain paths keep more.
        imbalance: rows that the busiest rank's experts receive, relative to an even share.
    """

    architecture: str | None = "sm_90"
    imbalance: float = 1.0

    @property
    def block(self) -> int:
        return 1 if self.architecture is None else ALLOCATOR_BLOCK

    def paths(self):
        """Context in which operations on meta tensors take the code paths of this target."""
        return nullcontext() if self.architecture is None else planned(self.architecture)


class Forecaster:
    """Memory of the ranks of one run.

    Args:
        config: a valid configuration.
        world: number of ranks.
        target: hardware and load.
        layout: of the pipeline; None = a layout without the search of `pipeline.schedule = auto`.
        moments: receives two moments of every slot for each call of `rank`, see `find_peak`.
    """

    def __init__(
        self,
        config: Config,
        world: int,
        target: Target,
        layout: PipelineLayout | None = None,
        moments: list[list[Moment]] | None = None,
    ) -> None:
        self._moments = moments
        self.config, self.world, self.target = config, world, target
        self.layout = layout or quick_layout(config, world)
        self.sizes = sizes_of(config, world)
        self.num_microbatches = micro_batch_counts(config, world)[-1]
        self._program = self.layout.program_of(self.num_microbatches)
        self._traces: dict[int, StageTrace] = {}  # by stage
        self._symmetric: dict[int, int] = {}  # by stage: bytes of symmetric-memory buffers
        # (trace, symmetric bytes) by the contents of a stage
        self._cache: dict[tuple, tuple[StageTrace, int]] = {}

    def rank(self, pp_rank: int) -> RankMemory:
        """Memory of a pipeline rank with index 0 on every other axis.

        The other ranks need as much, except for padded vocabularies and some counts of four bytes.
        With Muon they may need less at the end of a step: index 0 gets the largest matrices.
        """
        group = dense_grid(self.sizes).group(0, "pp")
        mesh = planned_mesh(
            self.sizes,
            group[pp_rank],
            num_kv_heads=self.config.model.num_kv_heads,
            shared=self.layout.shared,
        )
        with self.target.paths():
            return self._memory_of(mesh)

    def ranks(self) -> dict[int, RankMemory]:
        """Memory of every pipeline rank."""
        return {rank: self.rank(rank) for rank in range(self.sizes.pp)}

    def activations(self, pp_rank: int) -> Counter[str]:
        """Bytes by phase that one micro-batch keeps between forward and backward.

        Args:
            pp_rank: one that `rank` has been called for.
        """
        num_bytes: Counter[str] = Counter()
        for _, stage in self.layout.placement.stages_of(pp_rank):
            for step in self._traces[stage].passes["F"]:
                if step.kind != BOUNDARY:
                    num_bytes[step.kind] += step.delta
        return num_bytes

    def _memory_of(self, mesh: Mesh) -> RankMemory:
        config, rank, architecture = self.config, mesh["pp"].rank, self.target.architecture
        with MemoryWatch(self.target.block) as watch:
            with without_memory():
                stages = self.layout.stage_specs(rank)
                model = GPT(config, mesh, "meta", stages, self.layout.shared)
            sync = build_sync(config, mesh, model)
            optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
            state = _state_memory(model, sync, optimizer, watch)
            update = _update_bytes(sync, optimizer, watch)

        # passes: what a step adds
        set_load(model, self.target.imbalance, config.moe.capacity_factor)
        batch = planned_batch(config, mesh, model, self.num_microbatches * self.sizes.dp)
        for stage in model.stages:
            self._traces[stage], self._symmetric[stage] = self._trace(model, sync, stage, batch)
        peak, reduction, after_reduction = self._peak(model, sync, rank)
        on_gpu = architecture is not None
        return replace(
            state,
            weights=state.weights + _copies_bytes(sync, watch),
            inputs=self._inputs(batch, watch),
            peak=peak,
            end_of_step=max(reduction, after_reduction + update),
            library=gemm_workspace(architecture),
            symmetric=max(self._symmetric[stage] for stage in model.stages),
            outside=outside_bytes(_num_communicators(mesh)) if on_gpu else 0,
        )

    def _inputs(self, batch: MicroBatch, watch: MemoryWatch) -> int:
        tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
        return self.num_microbatches * sum(watch.rounded(tensor.nbytes) for tensor in tensors)

    def _message_bytes(self) -> list[int]:
        """Bytes of the message from each stage to the next."""
        sizes = message_bytes(self.config, self.layout.specs)
        return [MemoryWatch(self.target.block).rounded(size) for size in sizes]

    def _peak(self, model: GPT, sync: GradSync, rank: int) -> tuple[Peak, int, int]:
        """Peak of the passes, and of data parallelism's buffers while it ends its reductions.

        Returns:
            The peak of the passes, bytes at most during the reductions, and bytes after them.
        """
        phases = {stage: model.phases_of(stage) for stage in model.stages}
        local_stages = self.layout.placement.stages_of(rank)
        by_direction = {(direction, stage): phases[stage] for direction, stage in local_stages}
        sync.drop()
        repeat = find_repeat(self._program, rank)
        passes = passes_of(self._program, by_direction)
        for stage, count in repeat.passes.items() if repeat else ():
            passes |= {phase: passes[phase] - count for phase in phases[stage]}
        moments: list[Moment] | None = None
        with_graphs = self.config.train.cuda_graph != "none"
        # With graphs, data parallelism records the addresses of its buffers in a first step.
        records_first = with_graphs and self.config.parallel.zero >= 2
        for is_recorded in (True, False) if records_first else (False,):
            with Replay(sync, phases, passes, self.target.block, with_graphs) as replay:
                moments = None if self._moments is None or is_recorded else []
                peak = find_peak(
                    self._program,
                    rank,
                    self._traces,
                    self._message_bytes(),
                    replay,
                    repeat=repeat,
                    moments=moments,
                )
                replay.forget_peak()
                sync.finish_reduce()
                after_reduction = replay.live_bytes
                global_square_sum(sync.buckets)
        if self._moments is not None and moments is not None:
            self._moments.append(moments)
        return peak, replay.peak_bytes, after_reduction

    def _trace(
        self, model: GPT, sync: GradSync, stage: int, batch: MicroBatch
    ) -> tuple[StageTrace, int]:
        """A stage's trace and its bytes of symmetric memory; equal stages share a trace."""
        config, units, spec = self.config, _join_units(model.units_of(stage)), model.stages[stage]
        if not units:
            return empty_trace(self._message_bytes()[stage]), 0
        signatures = tuple(zip(map(_signature, units), _new_tables(units)))
        sent = [self.layout.specs[max(stage - 1, 0)].num_states, spec.num_states]
        shares = model.embedding is not None and (model.head is not None or bool(model.mtp_blocks))
        key = (signatures, spec.embedding, spec.head, shares, *sent)
        if key not in self._cache:
            form, *forms = [boundary_form(config, "meta", states) for states in (1, *sent)]
            split = any(
                action.op == "W"
                for slots in self._program.ranks
                for slot in slots
                for action in slot
            )
            tracer = Tracer(
                [message.shape for message in forms],
                form.dtype,
                batch,
                len(loss_terms(config)),
                split=split,
                block=self.target.block,
                sync=sync if config.parallel.zero >= 2 else None,
                rehearse=config.precision.fp8 != "none" or config.parallel.tp_overlap == "fused",
            )
            trace = tracer.trace(units, signatures, first=spec.embedding, last=spec.head)
            self._cache[key] = trace, model.overlap.buffer_bytes
        return self._cache[key]


def _join_units(units: list[list[Phase]]) -> list[list[Phase]]:
    """Units of phases, with layers that are recomputed together joined to one."""
    joined: list[list[Phase]] = []
    for unit in units:
        group = unit[0].activation_policy.group
        if joined and group is not None and group == joined[-1][-1].activation_policy.group:
            joined[-1] = joined[-1] + unit
        else:
            joined.append(unit)
    return joined


def _signature(unit: list[Phase]) -> tuple:
    """Key that is equal for units doing the same work on the same shapes."""
    groups = [phase.activation_policy.group for phase in unit]
    return tuple(
        (
            tuple(type(module) for module in phase.modules()),
            tuple(type(state_of(parameter).gemms) for parameter in phase.parameters()),
            _kept_parts(phase),
            None if group is None else groups.index(group),
            # Prediction blocks each add a term to the sums that they pass on.
            getattr(phase, "depth", None),
        )
        for phase, group in zip(unit, groups)
    )


def _new_tables(units: list[list[Phase]]) -> list[bool]:
    """Whether each unit is the first to read another kind of rotary tables than those before it.

    The layers of a stage share their tables.
    """
    kinds: set[object] = set()
    is_new = []
    for unit in units:
        tables = {phase.rope for phase in unit if getattr(phase, "rope", None)}
        is_new.append(bool(kinds and tables - kinds))
        kinds |= tables
    return is_new


def _kept_parts(phase: Phase) -> tuple:
    """Names of the parts that a phase keeps, and how many bytes of them are on the host."""
    policy = phase.activation_policy
    return policy.parts.names, policy.host_bytes, policy.input_host_bytes


def planned_batch(config: Config, mesh: Mesh, model: GPT, num_microbatches: int) -> MicroBatch:
    """One micro-batch of meta tensors, as a rank's stages see it; also starts the routers' step.

    Args:
        config: train and data.
        mesh: of the rank.
        model: that will read it.
        num_microbatches: of a step, on all data-parallel ranks.
    """
    # A document of one token and another of all that follow: masked, and no rank's part is empty.
    rows = torch.zeros(config.train.mbs, config.train.seq_len + 1, dtype=torch.int64)
    rows[:, 0] = 1
    batch = make_micro_batch(rows, document_mask=config.data.document_mask, eod=1)
    batch = SequenceSharding(config, mesh, "meta")(batch).to("meta")
    if model.balancer is not None:
        targets = torch.zeros((), dtype=torch.float64, device="meta")
        model.balancer.start_step(num_microbatches, targets, mesh["dp_cp"], False)
    shape = torch.Size(boundary_form(config, "meta").shape)
    # A run's first micro-batch computes and caches these; MemoryWatch makes meta operations fast.
    with MemoryWatch():
        dispatches = [module for module in model.modules() if isinstance(module, MoEDispatch)]
        for share in {dispatch.token_share for dispatch in dispatches}:
            share.tokens(shape, batch)
    return batch


def set_load(model: GPT, imbalance: float, capacity_factor: float | None) -> None:
    """Sets the load that the dispatchers of a model assume."""
    for module in model.modules():
        if isinstance(module, MoEDispatch):
            assumed = module.dispatcher.assumed_load
            assumed.load, assumed.limit = imbalance, capacity_factor or math.inf
    if model.send_capacity is not None:
        model.send_capacity.start_step()


def _bytes(tensors: Iterable[Tensor], watch: MemoryWatch) -> int:
    """Bytes of the storages of tensors, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    by_id = {id(storage): storage for storage in storages}
    return sum(watch.rounded(storage.nbytes()) for storage in by_id.values())


def _host_bytes(optimizer: Optimizer, watch: MemoryWatch) -> int:
    """Bytes of the optimizer's state in host memory."""
    on_host = [state for state in optimizer.slices if state.on_host]
    return _bytes(
        [t for state in on_host for t in (state.master, state.grads, *state.moments.values())],
        watch,
    )


def _state_memory(
    model: GPT, sync: GradSync, optimizer: Optimizer, watch: MemoryWatch
) -> RankMemory:
    """Memory before the first step, with every tensor that has been made inside of `watch`."""
    on_host = _host_bytes(optimizer, watch)
    excluded = on_host + watch.rounded(model.overlap.buffer_bytes)
    weights = _bytes([t for bucket in sync.buckets for t in bucket.resident_weights], watch)
    gradients = _bytes([bucket.resident_grads for bucket in sync.buckets], watch)
    moments = _bytes([t for _, t, state in optimizer.tensors() if not state.on_host], watch)
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        buffers=watch.live_bytes - excluded - weights - gradients - moments,
        setup=watch.peak_bytes - excluded,
        host_optimizer=on_host,
    )


def _copies_bytes(sync: GradSync, watch: MemoryWatch) -> int:
    """Bytes of the FP8 copies of weights that are not gathered; `_peak` counts the other ones."""
    weights = [
        parameter
        for bucket in sync.buckets
        if not bucket.shards_weights
        for parameter in bucket.parameters
    ]
    quantized = filter(is_quantized, weights)
    return _bytes([t for weight in quantized for t in quantized_copies(weight).tensors], watch)


def _update_bytes(sync: GradSync, optimizer: Optimizer, watch: MemoryWatch) -> int:
    """Peak of temporary bytes while the weights are updated and gathered."""
    resident = watch.forget_peak()
    optimizer.allocate_temporaries()
    update = watch.peak_bytes - resident
    resident = watch.forget_peak()
    sync.start_gather()
    sync.finish_gather()
    return max(update, watch.peak_bytes - resident)


def _num_communicators(mesh: Mesh) -> int:
    """Number of process groups: axes with the same ranks share one, the pipeline has two more."""
    return len({axis.ranks for axis in mesh.values() if axis.size > 1}) + 2 * (mesh["pp"].size > 1)

"""What memory every rank of a run will need: its layers are built and run on the meta device, and
bytes counted.

The model, data parallelism and the optimiser are the ones that train (build.py), on tensors that
have sizes and no memory; one micro-batch passes each kind of layer (planning/memory/trace.py), and
the pipeline's Program says how many are in flight (planning/memory/peak.py). No rank is started:
any layout of any world can be asked about.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

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
    """What is planned for.

    Args:
        architecture: of a GPU, for example sm_90; None = the CPU, whose plain paths keep more.
        imbalance: rows that the busiest rank's experts are sent, of an even share.
    """

    architecture: str | None = "sm_90"
    imbalance: float = 1.0

    @property
    def block(self) -> int:
        return 1 if self.architecture is None else ALLOCATOR_BLOCK

    def paths(self):
        """Returns a context in which the meta device's tensors go this target's ways."""
        return nullcontext() if self.architecture is None else planned(self.architecture)


class Forecaster:
    """Memory of the ranks of one run.

    Args:
        config: a valid configuration.
        world: number of ranks.
        target: what is planned for.
        layout: of the pipeline; None = made here, without the search that `pipeline.schedule =
            auto` will make.
        moments: takes two moments of every slot of each rank asked about, see `find_peak`, in the
            order of asking.
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
        self._known: dict[tuple, tuple[StageTrace, int]] = {}  # by what a stage is made of: both
        # by stage: bytes of the symmetric-memory buffers of its exchanges
        self._symmetric: dict[int, int] = {}

    def rank(self, pp_rank: int) -> RankMemory:
        """Returns memory of a pipeline rank, at place 0 of every other axis.

        The others need as much, padded vocabularies and some counts of four bytes aside; with Muon
        they may need less at the end of a step, because place 0 is given the largest matrices.
        """
        group = dense_grid(self.sizes).group(0, "pp")
        mesh = planned_mesh(
            self.sizes,
            group[pp_rank],
            num_kv_heads=self.config.model.num_kv_heads,
            shared=self.layout.shared,
        )
        with self.target.paths():
            return self._on(mesh)

    def ranks(self) -> dict[int, RankMemory]:
        """Returns the memory of every pipeline rank."""
        return {rank: self.rank(rank) for rank in range(self.sizes.pp)}

    def activations(self, pp_rank: int) -> Counter[str]:
        """Returns bytes that one micro-batch keeps between forward and backward on a rank asked
        about before, by phase."""
        kept: Counter[str] = Counter()
        for _, stage in self.layout.placement.stages_of(pp_rank):
            for step in self._traces[stage].passes["F"]:
                if step.kind != BOUNDARY:
                    kept[step.kind] += step.delta
        return kept

    def _on(self, mesh: Mesh) -> RankMemory:
        config, layout, rank = self.config, self.layout, mesh["pp"].rank
        with MemoryWatch(self.target.block) as watch:
            with without_memory():
                model = GPT(config, mesh, "meta", layout.stage_specs(rank), layout.shared)
            sync = build_sync(config, mesh, model)
            optimizer = build_optimizer(sync.buckets, config.optim, mesh, rounding_seed(config))
            away = _on_host(optimizer, watch)
            apart = away + watch.rounded(model.overlap.buffer_bytes)
            resident, setup = watch.live_bytes - apart, watch.peak_bytes - apart
            weights = _bytes(
                [tensor for bucket in sync.buckets for tensor in bucket.resident_weights], watch
            )
            gradients = _bytes([bucket.resident_grads for bucket in sync.buckets], watch)
            state = _bytes(
                [tensor for _, tensor, each in optimizer.tensors() if not each.on_host], watch
            )
            update = _update(sync, optimizer, watch)
        set_load(model, self.target.imbalance, config.moe.capacity_factor)
        batch = planned_batch(config, mesh, model, self.num_microbatches * self.sizes.dp)
        for stage in model.stages:
            self._traces[stage], self._symmetric[stage] = self._trace(model, sync, stage, batch)
        peak, reduction, fixed = self._peak(model, sync, rank)
        # those of gathered weights come and go with them, and `_peak` counts them
        staying = [
            parameter
            for bucket in sync.buckets
            if not bucket.shards_weights
            for parameter in bucket.parameters
        ]
        parts = [
            part
            for weight in filter(is_quantized, staying)
            for part in quantized_copies(weight).parts
        ]
        copies = _bytes(parts, watch)
        on_gpu = self.target.architecture is not None
        return RankMemory(
            weights=weights + copies,
            gradients=gradients,
            optimizer=state,
            buffers=resident - weights - gradients - state,
            inputs=self._inputs(batch, watch),
            peak=peak,
            end_of_step=max(reduction, fixed + update),
            setup=setup,
            library=gemm_workspace(self.target.architecture),
            symmetric=max(self._symmetric[stage] for stage in model.stages),
            outside=outside_bytes(_num_communicators(mesh)) if on_gpu else 0,
            host_optimizer=away,
        )

    def _inputs(self, batch: MicroBatch, watch: MemoryWatch) -> int:
        tensors = [value for value in vars(batch).values() if isinstance(value, Tensor)]
        return self.num_microbatches * sum(watch.rounded(tensor.nbytes) for tensor in tensors)

    def _message_bytes(self) -> list[int]:
        """Returns bytes of what each stage sends to the next."""
        sizes = message_bytes(self.config, self.layout.specs)
        return [MemoryWatch(self.target.block).rounded(each) for each in sizes]

    def _peak(self, model: GPT, sync: GradSync, rank: int) -> tuple[Peak, int, int]:
        """Returns the worst moment of the passes, and of data parallelism the most that it holds
        while it ends its reductions, and what it holds after them."""
        phases = {stage: model.phases_of(stage) for stage in model.stages}
        held = {
            (direction, stage): phases[stage]
            for direction, stage in self.layout.placement.stages_of(rank)
        }
        sync.drop()
        passes, repeat = passes_of(self._program, held), find_repeat(self._program, rank)
        for stage, count in repeat.passes.items() if repeat else ():
            passes |= {phase: passes[phase] - count for phase in phases[stage]}
        moments: list[Moment] | None = None
        with_graphs = self.config.train.cuda_graph != "none"
        for noted in (True, False) if with_graphs and self.config.parallel.zero >= 2 else (False,):
            with Replay(sync, phases, passes, self.target.block, with_graphs) as replay:
                given = self._traces, self._message_bytes(), replay
                moments = None if self._moments is None or noted else []
                peak = find_peak(self._program, rank, *given, repeat=repeat, moments=moments)
                replay.forget_peak()
                sync.finish_reduce()
                left = replay.live_bytes
                global_square_sum(sync.buckets)
        if self._moments is not None and moments is not None:
            self._moments.append(moments)
        return peak, replay.peak_bytes, left

    def _trace(
        self, model: GPT, sync: GradSync, stage: int, batch: MicroBatch
    ) -> tuple[StageTrace, int]:
        """Returns a stage's trace and bytes of symmetric memory; stages with the same layers share
        a trace."""
        config, units, spec = self.config, _units(model.units_of(stage)), model.stages[stage]
        if not units:
            return empty_trace(self._message_bytes()[stage]), 0
        signatures = tuple(zip(map(_signature, units), _further_tables(units)))
        sent = [self.layout.specs[max(stage - 1, 0)].sent, spec.sent]
        shares = model.embedding is not None and (model.head is not None or bool(model.mtp_blocks))
        key = (signatures, spec.embedding, spec.head, shares, *sent)
        if key not in self._known:
            form, *forms = [boundary_form(config, "meta", states) for states in (1, *sent)]
            split = any(
                action.op == "W" for line in self._program.ranks for slot in line for action in slot
            )
            tracer = Tracer(
                [each.shape for each in forms],
                form.dtype,
                batch,
                len(loss_terms(config)),
                split=split,
                block=self.target.block,
                sync=sync if config.parallel.zero >= 2 else None,
                rehearse=config.precision.fp8 != "none" or config.parallel.tp_overlap == "fused",
            )
            trace = tracer.trace(units, signatures, first=spec.embedding, last=spec.head)
            self._known[key] = trace, model.overlap.buffer_bytes
        return self._known[key]


def _units(units: list[list[Phase]]) -> list[list[Phase]]:
    """Layers that are recomputed together become one."""
    joined: list[list[Phase]] = []
    for unit in units:
        group = unit[0].activation_policy.group
        if joined and group is not None and group == joined[-1][-1].activation_policy.group:
            joined[-1] = joined[-1] + unit
        else:
            joined.append(unit)
    return joined


def _signature(unit: list[Phase]) -> tuple:
    """Returns equal for units whose phases do the same on tensors of the same sizes."""
    groups = [phase.activation_policy.group for phase in unit]
    return tuple(
        (
            tuple(type(module) for module in phase.modules()),
            tuple(type(state_of(parameter).gemms) for parameter in phase.parameters()),
            _keeping(phase),
            None if group is None else groups.index(group),
            # prediction blocks: each adds a term to the sums that it passes on
            getattr(phase, "depth", None),
        )
        for phase, group in zip(unit, groups)
    )


def _further_tables(units: list[list[Phase]]) -> list[bool]:
    """Says which units are the first to read a second kind of rotary tables, which a stage's layers
    share."""
    kinds: set[object] = set()
    further = []
    for unit in units:
        read = {phase.rope for phase in unit if getattr(phase, "rope", None)}
        further.append(bool(kinds and read - kinds))
        kinds |= read
    return further


def _keeping(phase: Phase) -> tuple:
    """Returns what of a phase is kept, and where."""
    policy = phase.activation_policy
    return policy.parts.names, policy.host_bytes, policy.input_host_bytes


def planned_batch(config: Config, mesh: Mesh, model: GPT, num_microbatches: int) -> MicroBatch:
    """Returns one micro-batch without values, as a rank's stages see it; the routers are told that
    a step begins.

    Args:
        config: train and data.
        mesh: of the rank.
        model: that will see it.
        num_microbatches: of a step, on all data-parallel ranks.
    """
    rows = torch.zeros(config.train.mbs, config.train.seq_len + 1, dtype=torch.int64)
    rows[:, 0] = 1  # a document of one token, another of all that follow: masked, and nowhere empty
    whole = make_micro_batch(rows, document_mask=config.data.document_mask, eod=1)
    batch = SequenceSharding(config, mesh, "meta")(whole).to("meta")
    if model.balancer is not None:
        targets = torch.zeros((), dtype=torch.float64, device="meta")
        model.balancer.start_step(num_microbatches, targets, mesh["dp_cp"], False)
    shape = torch.Size(boundary_form(config, "meta").shape)
    with MemoryWatch():  # for its quick operations
        for share in {
            module.share for module in model.modules() if isinstance(module, MoEDispatch)
        }:
            share.tokens(shape, batch)  # made by a run's first micro-batch, and remembered
    return batch


def set_load(model: GPT, imbalance: float, capacity_factor: float | None) -> None:
    for module in model.modules():
        if isinstance(module, MoEDispatch):
            module.dispatcher.planned.load, module.dispatcher.planned.limit = (
                imbalance,
                capacity_factor or math.inf,
            )
    if model.send_capacity is not None:
        model.send_capacity.start_step()


def _bytes(tensors: Sequence[Tensor], watch: MemoryWatch) -> int:
    """Returns bytes of the storages of tensors, each counted once."""
    storages = {
        id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)
    }
    return sum(watch.rounded(storage.nbytes()) for storage in storages.values())


def _on_host(optimizer: Optimizer, watch: MemoryWatch) -> int:
    """Returns what of the optimiser lies in the host's memory."""
    away = [state for state in optimizer.slices if state.on_host]
    return _bytes(
        [t for state in away for t in (state.master, state.grads, *state.moments.values())], watch
    )


def _update(sync: GradSync, optimizer: Optimizer, watch: MemoryWatch) -> int:
    """Returns the most, above what stays, while the weights are updated and gathered."""
    before = watch.forget_peak()
    optimizer.allocate_temporaries()
    update = watch.peak_bytes - before
    before = watch.forget_peak()
    sync.start_gather()
    sync.finish_gather()
    return max(update, watch.peak_bytes - before)


def _num_communicators(mesh: Mesh) -> int:
    """Returns the process groups: axes with the same ranks share one; the pipeline's channels have
    their own."""
    return len({axis.ranks for axis in mesh.values() if axis.size > 1}) + 2 * (mesh["pp"].size > 1)

"""Counts the work of a run's layers by building them on the meta device and running one sequence.

No formula describes the layers here. Copies of the objects that multiply weights
(precision/gemm.py) count GEMMs, the ledger of the axes counts collectives, and tensors are counted
where they are made. Only the FLOPs of attention come from a formula (model/flops.py). The model has
the fewest layers that include one of each kind. A micro-batch of more sequences has more rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.comm.ledger import Ledger
from megatron5d.config.derived import moe_layers, quantized_matrices, window_of
from megatron5d.config.schema import Config, OptimConfig, RecomputeConfig
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.model.embedding_head import TIED, loss_terms
from megatron5d.model.gpt import GPT, is_recomputed
from megatron5d.model.partition import StageSpec, full_model
from megatron5d.optim.muon import gathered_shape, replace_by_update
from megatron5d.optim.sharded_state import uses_muon
from megatron5d.phases.activations import COPY_CALLBACK
from megatron5d.phases.phase import Phase
from megatron5d.phases.stage import Pass, Stage
from megatron5d.phases.wgrad import grad_buffer
from megatron5d.planning.memory.forecast import Target, planned_batch, set_load
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.planning.time.work import (
    CoreFlops,
    Elements,
    Gemm,
    Matrix,
    Message,
    Step,
    Unit,
    Work,
    count_products,
    total_work,
)
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.topology.mesh import planned_mesh
from megatron5d.topology.shard_spec import spec_of, state_of, without_memory
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout, boundary_form
from megatron5d.train.preflight.parameters import parameter_names

EMBEDDING, HEAD, LAYERS = "embedding", "head", ("dense", "moe")

Kind = tuple[str, bool, frozenset[str], frozenset[str]]
"""Kind of a unit: name, whether the backward recomputes it, FP8 matrices, frozen parameters."""
_Block = tuple[str, frozenset[str], frozenset[str]]
Works = dict[str, dict[Phase, Work]]
"""op -> phase -> its work."""
_Trace = tuple[GPT, list[Kind], Works, Any]


class _OrderedLedger(Ledger):
    """A ledger that also lists the messages between the GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms, self.messages = list[Gemm](), list[Message]()

    def record(self, axis: str, op: str, num_elements: int, element_bytes: int) -> None:
        super().record(axis, op, num_elements, element_bytes)
        self.messages.append(Message(axis, op, num_elements * element_bytes, len(self.gemms)))

    def clear(self) -> None:
        super().clear()
        self.gemms.clear()
        self.messages.clear()


class _Counter(MemoryWatch):
    """Counts the work of phases while they run."""

    def __init__(self, ledger: _OrderedLedger) -> None:
        super().__init__()
        self.ledger, self.gemms = ledger, ledger.gemms
        self.num_made = self.made_bytes = self.host_bytes = self.before = 0

    def _count(self, tensor: Tensor, operation: str) -> None:
        super()._count(tensor, operation)
        self.num_made += 1
        self.made_bytes += tensor.nbytes

    def take(self, core_flops: float, kind: str = "", phase: str = "") -> Work:
        """The work since the last call: of a phase, with the FLOPs of attention from a formula."""
        new_bytes, self.before = self.live_bytes - self.before, self.live_bytes
        work = Work(
            tuple(self.gemms),
            core_flops,
            self.made_bytes,
            self.num_made,
            dict(self.ledger.totals),
            self.host_bytes,
            new_bytes,
            (Step(kind, phase, len(self.gemms), tuple(self.ledger.messages)),),
        )
        self.ledger.clear()
        self.num_made = self.made_bytes = self.host_bytes = 0
        return work

    def copied(self, num_bytes: int) -> None:
        """Counts a tensor that is copied to the host."""
        self.host_bytes += num_bytes


class _IterationCounter(_Counter):
    """Counts the work of Newton-Schulz iterations, whose GEMMs are torch's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            first, second = args[-2:]
            stack, rows, inputs = first.shape
            self.gemms.append(Gemm(stack * rows, inputs, second.shape[2], stack))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Workloads:
    """Units of any layouts of one model; work that two layouts share is traced once.

    Args:
        target: hardware, and the balance of experts.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._traced: dict[tuple[str, int], dict[Kind, Unit]] = {}  # of one sequence
        self._blocks: dict[str, _Trace] = {}
        # the last configuration, and what `_single_sequence` makes of it
        self._last: tuple[Config | None, dict[bool, tuple[Config, str]]] = None, {}
        self._units: dict[tuple, Unit] = {}

    def stages(self, config: Config, layout: PipelineLayout, ops: str = "FIWB") -> list[list[Unit]]:
        """The units of every stage.

        Args:
            config: a valid configuration.
            layout: of the pipeline.
            ops: passes that the units must have.
        """
        blocks, before = _blocks(config), layout.specs[-1].mtp.start
        stages = [
            [self._unit(config, kind, ops, before) for kind in _kinds(config, stage, spec, blocks)]
            for stage, spec in enumerate(layout.specs)
        ]
        if "tied" in layout.shared:
            _split_embedding(stages, layout)
        return stages

    def counted(self, config: Config, ops: str = "FIWB") -> list[tuple[Unit, int, bool]]:
        """One unit of each kind in the model, how many there are, and whether it is a layer."""
        kinds = Counter(_kinds(config, 0, full_model(config.model), _blocks(config)))
        return [
            (self._unit(config, kind, ops), count, kind[0] in LAYERS)
            for kind, count in kinds.items()
        ]

    def block(self, config: Config, before: Callable[[GPT], Any]) -> tuple[list[Phase], Works, Any]:
        """The model's MoE block, or its dense one.

        Args:
            config: a valid configuration.
            before: called with the model on the meta device, before a sequence passes it.

        Returns:
            Phases of the block, op -> phase -> its work, and the result of `before`.
        """
        single = _single_sequence(config, config.recompute.mode != "none")
        key = str(single)
        if key not in self._blocks:
            self._blocks[key] = _run_single(single, self.target, before=before)
            self._traced.setdefault((key, 0), {}).update(_units(single, self._blocks[key]))
        model, kinds, passes, result = self._blocks[key]
        names = [kind[0] for kind in kinds]
        return model.units[names.index("moe" if "moe" in names else "dense")], passes, result

    def _unit(self, config: Config, kind: Kind, ops: str, depths: int = 0) -> Unit:
        name, recomputes, *_ = kind
        if self._last[0] is not config:
            self._last = config, {}
        if recomputes not in self._last[1]:
            single = _single_sequence(config, recomputes)
            self._last[1][recomputes] = single, str(single)
        single, text = self._last[1][recomputes]
        layers = config.recompute.group_layers if recomputes and name in LAYERS else 1
        key = text, depths, kind, ops, config.train.mbs, layers
        if key not in self._units:
            unit = self._trace(single, (text, depths), kind, ops)
            self._units[key] = unit.times(config.train.mbs, layers)
        return self._units[key]

    def _trace(self, single: Config, key: tuple[str, int], kind: Kind, ops: str) -> Unit:
        """A unit for one sequence; runs the passes that are not known yet."""
        units = self._traced.setdefault(key, {})
        known = units[kind].passes if kind in units else {}
        missing = "".join(back for back in "IB" if back in ops and back not in known)
        if missing or not known:
            trace = _run_single(single, self.target, key[1], missing)
            for new_kind, unit in _units(single, trace).items():
                before = units[new_kind].passes if new_kind in units else {}
                units[new_kind] = dataclasses.replace(unit, passes={**before, **unit.passes})
        return units[kind]


def _split_embedding(stages: list[list[Unit]], layout: PipelineLayout) -> None:
    """Gives each rank that shares the embedding a copy; a trace on one rank has only one."""
    done = set[frozenset[int]]()
    for stage, units in enumerate(stages):
        index = next((index for index, unit in enumerate(units) if TIED in unit.read), None)
        ranks = frozenset(route[stage] for route in layout.placement.route)
        if index is None or ranks in done:
            continue
        done.add(ranks)
        unit = units[index]
        tied, is_counted = unit.read[TIED], TIED not in unit.borrowed
        fixed = tied if TIED in unit.fixed else 0
        params, frozen = unit.params, unit.frozen
        units[index] = dataclasses.replace(
            unit,
            params=params._replace(dense=params.dense - is_counted * tied, tied=tied),
            frozen=frozen._replace(dense=frozen.dense - is_counted * fixed, tied=fixed),
            borrowed=unit.borrowed - {TIED},
        )


def _frozen_names(config: Config) -> frozenset[str]:
    """Names of the model's parameters that are never updated."""
    names = parameter_names(config) if config.optim.freeze else []
    return frozenset(name for glob in config.optim.freeze for name in fnmatch.filter(names, glob))


def _kinds(config: Config, stage: int, spec: StageSpec, blocks: Sequence[_Block]) -> Iterator[Kind]:
    model, recompute, none = config.model, config.recompute, frozenset[str]()
    ends = recompute.mode != "none"  # embedding and head are recomputed if any layer is
    if spec.embedding:
        yield EMBEDDING, ends, none, none
    for position, i in enumerate(spec.layers):
        name, fp8, fixed = blocks[i]
        yield name, is_recomputed(recompute, stage, position), fp8, fixed
    if spec.head:
        yield HEAD, ends, none, none
    for position, depth in enumerate(spec.mtp, len(spec.layers)):
        name, fp8, fixed = blocks[model.num_layers + depth]
        yield f"mtp {depth} {name}", is_recomputed(recompute, stage, position), fp8, fixed


def _blocks(config: Config) -> list[_Block]:
    """Kind of each block, including those of multi-token prediction."""
    model, moe, blocks = config.model, moe_layers(config.model), []
    marked = (quantized_matrices(config), _frozen_names(config))
    for i in range(model.num_layers + model.num_mtp_layers):
        prefix = f"layers.{i}."
        fp8, fixed = (
            frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))
            for names in marked
        )
        kind = "moe" if min(i, model.num_layers - 1) in moe else "dense"
        kind += " windowed" if model.window_layers is not None and window_of(model, i) else ""
        blocks.append((kind, fp8, fixed))
    return blocks


def _single_sequence(config: Config, recomputes: bool) -> Config:
    """The same layers for one sequence, without pipeline and with the least data parallelism."""
    parallel, old, min_bytes = config.parallel, config.recompute, config.recompute.offload_min_bytes
    if old.offload:
        min_bytes = -(-min_bytes // config.train.mbs)
    if recomputes:
        recompute = dataclasses.replace(
            old, num_layers=None, stage_layers=None, group_layers=1, offload_min_bytes=min_bytes
        )
    else:
        recompute = RecomputeConfig(
            logit_tokens=old.logit_tokens, offload=old.offload, offload_min_bytes=min_bytes
        )
    return Config(
        model=config.model,
        parallel=dataclasses.replace(
            parallel,
            etp=parallel.etp or parallel.tp,
            pp=1,
            vpp=1,
            dp_replicate=1,
            zero=0,
            zero3_gather="per_microbatch",
            grad_reduce="per_microbatch",
            order=["pp", "dp", "cp", "tp"],
        ),
        train=dataclasses.replace(config.train, mbs=1, gbs=1, gbs_ramp=None),
        precision=config.precision,
        recompute=recompute,
        moe=config.moe,
        data=config.data,
        optim=OptimConfig(
            name=config.optim.name,
            ns_steps=config.optim.ns_steps,
            muon_exclude=config.optim.muon_exclude,
            freeze=config.optim.freeze,
            muon_per_head=config.optim.muon_per_head,
        ),
    )


def _window(blocks: Sequence[_Block]) -> range:
    """The fewest consecutive layers with one of each kind."""
    spans = (
        range(start, start + size)
        for size in range(1, len(blocks) + 1)
        for start in range(len(blocks) - size + 1)
    )
    return next(span for span in spans if set(blocks[span.start : span.stop]) == set(blocks))


def _units(config: Config, trace: _Trace) -> dict[Kind, Unit]:
    """A unit of every kind, for one sequence.

    Args:
        config: of `_single_sequence`.
        trace: of `_run_single`.
    """
    (model, kinds, passes, _), counted = trace, set[nn.Parameter]()
    parameters = [{p for phase in unit for p in phase.parameters()} for unit in model.units]
    readers = Counter(p for of_unit in parameters for p in of_unit)
    units = {}
    for kind, unit, read in zip(kinds, model.units, parameters):
        unit_params, fixed = read - counted, {p for p in read if state_of(p).frozen}
        borrowed = frozenset(spec_of(p).name for p in read & counted)
        counted |= unit_params
        works = {
            op: total_work(by_phase[phase] for phase in unit if phase in by_phase)
            for op, by_phase in passes.items()
        }
        # Offloaded tensors return during the backward of another unit (phases/activations.py).
        for op in {"B", "I"} & works.keys():
            works[op] = dataclasses.replace(works[op], host_bytes=works["F"].host_bytes)
        units[kind] = Unit(
            works,
            _elements(unit_params),
            _elements(unit_params & fixed),
            _elements(filter(is_quantized, unit_params)),
            {spec_of(p).name: p.numel() for p in read if readers[p] > 1},
            borrowed,
            frozenset(spec_of(p).name for p in fixed),
            _copied(unit_params - fixed),
            tuple(_matrices(unit_params - fixed, config.optim)),
        )
    return units


def _run_single(
    config: Config,
    target: Target,
    depths: int = 0,
    backs: str = "IB",
    before: Callable[[GPT], Any] = id,
) -> _Trace:
    """Builds a configuration on the meta device and runs one sequence through it.

    Args:
        config: of `_single_sequence`.
        target: hardware, and the balance of experts.
        depths: blocks of multi-token prediction before the head.
        backs: kinds of backward; I includes W.
        before: called with the model before the sequence passes.

    Returns:
        The model, the kind of each of its units, op -> phase -> its work, and the result of
        `before`.
    """
    m, frozen, blocks = config.model, _frozen_names(config), _blocks(config)
    window, num_mtp = _window(blocks[: m.num_layers]), m.num_mtp_layers
    specs = {0: StageSpec(window, True, not depths, range(depths or num_mtp))}
    if depths:
        specs[1] = StageSpec(range(0), False, True, range(depths, num_mtp))
    ledger, parallel = _OrderedLedger(), config.parallel
    experts, dense = parallel.ep * (parallel.etp or parallel.tp), parallel.cp * parallel.tp
    world = dense * (experts // gcd(experts, dense))
    sizes = sizes_of(config, world)
    mesh = planned_mesh(sizes, num_kv_heads=m.num_kv_heads, recorder=ledger)
    with target.paths():
        with without_memory():
            model = GPT(config, mesh, "meta", specs)
        for parameter in model.parameters():
            if spec_of(parameter).name in frozen:
                state_of(parameter).frozen = True  # as data_parallel/bucket.py does
        set_load(model, target.imbalance, config.moe.capacity_factor)
        batch = planned_batch(config, mesh, model, world // dense)
        result = before(model)
        passes = _counted_passes(config, model, batch, ledger, backs)
    kinds = [kind for stage, spec in specs.items() for kind in _kinds(config, stage, spec, blocks)]
    return model, kinds, passes, result


def _elements(parameters: Iterable[nn.Parameter]) -> Elements:
    sums = Counter[bool]()
    for parameter in parameters:
        sums[spec_of(parameter).expert] += parameter.numel()
    return Elements(sums[False], sums[True])


def _matrices(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> Iterator[Matrix]:
    """Matrices that Muon updates, with their iterations; exclusions must not name single layers."""
    for parameter in parameters:
        spec = spec_of(parameter)
        if uses_muon(spec, optim):
            full = torch.empty(gathered_shape(spec), dtype=parameter.dtype, device="meta")
            with _IterationCounter(_OrderedLedger()) as counter:
                replace_by_update(spec, full, optim.ns_steps, optim.muon_per_head)
            yield Matrix(parameter.numel(), spec.expert, counter.take(0.0))


def _copied(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Axis -> elements whose copies on its ranks have partial gradients."""
    elements = Counter[str]()
    for parameter in parameters:
        for piece in spec_of(parameter).pieces:
            elements.update(dict.fromkeys(piece.summed, prod(piece.shape)))
    return dict(elements)


def _counted_passes(config: Config, model: GPT, batch, ledger: _OrderedLedger, backs: str) -> Works:
    """Work of each pass: F, each kind of backward, and W after I."""
    form, works, core = boundary_form(config, "meta"), Works(), CoreFlops(config)
    num_terms, loss_dtype = len(loss_terms(config)), statistics_dtype(form.dtype)
    # The first pass makes tensors that remain: FP8 copies, symmetric memory, main gradients.
    rehearses = config.precision.fp8 != "none" or config.parallel.tp_overlap == "fused"
    with _Counter(ledger) as counter:
        count_products(model, counter)
        token = COPY_CALLBACK.set(counter.copied)
        try:
            for parameter in model.parameters():
                if not (rehearses or state_of(parameter).frozen):
                    grad_buffer(parameter)
            for back in [*("B" if rehearses else ""), *(backs or [""])]:
                stage = Stage(model.phases)
                counter.take(0.0)
                works["F"] = _run(stage.begin("F", 0, None, batch), counter, core)
                if not back:
                    break
                grad = torch.empty(num_terms, dtype=loss_dtype, device="meta")
                works[back] = _run(stage.begin(back, 0, grad), counter, core)
                if back == "I":
                    works["W"] = _run(stage.begin("W", 0), counter, core)
        finally:
            COPY_CALLBACK.reset(token)
    return works


def _run(work: Pass, counter: _Counter, core: CoreFlops) -> dict[Phase, Work]:
    """Work of each phase in a pass; that of a recomputed one includes its second forward."""
    works: dict[Phase, list[Work]] = defaultdict(list)
    for kind, phase, *_ in work.steps:
        work.advance()
        name = getattr(phase, "kind", None) or type(phase).__name__
        works[phase].append(counter.take(core(phase, kind), kind, name))
    return {phase: total_work(of_phase) for phase, of_phase in works.items()}

"""What the layers of a run do, counted: they are built on the meta device, and one sequence passes
them.

Nothing here follows the layers by formulas. Their GEMMs go through objects that their weights carry
(precision/gemm.py), of which copies count; their collectives go through axes, whose ledger counts;
the tensors that they make are counted where they are made. Attention's own FLOPs are the model's
formula (model/flops.py). A model of the fewest layers that has one of each kind is passed, and one
sequence: a micro-batch of more has more rows.
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
from megatron5d.model.partition import StageSpec, whole_model
from megatron5d.optim.muon import replace_by_update, whole_shape
from megatron5d.optim.sharded_state import takes_muon
from megatron5d.phases.offload import COPY_CALLBACK
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
"""Of a unit: what it is, whether the backward recomputes it, which matrices are multiplied in FP8, which are frozen."""
_Block = tuple[str, frozenset[str], frozenset[str]]
Works = dict[str, dict[Phase, Work]]
"""op -> phase -> its work."""
_Trace = tuple[GPT, list[Kind], Works, Any]


class _Counter(MemoryWatch):
    """Counts while phases run; `take` gives what they have done since it was last asked."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.gemms = ledger, list[Gemm]()
        self.made = self.made_bytes = self.host_bytes = self.before = 0

    def _count(self, tensor: Tensor, operation: str) -> None:
        super()._count(tensor, operation)
        self.made += 1
        self.made_bytes += tensor.nbytes

    def take(self, core_flops: float) -> Work:
        """Returns what was counted since the last call; `core_flops` are attention's, known by
        formula."""
        sent = dict(self.ledger.totals)
        kept, self.before = self.live_bytes - self.before, self.live_bytes
        work = Work(
            tuple(self.gemms), core_flops, self.made_bytes, self.made, sent, self.host_bytes, kept
        )
        self.ledger.clear()
        self.gemms, self.made, self.made_bytes, self.host_bytes = [], 0, 0, 0
        return work

    def copied(self, num_bytes: int) -> None:
        """Counts a tensor that is copied to the host."""
        self.host_bytes += num_bytes


class _IterationCounter(_Counter):
    """The same of Newton-Schulz iterations, whose GEMMs are torch's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            first, second = args[-2:]
            stack, rows, inputs = first.shape
            self.gemms.append(Gemm(stack * rows, inputs, second.shape[2], stack))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Workloads:
    """Units of any layouts of one model; what two layouts share is traced once.

    Args:
        target: whose paths the layers go, and how unevenly tokens choose.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._known: dict[tuple[str, int], dict[Kind, Unit]] = {}  # of one sequence
        self._blocks: dict[str, _Trace] = {}
        # the last configuration, alone
        self._of: tuple[Config | None, dict[bool, tuple[Config, str]]] = None, {}
        self._asked: dict[tuple, Unit] = {}

    def stages(self, config: Config, layout: PipelineLayout, ops: str = "FIWB") -> list[list[Unit]]:
        """Returns the units of every stage.

        Args:
            config: a valid configuration.
            layout: of the pipeline.
            ops: passes that the units have at least.
        """
        blocks, before = _blocks(config), layout.specs[-1].mtp.start
        stages = [
            [self._unit(config, kind, ops, before) for kind in _kinds(config, stage, spec, blocks)]
            for stage, spec in enumerate(layout.specs)
        ]
        if "tied" in layout.shared:
            _part_embedding(stages, layout)
        return stages

    def counted(self, config: Config, ops: str = "FIWB") -> list[tuple[Unit, int, bool]]:
        """Returns the whole model's units: of each kind one, how many, and whether it is a layer or
        an end."""
        kinds = Counter(_kinds(config, 0, whole_model(config.model), _blocks(config)))
        return [
            (self._unit(config, kind, ops), count, kind[0] in LAYERS)
            for kind, count in kinds.items()
        ]

    def block(self, config: Config, before: Callable[[GPT], Any]) -> tuple[list[Phase], Works, Any]:
        """Returns the phases of the model's mixture block, or of its dense one; op -> phase -> its
        work; and what `before` has returned.

        Args:
            config: a valid configuration.
            before: called with the model on the meta device, before a sequence passes it.
        """
        alone = _alone(config, config.recompute.mode != "none")
        key = str(alone)
        if key not in self._blocks:
            self._blocks[key] = _run_alone(alone, self.target, before=before)
            self._known.setdefault((key, 0), {}).update(_units(alone, self._blocks[key]))
        model, kinds, passes, said = self._blocks[key]
        names = [kind[0] for kind in kinds]
        return model.units[names.index("moe" if "moe" in names else "dense")], passes, said

    def _unit(self, config: Config, kind: Kind, ops: str, depths: int = 0) -> Unit:
        again = kind[1]
        if self._of[0] is not config:
            self._of = config, {}
        if again not in self._of[1]:
            self._of[1][again] = (found := _alone(config, again)), str(found)
        alone, text = self._of[1][again]
        layers = config.recompute.group_layers if again and kind[0] in LAYERS else 1
        key = text, depths, kind, ops, config.train.mbs, layers
        if key not in self._asked:
            self._asked[key] = self._traced(alone, (text, depths), kind, ops).times(
                config.train.mbs, layers
            )
        return self._asked[key]

    def _traced(self, alone: Config, key: tuple[str, int], kind: Kind, ops: str) -> Unit:
        """Returns a unit for one sequence; passes that nobody has asked about yet are run."""
        known = self._known.setdefault(key, {})
        has = known[kind].passes if kind in known else {}
        lacking = "".join(back for back in "IB" if back in ops and back not in has)
        if lacking or not has:
            for each, unit in _units(
                alone, _run_alone(alone, self.target, key[1], lacking)
            ).items():
                passes = {**known[each].passes, **unit.passes} if each in known else unit.passes
                known[each] = dataclasses.replace(unit, passes=passes)
        return known[kind]


def _part_embedding(stages: list[list[Unit]], layout: PipelineLayout) -> None:
    """Gives each rank that shares the embedding one of its own; traced on one rank, they have
    one."""
    seen = set[frozenset[int]]()
    for stage, units in enumerate(stages):
        place = next((place for place, unit in enumerate(units) if TIED in unit.read), None)
        ranks = frozenset(line[stage] for line in layout.placement.route)
        if place is None or ranks in seen:
            continue
        seen.add(ranks)
        unit = units[place]
        tied, own = unit.read[TIED], TIED not in unit.borrowed
        fixed = tied if TIED in unit.fixed else 0
        held, frozen = unit.held, unit.frozen
        units[place] = dataclasses.replace(
            unit,
            held=held._replace(dense=held.dense - own * tied, tied=tied),
            frozen=frozen._replace(dense=frozen.dense - own * fixed, tied=fixed),
            borrowed=unit.borrowed - {TIED},
        )


def _frozen_names(config: Config) -> frozenset[str]:
    """Returns the names of the parameters that are never updated, of the whole model."""
    names = parameter_names(config) if config.optim.freeze else []
    return frozenset(name for glob in config.optim.freeze for name in fnmatch.filter(names, glob))


def _kinds(config: Config, stage: int, spec: StageSpec, blocks: Sequence[_Block]) -> Iterator[Kind]:
    model, recompute, none = config.model, config.recompute, frozenset[str]()
    ends = recompute.mode != "none"  # computed again where anything is: `logit_tokens` says how
    if spec.embedding:
        yield EMBEDDING, ends, none, none
    for place, i in enumerate(spec.layers):
        name, fp8, fixed = blocks[i]
        yield name, is_recomputed(recompute, stage, place), fp8, fixed
    if spec.head:
        yield HEAD, ends, none, none
    for place, depth in enumerate(spec.mtp, len(spec.layers)):
        name, fp8, fixed = blocks[model.num_layers + depth]
        yield f"ahead {depth} {name}", is_recomputed(recompute, stage, place), fp8, fixed


def _blocks(config: Config) -> list[_Block]:
    """Returns what each block is, those of multi-token prediction included."""
    model, mixtures = config.model, moe_layers(config.model)
    marked, blocks = (quantized_matrices(config), _frozen_names(config)), []
    for i in range(model.num_layers + model.num_mtp_layers):
        start, name = f"layers.{i}.", "moe" if min(i, model.num_layers - 1) in mixtures else "dense"
        fp8, fixed = (
            frozenset(name.removeprefix(start) for name in names if name.startswith(start))
            for names in marked
        )
        name += " windowed" if model.window_layers is not None and window_of(model, i) else ""
        blocks.append((name, fp8, fixed))
    return blocks


def _alone(config: Config, again: bool) -> Config:
    """Returns the same layers for one sequence, without pipeline and with the least data
    parallelism that the experts need."""
    parallel, old = config.parallel, config.recompute
    smallest = (
        -(-old.offload_min_bytes // config.train.mbs) if old.offload else old.offload_min_bytes
    )
    recompute = dataclasses.replace(
        old, num_layers=None, stage_layers=None, group_layers=1, offload_min_bytes=smallest
    )
    if not again:
        recompute = RecomputeConfig(
            logit_tokens=old.logit_tokens, offload=old.offload, offload_min_bytes=smallest
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
    """Returns the fewest neighbouring layers with one of each kind."""
    spans = (
        range(at, at + size)
        for size in range(1, len(blocks) + 1)
        for at in range(len(blocks) - size + 1)
    )
    return next(span for span in spans if set(blocks[span.start : span.stop]) == set(blocks))


def _units(config: Config, trace: _Trace) -> dict[Kind, Unit]:
    """Returns every kind of unit of a configuration of `_alone`, for one sequence, which
    `_run_alone` has passed."""
    (model, kinds, passes, _), counted = trace, set[nn.Parameter]()
    readers = Counter(
        p for unit in model.units for p in {p for phase in unit for p in phase.parameters()}
    )
    found = {}
    for kind, unit in zip(kinds, model.units):
        read = {parameter for phase in unit for parameter in phase.parameters()}
        several = {spec_of(p).name: p.numel() for p in read if readers[p] > 1}
        borrowed = frozenset(spec_of(p).name for p in read & counted)
        own, fixed = (
            read - counted,
            {parameter for parameter in read if state_of(parameter).frozen},
        )
        counted |= own
        works = {
            op: total_work(each[phase] for phase in unit if phase in each)
            for op, each in passes.items()
        }
        # what went there comes back, begun in another's (phases/offload.py)
        for op in {"B", "I"} & works.keys():
            works[op] = dataclasses.replace(works[op], host_bytes=works["F"].host_bytes)
        found[kind] = Unit(
            works,
            _elements(own),
            _elements(own & fixed),
            _elements(filter(is_quantized, own)),
            several,
            borrowed,
            frozenset(spec_of(p).name for p in fixed),
            _copied(own - fixed),
            tuple(_matrices(own - fixed, config.optim)),
        )
    return found


def _run_alone(
    config: Config,
    target: Target,
    depths: int = 0,
    backs: str = "IB",
    before: Callable[[GPT], Any] = id,
) -> _Trace:
    """Builds a configuration of `_alone` on the meta device and passes one sequence through it.

    Args:
        config: as `_alone` returns it.
        target: whose paths the layers take.
        depths: blocks of multi-token prediction before the head.
        backs: kinds of backward; I brings W.
        before: called with the model before the sequence passes.

    Returns:
        The model, the kind of each of its units, op -> phase -> its work, and what `before` has
        returned.
    """
    parallel, model_config = config.parallel, config.model
    experts, dense = parallel.ep * (parallel.etp or parallel.tp), parallel.cp * parallel.tp
    world = dense * (experts // gcd(experts, dense))
    ledger, frozen, blocks = Ledger(), _frozen_names(config), _blocks(config)
    mesh = planned_mesh(
        sizes_of(config, world), num_kv_heads=model_config.num_kv_heads, recorder=ledger
    )
    window, ahead = _window(blocks[: model_config.num_layers]), model_config.num_mtp_layers
    specs = {0: StageSpec(window, True, not depths, range(depths or ahead))}
    if depths:
        specs[1] = StageSpec(range(0), False, True, range(depths, ahead))
    with target.paths():
        with without_memory():
            model = GPT(config, mesh, "meta", specs)
        for parameter in model.parameters():
            if spec_of(parameter).name in frozen:
                state_of(parameter).frozen = True  # as data_parallel/bucket.py does
        set_load(model, target.imbalance, config.moe.capacity_factor)
        batch = planned_batch(config, mesh, model, world // dense)
        said = before(model)
        with _Counter(ledger) as counter:
            count_products(model, counter)
            watched = COPY_CALLBACK.set(counter.copied)
            try:
                passes = _passes(config, model, batch, counter, backs)
            finally:
                COPY_CALLBACK.reset(watched)
    return (
        model,
        [kind for stage, spec in specs.items() for kind in _kinds(config, stage, spec, blocks)],
        passes,
        said,
    )


def _elements(parameters: Iterable[nn.Parameter]) -> Elements:
    sums = Counter[bool]()
    for parameter in parameters:
        sums[spec_of(parameter).expert] += parameter.numel()
    return Elements(sums[False], sums[True])


def _matrices(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> Iterator[Matrix]:
    """Yields those that Muon updates, each with its iteration; globs that exclude must name no
    layer's number."""
    for parameter in parameters:
        spec = spec_of(parameter)
        if takes_muon(spec, optim):
            whole = torch.empty(whole_shape(spec), dtype=parameter.dtype, device="meta")
            with _IterationCounter(Ledger()) as counter:
                replace_by_update(spec, whole, optim.ns_steps, optim.muon_per_head)
            yield Matrix(parameter.numel(), spec.expert, counter.take(0.0))


def _copied(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Axis -> elements of which its ranks hold copies with partial gradients."""
    found = Counter[str]()
    for parameter in parameters:
        for piece in spec_of(parameter).pieces:
            found.update(dict.fromkeys(piece.summed, prod(piece.shape)))
    return dict(found)


def _passes(config: Config, model: GPT, batch, counter: _Counter, backs: str) -> Works:
    form, phases = boundary_form(config, "meta"), model.phases
    found, core = Works(), CoreFlops(config)
    # the first pass makes what stays: FP8 copies of weights, symmetric memory, weights' gradients
    rehearse = config.precision.fp8 != "none" or config.parallel.tp_overlap == "fused"
    for parameter in model.parameters():
        if not (rehearse or state_of(parameter).frozen):
            grad_buffer(parameter)
    for back in [*("B" if rehearse else ""), *(backs or [""])]:
        stage = Stage(phases)
        counter.take(0.0)
        found["F"] = _run(stage.begin("F", 0, None, batch), counter, core)
        if not back:
            break
        grad = torch.empty(
            len(loss_terms(config)), dtype=statistics_dtype(form.dtype), device="meta"
        )
        found[back] = _run(stage.begin(back, 0, grad), counter, core)
        if back == "I":
            found["W"] = _run(stage.begin("W", 0), counter, core)
    return found


def _run(work: Pass, counter: _Counter, core: CoreFlops) -> dict[Phase, Work]:
    """Returns what each phase does in a pass; one that is computed again does so in its own
    backward."""
    found: dict[Phase, list[Work]] = defaultdict(list)
    for kind, phase, *_ in work.steps:
        work.advance()
        found[phase].append(counter.take(core(phase, kind)))
    return {phase: total_work(works) for phase, works in found.items()}

"""What the layers of a run do, counted: they are built on the meta device, and one sequence passes them.

Nothing here follows the layers by formulas. Their products go through objects that their weights carry
(precision/gemm.py), of which copies count; their collectives go through axes, whose ledger counts; the tensors that
they make are counted where they are made. Attention's own FLOPs are the model's formula (model/flops.py). A model of
the fewest layers that has one of each kind is passed, and one sequence: a micro-batch of more has more rows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod

import torch
from torch import Tensor, nn

from kernels.dispatch import statistics_dtype
from megatron5d.autograd.offload import WATCH
from megatron5d.comm.ledger import Ledger
from megatron5d.config.derived import is_moe, quantised_matrices
from megatron5d.config.schema import Config, OptimConfig, RecomputeConfig
from megatron5d.model.embedding_head import TIED, loss_terms
from megatron5d.model.flops import core_flops
from megatron5d.model.gpt import GPT
from megatron5d.model.options import is_recomputed
from megatron5d.model.partition import StageSpec
from megatron5d.optim.matrix_gather import whole_shape
from megatron5d.optim.muon import replace_by_update, takes_muon
from megatron5d.pipeline_parallel.stage import Pass, Stage
from megatron5d.planning.memory_forecast import Target, planned_batch, set_load
from megatron5d.planning.meta_run import MemoryWatch
from megatron5d.planning.work import Matrix, Product, Unit, Work, together
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.precision.gemm import ExpertGemms, Gemms, expert_gemms_of, gemms_of
from megatron5d.topology.mesh import planned_mesh
from megatron5d.topology.shard_spec import spec_of, without_memory
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import boundary_form

EMBEDDING, HEAD, LAYERS = "embedding", "head", ("dense", "moe")


Kind = tuple[str, frozenset[str], bool]
"""Of a unit: what it is, which of its matrices are multiplied in 8 bits, and whether the backward computes it again."""


class _Counter(MemoryWatch):
    """Counts while phases run; `take` gives what they have done since it was last asked."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger, self.products = ledger, list[Product]()
        self.made = self.made_bytes = self.host_bytes = self.before = 0

    def _made(self, tensor: Tensor, operation: str) -> None:
        super()._made(tensor, operation)
        self.made += 1
        self.made_bytes += tensor.nbytes

    def take(self, core_flops: float) -> Work:
        """What was counted since the last call; `core_flops` are those of attention, which are known by formula."""
        sent = dict(self.ledger.totals)
        kept, self.before = self.live_bytes - self.before, self.live_bytes
        work = Work(tuple(self.products), core_flops, self.made_bytes, self.made, sent, self.host_bytes, kept)
        self.ledger.clear()
        self.products, self.made, self.made_bytes, self.host_bytes = [], 0, 0, 0
        return work

    def copied(self, num_bytes: int) -> None:
        """A tensor travels to the host."""
        self.host_bytes += num_bytes


class _IterationCounter(_Counter):
    """The same of Newton-Schulz iterations, whose products are torch's own."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default):
            first, second = args[-2:]
            stack, rows, inputs = first.shape
            self.products.append(Product(stack * rows, inputs, second.shape[2], stack))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Workloads:
    """Units of any layouts of one model; what two layouts share is traced once.

    Args:
        target: whose paths the layers go, and how unevenly tokens choose.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._known: dict[str, dict[Kind, Unit]] = {}

    def stages(self, config: Config, specs: Sequence[StageSpec], shared: str = "none") -> list[list[Unit]]:
        """The units of every stage.

        Args:
            config: a lawful configuration.
            specs: what each stage holds.
            shared: which parameters mirrored pipeline ranks hold together (`PipelinePlan.shared`).
        """
        stages = [
            [self._unit(config, kind) for kind in _kinds(config, stage, spec)] for stage, spec in enumerate(specs)
        ]
        if shared == "tied":
            _part_ends(stages[0], stages[-1])
        return stages

    def counted(self, config: Config) -> list[tuple[Unit, int, bool]]:
        """The units of the whole model: of each kind one, how many there are, and whether it is a layer or an end."""
        kinds = Counter(_kinds(config, 0, StageSpec(range(config.model.num_layers), True, True)))
        return [(self._unit(config, kind), count, kind[0] in LAYERS) for kind, count in kinds.items()]

    def _unit(self, config: Config, kind: Kind) -> Unit:
        alone = _alone(config, kind[2])
        known = self._known.setdefault(repr(alone), {})
        if kind not in known:
            known |= _traced(alone, self.target)
        unit = known[kind].times(config.train.mbs)
        return _sharing(unit, config.recompute.group_layers) if kind[2] and kind[0] in LAYERS else unit


def _sharing(unit: Unit, layers: int) -> Unit:
    """A layer that is traced as if alone, whose input is kept, there or on the host, once for so many layers."""
    passes = {
        op: dataclasses.replace(work, host_bytes=work.host_bytes / layers, kept_bytes=work.kept_bytes / layers)
        for op, work in unit.passes.items()
    }
    return dataclasses.replace(unit, passes=passes)


def _part_ends(first: list[Unit], last: list[Unit]) -> None:
    """Gives the last stage the embedding that it shares with the first; traced on one rank, they have one."""
    place = next(place for place, unit in enumerate(last) if TIED in unit.borrowed)
    tied, borrowed = last[place].read[TIED], last[place].borrowed - {TIED}
    first[0] = dataclasses.replace(first[0], dense=first[0].dense - tied, tied=tied)
    last[place] = dataclasses.replace(last[place], tied=tied, borrowed=borrowed)


def _kinds(config: Config, stage: int, spec: StageSpec) -> Iterator[Kind]:
    model, recompute = config.model, config.recompute
    if spec.embedding:
        yield EMBEDDING, frozenset(), _slices(config)
    for place, i in enumerate(spec.layers):
        yield _block(config, i, is_recomputed(recompute, stage, place))
    if spec.head:
        yield HEAD, frozenset(), _slices(config)
        for depth in range(model.num_mtp_layers):
            again = is_recomputed(recompute, stage, len(spec.layers) + depth)
            name, matrices, _ = _block(config, model.num_layers + depth, again)
            yield f"ahead {depth} {name}", matrices, again


def _slices(config: Config) -> bool:
    """The ends are computed again where anything is: of them the mode says nothing, `logit_tokens` does."""
    return config.recompute.mode != "none"


def _block(config: Config, i: int, again: bool) -> Kind:
    start = f"layers.{i}."
    matrices = frozenset(name.removeprefix(start) for name in quantised_matrices(config) if name.startswith(start))
    return "moe" if is_moe(config.model, i) else "dense", matrices, again


def _alone(config: Config, again: bool) -> Config:
    """The same layers for one sequence, without pipeline and with the least data parallelism that the experts need."""
    parallel, old = config.parallel, config.recompute
    smallest = -(-old.offload_min_bytes // config.train.mbs) if old.offload else old.offload_min_bytes
    recompute = dataclasses.replace(old, num_layers=None, stage_layers=None, group_layers=1, offload_min_bytes=smallest)
    if not again:
        recompute = RecomputeConfig(logit_tokens=old.logit_tokens, offload=old.offload, offload_min_bytes=smallest)
    return Config(
        model=config.model,
        parallel=dataclasses.replace(
            parallel, pp=1, vpp=1, dp_replicate=1, zero=0, regather="per_microbatch", reduce="per_microbatch",
            order=["pp", "dp", "cp", "tp"],
        ),
        train=dataclasses.replace(config.train, mbs=1, gbs=1, gbs_ramp=None),
        precision=config.precision, recompute=recompute, moe=config.moe, data=config.data,
        optim=OptimConfig(
            name=config.optim.name, ns_steps=config.optim.ns_steps, muon_exclude=config.optim.muon_exclude
        ),
    )  # fmt: skip


def _window(config: Config) -> range:
    """The fewest neighbouring layers with one of each kind."""
    kinds = [_block(config, i, False) for i in range(config.model.num_layers)]
    wanted, start = set(kinds), 0
    best, seen = range(len(kinds)), defaultdict[Kind, int](int)
    for stop, kind in enumerate(kinds, 1):
        seen[kind] += 1
        while seen[kinds[start]] > 1:
            seen[kinds[start]] -= 1
            start += 1
        if len([each for each in seen.values() if each]) == len(wanted) and stop - start < len(best):
            best = range(start, stop)
    return best


def _traced(config: Config, target: Target) -> dict[Kind, Unit]:
    """Every kind of unit of a configuration of `_alone`, for one sequence."""
    parallel, model_config = config.parallel, config.model
    experts, dense = parallel.ep * (parallel.etp or parallel.tp), parallel.cp * parallel.tp
    world = dense * (experts // gcd(experts, dense))
    ledger, window = Ledger(), _window(config)
    mesh = planned_mesh(sizes_of(config, world), num_kv_heads=model_config.num_kv_heads, recorder=ledger)
    spec = StageSpec(window, True, True)
    kinds = list(_kinds(config, 0, spec))
    with target.paths():
        with without_memory():
            model = GPT(config, mesh, "meta", {0: spec})
        set_load(model, target.imbalance, config.moe.capacity_factor)
        batch = planned_batch(config, mesh, model, world // dense)
        with _Counter(ledger) as counter:
            _count_products(model, counter)
            watched = WATCH.set(counter.copied)
            try:
                passes = _passes(config, model, batch, counter)
            finally:
                WATCH.reset(watched)
    counted: set[nn.Parameter] = set()
    readers = Counter(p for unit in model.units for p in {p for phase in unit for p in phase.parameters()})
    found = {}
    for kind, unit in zip(kinds, model.units):
        read = {parameter for phase in unit for parameter in phase.parameters()}
        several = {spec_of(p).name: p.numel() for p in read if readers[p] > 1}
        borrowed = frozenset(spec_of(p).name for p in read & counted)
        own = read - counted
        counted |= own
        works = {op: together(each[phase] for phase in unit if phase in each) for op, each in passes.items()}
        for op in "BI":  # what went there comes back, begun in the backward of another unit (autograd/offload.py)
            works[op] = dataclasses.replace(works[op], host_bytes=works["F"].host_bytes)
        found[kind] = Unit(
            works, *_elements(own), read=several, borrowed=borrowed, copied=_copied(own),
            matrices=tuple(_matrices(own, config.optim)), eight_bits=_elements(filter(is_quantized, own)),
        )  # fmt: skip
    return found


def _elements(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
    """(dense, experts') elements."""
    sums = [0, 0]
    for parameter in parameters:
        sums[spec_of(parameter).expert] += parameter.numel()
    return sums[0], sums[1]


def _matrices(parameters: Iterable[nn.Parameter], optim: OptimConfig) -> Iterator[Matrix]:
    """Those that Muon updates, each with its iteration; a glob that excludes them must not name a layer's number."""
    for parameter in parameters:
        spec = spec_of(parameter)
        if takes_muon(spec, optim):
            whole = torch.empty(whole_shape(spec), dtype=parameter.dtype, device="meta")
            with _IterationCounter(Ledger()) as counter:
                replace_by_update(spec, whole, optim.ns_steps)
            yield Matrix(parameter.numel(), spec.expert, counter.take(0.0))


def _copied(parameters: Iterable[nn.Parameter]) -> dict[str, int]:
    """Axis -> elements of which its ranks hold copies with partial gradients."""
    found = Counter[str]()
    for parameter in parameters:
        for piece in spec_of(parameter).pieces:
            found.update(dict.fromkeys(piece.summed, prod(piece.shape)))
    return dict(found)


def _passes(config: Config, model: GPT, batch, counter: _Counter) -> dict[str, dict[nn.Module, Work]]:
    """op -> phase -> its work."""
    form, phases = boundary_form(config, "meta"), model.phases
    found: dict[str, dict[nn.Module, Work]] = {}
    core = _Core(config)
    for back in "BIB":  # the first pass makes the weights' gradients, which are there from then on
        stage = Stage(phases)
        counter.take(0.0)
        found["F"] = _run(stage.begin("F", 0, None, batch), counter, core)
        grad = torch.empty(len(loss_terms(config)), dtype=statistics_dtype(form.dtype), device="meta")
        found[back] = _run(stage.begin(back, 0, grad), counter, core)
        if back == "I":
            found["W"] = _run(stage.begin("W", 0), counter, core)
    return found


def _run(work: Pass, counter: _Counter, core: _Core) -> dict[nn.Module, Work]:
    """What each phase does in a pass; one that is computed again does so in its own backward."""
    found: dict[nn.Module, list[Work]] = defaultdict(list)
    for kind, phase, *_ in work.steps:
        work.advance()
        found[phase].append(counter.take(core(phase, kind)))
    return {phase: together(works) for phase, works in found.items()}


class _Core:
    """FLOPs of attention between queries, keys and values, of one sequence on one rank.

    Its backward makes the scores again: five products of the forward's two.
    """

    def __init__(self, config: Config) -> None:
        parallel, seq_len = config.parallel, config.train.seq_len
        self._forward = core_flops(config.model, seq_len) / 3 * seq_len / (parallel.tp * parallel.cp)
        recompute = config.recompute
        self._again = recompute.mode == "selective" and "attention" in recompute.parts

    def __call__(self, phase: nn.Module, kind: str) -> float:
        if getattr(phase, "kind", None) != "attention":
            return 0.0
        return self._forward * {"forward": 1.0, "recompute": 1.0, "backward": 2.5 + self._again, "wgrad": 0.0}[kind]


def _count_products(model: nn.Module, counter: _Counter) -> None:
    """Hangs on every weight a copy of the object that multiplies it, which counts."""
    copies: dict[int, Gemms | ExpertGemms] = {}
    for parameter in model.parameters():
        expert = spec_of(parameter).expert
        gemms = expert_gemms_of(parameter) if expert else gemms_of(parameter)
        if id(gemms) not in copies:
            counting = copies[id(gemms)] = copy.copy(gemms)
            for name in ("forward", "input_grad", "weight_grad"):
                count = _count_grouped if expert else _count_linear
                setattr(counting, name, count(counter, getattr(gemms, name), name))
        parameter.gemms = copies[id(gemms)]  # type: ignore[attr-defined]


def _count_linear(counter: _Counter, product, name: str):
    """A product of a linear layer that is counted: (x, weight), (dy, weight) or (weight, dy, x)."""

    def counted(first, second, *rest):
        weight, tokens = (first, second[0]) if name == "weight_grad" else (second, first[0])
        features = weight.shape[1] if name == "forward" else weight.shape[0]
        shape = (weight.shape[0], weight.shape[1]) if name == "input_grad" else (weight.shape[1], weight.shape[0])
        rows, summed = tokens.numel() // features, name == "weight_grad"
        counter.products.append(Product(rows, *shape, eight_bits=is_quantized(weight), summed=summed))
        return product(first, second, *rest)

    return counted


def _count_grouped(counter: _Counter, product, name: str):
    """The same of experts: (x, weights, experts, offsets), (dy, ...) or (weights, dy, x, experts, offsets)."""

    def counted(*given):
        place = 0 if name == "weight_grad" else 1
        weights, tokens, experts = given[place], given[1 - place][0], given[-2]
        inputs, outputs = weights.shape[-1], weights.numel() // weights.shape[-1] // experts
        summed = name == "weight_grad"
        counter.products.append(Product(tokens.shape[0], inputs, outputs, experts, is_quantized(weights), summed))
        return product(*given)

    return counted

"""Checks of the layout: what the sizes of the axes must divide, in plain integers."""

from megatron5d.config.checks.check import (
    Faults,
    check,
    data_parallel,
    divides,
    divisors,
    fault,
    multiples,
    nearest,
    seq_len_fix,
)
from megatron5d.config.schema import Config

MODEL_AXES = ("parallel.tp", "parallel.cp", "parallel.pp")
STAGES = ("parallel.pp", "parallel.vpp")


def _model_size(c: Config) -> int:
    return c.parallel.tp * c.parallel.cp * c.parallel.pp


def _legal_tp_sizes(config: Config, world: int) -> list[int]:
    """All tp that fit the world, the heads, the MLP and (with sp) the sequence."""
    model, parallel, num_kv_heads = config.model, config.parallel, max(1, config.model.num_kv_heads)
    others = max(1, parallel.cp) * max(1, parallel.pp)
    return [
        tp
        for tp in divisors(model.num_heads)
        if world % (tp * others) == 0
        and model.ffn_hidden_size % tp == 0
        and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)
        and not (parallel.sp and (tp == 1 or config.train.seq_len % tp))
    ]


def _tp_fix(config: Config, world: int) -> str:
    """Override of the nearest legal tp."""
    sizes = _legal_tp_sizes(config, world)
    if sizes:
        return f"parallel.tp={nearest(config.parallel.tp, sizes)}"
    if not config.parallel.sp:
        return "parallel.tp=1"
    overlap = "" if config.parallel.tp_overlap == "none" else " parallel.tp_overlap=none"
    return f"parallel.tp=1 parallel.sp=false{overlap}"


def _world_fix(c: Config, world: int) -> str:
    """Size of each axis with which the world would fit, and numbers of ranks that would."""
    fixes = []
    for name in ("tp", "cp", "pp"):
        size = getattr(c.parallel, name)
        others = _model_size(c) // size
        if size > 1 and world % others == 0:
            legal = _legal_tp_sizes(c, world) if name == "tp" else divisors(world // others)
            if legal:
                fixes.append(f"parallel.{name}={nearest(size, legal)}")
    ranks = multiples(world, _model_size(c))
    start = f" (bash launch/local.sh {ranks} ...)" if world == 1 else ""
    return ", or ".join([*fixes, f"use {ranks} ranks{start}"])


def _fewer_stages(c: Config, world: int) -> str:
    """Override with which every stage has a layer: fewer chunks, or else fewer ranks."""
    layers = c.model.num_layers
    if c.parallel.pp <= layers:
        return f"parallel.vpp={layers // c.parallel.pp}"
    others = max(1, c.parallel.tp) * max(1, c.parallel.cp)
    sizes = [pp for pp in range(1, layers + 1) if world % (pp * others) == 0]
    return f"parallel.pp={nearest(c.parallel.pp, sizes)} parallel.vpp=1"


def _even_layout(c: Config) -> str:
    """Layout of equally many layers; the first stages have one more if they do not divide."""
    num_stages = c.parallel.pp * c.parallel.vpp
    layers, remainder = divmod(c.model.num_layers, num_stages)
    return f"[{','.join(str(layers + (stage < remainder)) for stage in range(num_stages))}]"


@check(*MODEL_AXES)
def world_fits(c: Config, world: int) -> Faults:
    if world % _model_size(c):
        p = c.parallel
        yield fault(
            f"the number of ranks must be divisible by parallel.tp·cp·pp = {p.tp}·{p.cp}·{p.pp} = "
            f"{_model_size(c)} (got {world})",
            _world_fix(c, world),
        )


@check("parallel.dp_replicate", *MODEL_AXES, needs=["world-fits"])
def dp_replicate_divides_dp(c: Config, world: int) -> Faults:
    dp, replicas = data_parallel(c, world), c.parallel.dp_replicate
    if dp % replicas:
        yield fault(
            f"parallel.dp_replicate must divide dp = {world} ranks / {_model_size(c)} = {dp} "
            f"(got {replicas})",
            f"parallel.dp_replicate={nearest(replicas, divisors(dp))}",
        )


@check("parallel.ep", "parallel.etp", *MODEL_AXES, needs=["world-fits"])
def experts_fold(c: Config, world: int) -> Faults:
    p, dp, etp = c.parallel, data_parallel(c, world), c.parallel.etp or c.parallel.tp
    fold = dp * p.cp * p.tp
    if fold % (p.ep * etp):
        yield fault(
            f"parallel.ep·etp must divide dp·cp·tp = {dp}·{p.cp}·{p.tp} = {fold} "
            f"(got {p.ep}·{etp})",
            f"parallel.ep={nearest(p.ep, divisors(fold // etp))}"
            if fold % etp == 0
            else f"parallel.etp={nearest(etp, divisors(fold))} parallel.ep=1",
        )


@check("train.gbs", "train.mbs", *MODEL_AXES, needs=["world-fits"])
def gbs_splits(c: Config, world: int) -> Faults:
    dp, mbs, gbs = data_parallel(c, world), c.train.mbs, c.train.gbs
    if gbs % (mbs * dp):
        yield fault(
            f"train.gbs must be a multiple of train.mbs·dp = {mbs}·{dp} = {mbs * dp} (got {gbs}; "
            f"dp = {world} ranks / {_model_size(c)})",
            f"train.gbs={multiples(gbs, mbs * dp)}",
        )


@check("train.gbs", "train.mbs", *MODEL_AXES)
def gbs_holds_whole_micro_batches(c: Config, world: int) -> Faults:
    # dp is unknown while the world does not fit
    if world % _model_size(c) and c.train.gbs % c.train.mbs:
        yield fault(
            f"train.gbs must be a multiple of train.mbs={c.train.mbs}, for any dp "
            f"(got {c.train.gbs})",
            f"train.gbs={multiples(c.train.gbs, c.train.mbs)}",
        )


HEADS_OVER_TP = divides("parallel.tp", "model.num_heads", "heads-split-over-tp", _tp_fix)


@check("model.num_kv_heads", "parallel.tp")
def kv_heads_split_over_tp(c: Config, world: int) -> Faults:
    heads, tp = c.model.num_kv_heads, c.parallel.tp
    if heads % tp and tp % heads:
        yield fault(
            f"parallel.tp={tp} requires model.num_kv_heads that divides it, or is a multiple of it "
            f"(got {heads})",
            _tp_fix(c, world),
        )


def _mlp_fix(c: Config, world: int) -> str:
    size = multiples(c.model.ffn_hidden_size, c.parallel.tp)
    return f"{_tp_fix(c, world)}, or model.ffn_hidden_size={size}"


MLP_OVER_TP = divides("parallel.tp", "model.ffn_hidden_size", "ffn-splits-over-tp", _mlp_fix)


@check("train.seq_len", "parallel.sp", "parallel.tp", "parallel.cp")
def sequence_splits_over_tp(c: Config, world: int) -> Faults:
    p, length = c.parallel, c.train.seq_len
    if p.sp and p.cp == 1 and length % p.tp:
        yield fault(
            f"parallel.sp=true requires train.seq_len divisible by parallel.tp={p.tp} "
            f"(got {length})",
            seq_len_fix(c, p.tp),
        )


@check("model.num_layers", *STAGES, "pipeline.layout", "pipeline.balance", "pipeline.schedule")
def stages_have_layers(c: Config, world: int) -> Faults:
    pipeline, p = c.pipeline, c.parallel
    searched = (pipeline.schedule, pipeline.balance) == ("auto", "auto")
    even = pipeline.balance in ("auto", "stages") and pipeline.layout is None and not searched
    if even and c.model.num_layers < p.pp * p.vpp:
        yield fault(
            f"parallel.pp·vpp = {p.pp}·{p.vpp} = {p.pp * p.vpp} stages require one layer each "
            f"(got model.num_layers={c.model.num_layers})",
            _fewer_stages(c, world),
        )


@check("pipeline.layout", *STAGES, "model.num_layers")
def layout_counts_stages(c: Config, world: int) -> Faults:
    layout, pp, vpp = c.pipeline.layout, c.parallel.pp, c.parallel.vpp
    # parallel.vpp=1 leaves the chunks to the schedule (zb_v has two), so only pp must divide them
    if layout is not None and (len(layout) % pp if vpp == 1 else len(layout) - pp * vpp):
        yield fault(
            f"pipeline.layout must have parallel.pp·vpp = {pp}·{vpp} = {pp * vpp} stages "
            f"(got {len(layout)})",
            f"pipeline.layout={_even_layout(c)}",
        )


@check("pipeline.layout", "model.num_layers", "model.num_mtp_layers", *STAGES)
def layout_sums_to_layers(c: Config, world: int) -> Faults:
    layout, layers, mtp_layers = c.pipeline.layout, c.model.num_layers, c.model.num_mtp_layers
    if layout is not None and not layers <= sum(layout) <= layers + mtp_layers:
        with_mtp = (
            f", or {layers + mtp_layers} with those of model.num_mtp_layers" if mtp_layers else ""
        )
        yield fault(
            f"pipeline.layout must sum to model.num_layers={layers}{with_mtp} (got {sum(layout)})",
            f"pipeline.layout={_even_layout(c)}",
        )

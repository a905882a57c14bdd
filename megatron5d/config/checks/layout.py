"""Laws of the layout: what the sizes of the axes must divide, in plain integers."""

from __future__ import annotations

from megatron5d.config.checks.check import (
    Law,
    data_parallel,
    divisors,
    multiples,
    nearest,
    tensor_parallel_fix,
    tensor_parallel_sizes,
)
from megatron5d.config.schema import Config

MODEL_AXES = ("parallel.tp", "parallel.cp", "parallel.pp")


def _model_size(c: Config) -> int:
    return c.parallel.tp * c.parallel.cp * c.parallel.pp


def _world_fix(c: Config, world: int) -> str:
    """The value of each axis with which the world would fit, and the numbers of ranks that would."""
    ways = []
    for name in ("tp", "cp", "pp"):
        size = getattr(c.parallel, name)
        others = _model_size(c) // size
        if size > 1 and world % others == 0:
            legal = tensor_parallel_sizes(c, world) if name == "tp" else divisors(world // others)
            if legal:
                ways.append(f"parallel.{name}={nearest(size, legal)}")
    fits = world // _model_size(c) * _model_size(c)
    ways.append(f"start {f'{fits} or ' if fits else ''}{fits + _model_size(c)} ranks")
    return ", or ".join(ways)


def _fold(c: Config, world: int) -> int:
    return data_parallel(c, world) * c.parallel.cp * c.parallel.tp


def _expert_fix(c: Config, world: int) -> str:
    fold, etp = _fold(c, world), c.parallel.etp or c.parallel.tp
    if fold % etp == 0:
        return f"parallel.ep={nearest(c.parallel.ep, divisors(fold // etp))}"
    return f"parallel.etp={nearest(etp, divisors(fold))} parallel.ep=1"


def _batch_fix(c: Config, world: int) -> str:
    step = c.train.mbs * data_parallel(c, world)
    return f"train.gbs={multiples(c.train.gbs, step)}"


def _stages(c: Config) -> int:
    return c.parallel.pp * c.parallel.vpp


def _fewer_stages(c: Config, world: int) -> str:
    """The override under which every stage has a layer: fewer chunks, and where that is not enough fewer ranks."""
    layers = c.model.num_layers
    if c.parallel.pp <= layers:
        return f"parallel.vpp={layers // c.parallel.pp}"
    others = max(1, c.parallel.tp) * max(1, c.parallel.cp)
    sizes = [pp for pp in range(1, layers + 1) if world % (pp * others) == 0]
    return f"parallel.pp={nearest(c.parallel.pp, sizes)} parallel.vpp=1"


RANK_LAWS = (
    Law(
        "world-fits",
        MODEL_AXES,
        lambda c, w: w % _model_size(c) != 0,
        lambda c, w: (
            f"a world of {w} rank{'s' if w > 1 else ''} is not divisible by parallel.tp·cp·pp = "
            f"{c.parallel.tp}·{c.parallel.cp}·{c.parallel.pp} = {_model_size(c)}"
        ),
        _world_fix,
    ),
    Law(
        "dp-replicate-divides-dp",
        ("parallel.dp_replicate", *MODEL_AXES),
        lambda c, w: data_parallel(c, w) % c.parallel.dp_replicate != 0,
        lambda c, w: (
            f"parallel.dp_replicate = {c.parallel.dp_replicate} does not divide dp = {data_parallel(c, w)} "
            f"(= {w} ranks / {_model_size(c)})"
        ),
        lambda c, w: f"parallel.dp_replicate={nearest(c.parallel.dp_replicate, divisors(data_parallel(c, w)))}",
        needs=("world-fits",),
    ),
    Law(
        "experts-fold",
        ("parallel.ep", "parallel.etp", *MODEL_AXES),
        lambda c, w: _fold(c, w) % (c.parallel.ep * (c.parallel.etp or c.parallel.tp)) != 0,
        lambda c, w: (
            f"parallel.ep·etp = {c.parallel.ep}·{c.parallel.etp or c.parallel.tp} does not divide "
            f"dp·cp·tp = {data_parallel(c, w)}·{c.parallel.cp}·{c.parallel.tp} = {_fold(c, w)}"
        ),
        _expert_fix,
        needs=("world-fits",),
    ),
    Law(
        "gbs-splits",
        ("train.gbs", "train.mbs", *MODEL_AXES),
        lambda c, w: c.train.gbs % (c.train.mbs * data_parallel(c, w)) != 0,
        lambda c, w: (
            f"train.gbs = {c.train.gbs} is not a multiple of train.mbs·dp = {c.train.mbs}·"
            f"{data_parallel(c, w)} = {c.train.mbs * data_parallel(c, w)} (dp = {w} ranks / {_model_size(c)})"
        ),
        _batch_fix,
        needs=("world-fits",),
    ),
)

TENSOR_LAWS = (
    Law(
        "sp-needs-tp",
        ("parallel.sp", "parallel.tp"),
        lambda c, w: c.parallel.sp and c.parallel.tp == 1,
        lambda c, w: "parallel.sp = true cuts activations along tp, and parallel.tp = 1",
        lambda c, w: "parallel.sp=false",
    ),
    Law(
        "overlap-needs-sp",
        ("parallel.tp_overlap", "parallel.sp"),
        lambda c, w: c.parallel.tp_overlap != "none" and not c.parallel.sp,
        lambda c, w: (
            f"parallel.tp_overlap = {c.parallel.tp_overlap} hides what sequence parallelism gathers and scatters, and "
            "parallel.sp = false"
        ),
        lambda c, w: "parallel.tp_overlap=none" + (", or parallel.sp=true" if c.parallel.tp > 1 else ""),
    ),
    Law(
        "heads-split-over-tp",
        ("model.num_heads", "parallel.tp"),
        lambda c, w: c.model.num_heads % c.parallel.tp != 0,
        lambda c, w: f"model.num_heads = {c.model.num_heads} is not divisible by parallel.tp = {c.parallel.tp}",
        tensor_parallel_fix,
    ),
    Law(
        "kv-heads-split-over-tp",
        ("model.num_kv_heads", "parallel.tp"),
        lambda c, w: c.model.num_kv_heads % c.parallel.tp != 0 and c.parallel.tp % c.model.num_kv_heads != 0,
        lambda c, w: (
            f"model.num_kv_heads = {c.model.num_kv_heads} and parallel.tp = {c.parallel.tp}: neither divides "
            "the other, so KV heads can be neither split nor replicated evenly"
        ),
        tensor_parallel_fix,
    ),
    Law(
        "ffn-splits-over-tp",
        ("model.ffn_hidden_size", "parallel.tp"),
        lambda c, w: c.model.ffn_hidden_size % c.parallel.tp != 0,
        lambda c, w: (
            f"model.ffn_hidden_size = {c.model.ffn_hidden_size} is not divisible by parallel.tp = {c.parallel.tp}"
        ),
        lambda c, w: (
            f"{tensor_parallel_fix(c, w)}, or model.ffn_hidden_size={multiples(c.model.ffn_hidden_size, c.parallel.tp)}"
        ),
    ),
    Law(
        "sequence-splits-over-tp",
        ("train.seq_len", "parallel.sp", "parallel.tp", "parallel.cp"),
        lambda c, w: c.parallel.sp and c.parallel.cp == 1 and c.train.seq_len % c.parallel.tp != 0,
        lambda c, w: (
            f"train.seq_len = {c.train.seq_len} is not divisible by parallel.tp = {c.parallel.tp}, "
            "as parallel.sp = true needs"
        ),
        lambda c, w: f"train.seq_len={multiples(c.train.seq_len, c.parallel.tp)}",
    ),
)

STAGE_LAWS = (
    Law(
        "vpp-needs-pp",
        ("parallel.vpp", "parallel.pp"),
        lambda c, w: c.parallel.vpp > 1 and c.parallel.pp == 1,
        lambda c, w: f"parallel.vpp = {c.parallel.vpp} cuts a pipeline rank into chunks, and parallel.pp = 1",
        lambda c, w: "parallel.vpp=1",
    ),
    Law(
        "stages-have-layers",
        ("model.num_layers", "parallel.pp", "parallel.vpp", "pipeline.layout", "pipeline.balance", "pipeline.schedule"),
        lambda c, w: (
            c.pipeline.layout is None
            and c.pipeline.balance in ("auto", "stages")
            and (c.pipeline.schedule, c.pipeline.balance) != ("auto", "auto")
            and c.model.num_layers < _stages(c)
        ),
        lambda c, w: (
            f"model.num_layers = {c.model.num_layers} is fewer than the parallel.pp·vpp = "
            f"{c.parallel.pp}·{c.parallel.vpp} = {_stages(c)} stages"
        ),
        lambda c, w: _fewer_stages(c, w),
    ),
    Law(
        "layout-counts-stages",
        ("pipeline.layout", "parallel.pp", "parallel.vpp", "model.num_layers"),
        # parallel.vpp = 1 leaves the chunks to the schedule (zb_v has two): then only pp must divide the stages
        lambda c, w: (
            c.pipeline.layout is not None
            and (len(c.pipeline.layout) % c.parallel.pp if c.parallel.vpp == 1 else len(c.pipeline.layout) - _stages(c))
            != 0
        ),
        lambda c, w: (
            f"pipeline.layout has {len(c.pipeline.layout or [])} stages, "
            f"parallel.pp·vpp = {c.parallel.pp}·{c.parallel.vpp} = {_stages(c)}"
        ),
        lambda c, w: f"pipeline.layout={_even_layout(c)}",
    ),
    Law(
        "layout-sums-to-layers",
        ("pipeline.layout", "model.num_layers", "parallel.pp", "parallel.vpp"),
        lambda c, w: c.pipeline.layout is not None and sum(c.pipeline.layout) != c.model.num_layers,
        lambda c, w: (
            f"pipeline.layout sums to {sum(c.pipeline.layout or [])} layers, model.num_layers = {c.model.num_layers}"
        ),
        lambda c, w: f"pipeline.layout={_even_layout(c)}",
    ),
)


ZERO_LAWS = (
    Law(
        "regather-needs-sharded-weights",
        ("parallel.regather", "parallel.zero"),
        lambda c, w: c.parallel.regather == "per_step" and c.parallel.zero < 3,
        lambda c, w: (
            f"parallel.regather = per_step says how long gathered weights stay, and under parallel.zero = "
            f"{c.parallel.zero} they are never given back"
        ),
        lambda c, w: "parallel.regather=per_microbatch, or parallel.zero=3",
    ),
    Law(
        "reduce-needs-sharded-gradients",
        ("parallel.reduce", "parallel.zero"),
        lambda c, w: c.parallel.reduce == "per_step" and c.parallel.zero < 2,
        lambda c, w: (
            f"parallel.reduce = per_step keeps whole gradients until a step's last micro-batch, as parallel.zero = "
            f"{c.parallel.zero} does anyway"
        ),
        lambda c, w: "parallel.reduce=per_microbatch, or parallel.zero=2",
    ),
)


def _even_layout(c: Config) -> str:
    """The layout with equally many layers on each stage; the first stages have one more where they do not divide."""
    each, more = divmod(c.model.num_layers, _stages(c))
    return f"[{','.join(str(each + (stage < more)) for stage in range(_stages(c)))}]"


LAYOUT_LAWS = (*RANK_LAWS, *TENSOR_LAWS, *STAGE_LAWS, *ZERO_LAWS)

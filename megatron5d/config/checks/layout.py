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


def _tensor_parallel_sizes(config: Config, world: int) -> list[int]:
    """Returns every tp that fits the world, the heads, the MLP and (with sp) the sequence."""
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


def _tensor_parallel_fix(config: Config, world: int) -> str:
    """Returns the override of the nearest legal tp."""
    sizes = _tensor_parallel_sizes(config, world)
    if sizes:
        return f"parallel.tp={nearest(config.parallel.tp, sizes)}"
    overlapped = config.parallel.sp and config.parallel.tp_overlap != "none"
    return (
        "parallel.tp=1"
        + (" parallel.sp=false" if config.parallel.sp else "")
        + (" parallel.tp_overlap=none" if overlapped else "")
    )


def _world_fix(c: Config, world: int) -> str:
    """Returns the value of each axis with which the world would fit, and the numbers of ranks that
    would."""
    ways = []
    for name in ("tp", "cp", "pp"):
        size = getattr(c.parallel, name)
        others = _model_size(c) // size
        if size > 1 and world % others == 0:
            legal = _tensor_parallel_sizes(c, world) if name == "tp" else divisors(world // others)
            if legal:
                ways.append(f"parallel.{name}={nearest(size, legal)}")
    fits = world // _model_size(c) * _model_size(c)
    ways.append(f"start {f'{fits} or ' if fits else ''}{fits + _model_size(c)} ranks")
    return ", or ".join(ways)


def _fewer_stages(c: Config, world: int) -> str:
    """Returns the override under which every stage has a layer: fewer chunks, and if that is not
    enough fewer ranks."""
    layers = c.model.num_layers
    if c.parallel.pp <= layers:
        return f"parallel.vpp={layers // c.parallel.pp}"
    others = max(1, c.parallel.tp) * max(1, c.parallel.cp)
    sizes = [pp for pp in range(1, layers + 1) if world % (pp * others) == 0]
    return f"parallel.pp={nearest(c.parallel.pp, sizes)} parallel.vpp=1"


def _even_layout(c: Config) -> str:
    """Returns the layout with as many layers on each stage; the first have one more where they do
    not divide."""
    num_stages = c.parallel.pp * c.parallel.vpp
    each, more = divmod(c.model.num_layers, num_stages)
    return f"[{','.join(str(each + (stage < more)) for stage in range(num_stages))}]"


@check(*MODEL_AXES)
def world_fits(c: Config, world: int) -> Faults:
    if world % _model_size(c):
        p = c.parallel
        yield fault(
            f"a world of {world} rank{'s' if world > 1 else ''} is not divisible by parallel.tp·cp·pp = "
            f"{p.tp}·{p.cp}·{p.pp} = {_model_size(c)}",
            _world_fix(c, world),
        )


@check("parallel.dp_replicate", *MODEL_AXES, needs=["world-fits"])
def dp_replicate_divides_dp(c: Config, world: int) -> Faults:
    dp, replicas = data_parallel(c, world), c.parallel.dp_replicate
    if dp % replicas:
        yield fault(
            f"parallel.dp_replicate = {replicas} does not divide dp = {dp} (= {world} ranks / {_model_size(c)})",
            f"parallel.dp_replicate={nearest(replicas, divisors(dp))}",
        )


@check("parallel.ep", "parallel.etp", *MODEL_AXES, needs=["world-fits"])
def experts_fold(c: Config, world: int) -> Faults:
    p, dp, etp = c.parallel, data_parallel(c, world), c.parallel.etp or c.parallel.tp
    fold = dp * p.cp * p.tp
    if fold % (p.ep * etp):
        yield fault(
            f"parallel.ep·etp = {p.ep}·{etp} does not divide dp·cp·tp = {dp}·{p.cp}·{p.tp} = {fold}",
            f"parallel.ep={nearest(p.ep, divisors(fold // etp))}"
            if fold % etp == 0
            else f"parallel.etp={nearest(etp, divisors(fold))} parallel.ep=1",
        )


@check("train.gbs", "train.mbs", *MODEL_AXES, needs=["world-fits"])
def gbs_splits(c: Config, world: int) -> Faults:
    dp, mbs, gbs = data_parallel(c, world), c.train.mbs, c.train.gbs
    if gbs % (mbs * dp):
        yield fault(
            f"train.gbs = {gbs} is not a multiple of train.mbs·dp = {mbs}·{dp} = {mbs * dp} "
            f"(dp = {world} ranks / {_model_size(c)})",
            f"train.gbs={multiples(gbs, mbs * dp)}",
        )


@check("train.gbs", "train.mbs", *MODEL_AXES)
def gbs_holds_whole_micro_batches(c: Config, world: int) -> Faults:
    """Yields what can be said of the batch while the world does not fit, and dp is unknown."""
    if world % _model_size(c) and c.train.gbs % c.train.mbs:
        yield fault(
            f"train.gbs = {c.train.gbs} is not a multiple of train.mbs = {c.train.mbs}, whatever dp will be",
            f"train.gbs={multiples(c.train.gbs, c.train.mbs)}",
        )


@check("parallel.sp", "parallel.tp")
def sp_needs_tp(c: Config, world: int) -> Faults:
    if c.parallel.sp and c.parallel.tp == 1:
        yield fault(
            "parallel.sp = true cuts activations along tp, and parallel.tp = 1", "parallel.sp=false"
        )


@check("parallel.tp_overlap", "parallel.sp")
def overlap_needs_sp(c: Config, world: int) -> Faults:
    if c.parallel.tp_overlap != "none" and not c.parallel.sp:
        yield fault(
            f"parallel.tp_overlap = {c.parallel.tp_overlap} hides what sequence parallelism gathers and scatters, and "
            "parallel.sp = false",
            "parallel.tp_overlap=none" + (", or parallel.sp=true" if c.parallel.tp > 1 else ""),
        )


HEADS_OVER_TP = divides(
    "parallel.tp", "model.num_heads", "heads-split-over-tp", _tensor_parallel_fix
)


@check("model.num_kv_heads", "parallel.tp")
def kv_heads_split_over_tp(c: Config, world: int) -> Faults:
    heads, tp = c.model.num_kv_heads, c.parallel.tp
    if heads % tp and tp % heads:
        yield fault(
            f"model.num_kv_heads = {heads} and parallel.tp = {tp}: neither divides the other, so KV heads can be "
            "neither split nor replicated evenly",
            _tensor_parallel_fix(c, world),
        )


def _other_mlp(c: Config, world: int) -> str:
    size = multiples(c.model.ffn_hidden_size, c.parallel.tp)
    return f"{_tensor_parallel_fix(c, world)}, or model.ffn_hidden_size={size}"


MLP_OVER_TP = divides("parallel.tp", "model.ffn_hidden_size", "ffn-splits-over-tp", _other_mlp)


@check("train.seq_len", "parallel.sp", "parallel.tp", "parallel.cp")
def sequence_splits_over_tp(c: Config, world: int) -> Faults:
    p, length = c.parallel, c.train.seq_len
    if p.sp and p.cp == 1 and length % p.tp:
        yield fault(
            f"train.seq_len = {length} is not divisible by parallel.tp = {p.tp}, as parallel.sp = true needs",
            seq_len_fix(c, p.tp),
        )


@check("parallel.vpp", "parallel.pp")
def vpp_needs_pp(c: Config, world: int) -> Faults:
    if c.parallel.vpp > 1 and c.parallel.pp == 1:
        yield fault(
            f"parallel.vpp = {c.parallel.vpp} cuts a pipeline rank into chunks, and parallel.pp = 1",
            "parallel.vpp=1",
        )


@check("model.num_layers", *STAGES, "pipeline.layout", "pipeline.balance", "pipeline.schedule")
def stages_have_layers(c: Config, world: int) -> Faults:
    pipeline, p = c.pipeline, c.parallel
    chosen = pipeline.layout is not None or (pipeline.schedule, pipeline.balance) == (
        "auto",
        "auto",
    )
    if not chosen and pipeline.balance in ("auto", "stages") and c.model.num_layers < p.pp * p.vpp:
        yield fault(
            f"model.num_layers = {c.model.num_layers} is fewer than the parallel.pp·vpp = "
            f"{p.pp}·{p.vpp} = {p.pp * p.vpp} stages",
            _fewer_stages(c, world),
        )


@check("pipeline.layout", *STAGES, "model.num_layers")
def layout_counts_stages(c: Config, world: int) -> Faults:
    layout, pp, vpp = c.pipeline.layout, c.parallel.pp, c.parallel.vpp
    # parallel.vpp = 1 leaves the chunks to the schedule (zb_v has two): then only pp must divide
    # the stages
    if layout is not None and (len(layout) % pp if vpp == 1 else len(layout) - pp * vpp):
        yield fault(
            f"pipeline.layout has {len(layout)} stages, parallel.pp·vpp = {pp}·{vpp} = {pp * vpp}",
            f"pipeline.layout={_even_layout(c)}",
        )


@check("pipeline.layout", "model.num_layers", "model.num_mtp_layers", *STAGES)
def layout_sums_to_layers(c: Config, world: int) -> Faults:
    layout, layers, ahead = c.pipeline.layout, c.model.num_layers, c.model.num_mtp_layers
    if layout is not None and not layers <= sum(layout) <= layers + ahead:
        more = f", and {layers + ahead} with the blocks of model.num_mtp_layers" if ahead else ""
        yield fault(
            f"pipeline.layout sums to {sum(layout)} layers, model.num_layers = {layers}{more}",
            f"pipeline.layout={_even_layout(c)}",
        )


@check("parallel.zero3_gather", "parallel.zero")
def zero3_gather_needs_sharded_weights(c: Config, world: int) -> Faults:
    if c.parallel.zero3_gather == "per_step" and c.parallel.zero < 3:
        yield fault(
            f"parallel.zero3_gather = per_step says how long gathered weights stay, and under parallel.zero = "
            f"{c.parallel.zero} they are never given back",
            "parallel.zero3_gather=per_microbatch, or parallel.zero=3",
        )


@check("parallel.grad_reduce", "parallel.zero")
def reduce_needs_sharded_gradients(c: Config, world: int) -> Faults:
    if c.parallel.grad_reduce == "per_step" and c.parallel.zero < 2:
        yield fault(
            "parallel.grad_reduce = per_step keeps whole gradients until a step's last micro-batch, as parallel.zero = "
            f"{c.parallel.zero} does anyway",
            "parallel.grad_reduce=per_microbatch, or parallel.zero=2",
        )

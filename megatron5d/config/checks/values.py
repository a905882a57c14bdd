"""Checks of single keys: the range of each number, the words of each enumeration, the form of each
list."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from megatron5d.config.checks.check import Check, Faults, check, check_id, fault, nearest, spelled
from megatron5d.config.convert import kind_of, value_of
from megatron5d.config.derived import STAGE
from megatron5d.config.errors import alternatives, closest
from megatron5d.config.schema import GATED, Config

BALANCES = ("none", "aux", "seq_aux", "global_aux", "bias")
PARTS = ("norm", "qkv", "attention", "activation", "mlp", "experts", "permute")
OFFLOADS = ("attention", "mlp", "dispatch", "experts", "combine", "inputs")
AXES = ("pp", "dp", "cp", "tp")

AT_LEAST = {
    1: """model.num_layers model.hidden_size model.ffn_hidden_size model.num_heads model.num_kv_heads model.head_dim
        model.vocab_size model.max_positions model.attention_window model.rope_scaling.factor
        model.rope_scaling.original_max_positions model.q_lora_rank model.kv_lora_rank model.qk_nope_head_dim
        model.qk_rope_head_dim model.v_head_dim parallel.tp parallel.cp parallel.cp_inner parallel.pp parallel.vpp
        parallel.ep parallel.etp parallel.dp_replicate train.steps train.gbs train.mbs train.seq_len train.eval_batches
        recompute.num_layers optim.ns_steps recompute.group_layers recompute.logit_tokens log.every model.top_k
        model.moe_ffn_hidden_size model.moe_interval model.num_groups model.top_groups moe.log_every parallel.ep_inner
        moe.planned_imbalance log.profile_step data.sample_len model.query_pre_attn_scalar""",
    0: """pipeline.embedding_layers pipeline.head_layers pipeline.evaluations pipeline.flops_per_byte
        model.attention_softcap model.logit_softcap
        model.rope_scaling.mscale_all_dim train.z_loss train.eval_every train.stop_after train.seed optim.min_lr
        optim.warmup_steps optim.decay_steps optim.weight_decay optim.clip optim.skip_norm
        optim.max_skipped moe.aux_coef moe.z_coef moe.bias_rate
        data.eod checkpoint.every model.num_experts model.shared_ffn_hidden_size
        model.first_k_dense model.num_mtp_layers train.mtp_loss precision.fp8_skip_first precision.fp8_skip_last
        log.memory_snapshot_step recompute.offload_min_bytes""",
}
ABOVE_ZERO = """pipeline.memory model.norm_eps model.latent_norm_eps model.rope_theta model.window_rope_theta
    model.init_std model.rope_scaling.low_freq_factor
    model.rope_scaling.high_freq_factor model.rope_scaling.beta_fast model.rope_scaling.beta_slow
    model.rope_scaling.attention_factor model.rope_scaling.mscale optim.lr optim.eps parallel.timeout_s
    pipeline.search_s moe.capacity_factor log.peak_tflops log.device_memory_gb model.routed_scaling_factor
    model.rotary_percent model.embedding_scale"""
# a number with more digits is a slip of the hand, and overflows what computes with it
AT_MOST = {
    "model.rotary_percent": 1.0,
    "train.seed": 2**63 - 1,
    "recompute.offload_min_bytes": 2**53,
    "parallel.timeout_s": 10**7,
}
MOST = 2**31 - 1  # of integers without a limit of their own
WORDS: dict[str, Sequence[str]] = {
    "model.norm": ("rmsnorm", "layernorm"),
    "model.activation": (*GATED, "gelu", "gelu_tanh"),
    "model.block_norm": ("pre", "post", "both"),
    "model.parallel_block": ("none", "two_norms", "one_norm"),
    "model.attention": ("gqa", "mla"),
    "model.position": ("rope", "learned"),
    "model.rope_scaling.type": ("none", "linear", "llama3", "yarn"),
    "model.router_score": ("softmax", "sigmoid"),
    "model.group_score": ("max", "top2_sum"),
    "moe.drop_by": ("probability", "position"),
    "moe.exchange": ("counted", "planned"),
    "pipeline.split": ("even", "cost"),
    "pipeline.balance": ("auto", "stages", "ranks", "late", "ends"),
    "parallel.cp_method": ("ring", "allgather", "ulysses", "two_level"),
    "train.cuda_graph": ("none", "phases"),
    "parallel.tp_overlap": ("none", "chunked", "fused"),
    "parallel.zero3_gather": ("per_microbatch", "per_step"),
    "parallel.grad_reduce": ("per_microbatch", "per_step"),
    "optim.name": ("adamw", "muon"),
    "optim.schedule_by": ("steps", "samples"),
    "optim.schedule": ("cosine", "linear", "wsd", "constant"),
    "optim.on_nonfinite": ("stop", "skip"),
    "optim.implementation": ("auto", "torch", "apex", "kernel"),
    "precision.dtype": ("fp64", "fp32", "bf16"),
    "precision.fp8": ("none", "tensorwise", "blockwise"),
    "precision.grad_dtype": ("fp32", "bf16"),
    "kernels.attention": ("auto", "triton", "cudnn", "fa4"),
    **dict.fromkeys(
        ("kernels.fp8", "kernels.grouped", "kernels.norm"), ("auto", "triton", "torch")
    ),
    "recompute.mode": ("none", "selective", "full"),
    "data.weights": ("size", "equal"),
    "data.order": ("shuffled", "sequential", "megatron"),
    "log.wandb.mode": ("online", "offline", "disabled"),
    "log.memory_check": ("refuse", "warn", "off"),
}


# Names of values in other code bases that are not spelled like ours.
SYNONYMS = {
    "fp16": "bf16",
    "half": "bf16",
    "float16": "bf16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "adam": "adamw",
    "gelu_new": "gelu_tanh",
    "silu": "swiglu",
    "off": "disabled",
}


def _nearest_word(written: str, words: Sequence[str]) -> str | None:
    idle = next((word for word in ("none", "disabled", "off") if word in words), None)
    if idle and written.lower() in ("false", "no", "off", "none", "null"):
        return idle
    if idle and written.lower() in ("true", "yes", "on"):
        return next(word for word in words if word != idle)
    return SYNONYMS[written] if SYNONYMS.get(written) in words else closest(written, words)


def _in_range(knob: str, low: int, exclusive: bool = False) -> Check:
    most = AT_MOST.get(knob, MOST if kind_of(knob) is int else inf)
    example = spelled(value_of(Config(), knob) or 1.0)

    @check(knob, id=check_id(knob))
    def find(c: Config, world: int) -> Faults:
        value = value_of(c, knob)
        if value is None or low < value <= most or (value == low and not exclusive):
            return
        wrong = (
            f"above {most}" if value > low else f"not above {low}" if exclusive else f"below {low}"
        )
        yield fault(
            f"{knob} = {value} is {wrong}",
            f"{knob}={example if exclusive else low if value < low else most}",
        )

    return find


def _one_of(knob: str, words: Sequence[str]) -> Check:
    @check(knob, id=check_id(knob))
    def find(c: Config, world: int) -> Faults:
        value = value_of(c, knob)
        if value not in words:
            meant = _nearest_word(value, words) or value_of(Config(), knob)
            yield fault(f"{knob} = {value} is not {alternatives(words)}", f"{knob}={meant}")

    return find


def _shape(
    knob: str, legal: Callable[[Config], bool], wanted: str, fix: Callable[[Config], str]
) -> Check:
    @check(knob, id=check_id(knob))
    def find(c: Config, world: int) -> Faults:
        if not legal(c):
            yield fault(f"{knob} = {value_of(c, knob)} is not {wanted}", f"{knob}={fix(c)}")

    return find


def _schedule_is_a_name(c: Config) -> bool:
    """Returns whether it is a word or file:<path>; train/pipeline_layout.py checks that the
    schedule exists."""
    kind, colon, path = c.pipeline.schedule.partition(":")
    return kind == "file" and path != "" if colon else re.fullmatch(r"\w+", kind) is not None


def _are_scales(key: str, c: Config) -> bool:
    return all(
        re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?\s+\S+", each)
        for each in value_of(c, f"optim.{key}")
    )


def _is_step_or_range(text: str) -> bool:
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", text)
    return match is not None and int(match[1]) <= int(match[2] or match[1])


def _ramp_is_shaped(c: Config) -> bool:
    text = " ".join(c.train.gbs_ramp or ["0:1"])
    return (
        re.fullmatch(rf"0*[1-9]\d*( 0*[1-9]\d*){{2}}|{STAGE.pattern}( +{STAGE.pattern})*", text)
        is not None
    )


def _known_balances(c: Config) -> list[str]:
    known = {closest(word, BALANCES[1:]) for word in c.moe.balance if word != "none"}
    return sorted(word for word in known if word) or ["none"]


def _known(written: Sequence[str], words: Sequence[str]) -> list[str]:
    """Returns the legal words nearest to those written; the first legal word where none is near."""
    known = {closest(word, words) for word in written}
    return [word for word in words if word in known] or [words[0]]


MAX_PREFETCH = 1024  # global batches; more only fill the host's memory

_SHAPES = [
    _shape(
        "data.prefetch",
        lambda c: 0 <= c.data.prefetch <= MAX_PREFETCH,
        f"0 to {MAX_PREFETCH} global batches",
        lambda c: str(nearest(c.data.prefetch, (0, MAX_PREFETCH))),
    ),
    _shape(
        "parallel.zero",
        lambda c: c.parallel.zero in (0, 1, 2, 3),
        "0, 1, 2 or 3",
        lambda c: str(nearest(c.parallel.zero, range(4))),
    ),
    _shape(
        "parallel.order",
        lambda c: sorted(c.parallel.order) == sorted(AXES),
        f"each of {alternatives(AXES)} once",
        lambda c: spelled(AXES),
    ),
    _shape(
        "pipeline.schedule",
        _schedule_is_a_name,
        "the name of a schedule or file:<path>",
        lambda c: "1f1b",
    ),
    _shape(
        "pipeline.copies",
        lambda c: c.pipeline.copies in (1, 2),
        "1 or 2",
        lambda c: str(nearest(c.pipeline.copies, (1, 2))),
    ),
    _shape(
        "pipeline.layout",
        lambda c: c.pipeline.layout is None or min(c.pipeline.layout, default=-1) >= 0,
        "a list of layer counts, each at least 0",
        lambda c: "null",
    ),
    _shape(
        "recompute.parts",
        lambda c: c.recompute.parts != [] and set(c.recompute.parts) <= set(PARTS),
        f"a list of {alternatives(PARTS)}",
        lambda c: spelled(_known(c.recompute.parts, PARTS)),
    ),
    _shape(
        "recompute.offload",
        lambda c: set(c.recompute.offload) <= set(OFFLOADS),
        f"a list of {alternatives(OFFLOADS)}",
        lambda c: spelled(_known(c.recompute.offload, OFFLOADS)),
    ),
    _shape(
        "recompute.stage_layers",
        lambda c: (
            c.recompute.stage_layers is None or min(c.recompute.stage_layers, default=-1) >= 0
        ),
        "a list of layer counts, each at least 0",
        lambda c: "null",
    ),
    _shape(
        "train.gbs_ramp",
        _ramp_is_shaped,
        "[start gbs, increment, ramp length in sequences], each at least 1,"
        ' or stages such as "0:8 2B:16"',
        lambda c: "null",
    ),
    _shape(
        "checkpoint.keep",
        lambda c: all(
            re.fullmatch(r"((last|best):)?\d+|every:[1-9]\d*", each)
            for each in c.checkpoint.keep.split("+")
        ),
        "K or last:K, every:N, best:K, joined by +",
        lambda c: "2",
    ),
    _shape(
        "checkpoint.hf_export",
        lambda c: (
            re.fullmatch(r"last|every:[1-9]\d*", c.checkpoint.hf_export or "last") is not None
        ),
        "every:N, last or null",
        lambda c: "last",
    ),
    _shape(
        "data.skip_steps",
        lambda c: all(map(_is_step_or_range, c.data.skip_steps)),
        "a list of steps from 1 and of ranges such as 120-169, the lower first",
        lambda c: "[]",
    ),
    *(
        _shape(
            f"optim.{key}",
            partial(_are_scales, key),
            'a list of "factor glob", factors from 0',
            lambda c: "[]",
        )
        for key in ("lr_scale", "decay_scale")
    ),
    _shape(
        "optim.betas",
        lambda c: len(c.optim.betas) == 2 and all(0 <= beta < 1 for beta in c.optim.betas),
        "two numbers, each at least 0 and below 1",
        lambda c: spelled(Config().optim.betas),
    ),
    _shape(
        "optim.momentum",
        lambda c: 0 <= c.optim.momentum < 1,
        "at least 0 and below 1",
        lambda c: "0" if c.optim.momentum < 0 else "0.95",
    ),
    _shape(
        "log.slow_rank",
        lambda c: c.log.slow_rank is None or c.log.slow_rank == 0 or c.log.slow_rank > 1,
        "above 1, 0 or null",
        lambda c: "1.2" if (c.log.slow_rank or 0) > 0 else "0",
    ),
    _shape(
        "moe.jitter",
        lambda c: 0 <= c.moe.jitter < 1,
        "at least 0 and below 1",
        lambda c: "0" if c.moe.jitter < 0 else "0.01",
    ),
    _shape(
        "moe.balance",
        lambda c: (
            all(word in BALANCES for word in c.moe.balance)
            and (c.moe.balance == ["none"] or (c.moe.balance != [] and "none" not in c.moe.balance))
        ),
        f"none alone or a list of {alternatives(BALANCES[1:])}",
        lambda c: spelled(_known_balances(c)),
    ),
]

VALUE_CHECKS = (
    *(_in_range(knob, low) for low, knobs in AT_LEAST.items() for knob in knobs.split()),
    *(_in_range(knob, 0, exclusive=True) for knob in ABOVE_ZERO.split()),
    *(_one_of(knob, words) for knob, words in WORDS.items()),
    *_SHAPES,
)

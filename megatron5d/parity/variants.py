"""Variants of a configuration that the parity check runs: a small one, and some with an option off.

`shrink` makes a configuration small enough to train on a laptop in seconds. Every size becomes the
smallest candidate with which all checks pass, the pipeline has a layout, and the features of the
run stay as they were: what is replicated, padded, uneven or truncated remains so. Layout, schedule,
ZeRO, recompute and everything else that is not a size are not changed. `ablations` turns off one
option of a layout at a time, to find which of them a difference needs.
"""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from megatron5d.config.checks import run_checks
from megatron5d.config.checks.check import data_parallel, divisors
from megatron5d.config.convert import Change, changed, leaves, override_text, value_of
from megatron5d.config.derived import batch_schedule, moe_layers, sample_len, split_of, window_of
from megatron5d.config.errors import Fault
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    InitConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from megatron5d.model.partition import stage_specs
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
from megatron5d.train.preflight.parameters import parameter_names

MIN_EPS = 1e-5  # a smaller optim.eps would divide the rounding of a vanishing gradient by itself
MIN_RATE = 1e-6  # a smaller one would hide a wrong update
MAX_RATE = 1e-2  # with a larger one, steps multiply rounding until it is visible
MIN_CLIP = 1e-3  # clipped to a smaller norm, gradients vanish next to optim.eps
MAX_CLIP = 0.1  # gradients of a small model may never reach a larger norm
MAX_CAPACITY = 1.0  # with a larger one no token may be dropped
# With larger ones, initial scores are too small to be capped.
MAX_SOFTCAPS = {"attention_softcap": 0.01, "logit_softcap": 1.0}
# With smaller ones, normalized queries and keys get a gradient of rounding only.
MAX_NORMED_SOFTCAP = 1.0


def exact(config: Config, steps: int) -> Config:
    """A short run of a configuration in fp64 that reads and writes no files.

    The schedule of the rate, the initial weights, the masks and skipped steps of the data stay. The
    end of a document is token 0 where the data has any. A ramp takes the steps of this run.
    Thresholds move so that no update is skipped, gradients are clipped, scores capped and tokens
    dropped, and every rate has a visible effect.
    """
    data, model, moe, train = config.data, config.model, config.moe, config.train
    largest = MAX_SOFTCAPS | ({"attention_softcap": MAX_NORMED_SOFTCAP} if model.qk_norm else {})
    softcaps = {name: min(getattr(model, name), value) for name, value in largest.items()}
    capacity = None if moe.capacity_factor is None else min(moe.capacity_factor, MAX_CAPACITY)
    bias_rate = max(moe.bias_rate, MIN_RATE * ("bias" in moe.balance))
    eod = 0 if data.document_mask or data.eod_mask_loss else None
    if config.pipeline.schedule == "auto":
        config = changed(config, {"pipeline.evaluations": 100})
    return replace(
        config,
        init=InitConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        data=replace(data, train=[], valid=[], valid_sets=[], split=None, tokenizer=None, eod=eod),
        model=replace(model, **softcaps),
        precision=PrecisionConfig(dtype="fp64"),
        moe=replace(
            moe,
            fp8_dispatch=False,
            bias_rate=bias_rate,
            capacity_factor=capacity,
            replay=None,
            record=None,
            log_every=1 if model.num_experts else moe.log_every,
        ),
        train=replace(train, steps=steps, gbs_ramp=_short_ramp(config, steps), stop_after=0),
        optim=_exact_optim(config, steps),
    )


def _short_ramp(config: Config, steps: int) -> list[str] | None:
    """The batches of a ramp within a few steps: the first, the last, and some between them."""
    if config.train.gbs_ramp is None:
        return None
    sizes = [size for _, size in batch_schedule(config)]
    last = max(1, steps - 1)
    picked = [sizes[step * (len(sizes) - 1) // last] for step in range(last + 1)]
    grows = [(step, size) for step, size in enumerate(picked[1:], 1) if picked[step - 1] != size]
    return [f"0:{picked[0]}", *(f"{step}steps:{size}" for step, size in grows)]


def _exact_optim(config: Config, steps: int) -> OptimConfig:
    optim = config.optim
    warmup = min(optim.warmup_steps, 1, steps - 1)
    return replace(
        optim,
        warmup_steps=warmup,
        decay_steps=min(optim.decay_steps, steps - warmup),
        eps=max(optim.eps, MIN_EPS),
        # apex has nothing for CPUs
        implementation="auto" if optim.implementation == "apex" else optim.implementation,
        skip_norm=0.0,
        clip=optim.clip and min(max(optim.clip, MIN_CLIP), MAX_CLIP),
        lr=min(max(optim.lr, MIN_RATE), MAX_RATE),
        min_lr=min(max(optim.min_lr, MIN_RATE), MAX_RATE),
    )


def features(c: Config, world: int) -> tuple:
    """Everything about computation and communication that sizes decide, without the sizes."""
    return (
        *_attention_features(c),
        *_expert_features(c.model, c),
        *_batch_features(c, data_parallel(c, world)),
    )


def _attention_features(c: Config) -> tuple:
    m, p = c.model, c.parallel
    heads, kv = m.num_heads // p.tp, max(1, m.num_kv_heads // p.tp)  # of a tp rank
    _, inner = split_of(c)
    latents = (m.q_lora_rank or 0) + m.kv_lora_rank + m.qk_rope_head_dim
    windowed = [window_of(m, i) is not None for i in range(m.num_layers)]
    return (
        (m.num_kv_heads == m.num_heads, m.num_kv_heads == 1, m.num_kv_heads < p.tp),
        (heads > inner, kv > inner),
        (m.vocab_size % p.tp == 0, m.attention == "mla" and latents < m.hidden_size),
        (_window_reach(c), any(windowed), all(windowed)),
    )


def _expert_features(m: ModelConfig, c: Config) -> tuple:
    p, moe = c.parallel, moe_layers(m)
    return (
        (m.num_experts > p.ep, m.num_experts > m.num_groups),
        (m.top_k > 1, m.top_k < m.num_experts, m.top_k > m.num_experts // p.ep),
        (m.top_k > p.ep // p.ep_inner, m.top_k > p.ep),
        (m.num_groups > 1, m.top_groups > 1, m.top_groups < m.num_groups),
        (len(moe) > 0, len(moe) < m.num_layers, m.num_layers > 1, m.num_mtp_layers > 1),
    )


def _batch_features(c: Config, dp: int) -> tuple:
    m, p, t, r = c.model, c.parallel, c.train, c.recompute
    stages = p.pp * p.vpp
    rows, layers = t.seq_len // p.cp * t.mbs, m.num_layers // stages  # of a cp rank, of a stage
    *starts, last = _micro_batches(c, dp)
    muon = c.optim.name == "muon"
    widths = (m.ffn_hidden_size, m.expert_hidden_size, m.shared_ffn_hidden_size) if muon else ()
    group = min(r.group_layers, layers)
    return (
        (rows % p.tp, tuple(size > m.hidden_size for size in widths)),
        # A layer has four matrices: whether several rounds of Muon update them.
        muon and 4 * layers > p.tp * dp,
        (t.mbs > 1, sample_len(c) < t.seq_len),
        [(min(count, 2 * p.pp), count % p.pp) for count in (*starts, last)],
        [count < last for count in starts],
        r.logit_tokens is None or r.logit_tokens < rows,
        r.logit_tokens is not None and rows % r.logit_tokens > 0,
        (m.num_layers % stages > 0 and c.pipeline.split == "even", group > 1),
        layers > 1 and c.pipeline.layout is None,  # a listed layout keeps several by itself
        layers % min(r.group_layers, max(1, layers)) > 0,
        r.num_layers is None or r.num_layers * p.pp < m.num_layers,
    )


def _micro_batches(c: Config, dp: int) -> list[int]:
    """Micro-batches of a rank in every stage of the batch ramp, at last those of train.gbs."""
    return [size // (c.train.mbs * dp) for _, size in batch_schedule(c)]


def _window_reach(c: Config) -> tuple[int, ...]:
    """How many earlier chunks of the sequence a window reaches, and how far into the last one."""
    t, window, (outer, _) = c.train, c.model.attention_window, split_of(c)
    if window is None or window >= t.seq_len:
        return ()
    if outer == 1:
        return (min(window, 2),)
    chunk = t.seq_len // (2 * outer)
    chunks, remainder = divmod(window - 1, chunk)
    return (min(window, 2), chunks, min(remainder, 2), min(chunk - remainder, 2))


def faults_of(config: Config, world: int) -> list[Fault]:
    """Reasons why a configuration cannot run; the files that it names need not exist."""
    return run_checks(config, world, files=False) or pipeline_faults(config, world)


def shrink(config: Config, world: int, keep: Collection[str] = ()) -> Config:
    """The smallest configuration with the features of a valid one, one group of sizes at a time.

    Args:
        keep: keys that do not change.
    """
    original = features(config, world)
    for candidates in GROUPS:
        for change in candidates(config, world):
            change = {key: value for key, value in change.items() if key not in keep}
            smaller = changed(config, change)
            if features(smaller, world) == original and not faults_of(smaller, world):
                config = smaller
                break
    return config


def changed_keys(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Keys in which two configurations differ, with both values, except those that only write."""
    passive = ("checkpoint.", "log.")
    pairs = {
        key: (value_of(before, key), value_of(after, key))
        for key in leaves()
        if not key.startswith(passive)
    }
    return {key: (old, new) for key, (old, new) in pairs.items() if old != new}


def _up_to(value: int, low: int, step: int = 1) -> list[int]:
    """Values from `low` up in steps, and finally the value itself."""
    return [*range(low, value, step), value]


def _sizes_of_key(key: str, low: int) -> Callable[[Config, int], Iterator[Change]]:
    """Candidates for one key, where it has a size."""

    def candidates(c: Config, world: int) -> Iterator[Change]:
        if size := value_of(c, key):
            yield from ({key: smaller} for smaller in _up_to(size, low))

    return candidates


def _heads(c: Config, world: int) -> Iterator[Change]:
    m = c.model
    dims = {"head_dim": 8}
    if _is_mla(c):
        dims = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
    change: Change = {f"model.{name}": min(getattr(m, name), size) for name, size in dims.items()}
    for heads in _up_to(m.num_heads, c.parallel.tp, c.parallel.tp):
        for kv in divisors(heads):
            yield change | {"model.num_heads": heads, "model.num_kv_heads": kv}


def _hidden(c: Config, world: int) -> Iterator[Change]:
    """Hidden sizes, with latents whose sizes decide whether they or the hidden states are sent."""
    q, kv = c.model.q_lora_rank, c.model.kv_lora_rank
    for hidden in _up_to(c.model.hidden_size, 32, 16):
        for factor in (1, 3) if _is_mla(c) else ():
            yield {
                "model.hidden_size": hidden,
                "model.q_lora_rank": None if q is None else min(q, 8 * factor),
                "model.kv_lora_rank": min(kv, 6 * factor),
            }
        if not _is_mla(c):
            yield {"model.hidden_size": hidden}


def _is_mla(c: Config) -> bool:
    return c.model.attention == "mla"


def _experts(c: Config, world: int) -> Iterator[Change]:
    m, p = c.model, c.parallel
    # 2 or 3 experts per token, or just more than a token can find on one node, or on one rank each
    top_ks = sorted({min(m.top_k, size) for size in (2, 3, p.ep // p.ep_inner + 1, p.ep + 1)})
    for experts in _up_to(m.num_experts, p.ep, p.ep) if m.num_experts else ():
        for groups, top_k in product(divisors(experts), top_ks):
            # With so few experts, all tokens may choose the same ones.
            if experts <= min(m.num_experts - 1, 2 * top_k):
                continue
            sizes = {"num_experts": experts, "num_groups": groups, "top_k": top_k, "top_groups": 2}
            yield {f"model.{name}": min(getattr(m, name), size) for name, size in sizes.items()}


def _tokens(c: Config, world: int) -> Iterator[Change]:
    """Lengths of the sequence, with everything that is counted in its tokens."""
    m, p, r, seq_len = c.model, c.parallel, c.recompute, c.train.seq_len
    shortest = 4 * p.cp * (p.tp if p.sp else 1)  # four rows on every rank
    slices: Sequence[int | None] = [None]
    if r.logit_tokens is not None:
        slices = sorted({min(r.logit_tokens, 3), min(r.logit_tokens, 4)})
    for length in _up_to(seq_len, max(16, shortest)):
        change: Change = {"train.seq_len": length}
        if c.data.sample_len is not None:
            missing = min(max(0, seq_len - c.data.sample_len), length // 4)
            change["data.sample_len"] = length - missing
        if m.position == "learned":
            change["model.max_positions"] = min(m.max_positions, length + 8)
        if r.offload:
            change["recompute.offload_min_bytes"] = 0
        windows: Sequence[int | None] = [m.attention_window]
        if m.attention_window is not None and m.attention_window < seq_len:
            sizes = list(range(1, min(m.attention_window, length) + 1))
            # from a third of the length, and the smaller ones last
            windows = [*sizes[length // 3 - 1 :], *sizes[: length // 3 - 1]]
        for logit_tokens, window in product(slices, windows):
            sizes_in_tokens = {
                "recompute.logit_tokens": logit_tokens,
                "model.attention_window": window,
            }
            yield change | sizes_in_tokens


def _layers(c: Config, world: int) -> Iterator[Change]:
    """Numbers of layers, with everything that counts them; an uneven layout stays uneven."""
    m, r = c.model, c.recompute
    change: Change = {
        "recompute.group_layers": min(r.group_layers, 2),
        "model.first_k_dense": min(m.first_k_dense, 1),
        "model.moe_interval": min(m.moe_interval, 2),
    }
    counts: Iterable[int] = range(1, m.num_layers + 1)
    if (layout := c.pipeline.layout) is not None:
        # Entries of the layout may also count prediction blocks, which stay.
        layers = [len(spec.layers) for spec in stage_specs(layout, m)]
        smallest = min(count for count in layers if count)
        removed = [n - (n > 0) - (n > smallest) for n in layers]
        change["pipeline.layout"] = [n - num_removed for n, num_removed in zip(layout, removed)]
        counts = [m.num_layers - sum(removed)]
    if r.num_layers is not None:
        change["recompute.num_layers"] = 1
    if r.stage_layers is not None:
        change["recompute.stage_layers"] = [min(count, 1) for count in r.stage_layers]
    matches = _glob_matches(c)
    for count in counts:
        candidate = change | _layer_lists(m, count) | {"model.num_layers": count}
        if _glob_matches(changed(c, candidate)) == matches:
            yield candidate


def _layer_lists(m: ModelConfig, count: int) -> Change:
    """Lists of MoE layers and of windowed layers for fewer layers."""
    change: Change = {}
    if m.moe_layers is not None:
        some = range(count // 2, max(1, count - 1))
        change["model.moe_layers"] = list(
            range(count) if len(m.moe_layers) == m.num_layers else some
        )
    if m.window_layers is not None:
        # layers at equal distances, the first and the last included
        picked = [i * (m.num_layers - 1) // max(1, count - 1) for i in range(count)]
        change["model.window_layers"] = [i for i, n in enumerate(picked) if n in m.window_layers]
    return change


def _glob_matches(c: Config) -> list[set[tuple[bool, bool]]]:
    """For every glob that may distinguish layers: does it match names in layers, and others?"""
    o = c.optim
    entries = [*o.freeze, *o.lr_scale, *o.decay_scale, *o.decay_exclude, *o.muon_exclude]
    globs = [
        glob for glob in (entry.split()[-1] for entry in entries) if re.search(r"[\d?[]", glob)
    ]
    names = parameter_names(c) if globs else []
    return [
        {(name.startswith("layers."), fnmatch.fnmatch(name, glob)) for name in names}
        for glob in globs
    ]


def _batch(c: Config, world: int) -> Iterator[Change]:
    t, dp = c.train, data_parallel(c, world)
    mbs, largest = min(t.mbs, 2), t.gbs // (t.mbs * dp)
    # Every token of the vocabulary occurs twice.
    smallest = -(-2 * c.model.vocab_size // (mbs * dp * t.seq_len))
    starts = [min(n, 2 * c.parallel.pp + n % c.parallel.pp) for n in _micro_batches(c, dp)[:-1]]
    for count in range(min(smallest, largest), largest + 1):
        change: Change = {"train.mbs": mbs, "train.gbs": mbs * dp * count}
        if t.gbs_ramp is not None:
            begins = [word.partition(":")[0] for word in t.gbs_ramp]
            sizes = [mbs * dp * start for start in [*starts, count]]
            ramp = [f"{begin}:{size}" for begin, size in zip(begins, sizes)]
            change["train.gbs_ramp"] = ramp
        yield change


GROUPS = (
    _heads,
    _hidden,
    _sizes_of_key("model.ffn_hidden_size", 48),
    _sizes_of_key("model.moe_ffn_hidden_size", 24),
    _sizes_of_key("model.shared_ffn_hidden_size", 16),
    _sizes_of_key("model.vocab_size", 32),
    _experts,
    _tokens,
    _layers,
    _batch,
)


_NO_SP: Change = {"parallel.sp": False, "parallel.tp_overlap": "none"}
_ONE_CHUNK: Change = {
    "parallel.vpp": 1,
    "pipeline.layout": None,
    "pipeline.balance": "stages",
    "recompute.stage_layers": None,
}
_NO_ZERO: Change = {
    "parallel.zero": 0,
    "parallel.zero3_gather": "per_microbatch",
    "parallel.grad_reduce": "per_microbatch",
}
# Each entry turns off its first key, which names it, and everything that has no meaning without it.
OFF: tuple[Change, ...] = (
    {"parallel.tp": 1, **_NO_SP},
    _NO_SP,
    {"parallel.tp_overlap": "none"},
    {
        "parallel.cp": 1,
        "parallel.cp_inner": 1,
        "parallel.cp_method": "ring",
        "parallel.cp_compress_kv": False,
    },
    {"parallel.cp_method": "ring", "parallel.cp_inner": 1},
    {"parallel.cp_compress_kv": False},
    {"parallel.pp": 1, "pipeline.schedule": "1f1b", **_ONE_CHUNK},
    {"pipeline.schedule": "1f1b", **_ONE_CHUNK},
    {"parallel.ep": 1, "parallel.ep_inner": 1},
    {"parallel.ep_inner": 1},
    {"parallel.etp": 1},
    {"parallel.dp_replicate": 1},
    _NO_ZERO,
    {"parallel.zero3_gather": "per_microbatch"},
    {"parallel.grad_reduce": "per_microbatch"},
    {
        f"recompute.{name}": value
        for name, value in vars(RecomputeConfig()).items()
        if name != "offload_min_bytes"
    },
    {"recompute.offload": []},
    {"recompute.logit_tokens": None},
    {"optim.implementation": "auto"},
    {"optim.offload": False},
)
AXES = ("parallel.tp", "parallel.cp", "parallel.pp")


@dataclass(frozen=True)
class Ablation:
    """A configuration with one dimension or option turned off.

    Args:
        change: as overrides; "dp=1" where the number of ranks shrinks instead.
        config: valid.
        world: number of ranks, with dp as before.
    """

    change: str
    config: Config
    world: int


def ablations(config: Config, world: int) -> Iterator[Ablation]:
    """What a configuration uses and could run without, one at a time, with the same mathematics."""
    if data_parallel(config, world) > 1:
        ranks = world // data_parallel(config, world)
        single = _folded(changed(config, {"parallel.dp_replicate": 1}), ranks)
        yield from _valid("dp=1", single, ranks)
    for off in OFF:
        first, *_ = off
        change = {key: value for key, value in off.items() if value_of(config, key) != value}
        if first in change and not (first == "parallel.etp" and config.parallel.etp is None):
            ranks = world // (value_of(config, first) if first in AXES else 1)
            variant = _folded(changed(config, change), ranks)
            yield from _valid(override_text({first: off[first]}), variant, ranks)


def _valid(change: str, config: Config, world: int) -> Iterator[Ablation]:
    if not faults_of(config, world):
        yield Ablation(change, config, world)


def _folded(config: Config, world: int) -> Config:
    """Reduces ep and etp to sizes that fold into this number of ranks."""
    p = config.parallel
    fold = world // p.pp
    etp = None if p.etp is None else gcd(p.etp, fold)
    ep = gcd(p.ep, fold // (etp or p.tp))
    return changed(
        config, {"parallel.etp": etp, "parallel.ep": ep, "parallel.ep_inner": gcd(p.ep_inner, ep)}
    )

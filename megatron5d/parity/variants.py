"""Variants of a configuration that the parity check runs: a small one, and some with one thing of
the layout off.

`shrink` makes it so small that it trains on a laptop in seconds: every size becomes the smallest
candidate with which all checks pass, the pipeline can be laid out, and the features of the run are
what they were: what is replicated, padded, uneven or cut short stays so. Layout, schedule, ZeRO,
recompute and everything that is no size are not touched. `ablations` turn off one thing of a layout
at a time, to find which of them a difference needs.
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
from megatron5d.config.derived import moe_layers, split_of, window_of
from megatron5d.config.errors import Fault
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    InitConfig,
    LogConfig,
    PrecisionConfig,
    RecomputeConfig,
)
from megatron5d.model.partition import stage_specs
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
from megatron5d.train.preflight.parameters import parameter_names

MIN_EPS = 1e-8  # a smaller optim.eps would divide the rounding of a gradient that is zero by itself
MIN_RATE = 1e-6  # under a smaller one a wrong update would not be seen
MIN_CLIP = 1e-3  # to a smaller norm gradients vanish beside optim.eps
MAX_CLIP = 0.1  # a larger norm gradients of a small model may not have
MAX_CAPACITY = 1.0  # from a larger one no token may be dropped
# beside larger ones first scores are nothing
MAX_SOFTCAPS = {"attention_softcap": 0.01, "logit_softcap": 1.0}


def exact(config: Config, steps: int) -> Config:
    """Returns the run with every rounding of its arithmetic taken out, as a short one of some steps
    that keeps no files.

    Precision is fp64 without FP8 GEMMs; the schedule of the rate, the weights' random beginning and
    the masks of the data stay. An end of document is token 0 where there is any. No threshold keeps
    a step from being made, a gradient from being clipped, a score from being capped or a token from
    being dropped, and no rate and no clipped gradient from being seen.
    """
    o, d, moe = config.optim, config.data, config.moe
    capacity = None if moe.capacity_factor is None else min(moe.capacity_factor, MAX_CAPACITY)
    softcaps = {name: min(getattr(config.model, name), most) for name, most in MAX_SOFTCAPS.items()}
    bias_rate = max(moe.bias_rate, MIN_RATE * ("bias" in moe.balance))
    eod = 0 if d.document_mask or d.eod_mask_loss else None
    warmup = min(o.warmup_steps, 1, steps - 1)
    # which has nothing for CPUs
    implementation = "auto" if o.implementation == "apex" else o.implementation
    pipeline = (
        replace(config.pipeline, evaluations=100)
        if config.pipeline.schedule == "auto"
        else config.pipeline
    )
    return replace(
        config,
        init=InitConfig(),
        checkpoint=CheckpointConfig(),
        log=LogConfig(),
        data=DataConfig(document_mask=d.document_mask, eod_mask_loss=d.eod_mask_loss, eod=eod),
        model=replace(config.model, **softcaps),
        precision=PrecisionConfig(dtype="fp64"),
        moe=replace(
            moe,
            fp8_dispatch=False,
            bias_rate=bias_rate,
            capacity_factor=capacity,
            replay=None,
            record=None,
        ),
        train=replace(config.train, steps=steps, gbs_ramp=None, stop_after=0),
        optim=replace(
            o,
            warmup_steps=warmup,
            decay_steps=min(o.decay_steps, steps - warmup),
            eps=max(o.eps, MIN_EPS),
            implementation=implementation,
            skip_norm=0.0,
            clip=o.clip and min(max(o.clip, MIN_CLIP), MAX_CLIP),
            lr=max(o.lr, MIN_RATE),
            min_lr=max(o.min_lr, MIN_RATE),
        ),
        pipeline=pipeline,
    )


def features(c: Config, world: int) -> tuple:
    """Returns what sizes decide about what is computed and communicated, whatever they are."""
    m, p, t, r = c.model, c.parallel, c.train, c.recompute
    heads, kv = m.num_heads // p.tp, max(1, m.num_kv_heads // p.tp)  # of a tp rank
    _, inner = split_of(c)
    moe, dp = moe_layers(m), data_parallel(c, world)
    count = t.gbs // (t.mbs * dp)
    stages = p.pp * p.vpp
    latents = (m.q_lora_rank or 0) + m.kv_lora_rank + m.qk_rope_head_dim
    rows, layers = t.seq_len // p.cp * t.mbs, m.num_layers // stages  # of a cp rank, of a stage
    windowed = [window_of(m, i) is not None for i in range(m.num_layers)]
    muon = c.optim.name == "muon"
    wide = (m.ffn_hidden_size, m.expert_hidden_size, m.shared_ffn_hidden_size) if muon else ()
    return (
        (
            m.num_kv_heads == m.num_heads,
            m.num_kv_heads == 1,
            m.num_kv_heads < p.tp,
            heads > inner,
            kv > inner,
        ),
        (m.vocab_size % p.tp == 0, m.attention == "mla" and latents < m.hidden_size),
        (_reach(c), any(windowed), all(windowed)),
        (rows % p.tp, tuple(size > m.hidden_size for size in wide)),
        # a layer's matrices are four, and several rounds update them
        muon and 4 * layers > p.tp * dp,
        (
            m.num_experts > p.ep,
            m.top_k > 1,
            m.top_k < m.num_experts,
            m.top_k > m.num_experts // p.ep,
        ),
        (m.top_k > p.ep // p.ep_inner, m.top_k > p.ep),
        (
            m.num_groups > 1,
            m.top_groups > 1,
            m.top_groups < m.num_groups,
            m.num_experts > m.num_groups,
        ),
        (len(moe) > 0, len(moe) < m.num_layers, m.num_layers > 1, m.num_mtp_layers > 1),
        (
            t.mbs > 1,
            min(count, 2 * p.pp),
            count % p.pp,
            r.logit_tokens is None or r.logit_tokens < rows,
        ),
        r.logit_tokens is not None and rows % r.logit_tokens > 0,
        (m.num_layers % stages > 0 and c.pipeline.split == "even", min(r.group_layers, layers) > 1),
        layers > 1 and c.pipeline.layout is None,  # a listed layout keeps several by itself
        layers % min(r.group_layers, max(1, layers)) > 0,
        r.num_layers is None or r.num_layers * p.pp < m.num_layers,
    )


def _reach(c: Config) -> tuple[int, ...]:
    """Counts chunks before its own the rows of a chunk see under a window, and of the last one how
    few or many."""
    t, window, (outer, _) = c.train, c.model.attention_window, split_of(c)
    if window is None or window >= t.seq_len:
        return ()
    if outer == 1:
        return (min(window, 2),)
    chunk = t.seq_len // (2 * outer)
    chunks, rest = divmod(window - 1, chunk)
    return (min(window, 2), chunks, min(rest, 2), min(chunk - rest, 2))


def faults_of(config: Config, world: int) -> list[Fault]:
    """Returns why it cannot run; the files of the user's own run need not be there."""
    return run_checks(config, world, files=False) or pipeline_faults(config, world)


def shrink(config: Config, world: int, keep: Collection[str] = ()) -> Config:
    """Returns the smallest that every feature of a valid configuration fits into, one group after
    the other."""
    wanted = features(config, world)
    for candidates in GROUPS:
        for change in candidates(config, world):
            smaller = changed(
                config, {key: value for key, value in change.items() if key not in keep}
            )
            if features(smaller, world) == wanted and not faults_of(smaller, world):
                config = smaller
                break
    return config


def differing(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the keys in which two configurations differ, with both values; not those that only
    name files."""
    passive = ("init.", "checkpoint.", "log.", "data.")
    pairs = {
        key: (value_of(before, key), value_of(after, key))
        for key in leaves()
        if not key.startswith(passive)
    }
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _to(value: int, low: int, step: int = 1) -> list[int]:
    """Lists values from `low` up in steps, and finally the value itself."""
    return [*range(low, value, step), value]


def _one(key: str, low: int) -> Callable[[Config, int], Iterator[Change]]:
    """Returns the sizes of one knob, where it has any."""
    return lambda c, world: (
        {key: size} for size in _to(value_of(c, key) or 0, low) if value_of(c, key)
    )


def _heads(c: Config, world: int) -> Iterator[Change]:
    m = c.model
    dims = (
        {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
        if _mla(c)
        else {"head_dim": 8}
    )
    least: Change = {f"model.{name}": min(getattr(m, name), size) for name, size in dims.items()}
    for heads in _to(m.num_heads, c.parallel.tp, c.parallel.tp):
        for kv in divisors(heads):
            yield least | {"model.num_heads": heads, "model.num_kv_heads": kv}


def _hidden(c: Config, world: int) -> Iterator[Change]:
    """Yields smaller hidden sizes with latents to match, whose sizes decide which of them
    travel."""
    q, kv = c.model.q_lora_rank, c.model.kv_lora_rank
    for hidden in _to(c.model.hidden_size, 32, 16):
        for factor in (1, 3) if _mla(c) else ():
            q_rank = None if q is None else min(q, 8 * factor)
            yield {
                "model.hidden_size": hidden,
                "model.q_lora_rank": q_rank,
                "model.kv_lora_rank": min(kv, 6 * factor),
            }
        if not _mla(c):
            yield {"model.hidden_size": hidden}


def _mla(c: Config) -> bool:
    return c.model.attention == "mla"


def _experts(c: Config, world: int) -> Iterator[Change]:
    m, p = c.model, c.parallel
    # to fewer or more ranks
    some = sorted({min(m.top_k, size) for size in (2, 3, p.ep // p.ep_inner + 1, p.ep + 1)})
    for experts in _to(m.num_experts, p.ep, p.ep) if m.num_experts else ():
        for groups, top_k in product(divisors(experts), some):
            if experts <= min(m.num_experts - 1, 2 * top_k):  # so few choices may all be the same
                continue
            fewer = {"num_experts": experts, "num_groups": groups, "top_k": top_k, "top_groups": 2}
            yield {f"model.{name}": min(getattr(m, name), size) for name, size in fewer.items()}


def _tokens(c: Config, world: int) -> Iterator[Change]:
    """Yields lengths of the sequence, with what is counted in its tokens."""
    m, p, r, seq_len = c.model, c.parallel, c.recompute, c.train.seq_len
    least = 4 * p.cp * (p.tp if p.sp else 1)  # four rows on every rank
    for length in _to(seq_len, max(16, least)):
        change: Change = {"train.seq_len": length}
        if m.position == "learned":
            change["model.max_positions"] = min(m.max_positions, length + 8)
        change |= {"recompute.offload_min_bytes": 0} if r.offload else {}
        windows: Sequence[int | None] = [m.attention_window]
        if m.attention_window is not None and m.attention_window < seq_len:
            sizes = list(range(1, min(m.attention_window, length) + 1))
            windows = [*sizes[length // 3 - 1 :], *sizes[: length // 3 - 1]]
        for slices in (
            [None]
            if r.logit_tokens is None
            else sorted({min(r.logit_tokens, 3), min(r.logit_tokens, 4)})
        ):
            yield from (
                change | {"recompute.logit_tokens": slices, "model.attention_window": each}
                for each in windows
            )


def _layers(c: Config, world: int) -> Iterator[Change]:
    """Layers with everything that counts them; an uneven layout stays one."""
    m, r, layout = c.model, c.recompute, c.pipeline.layout
    counts: Iterable[int] = range(1, m.num_layers + 1)
    change: Change = {"recompute.group_layers": min(r.group_layers, 2)}
    if layout is not None:
        # the rest are multi-token prediction's
        held = [len(spec.layers) for spec in stage_specs(layout, m)]
        least = min(each for each in held if each)
        fewer = [each - (each > 0) - (each > least) for each in held]
        change["pipeline.layout"] = [each - less for each, less in zip(layout, fewer)]
        counts = [m.num_layers - sum(fewer)]
    if r.num_layers is not None:
        change["recompute.num_layers"] = 1
    if r.stage_layers is not None:
        change["recompute.stage_layers"] = [min(each, 1) for each in r.stage_layers]
    change |= {
        "model.first_k_dense": min(m.first_k_dense, 1),
        "model.moe_interval": min(m.moe_interval, 2),
    }
    named = _named(c)
    for count in counts:
        if m.moe_layers is not None:
            some = (
                range(count)
                if len(m.moe_layers) == m.num_layers
                else range(count // 2, max(1, count - 1))
            )
            change["model.moe_layers"] = list(some)
        # those at equal distances, the first and the last among them
        if m.window_layers is not None:
            places = [i * (m.num_layers - 1) // max(1, count - 1) for i in range(count)]
            change["model.window_layers"] = [
                i for i, place in enumerate(places) if place in m.window_layers
            ]
        fewer_layers = change | {"model.num_layers": count}
        if _named(changed(c, fewer_layers)) == named:
            yield fewer_layers


def _named(c: Config) -> list[set[tuple[bool, bool]]]:
    """Returns of every glob that may tell layers apart which parameters in and outside of layers it
    matches or not."""
    o = c.optim
    entries = [*o.freeze, *o.lr_scale, *o.decay_scale, *o.decay_exclude, *o.muon_exclude]
    globs = [glob for glob in (each.split()[-1] for each in entries) if re.search(r"[\d?[]", glob)]
    names = parameter_names(c) if globs else []
    return [
        {(name.startswith("layers."), fnmatch.fnmatch(name, glob)) for name in names}
        for glob in globs
    ]


def _batch(c: Config, world: int) -> Iterator[Change]:
    t, dp = c.train, data_parallel(c, world)
    mbs, most = min(t.mbs, 2), t.gbs // (t.mbs * dp)
    least = -(-2 * c.model.vocab_size // (mbs * dp * t.seq_len))  # every token is met twice
    for count in range(min(least, most), most + 1):
        yield {"train.mbs": mbs, "train.gbs": mbs * dp * count}


GROUPS = (
    _heads,
    _hidden,
    _one("model.ffn_hidden_size", 48),
    _one("model.moe_ffn_hidden_size", 24),
    _one("model.shared_ffn_hidden_size", 16),
    _one("model.vocab_size", 32),
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
# what is turned off, and what has no meaning without it; the first key gives the whole its name
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
    """A configuration without one thing."""

    change: str  # what is turned off, as overrides; "dp=1" where it is the ranks that are fewer
    config: Config  # without it; valid
    world: int  # ranks that remain; dp is as before


def ablations(config: Config, world: int) -> Iterator[Ablation]:
    """Lists what this configuration uses and could run without, one at a time; the mathematics
    stays."""
    if data_parallel(config, world) > 1:
        fewer = world // data_parallel(config, world)
        yield from _valid(
            "dp=1", _folded(changed(config, {"parallel.dp_replicate": 1}), fewer), fewer
        )
    for off in OFF:
        first, *_ = off
        change = {key: value for key, value in off.items() if value_of(config, key) != value}
        if first in change and not (first == "parallel.etp" and config.parallel.etp is None):
            size = value_of(config, first) if first in AXES else 1
            yield from _valid(
                override_text({first: off[first]}),
                _folded(changed(config, change), world // size),
                world // size,
            )


def _valid(change: str, config: Config, world: int) -> Iterator[Ablation]:
    if not faults_of(config, world):
        yield Ablation(change, config, world)


def _folded(config: Config, world: int) -> Config:
    """Keeps as many of the expert axes as fold into the ranks that are left."""
    p = config.parallel
    fold = world // p.pp
    etp = None if p.etp is None else gcd(p.etp, fold)
    ep = gcd(p.ep, fold // (etp or p.tp))
    return changed(
        config, {"parallel.etp": etp, "parallel.ep": ep, "parallel.ep_inner": gcd(p.ep_inner, ep)}
    )

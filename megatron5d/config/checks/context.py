"""Laws of context parallelism: what each method must divide, and where latents can be sent."""

from __future__ import annotations

from math import lcm

from megatron5d.config.checks.check import Law, divisors, multiples, nearest
from megatron5d.config.context_cost import (
    advice,
    head_features,
    latent_features,
    local_heads,
    split_of,
    splits_heads,
)
from megatron5d.config.schema import Config

_HEADS = ("parallel.cp_method", "parallel.cp", "parallel.cp_inner", "parallel.tp", "model.num_heads",
          "model.num_kv_heads")  # fmt: skip


def _two_level(c: Config) -> bool:
    return c.parallel.cp_method == "two_level"


def _tp_splits_heads(c: Config) -> bool:
    a, g, tp = c.model.num_heads, c.model.num_kv_heads, c.parallel.tp
    return a % tp == 0 and (g % tp == 0 or tp % g == 0)


def _sequence_cut(c: Config) -> int:
    """The number that must divide train.seq_len: zigzag makes two chunks per outer rank, sp divides rows by tp."""
    outer, inner = split_of(c)
    return lcm(inner * outer * (2 if outer > 1 else 1), c.parallel.cp * (c.parallel.tp if c.parallel.sp else 1))


def _cut_reason(c: Config) -> str:
    outer, _ = split_of(c)
    zigzag = "two chunks per rank of the ring, so that work is even" if outer > 1 else "one piece per rank"
    return (
        f"train.seq_len = {c.train.seq_len} is not divisible by {_sequence_cut(c)}: parallel.cp = {c.parallel.cp} with "
        f"parallel.cp_method = {c.parallel.cp_method} cuts {zigzag}"
        + (f", and parallel.sp each rank's rows by parallel.tp = {c.parallel.tp}" if c.parallel.sp else "")
    )


def _breaks_heads(c: Config) -> bool:
    _, inner = split_of(c)
    return inner > 1 and _tp_splits_heads(c) and not splits_heads(c, inner)


def _heads_reason(c: Config) -> str:
    (_, inner), (a, g) = split_of(c), local_heads(c)
    knob = "cp_inner" if _two_level(c) else "cp"
    return (
        f"parallel.cp_method = {c.parallel.cp_method} deals the heads of a tp rank, {a} for queries and {g} for keys "
        f"(model.num_heads = {c.model.num_heads}, num_kv_heads = {c.model.num_kv_heads}, parallel.tp = "
        f"{c.parallel.tp}), over parallel.{knob} = {inner} ranks: both must split or, keys, be repeated evenly"
    )


def _heads_fix(c: Config, world: int) -> str:
    if _two_level(c):
        legal = [n for n in divisors(c.parallel.cp) if splits_heads(c, n)]
        return f"parallel.cp_inner={nearest(c.parallel.cp_inner, legal)}"
    return advice(c)


def _latents_cost(c: Config) -> int:
    """Elements per token that are sent as latents."""
    return latent_features(c.model) * split_of(c)[1]


def _keys_cost(c: Config) -> int:
    """Elements per token that would be sent as keys and values."""
    return local_heads(c)[1] * head_features(c.model)


CONTEXT_LAWS = (
    Law(
        "cp-inner-needs-two-level",
        ("parallel.cp_inner", "parallel.cp_method"),
        lambda c, w: c.parallel.cp_inner > 1 and not _two_level(c),
        lambda c, w: (
            f"parallel.cp_inner = {c.parallel.cp_inner} says how many ranks exchange heads, and parallel.cp_method = "
            f"{c.parallel.cp_method} has no such groups"
        ),
        lambda c, w: "parallel.cp_inner=1, or parallel.cp_method=two_level",
    ),
    Law(
        "cp-inner-divides-cp",
        ("parallel.cp_inner", "parallel.cp", "parallel.cp_method"),
        lambda c, w: _two_level(c) and c.parallel.cp % c.parallel.cp_inner != 0,
        lambda c, w: f"parallel.cp_inner = {c.parallel.cp_inner} does not divide parallel.cp = {c.parallel.cp}",
        lambda c, w: f"parallel.cp_inner={nearest(c.parallel.cp_inner, divisors(c.parallel.cp))}",
    ),
    Law(
        "sequence-splits-over-cp",
        ("train.seq_len", "parallel.cp", "parallel.sp", "parallel.tp", "parallel.cp_method", "parallel.cp_inner"),
        lambda c, w: c.parallel.cp > 1 and c.train.seq_len % _sequence_cut(c) != 0,
        lambda c, w: _cut_reason(c),
        lambda c, w: f"train.seq_len={multiples(c.train.seq_len, _sequence_cut(c))}",
        needs=("cp-inner-divides-cp",),
    ),
    Law(
        "cp-splits-heads",
        _HEADS,
        lambda c, w: _breaks_heads(c),
        lambda c, w: _heads_reason(c),
        _heads_fix,
        needs=("cp-inner-divides-cp",),
    ),
    Law(
        "compress-needs-mla",
        ("parallel.cp_compress_kv", "model.attention"),
        lambda c, w: c.parallel.cp_compress_kv and c.model.attention != "mla",
        lambda c, w: (
            f"parallel.cp_compress_kv = true sends latents, and model.attention = {c.model.attention} has none"
        ),
        lambda c, w: "parallel.cp_compress_kv=false",
    ),
    Law(
        "compress-needs-blocks",
        ("parallel.cp_compress_kv", "parallel.cp_method"),
        lambda c, w: c.parallel.cp_compress_kv and c.parallel.cp_method == "allgather",
        lambda c, w: (
            "parallel.cp_compress_kv = true: parallel.cp_method = allgather bounds its peak by groups of heads, which "
            "latents do not have"
        ),
        lambda c, w: "parallel.cp_method=ring, or parallel.cp_compress_kv=false",
    ),
    Law(
        "compress-saves",
        ("parallel.cp_compress_kv", "model.kv_lora_rank", "model.qk_rope_head_dim", "model.qk_nope_head_dim",
         "model.v_head_dim", *_HEADS),
        lambda c, w: c.parallel.cp_compress_kv and c.parallel.cp > 1 and _latents_cost(c) >= _keys_cost(c),
        lambda c, w: (
            f"parallel.cp_compress_kv = true would send {_latents_cost(c)} elements a token where keys and values are "
            f"{_keys_cost(c)} (parallel.tp = {c.parallel.tp}, parallel.cp_method = {c.parallel.cp_method})"
        ),
        lambda c, w: "parallel.cp_compress_kv=false",
        needs=("compress-needs-mla", "cp-inner-divides-cp", "cp-splits-heads"),
    ),
)  # fmt: skip

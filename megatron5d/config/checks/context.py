"""Laws of context parallelism: what each method must divide, and where latents can be sent.

The elements that context parallelism sends in one attention layer, in closed form, and which method is best.

For each token of a rank, with a query heads and g key-value heads (at least one) of a tp rank, and d and dv features:

    kv = g·(d+dv)              keys and values, sent by ring and allgather (latents: r+dr instead)
    qo = a·(d+dv)              queries and outputs, sent by ulysses and two_level
    G  = max(g, inner)·(d+dv)  keys and values, sent by ulysses and two_level; repeated if heads are fewer than ranks

                forward                                              backward
ring            (cp-1)·kv                                            (cp-1)·kv, and (cp-1)·kv in fp32
allgather       the same                                             the same
ulysses         (qo + G)·(cp-1)/cp                                   the same
two_level       (qo + G)·(inner-1)/inner + (outer-1)·G               inner the same; outer as the ring, twice
latents         inner: qo·(inner-1)/inner + (inner-1)·(r+dr);        inner the same; outer as the ring, twice
                outer: (outer-1)·inner·(r+dr)

In the ring of two_level, a rank has `inner` times as many tokens of 1/inner of the heads. A ring makes fewer than
outer-1 hops where a window or documents hide the other blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, lcm

from megatron5d.config.checks.check import Law, divisors, multiples, nearest
from megatron5d.config.derived import split_of
from megatron5d.config.schema import ELEMENT_BYTES, Config, ModelConfig

GRAD_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}  # of gradients in the ring, which are summed in fp32
FLOPS_PER_BYTE = 8000.0  # of attention while a byte is sent between nodes: 400 TFLOP/s, 400 Gbit/s


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends in one layer's attention for one sequence."""

    inner: int = 0  # over cp_inner, forward; the backward is the same
    outer: int = 0  # over cp_outer, forward; the backward sends them again, and as many gradients

    def num_bytes(self, dtype: str) -> tuple[int, int]:
        """(over cp_inner, over cp_outer), forward and backward together."""
        value, grad = ELEMENT_BYTES[dtype], GRAD_BYTES[dtype]
        return self.inner * 2 * value, self.outer * (2 * value + grad)


def local_heads(c: Config) -> tuple[int, int]:
    """Query and key-value heads of one tp rank."""
    a, tp = c.model.num_heads, c.parallel.tp
    return a // tp, max(1, c.model.num_kv_heads // tp)


def head_features(model: ModelConfig) -> int:
    """Features of one head's key and value, d + dv."""
    if model.attention == "mla":
        return model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    return 2 * model.head_dim


def latent_features(model: ModelConfig) -> int:
    """Features of the latent from which all heads' keys and values are projected, r + dr."""
    return model.kv_lora_rank + model.qk_rope_head_dim


def traffic(c: Config) -> Traffic:
    """The elements that one layer's attention sends for one sequence; all divisions must be exact."""
    (outer, inner), (a, g) = split_of(c), local_heads(c)
    rows, width = c.train.seq_len // c.parallel.cp, head_features(c.model)
    exchanged = rows * a * width * (inner - 1) // inner
    if c.parallel.cp_compress_kv:
        latents = rows * latent_features(c.model)
        return Traffic(exchanged + (inner - 1) * latents, (outer - 1) * inner * latents)
    shared = rows * max(g, inner) * width
    return Traffic(exchanged + shared * (inner - 1) // inner, (outer - 1) * shared)


def splits_heads(c: Config, inner: int) -> bool:
    """Whether `inner` ranks can exchange heads: query heads divide, key-value heads divide or are repeated."""
    a, g = local_heads(c)
    return a % inner == 0 and (g % inner == 0 or inner % g == 0)


def hidden_from(c: Config, flops_per_byte: float = FLOPS_PER_BYTE) -> int:
    """The sequence length from which on the hops of a ring are hidden by attention; 0 without a ring.

    The bytes of a hop grow with s. The causal attention that overlaps with it takes (s/outer)²·(a/inner)·(d+dv) FLOP:
    half of all pairs, two FLOP for each feature of a key and of a value.
    """
    (outer, inner), (a, _) = split_of(c), local_heads(c)
    if outer == 1:
        return 0
    hop_bytes = traffic(c).outer / (outer - 1) * ELEMENT_BYTES[c.precision.dtype]
    flops = (c.train.seq_len / outer) ** 2 * a / inner * head_features(c.model)
    return ceil(c.train.seq_len * hop_bytes * flops_per_byte / flops)


@dataclass(frozen=True)
class Choice:
    """A method of context parallelism, and the bytes that a rank sends in one layer, forward and backward."""

    method: str  # parallel.cp_method; allgather sends what ring does
    cp_inner: int  # parallel.cp_inner; 1 but for two_level
    inside: int  # over links inside a node
    between: int  # over links between nodes
    hidden_from: int  # train.seq_len from which on hops are hidden by attention; 0 = no hops


def choices(c: Config, ranks_per_node: int = 8) -> list[Choice]:
    """All methods whose exchange of heads is possible and stays inside a node, the best first.

    The best one sends least between nodes, then least inside a node. Between nodes only blocks of the ring are sent,
    which overlap with the attention of the previous block.

    Args:
        c: gives model, tp, cp, sequence and precision.
        ranks_per_node: ranks that share fast links; tp uses the first of them.
    """
    cp, room = c.parallel.cp, max(1, ranks_per_node // c.parallel.tp)
    compressed = c.parallel.cp_compress_kv and c.model.attention == "mla"
    plain, found = replace(c.parallel, cp_compress_kv=compressed), []
    for inner in (n for n in range(1, cp + 1) if cp % n == 0 and n <= room and splits_heads(c, n)):
        method = "ring" if inner == 1 else "ulysses" if inner == cp else "two_level"
        cp_inner = inner if method == "two_level" else 1
        spread = replace(c, parallel=replace(plain, cp_method=method, cp_inner=cp_inner))
        inside, between = traffic(spread).num_bytes(c.precision.dtype)
        if cp <= room:  # no link is slow: all bytes are alike
            inside, between = inside + between, 0
        found.append(Choice(method, cp_inner, inside, between, hidden_from(spread)))
    return sorted(found, key=lambda choice: (choice.between, choice.inside))


def recommended(c: Config, ranks_per_node: int = 8) -> tuple[str, int]:
    """(parallel.cp_method, parallel.cp_inner) of the best of `choices` without parallel.cp_compress_kv."""
    best = choices(replace(c, parallel=replace(c.parallel, cp_compress_kv=False)), ranks_per_node)[0]
    return best.method, best.cp_inner


def advice(c: Config) -> str:
    """The overrides of `recommended`."""
    method, inner = recommended(c)
    return f"parallel.cp_method={method}" + (f" parallel.cp_inner={inner}" if method == "two_level" else "")


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

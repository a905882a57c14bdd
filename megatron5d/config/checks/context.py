"""Checks of context parallelism, and the closed form of what each method sends.

Elements that one attention layer sends for each token of a rank, with a query heads and g key-value
heads (at least one) of a tp rank, and d and dv features per head:

    kv = g·(d+dv)              keys and values, sent by ring and allgather (latents: r+dr instead)
    qo = a·(d+dv)              queries and outputs, sent by ulysses and two_level
    G  = max(g, inner)·(d+dv)  keys and values, sent by ulysses and two_level; heads are repeated if
                               they are fewer than ranks

                forward                                   backward
ring            (cp-1)·kv                                 (cp-1)·kv, and (cp-1)·kv in fp32
allgather       the same                                  the same
ulysses         (qo + G)·(cp-1)/cp                        the same
two_level       (qo + G)·(inner-1)/inner + (outer-1)·G    inner the same; outer as the ring, twice
latents         inner: qo·(inner-1)/inner                 inner the same; outer as the ring, twice
                + (inner-1)·(r+dr); outer:
                (outer-1)·inner·(r+dr)

In the ring of two_level, a rank has `inner` times more tokens of 1/inner of the heads. A ring
makes fewer than outer-1 hops if a window or documents hide the other blocks.
"""

from dataclasses import dataclass, replace
from math import ceil, lcm

from megatron5d.config.checks.check import (
    Faults,
    check,
    divides,
    divisors,
    fault,
    nearest,
    seq_len_fix,
)
from megatron5d.config.derived import split_of
from megatron5d.config.schema import ELEMENT_BYTES, Config, ModelConfig

GRAD_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}  # of gradients in the ring, which are summed in fp32
FLOPS_PER_BYTE = 8000.0  # of attention while a byte is sent between nodes: 400 TFLOP/s, 400 Gbit/s


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends in one layer's attention for one sequence."""

    inner: int = 0  # over cp_inner, forward; the backward sends the same number
    # over cp_outer, forward; the backward sends them again, and their gradients
    outer: int = 0

    def num_bytes(self, dtype: str) -> tuple[int, int]:
        """Bytes (over cp_inner, over cp_outer), forward and backward together."""
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
    """Elements that one layer's attention sends for one sequence; all divisions must be exact."""
    (outer, inner), (a, g) = split_of(c), local_heads(c)
    rows, width = c.train.seq_len // c.parallel.cp, head_features(c.model)
    exchanged = rows * a * width * (inner - 1) // inner
    if c.parallel.cp_compress_kv:
        latents = rows * latent_features(c.model)
        return Traffic(exchanged + (inner - 1) * latents, (outer - 1) * inner * latents)
    keys = rows * max(g, inner) * width
    return Traffic(exchanged + keys * (inner - 1) // inner, (outer - 1) * keys)


def splits_heads(c: Config, inner: int) -> bool:
    """Whether `inner` ranks can exchange heads, of which key-value heads may be repeated."""
    a, g = local_heads(c)
    return a % inner == 0 and (g % inner == 0 or inner % g == 0)


def hidden_from(c: Config) -> int:
    """Sequence length from which attention hides the hops of a ring; 0 without a ring.

    The bytes of a hop grow with s. The causal attention that overlaps with it takes
    (s/outer)²·(a/inner)·(d+dv) FLOPs: half of all pairs, two FLOPs for each feature of a key and of
    a value.
    """
    (outer, inner), (a, _) = split_of(c), local_heads(c)
    if outer == 1:
        return 0
    hop_bytes = traffic(c).outer / (outer - 1) * ELEMENT_BYTES[c.precision.dtype]
    flops = (c.train.seq_len / outer) ** 2 * a / inner * head_features(c.model)
    return ceil(c.train.seq_len * hop_bytes * FLOPS_PER_BYTE / flops)


@dataclass(frozen=True)
class Choice:
    """A method of context parallelism, and the bytes that a rank sends in one layer and step."""

    method: str  # parallel.cp_method; allgather sends as much as ring
    cp_inner: int  # parallel.cp_inner; 1 but for two_level
    inside: int  # over links inside a node, forward and backward
    between: int  # over links between nodes, forward and backward
    hidden_from: int  # train.seq_len from which attention hides the hops; 0 = no hops


def choices(c: Config, ranks_per_node: int = 8) -> list[Choice]:
    """All methods whose exchange of heads is possible inside a node, the best first.

    The best one sends least between nodes, then least inside a node. Only blocks of the ring are
    sent between nodes, which overlap with the attention of the previous block.

    Args:
        c: gives model, tp, cp, sequence and precision.
        ranks_per_node: ranks that share fast links; tp uses the first of them.
    """
    cp, cp_per_node = c.parallel.cp, max(1, ranks_per_node // c.parallel.tp)
    compressed = c.parallel.cp_compress_kv and c.model.attention == "mla"
    result = []
    for inner in divisors(cp):
        if inner > cp_per_node or not splits_heads(c, inner):
            continue
        method = "ring" if inner == 1 else "ulysses" if inner == cp else "two_level"
        cp_inner = inner if method == "two_level" else 1
        layout = replace(c.parallel, cp_method=method, cp_inner=cp_inner, cp_compress_kv=compressed)
        candidate = replace(c, parallel=layout)
        inside, between = traffic(candidate).num_bytes(c.precision.dtype)
        if cp <= cp_per_node:  # no link is slow, so all bytes cost the same
            inside, between = inside + between, 0
        result.append(Choice(method, cp_inner, inside, between, hidden_from(candidate)))
    return sorted(result, key=lambda choice: (choice.between, choice.inside))


def recommended(c: Config, ranks_per_node: int = 8) -> tuple[str, int]:
    """(parallel.cp_method, parallel.cp_inner) that is best without parallel.cp_compress_kv."""
    plain = replace(c, parallel=replace(c.parallel, cp_compress_kv=False))
    best = choices(plain, ranks_per_node)[0]
    return best.method, best.cp_inner


def advice(c: Config) -> str:
    """Overrides of `recommended`."""
    method, inner = recommended(c)
    override = f"parallel.cp_method={method}"
    return f"{override} parallel.cp_inner={inner}" if method == "two_level" else override


_SPLIT_KEYS = ("parallel.cp_method", "parallel.cp", "parallel.cp_inner", "parallel.tp")
_HEAD_KEYS = (*_SPLIT_KEYS, "model.num_heads", "model.num_kv_heads")
INNER_OF_CP = replace(
    divides("parallel.cp_inner", "parallel.cp", "cp-inner-divides-cp"),
    needs=("cp-inner-needs-two-level",),
)


@check("train.seq_len", *_SPLIT_KEYS, "parallel.sp", needs=["cp-inner-divides-cp"])
def sequence_splits_over_cp(c: Config, world: int) -> Faults:
    p, length, (outer, inner) = c.parallel, c.train.seq_len, split_of(c)
    # zigzag gives each rank of a ring two chunks, so that work is even; sp divides its rows by tp
    chunks = 2 if outer > 1 else 1
    multiple = lcm(inner * outer * chunks, p.cp * (p.tp if p.sp else 1))
    if p.cp > 1 and length % multiple:
        rows = f", whose rows parallel.sp divides by parallel.tp={p.tp}" if p.sp else ""
        yield fault(
            f"parallel.cp={p.cp} with parallel.cp_method={p.cp_method} requires train.seq_len "
            f"divisible by {multiple}, for {chunks} chunk{'s' if chunks > 1 else ''} per rank"
            f"{rows} (got {length})",
            seq_len_fix(c, multiple),
        )


@check(*_HEAD_KEYS, needs=["cp-inner-divides-cp"])
def cp_splits_heads(c: Config, world: int) -> Faults:
    m, p, (_, inner), (a, g) = c.model, c.parallel, split_of(c), local_heads(c)
    splits_over_tp = m.num_heads % p.tp == 0 and (
        m.num_kv_heads % p.tp == 0 or p.tp % m.num_kv_heads == 0
    )
    if inner > 1 and splits_over_tp and not splits_heads(c, inner):
        two_level = p.cp_method == "two_level"
        legal = [n for n in divisors(p.cp) if splits_heads(c, n)]
        yield fault(
            f"parallel.cp_method={p.cp_method} requires heads that split evenly over "
            f"parallel.{'cp_inner' if two_level else 'cp'}={inner} ranks, or key heads that are "
            f"repeated evenly (got {a} query and {g} key heads of a tp rank: "
            f"model.num_heads={m.num_heads}, num_kv_heads={m.num_kv_heads}, parallel.tp={p.tp})",
            f"parallel.cp_inner={nearest(p.cp_inner, legal)}" if two_level else advice(c),
        )


@check(
    "parallel.cp_compress_kv",
    "model.kv_lora_rank",
    "model.qk_rope_head_dim",
    "model.qk_nope_head_dim",
    "model.v_head_dim",
    *_HEAD_KEYS,
    needs=["compress-needs-mla", "cp-inner-divides-cp", "cp-splits-heads"],
)
def compress_saves(c: Config, world: int) -> Faults:
    p = c.parallel
    latents = latent_features(c.model) * split_of(c)[1]  # elements per token
    keys = local_heads(c)[1] * head_features(c.model)
    if p.cp_compress_kv and p.cp > 1 and latents >= keys:
        yield fault(
            f"parallel.cp_compress_kv=true requires fewer elements per token than the {keys} of "
            f"keys and values (got {latents}, with parallel.tp={p.tp}, "
            f"parallel.cp_method={p.cp_method})",
            "parallel.cp_compress_kv=false",
        )

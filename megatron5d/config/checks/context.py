"""Checks of context parallelism: what each method must divide, where latents can be sent, and which
method sends least.

The elements that are sent in one attention layer follow in closed form. For each token of a rank,
with a query heads and g key-value heads (at least one) of a tp rank, and d and dv features:

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

In the ring of two_level, a rank has `inner` times as many tokens of 1/inner of the heads. A ring
makes fewer than outer-1 hops where a window or documents hide the other blocks.
"""

from dataclasses import dataclass, replace
from math import ceil, lcm

from megatron5d.config.checks.check import Faults, check, divisors, fault, nearest, seq_len_fix
from megatron5d.config.derived import split_of
from megatron5d.config.schema import ELEMENT_BYTES, Config, ModelConfig

GRAD_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}  # of gradients in the ring, which are summed in fp32
FLOPS_PER_BYTE = 8000.0  # of attention while a byte is sent between nodes: 400 TFLOP/s, 400 Gbit/s


@dataclass(frozen=True)
class Traffic:
    """Elements that one rank sends in one layer's attention for one sequence."""

    inner: int = 0  # over cp_inner, forward; the backward is the same
    # over cp_outer, forward; the backward sends them once more, and as many gradients
    outer: int = 0

    def num_bytes(self, dtype: str) -> tuple[int, int]:
        """Returns (over cp_inner, over cp_outer), forward and backward together."""
        value, grad = ELEMENT_BYTES[dtype], GRAD_BYTES[dtype]
        return self.inner * 2 * value, self.outer * (2 * value + grad)


def local_heads(c: Config) -> tuple[int, int]:
    """Returns the query and key-value heads of one tp rank."""
    a, tp = c.model.num_heads, c.parallel.tp
    return a // tp, max(1, c.model.num_kv_heads // tp)


def head_features(model: ModelConfig) -> int:
    """Returns the features of one head's key and value, d + dv."""
    if model.attention == "mla":
        return model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
    return 2 * model.head_dim


def latent_features(model: ModelConfig) -> int:
    """Returns the features of the latent from which all heads' keys and values are projected, r +
    dr."""
    return model.kv_lora_rank + model.qk_rope_head_dim


def traffic(c: Config) -> Traffic:
    """Returns the elements that one layer's attention sends for one sequence; all divisions must be
    exact."""
    (outer, inner), (a, g) = split_of(c), local_heads(c)
    rows, width = c.train.seq_len // c.parallel.cp, head_features(c.model)
    exchanged = rows * a * width * (inner - 1) // inner
    if c.parallel.cp_compress_kv:
        latents = rows * latent_features(c.model)
        return Traffic(exchanged + (inner - 1) * latents, (outer - 1) * inner * latents)
    shared = rows * max(g, inner) * width
    return Traffic(exchanged + shared * (inner - 1) // inner, (outer - 1) * shared)


def splits_heads(c: Config, inner: int) -> bool:
    """Returns whether `inner` ranks can exchange heads: query heads divide, key-value heads divide
    or are repeated."""
    a, g = local_heads(c)
    return a % inner == 0 and (g % inner == 0 or inner % g == 0)


def hidden_from(c: Config, flops_per_byte: float = FLOPS_PER_BYTE) -> int:
    """Returns the sequence length from which on the hops of a ring are hidden by attention; 0
    without a ring.

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
    """A method of context parallelism, and the bytes that a rank sends in one layer, forward and
    backward."""

    method: str  # parallel.cp_method; allgather sends what ring does
    cp_inner: int  # parallel.cp_inner; 1 but for two_level
    inside: int  # over links inside a node
    between: int  # over links between nodes
    hidden_from: int  # train.seq_len from which on hops are hidden by attention; 0 = no hops


def choices(c: Config, ranks_per_node: int = 8) -> list[Choice]:
    """Returns all methods whose exchange of heads is possible and stays inside a node, the best
    first.

    The best one sends least between nodes, then least inside a node. Between nodes only blocks of
    the ring are sent, which overlap with the attention of the previous block.

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
    """Returns (parallel.cp_method, parallel.cp_inner) of the best of `choices` without
    parallel.cp_compress_kv."""
    best = choices(replace(c, parallel=replace(c.parallel, cp_compress_kv=False)), ranks_per_node)[
        0
    ]
    return best.method, best.cp_inner


def advice(c: Config) -> str:
    """Returns the overrides of `recommended`."""
    method, inner = recommended(c)
    return f"parallel.cp_method={method}" + (
        f" parallel.cp_inner={inner}" if method == "two_level" else ""
    )


_HEADS = (
    "parallel.cp_method",
    "parallel.cp",
    "parallel.cp_inner",
    "parallel.tp",
    "model.num_heads",
    "model.num_kv_heads",
)


@check("parallel.cp_inner", "parallel.cp_method")
def cp_inner_needs_two_level(c: Config, world: int) -> Faults:
    if c.parallel.cp_inner > 1 and c.parallel.cp_method != "two_level":
        yield fault(
            f"parallel.cp_inner = {c.parallel.cp_inner} says how many ranks exchange heads, and parallel.cp_method = "
            f"{c.parallel.cp_method} has no such groups",
            "parallel.cp_inner=1, or parallel.cp_method=two_level",
        )


@check("parallel.cp_inner", "parallel.cp", "parallel.cp_method")
def cp_inner_divides_cp(c: Config, world: int) -> Faults:
    inner, cp = c.parallel.cp_inner, c.parallel.cp
    if c.parallel.cp_method == "two_level" and cp % inner:
        yield fault(
            f"parallel.cp_inner = {inner} does not divide parallel.cp = {cp}",
            f"parallel.cp_inner={nearest(inner, divisors(cp))}",
        )


@check(
    "train.seq_len",
    "parallel.cp",
    "parallel.sp",
    "parallel.tp",
    "parallel.cp_method",
    "parallel.cp_inner",
    needs=["cp-inner-divides-cp"],
)
def sequence_splits_over_cp(c: Config, world: int) -> Faults:
    p, length, (outer, inner) = c.parallel, c.train.seq_len, split_of(c)
    # zigzag makes two chunks per outer rank, sp divides each rank's rows by tp
    cut = lcm(inner * outer * (2 if outer > 1 else 1), p.cp * (p.tp if p.sp else 1))
    if p.cp > 1 and length % cut:
        zigzag = (
            "two chunks per rank of the ring, so that work is even"
            if outer > 1
            else "one piece per rank"
        )
        rows = f", and parallel.sp each rank's rows by parallel.tp = {p.tp}" if p.sp else ""
        yield fault(
            f"train.seq_len = {length} is not divisible by {cut}: parallel.cp = {p.cp} with parallel.cp_method = "
            f"{p.cp_method} cuts {zigzag}{rows}",
            seq_len_fix(c, cut),
        )


@check(*_HEADS, needs=["cp-inner-divides-cp"])
def cp_splits_heads(c: Config, world: int) -> Faults:
    m, p, (_, inner), (a, g) = c.model, c.parallel, split_of(c), local_heads(c)
    split_over_tp = m.num_heads % p.tp == 0 and (
        m.num_kv_heads % p.tp == 0 or p.tp % m.num_kv_heads == 0
    )
    if inner > 1 and split_over_tp and not splits_heads(c, inner):
        two_level = p.cp_method == "two_level"
        legal = [n for n in divisors(p.cp) if splits_heads(c, n)]
        yield fault(
            f"parallel.cp_method = {p.cp_method} deals the heads of a tp rank, {a} for queries and {g} for keys "
            f"(model.num_heads = {m.num_heads}, num_kv_heads = {m.num_kv_heads}, parallel.tp = {p.tp}), over "
            f"parallel.{'cp_inner' if two_level else 'cp'} = {inner} ranks: both must split or, keys, be repeated "
            "evenly",
            f"parallel.cp_inner={nearest(p.cp_inner, legal)}" if two_level else advice(c),
        )


@check("parallel.cp_compress_kv", "model.attention")
def compress_needs_mla(c: Config, world: int) -> Faults:
    if c.parallel.cp_compress_kv and c.model.attention != "mla":
        yield fault(
            f"parallel.cp_compress_kv = true sends latents, and model.attention = {c.model.attention} has none",
            "parallel.cp_compress_kv=false",
        )


@check("parallel.cp_compress_kv", "parallel.cp_method")
def compress_needs_blocks(c: Config, world: int) -> Faults:
    if c.parallel.cp_compress_kv and c.parallel.cp_method == "allgather":
        yield fault(
            "parallel.cp_compress_kv = true: parallel.cp_method = allgather bounds its peak by groups of heads, which "
            "latents do not have",
            "parallel.cp_method=ring, or parallel.cp_compress_kv=false",
        )


@check(
    "parallel.cp_compress_kv",
    "model.kv_lora_rank",
    "model.qk_rope_head_dim",
    "model.qk_nope_head_dim",
    "model.v_head_dim",
    *_HEADS,
    needs=["compress-needs-mla", "cp-inner-divides-cp", "cp-splits-heads"],
)
def compress_saves(c: Config, world: int) -> Faults:
    p = c.parallel
    latents = latent_features(c.model) * split_of(c)[1]  # elements a token
    keys = local_heads(c)[1] * head_features(c.model)
    if p.cp_compress_kv and p.cp > 1 and latents >= keys:
        yield fault(
            f"parallel.cp_compress_kv = true would send {latents} elements a token where keys and values are {keys} "
            f"(parallel.tp = {p.tp}, parallel.cp_method = {p.cp_method})",
            "parallel.cp_compress_kv=false",
        )

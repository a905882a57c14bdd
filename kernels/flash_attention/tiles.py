"""How attention kernels reach q, k, v: by descriptors for the copy engine (Hopper and later), or by
pointers."""

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import HALF_DTYPES, TensorDescriptor, jit, next_power_of_2, tl
from megatron5d.kernels.flash_attention.mask import needs_spans
from megatron5d.kernels.flash_attention.plain import AttentionRule

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
POINTERS, ROWS, HEADS = 0, 1, 2
COUNTS = [
    "num_queries",
    "num_keys",
    "num_batch",
    "num_heads",
    "group",
    "padded",
    "window",
    "span_stride",
]
"""Arguments that one binary takes at any value; Triton would compile others for 1 and for multiples of 16, and always
does for what is in a tuple."""


def takes(q: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Says whether the kernels know this dtype, these head dims and this scale."""
    dims = (q.shape[-1], v.shape[-1])
    return (
        q.dtype in HALF_DTYPES
        and all(16 <= d <= MAX_HEAD_DIM and d % 8 == 0 for d in dims)
        and rule.scale > 0
    )


def aligned(x: Tensor) -> Tensor:
    """Returns x, or a copy if the copy engine cannot read it: it takes neighbours in memory and
    16-byte strides.

    `contiguous` would not do: it gives back what begins anywhere, and any stride of a dim of size
    1.
    """
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def reach(tensors: list[Tensor], described: bool) -> int:
    """Returns how tiles of these tensors are loaded: by POINTERS, by descriptors of ROWS, or by
    descriptors of HEADS.

    A descriptor of rows sees `[s, everything else]`: the tile is two-dimensional and enters an MMA
    straight from shared memory. It cannot cut at a head's edge, so head dims must be powers of two,
    and tokens must be the outermost dim.
    """
    if not described:
        return POINTERS
    outermost = all(
        x.stride(0) >= x.stride(1) * x.shape[1] and x.stride(0) >= x.stride(2) * x.shape[2]
        for x in tensors
    )
    return (
        ROWS
        if outermost and all(x.shape[3] == next_power_of_2(x.shape[3]) for x in tensors)
        else HEADS
    )


def sources(tensors: list[Tensor], blocks: list[int], mode: int) -> tuple[tuple, tuple]:
    """Makes the arguments with which a kernel loads `[block, head dim]` tiles: descriptors or
    pointers, layouts."""
    if mode == POINTERS:
        return tuple(tensors), tuple((*x.stride()[:3], x.shape[0], x.shape[3]) for x in tensors)
    # 0: not read
    layouts = tuple((0, *(x.stride()[1:3] if mode == ROWS else (0, 0)), 0, 0) for x in tensors)
    return tuple(_descriptor(x, block, mode) for x, block in zip(tensors, blocks)), layouts


def _descriptor(x: Tensor, block: int, mode: int) -> TensorDescriptor:
    s, b, heads, d = x.shape
    if mode == ROWS:
        width = (b - 1) * x.stride(1) + (heads - 1) * x.stride(2) + d
        return TensorDescriptor(x, [s, width], [x.stride(0), 1], [block, d])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [block, 1, 1, next_power_of_2(d)])


@jit
def tile(
    source, layout, first, batch, head, BLOCK: tl.constexpr, D: tl.constexpr, REACH: tl.constexpr
):
    """Loads tokens [first, first + BLOCK) of one batch entry and head, `[BLOCK, D]`, zeros past
    every edge."""
    if REACH == 1:
        loaded = source.load([first, batch * layout[1] + head * layout[2]])
    elif REACH == 2:
        loaded = source.load([first, batch, head, 0]).reshape(BLOCK, D)
    else:
        token = first + tl.arange(0, BLOCK)
        column = tl.arange(0, D)
        start = batch.to(tl.int64) * layout[1] + head.to(tl.int64) * layout[2]
        live = (token < layout[3])[:, None] & (column < layout[4])[None, :]
        loaded = tl.load(
            source + start + token.to(tl.int64)[:, None] * layout[0] + column[None, :],
            live,
            other=0.0,
        )
    return loaded


@jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in units of log2: times `scale` (which holds log2 e), or through the soft-cap (scale
    as it is)."""
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = (
            softcap * 1.4426950408889634 * (2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0)
        )
    else:
        scores = scores * scale
    return scores


def kernel_scale(rule: AttentionRule) -> float:
    """Returns the factor that `capped` expects."""
    return rule.scale if rule.softcap else rule.scale * LOG2_E


def tuning_key(d: int, dv: int, rule: AttentionRule) -> dict[str, int]:
    """Returns the shape keys of the tables: head dims that are cut and masks at two edges take more
    registers.

    `split` is 1 for the two edges of a window, 2 for those that depend on documents or positions.
    """
    cut = d != next_power_of_2(d) or dv != next_power_of_2(dv) or d != dv
    split = 2 if needs_spans(rule) else int(rule.window is not None)
    return {"head_dim": max(d, dv), "cut": int(cut), "split": split}


def flags(rule: AttentionRule) -> dict:
    """Returns the parts of a rule that select code in the kernels."""
    return {
        "CAUSAL": rule.causal,
        "HAS_WINDOW": rule.window is not None,
        "HAS_SOFTCAP": rule.softcap != 0.0,
        "HAS_DOCUMENTS": rule.documents is not None,
        "HAS_Q_POSITIONS": rule.q_positions is not None,
        "HAS_K_POSITIONS": rule.k_positions is not None,
        "HAS_SPANS": needs_spans(rule),
    }


def mask_inputs(rule: AttentionRule, unused: Tensor) -> tuple[Tensor, ...]:
    """Positions and documents of queries and keys in the order of the kernels; `unused` where the
    rule has none."""
    k_documents = rule.documents if rule.k_documents is None else rule.k_documents
    given = (rule.q_positions, rule.k_positions, rule.documents, k_documents)
    return tuple(unused if x is None else x.to(torch.int32).contiguous() for x in given)

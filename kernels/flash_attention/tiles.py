"""How attention kernels load tiles of q, k, v: by descriptors for the copy engine (Hopper and
later), or by pointers."""

import torch
from torch import Tensor

from megatron5d.kernels.dispatch import HALF_DTYPES, TensorDescriptor, jit, next_power_of_2, tl
from megatron5d.kernels.flash_attention.mask import Flags
from megatron5d.kernels.flash_attention.plain import AttentionRule

LOG2_E = 1.4426950408889634
MAX_HEAD_DIM = 256
POINTERS, ROWS, HEADS = 0, 1, 2  # values of REACH
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
"""Arguments that one binary takes at any value.

Triton would compile others for 1 and for multiples of 16, and always does so for those in tuples.
"""


def supports(q: Tensor, v: Tensor, rule: AttentionRule) -> bool:
    """Whether the kernels support this dtype, these head dims and this scale."""
    dims = (q.shape[-1], v.shape[-1])
    return (
        q.dtype in HALF_DTYPES
        and all(16 <= d <= MAX_HEAD_DIM and d % 8 == 0 for d in dims)
        and rule.scale > 0
    )


def aligned(x: Tensor) -> Tensor:
    """x, or a copy if the copy engine cannot read it: it needs 16-byte strides and a unit stride.

    `contiguous` would not do: it accepts any start address, and any stride of a dim of size 1.
    """
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    fits = fits and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def reach(tensors: list[Tensor], described: bool) -> int:
    """How tiles of these tensors are loaded: by POINTERS, or by descriptors of ROWS or of HEADS.

    A descriptor of rows sees `[s, everything else]`: the tile is two-dimensional and enters an MMA
    straight from shared memory. It cannot cut at a head's edge, so head dims must be powers of two,
    and tokens must be the outermost dim.
    """
    if not described:
        return POINTERS
    in_rows = all(
        x.stride(0) >= max(x.stride(1) * x.shape[1], x.stride(2) * x.shape[2])
        and x.shape[3] == next_power_of_2(x.shape[3])
        for x in tensors
    )
    return ROWS if in_rows else HEADS


def sources(tensors: list[Tensor], blocks: list[int], mode: int) -> list:
    """Kernel arguments to load `[block, head dim]` tiles: each tensor's source, and all layouts.

    A source is a pointer, or a descriptor, which a launch does not accept inside a tuple.
    """
    if mode == POINTERS:
        return [*tensors, tuple((*x.stride()[:3], x.shape[0], x.shape[3]) for x in tensors)]
    # kernels do not read the zeros
    layouts = tuple((0, *(x.stride()[1:3] if mode == ROWS else (0, 0)), 0, 0) for x in tensors)
    return [*(_descriptor(x, block, mode) for x, block in zip(tensors, blocks)), layouts]


def _descriptor(x: Tensor, block: int, mode: int) -> TensorDescriptor:
    s, b, heads, d = x.shape
    if mode == ROWS:
        width = (b - 1) * x.stride(1) + (heads - 1) * x.stride(2) + d
        return TensorDescriptor(x, [s, width], [x.stride(0), 1], [block, d])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [block, 1, 1, next_power_of_2(d)])


@jit
def load_tile(tiles, first, batch, head, BLOCK: tl.constexpr, D: tl.constexpr, REACH: tl.constexpr):
    """Loads tokens [first, first + BLOCK) of one batch entry and head, zero past every edge.

    `tiles` is (source, layout), from `sources`. Result: `[BLOCK, D]`.
    """
    source, layout = tiles
    if REACH == 1:
        tile = source.load([first, batch * layout[1] + head * layout[2]])
    elif REACH == 2:
        tile = source.load([first, batch, head, 0]).reshape(BLOCK, D)
    else:
        token = first + tl.arange(0, BLOCK)
        column = tl.arange(0, D)
        start = batch.to(tl.int64) * layout[1] + head.to(tl.int64) * layout[2]
        live = (token < layout[3])[:, None] & (column < layout[4])[None, :]
        at = source + start + token.to(tl.int64)[:, None] * layout[0] + column[None, :]
        tile = tl.load(at, live, other=0.0)
    return tile


@jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores in units of log2: times `scale`, or through the soft-cap (`kernel_scale`)."""
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1
        tanh = 2.0 * tl.sigmoid(2.0 * scores * scale / softcap) - 1.0
        scores = softcap * 1.4426950408889634 * tanh
    else:
        scores = scores * scale
    return scores


def kernel_scale(rule: AttentionRule) -> float:
    """Factor that `capped` expects: it includes log2 e, unless there is a soft-cap."""
    return rule.scale if rule.softcap else rule.scale * LOG2_E


def tuning_key(d: int, dv: int, flags: Flags) -> dict[str, int]:
    """Shape keys of the tables: cut head dims and masks at two edges take more registers.

    `split` is 1 for the two edges of a window, 2 for those that depend on documents or positions.
    """
    cut = d != next_power_of_2(d) or dv != next_power_of_2(dv) or d != dv
    split = 2 if flags.spans else int(flags.window)
    return {"head_dim": max(d, dv), "cut": int(cut), "split": split}

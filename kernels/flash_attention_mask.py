"""Which keys a block of queries sees: elementwise in a kernel, and as ranges of blocks worth visiting."""

import torch
from torch import Tensor

from kernels.flash_attention_plain import AttentionRule
from kernels.language import jit, tl


@jit
def visible(
    q_at,
    k_at,
    q_document,
    k_document,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr,
):
    """The mask of a tile; positions and documents broadcast against each other, in either orientation."""
    distance = q_at - k_at
    seen = distance >= 0 if CAUSAL else distance == distance
    if HAS_WINDOW:
        seen &= tl.abs(distance) < window
    if HAS_DOCUMENTS:
        seen &= q_document == k_document
    return seen


@jit
def positions(pointer, index, count, GIVEN: tl.constexpr):
    """Positions of the tokens at `index`: read where they are given, the index itself where not."""
    return tl.load(pointer + index, index < count, other=0) if GIVEN else index


@jit
def documents(pointer, batch, index, count, BEYOND: tl.constexpr, GIVEN: tl.constexpr):
    """Documents of the tokens at `index`; past the end all belong to document `BEYOND`, unlike any."""
    if GIVEN:
        index = tl.load(pointer + batch.to(tl.int64) * count + index, index < count, other=BEYOND)
    return index


def _extremes(values: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Least and greatest value in each block of the last dim."""
    short = -values.shape[-1] % block
    padded = torch.cat((values, values[..., -1:].expand(*values.shape[:-1], short)), dim=-1) if short else values
    blocks = padded.unflatten(-1, (-1, block))
    return blocks.amin(-1), blocks.amax(-1)


def _meeting_blocks(rule: AttentionRule, s: int, t: int, block_m: int, block_n: int, device) -> Tensor:
    """`[b|1, query blocks, key blocks]`: which blocks may hold a visible pair; never false where one does."""
    q_at = torch.arange(s, device=device) if rule.q_positions is None else rule.q_positions
    k_at = torch.arange(t, device=device) if rule.k_positions is None else rule.k_positions
    q_low, q_high = (x[None, :, None] for x in _extremes(q_at, block_m))
    k_low, k_high = (x[None, None, :] for x in _extremes(k_at, block_n))
    meet = k_low <= q_high if rule.causal else torch.ones_like(k_low <= q_high)
    if rule.window is not None:
        meet = meet & (q_low - k_high < rule.window) & (k_low - q_high < rule.window)
    if rule.documents is not None:
        k_documents = rule.documents if rule.k_documents is None else rule.k_documents
        q_first, q_last = (x[:, :, None] for x in _extremes(rule.documents, block_m))
        k_first, k_last = (x[:, None, :] for x in _extremes(k_documents, block_n))
        meet = meet & (q_first <= k_last) & (k_first <= q_last)
    return meet


def _span(meet: Tensor, block: int, limit: int) -> Tensor:
    """`[b|1, blocks, 2]` int32: first and one-past-last token of the blocks that meet; (0, 0) where none does."""
    count = meet.shape[-1]
    found = meet.any(-1)
    first = meet.int().argmax(-1)
    last = count - meet.flip(-1).int().argmax(-1)
    span = torch.stack((first * block, (last * block).clamp(max=limit)), dim=-1)
    return span.where(found[..., None], 0).int().contiguous()


def needs_spans(rule: AttentionRule) -> bool:
    """Whether the blocks to visit depend on data (documents, positions), not on indices alone."""
    return rule.documents is not None or rule.q_positions is not None or rule.k_positions is not None


def key_spans(rule: AttentionRule, s: int, t: int, block_m: int, block_n: int, device) -> Tensor:
    """For each block of queries the range of keys to visit, `[b|1, query blocks, 2]` int32, made on the device."""
    return _span(_meeting_blocks(rule, s, t, block_m, block_n, device), block_n, t)


def query_spans(rule: AttentionRule, s: int, t: int, block_m: int, block_n: int, device) -> Tensor:
    """For each block of keys the range of queries to visit, `[b|1, key blocks, 2]` int32, made on the device."""
    return _span(_meeting_blocks(rule, s, t, block_m, block_n, device).mT, block_m, s)

"""Cross-entropy over a vocabulary that may be cut into column shards.

With m = max_j z_j and l = sum_j exp(z_j - m) over the full row:
    loss = log l + m - z_label
Each shard contributes its maximum m_i, sum l_i and target logit; they merge by
    m = max m_i,  l = sum l_i exp(m_i - m),  z_label = sum of target logits
    dloss/dz_j = p_j (1 + 2 c log-sum-exp) - [j = label],  p_j = exp(z_j - m) / l
where c log-sum-exp² is the z-loss that keeps the normalizer near one (Chowdhery et al.,
arXiv:2204.02311, sec. 5). Shards are merged as in Megatron-LM (Shoeybi et al., arXiv:1909.08053,
sec. 3).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron5d.kernels import dispatch, tuning
from megatron5d.kernels.dispatch import (
    FirstOrderFunction,
    cdiv,
    jit,
    load_float32,
    rows_of,
    statistics_dtype,
    tl,
)

_ELEMENTS_IN_CACHE = 1 << 18  # of logits, in a block of rows of the plain path


def _target_columns(
    labels: Tensor, vocab_start: int, num_valid_columns: int
) -> tuple[Tensor, Tensor]:
    """Each label's column in this shard (0 if another shard has it), and whether it has one."""
    column = labels - vocab_start
    is_local = (column >= 0) & (column < num_valid_columns)
    return column.where(is_local, 0), is_local


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Blocks of rows that fit into a core's cache."""
    rows = max(1, _ELEMENTS_IN_CACHE // max(1, logits.shape[1]))
    return (slice(lo, lo + rows) for lo in range(0, logits.shape[0], rows))


def vocab_statistics_reference(
    logits: Tensor, labels: Tensor, vocab_start: int, num_valid_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one shard's statistics in plain torch, in blocks of rows, which saves a float32 copy
    of all logits."""
    wide = statistics_dtype(logits.dtype)
    rows = logits.shape[0]
    row_max = torch.full((rows,), float("-inf"), dtype=wide, device=logits.device)
    row_sum = torch.zeros_like(row_max)
    target = torch.zeros_like(row_max)
    if num_valid_columns <= 0:
        return row_max, row_sum, target
    column, is_local = _target_columns(labels, vocab_start, num_valid_columns)
    for block in _row_blocks(logits):
        z = logits[block, :num_valid_columns].to(wide)
        row_max[block] = z.amax(-1)
        target[block] = z.gather(-1, column[block, None]).squeeze(-1).where(is_local[block], 0)
        # z is a copy only if the logits are narrower.
        subtract = z.sub if logits.dtype == wide else z.sub_
        row_sum[block] = subtract(row_max[block, None]).exp_().sum(-1)
    return row_max, row_sum, target


def vocab_cross_entropy_backward_reference(
    logits: Tensor,
    labels: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    dloss: Tensor,
    vocab_start: int,
    num_valid_columns: int,
    *,
    z_coef: float = 0.0,
) -> Tensor:
    """Computes one shard's gradient in plain torch and writes it over `logits`."""
    wide = row_max.dtype
    num_valid_columns = max(num_valid_columns, 0)
    column, is_local = _target_columns(labels, vocab_start, num_valid_columns)
    scale = dloss.to(wide).where(labels >= 0, 0)
    softmax_scale = scale / row_sum * (1 + 2 * z_coef * (row_max + row_sum.log()))
    for block in _row_blocks(logits):
        d = logits[block, :num_valid_columns].to(wide)  # the logits themselves if they are as wide
        d.sub_(row_max[block, None]).exp_().mul_(softmax_scale[block, None])
        if num_valid_columns:
            d.scatter_add_(
                -1, column[block, None], -scale[block].where(is_local[block], 0)[:, None]
            )
        if logits.dtype != wide:
            logits[block, :num_valid_columns] = d
    logits[:, num_valid_columns:] = 0
    return logits


@jit
def _exp(x):
    """e to the x, in two instructions where `tl.exp` takes five; subnormal results become 0."""
    return tl.exp2(x * 1.4426950408889634)


@jit
def _update_lanes(z, lane_max, lane_sum):
    """Adds logits `[lanes, n]` to the maximum and sum of each lane: one exponential per logit, one
    more per lane."""
    new_max = tl.maximum(lane_max, tl.max(z, 1))
    # A lane that has seen only padding has maximum -inf, and -inf - -inf is not a number.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, lane_sum * _exp(lane_max - base) + tl.sum(_exp(z - base[:, None]), 1)


@jit
def _statistics_kernel(
    logits_ptr,
    labels_ptr,
    max_ptr,
    sum_ptr,
    target_ptr,
    stride,
    vocab_start,
    num_valid_columns,
    BLOCK: tl.constexpr,
):
    """Processes one row.

    A lane is the 16 bytes that a thread loads at once, so its maximum and sum need no other thread.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    LANES: tl.constexpr = BLOCK // VECTOR
    offset = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full((LANES,), float("-inf"), tl.float32)
    lane_sum = tl.zeros((LANES,), tl.float32)
    end = num_valid_columns // BLOCK * BLOCK  # of blocks that need no mask
    for start in range(0, end, BLOCK):
        z = tl.load(logits_ptr + start + offset).to(tl.float32)
        lane_max, lane_sum = _update_lanes(z, lane_max, lane_sum)
    if end < num_valid_columns:
        column = end + offset
        z = tl.load(logits_ptr + column, column < num_valid_columns, other=float("-inf"))
        lane_max, lane_sum = _update_lanes(z.to(tl.float32), lane_max, lane_sum)
    row_max = tl.max(lane_max, 0)
    row_sum = tl.sum(lane_sum * _exp(lane_max - row_max), 0)
    column = tl.load(labels_ptr + row) - vocab_start
    is_local = (column >= 0) & (column < num_valid_columns)
    target = load_float32(logits_ptr + column, is_local)
    tl.store(max_ptr + row, row_max)
    tl.store(sum_ptr + row, row_sum)
    tl.store(target_ptr + row, target)


@jit
def _backward_kernel(
    logits_ptr,
    labels_ptr,
    max_ptr,
    sum_ptr,
    dloss_ptr,
    stride,
    vocab_start,
    num_valid_columns,
    width,
    z_coef,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    row_max = tl.load(max_ptr + row)
    row_sum = tl.load(sum_ptr + row)
    dloss = tl.where(label < 0, 0.0, tl.load(dloss_ptr + row).to(tl.float32))
    softmax_scale = dloss / row_sum * (1.0 + 2.0 * z_coef * (row_max + tl.log(row_sum)))
    target = label - vocab_start
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits_ptr + column, column < num_valid_columns, other=float("-inf")).to(tl.float32)
    d = _exp(z - row_max) * softmax_scale
    d = tl.where((column == target) & (column < num_valid_columns), d - dloss, d)
    tl.store(logits_ptr + column, d, column < width)


def vocab_statistics(
    logits: Tensor, labels: Tensor, vocab_start: int, num_valid_columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes row maximum, sum of exp(z - maximum) and target logit of one vocabulary shard.

    Args:
        logits: `[n, v/tp]`, any floating dtype.
        labels: `[n]` int64, global vocabulary ids; the target logit of a label of another shard,
            or of a negative one, is 0.
        vocab_start: global id of this shard's first column.
        num_valid_columns: leading columns of this shard that are not padding; padding is never
            read.

    Returns:
        Maximum (-inf where no column is valid), sum, target logit: `[n]` float32 (float64 for
        float64).
    """
    if not dispatch.runs_triton(logits) or num_valid_columns <= 0:
        return vocab_statistics_reference(logits, labels, vocab_start, num_valid_columns)
    rows = rows_of(logits)
    statistics = torch.empty(3, rows.shape[0], dtype=torch.float32, device=rows.device)
    sizes = (rows.stride(0), vocab_start, num_valid_columns)
    config = tuning.select("vocab_statistics", rows.device)
    _statistics_kernel[(rows.shape[0],)](rows, labels.contiguous(), *statistics, *sizes, **config)
    row_max, row_sum, target = statistics
    return row_max, row_sum, target


def vocab_cross_entropy_backward(
    logits: Tensor,
    labels: Tensor,
    row_max: Tensor,
    row_sum: Tensor,
    dloss: Tensor,
    vocab_start: int,
    num_valid_columns: int,
    *,
    z_coef: float = 0.0,
) -> Tensor:
    """Writes the gradient of the token losses by one shard's logits over these logits.

    Args:
        logits: `[n, v/tp]`, overwritten.
        labels: `[n]` int64, global vocabulary ids; a token with a negative label has no gradient.
        row_max: `[n]` float32 or float64, merged over all shards.
        row_sum: `[n]`, sum of exp(z - row_max), merged over all shards.
        dloss: `[n]`, the gradient of each token's loss.
        vocab_start: global id of this shard's first column.
        num_valid_columns: as in `vocab_statistics`; padding columns get gradient zero.
        z_coef: coefficient of the squared log-sum-exp added to each token's loss.

    Returns:
        `logits`, now holding the gradient.
    """
    row = (labels.contiguous(), row_max.contiguous(), row_sum.contiguous(), dloss.contiguous())
    if not dispatch.runs_triton(logits) or logits.stride(-1) != 1:
        return vocab_cross_entropy_backward_reference(
            logits, *row, vocab_start, num_valid_columns, z_coef=z_coef
        )
    config = tuning.select("vocab_cross_entropy_backward", logits.device)
    grid = (logits.shape[0], cdiv(logits.shape[1], config["BLOCK"]))
    sizes = (logits.stride(0), vocab_start, num_valid_columns, logits.shape[1])
    _backward_kernel[grid](logits, *row, *sizes, z_coef, **config)
    return logits


def cross_entropy_reference(
    logits: Tensor, labels: Tensor, *, num_valid_columns: int | None = None, z_coef: float = 0.0
) -> Tensor:
    """Computes the token losses of a full vocabulary in plain torch, by autograd."""
    z = logits[:, :num_valid_columns].to(statistics_dtype(logits.dtype))
    is_target = labels >= 0
    lse = z.logsumexp(-1)
    target = z.gather(-1, labels.where(is_target, 0)[:, None]).squeeze(-1)
    return (lse - target + z_coef * lse.square()).where(is_target, 0)


class _CrossEntropy(FirstOrderFunction):
    @staticmethod
    def forward(ctx, logits, labels, num_valid_columns, z_coef):
        row_max, row_sum, target = vocab_statistics(logits, labels, 0, num_valid_columns)
        ctx.save_for_backward(logits, labels, row_max, row_sum)
        ctx.settings = (num_valid_columns, z_coef)
        lse = row_max + row_sum.log()
        return (lse - target + z_coef * lse.square()).where(labels >= 0, 0)

    @staticmethod
    def backward(ctx, dloss):
        logits, labels, row_max, row_sum = ctx.saved_tensors
        num_valid_columns, z_coef = ctx.settings
        inputs = (logits.clone(), labels, row_max, row_sum, dloss, 0, num_valid_columns)
        return vocab_cross_entropy_backward(*inputs, z_coef=z_coef), None, None, None


def cross_entropy(
    logits: Tensor, labels: Tensor, *, num_valid_columns: int | None = None, z_coef: float = 0.0
) -> Tensor:
    """Computes each token's cross-entropy over a full vocabulary, differentiable.

    Args:
        logits: `[n, v]`, any floating dtype.
        labels: `[n]` int64; a token with a negative label has loss and gradient zero.
        num_valid_columns: further columns are padding; None = all are valid.
        z_coef: coefficient of the squared log-sum-exp added to each token's loss.

    Returns:
        `[n]` float32 (float64 for float64).
    """
    columns = logits.shape[-1] if num_valid_columns is None else num_valid_columns
    return _CrossEntropy.apply(logits, labels, columns, z_coef)

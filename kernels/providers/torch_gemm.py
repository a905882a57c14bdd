"""GEMMs in FP8 and of experts by torch: cuBLAS and CUTLASS.

FP8: one scale per matrix on any GPU with FP8. On Hopper alone, a scale per 1×128 group of one
operand, and per group or 128×128 block of the other. cuBLAS reads the scales of groups with the
rows innermost, so they are copied once: 1/32 of the operand's bytes. Its sums are promoted to
float32 (`use_fast_accum=False`).

Experts: the forward and the input gradient. torch would round the weight gradient to bfloat16
before adding it to the main gradient, and scales FP8 operands by rows alone; Triton computes both.
"""

import torch
from torch import Tensor

from megatron5d.kernels import dispatch
from megatron5d.kernels.choice import Fp8Request, GroupedRequest
from megatron5d.kernels.dispatch import cdiv, jit, tl

GROUP = 128
E5M2 = torch.float8_e5m2
GROUPED_DTYPES, FP8_OUT_DTYPES = (torch.bfloat16,), (torch.bfloat16, torch.float32)


def missing() -> str | None:
    return None if torch.version.cuda else "this build of torch has no CUDA"


def supports(request: Fp8Request | GroupedRequest, deterministic: bool) -> bool:
    if isinstance(request, GroupedRequest):
        aligned = request.n % 8 == request.k % 8 == 0
        return request.capability // 10 in (9, 10) and request.dtype in GROUPED_DTYPES and aligned
    m, n, k = request.sizes
    both_e5m2 = request.dtypes == (E5M2, E5M2)
    if n % 16 or k % 16 or both_e5m2 or request.out_dtype not in FP8_OUT_DTYPES:
        return False
    if request.rows == (0, 0):
        return request.capability >= 89
    # rows of scales must begin 16 bytes apart
    aligned = all(
        (size if rows == 1 else cdiv(k, GROUP)) % 4 == 0
        for rows, size in zip(request.rows, (m, n))
        if rows
    )
    return request.capability == 90 and aligned and request.rows in ((1, 1), (1, GROUP), (GROUP, 1))


def _scales(scales: Tensor, rows: int) -> Tensor:
    return scales.t().contiguous().t() if rows == 1 else scales.contiguous()


def fp8_matmul(
    values: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    rows: tuple[int, int],
    out_dtype: torch.dtype,
    into: Tensor | None,
    accumulate: bool,
) -> Tensor:
    """Computes `a bᵀ`, or adds it to `into`, or writes it there; arguments as in `Fp8Request`."""
    (a, b), (a_scales, b_scales) = values, map(_scales, scales, rows)
    operands = (a, b.t(), a_scales, b_scales.t())
    if into is not None and not accumulate:
        return torch._scaled_mm(*operands, out_dtype=out_dtype, use_fast_accum=False, out=into)
    out_dtype = out_dtype if into is None else dispatch.statistics_dtype(out_dtype)
    y = torch._scaled_mm(*operands, out_dtype=out_dtype, use_fast_accum=False)
    return y if into is None else into.add_(y)


@jit(do_not_specialize=["rows"])
def _clear_kernel(
    y_ptr, offsets_ptr, num_experts, rows, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    first = tl.load(offsets_ptr + num_experts).to(tl.int32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(0) * ROWS + ROWS <= first:
        return
    at = row.to(tl.int64)[:, None] * n + column[None, :]
    live = ((row >= first) & (row < rows))[:, None] & (column < n)[None, :]
    tl.store(y_ptr + at, tl.zeros((ROWS, COLUMNS), y_ptr.dtype.element_ty), live)


def clear_padding(y: Tensor, offsets: Tensor) -> Tensor:
    """Zeroes the rows past the last expert's, in place: torch leaves them uninitialized."""
    rows, n = y.shape
    if dispatch.runs_triton(y):
        grid = (cdiv(rows, 16), cdiv(n, 1024))
        _clear_kernel[grid](y, offsets, len(offsets) - 1, rows, n, ROWS=16, COLUMNS=1024)
        return y
    return y.masked_fill_((torch.arange(rows, device=y.device) >= offsets[-1])[:, None], 0)


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Computes `y[r] = W[e] x[r]` as `kernels.gemm.grouped_matmul`, for `[E, n, k]` of any
    layout."""
    y = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:].int())
    return clear_padding(y, offsets)

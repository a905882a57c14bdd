"""Quantisation to 8-bit floats with one scale per tensor, per 1×128 group of a row, or per 128×128 block.

value ≈ scale · q with scale = amax / largest finite q (448 for e4m3, 57344 for e5m2), so the largest value of each
group meets the largest number exactly (Micikevicius et al., arXiv:2209.05433, sec. 3; groups: DeepSeek-V3,
arXiv:2412.19437, sec. 3.3.2). A product contracts the grouped dim, so a tensor that enters two products needs both
orientations: they are made in one pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import dispatch, tuning
from kernels.dispatch import rows_of
from kernels.language import cdiv, jit, tl

GROUP = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Quantized:
    """Values in 8 bits and what to multiply them with.

    Args:
        values: `[rows, columns]` float8.
        scales: float32; `[rows, ceil(columns/128)]` for rows_per_scale 1, `[ceil(rows/128), ceil(columns/128)]` for
            128,
            `[1, 1]` for 0.
        rows_per_scale: 1 (a scale for each 1×128 group), 128 (for each 128×128 block) or 0 (one for the tensor).
    """

    values: Tensor
    scales: Tensor
    rows_per_scale: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`[rows, columns]` in a wide dtype."""
        wide = self.values.to(torch.float32)
        if self.rows_per_scale == 0:
            return (wide * self.scales).to(dtype)
        scales = self.scales.repeat_interleave(self.rows_per_scale, 0)[: wide.shape[0]]
        return (wide * scales.repeat_interleave(GROUP, 1)[:, : wide.shape[1]]).to(dtype)


def _scales(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """amax / largest, and 1 for a group of zeros, so that nothing is divided by zero."""
    return torch.where(amax > 0, amax / torch.finfo(dtype).max, 1.0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def quantize_tensor(x: Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """One scale for the whole tensor.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        values, and scales `[1, 1]`.
    """
    wide = x.float()
    scale = _scales(wide.abs().amax().reshape(1, 1) if x.numel() else wide.new_zeros(1, 1), dtype)
    return Quantized(_cast(wide / scale, dtype), scale, 0)


def quantize_reference(x: Tensor, rows_per_scale: int, dtype: torch.dtype = E4M3) -> Quantized:
    """Groups of 1×128 (rows_per_scale 1) or blocks of 128×128 in plain torch."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -columns % GROUP, 0, -rows % rows_per_scale))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, rows_per_scale))  # [R, rows_per_scale, C, 128]
    scales = _scales(blocks.abs().amax((1, 3)), dtype)
    values = _cast(blocks / scales[:, None, :, None], dtype).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return Quantized(values.contiguous(), scales.contiguous(), rows_per_scale)


@jit
def quantized(x, amax, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """A tile over its scales (`amax` broadcasts), saturated; and the scales."""
    scale = tl.where(amax > 0.0, amax / LARGEST, 1.0)
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST).to(DTYPE), scale


@jit
def _quantize_kernel(
    x_ptr,
    values_ptr,
    scales_ptr,
    turned_ptr,
    turned_scales_ptr,
    rows,
    columns,
    x_stride,
    row_groups,
    column_groups,
    BLOCKS: tl.constexpr,
    TURNED: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One 128×128 tile: quantised by rows (or as a block), and its transpose quantised by the tile's columns."""
    row_group, column_group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = row_group * GROUP + tl.arange(0, GROUP)
    column = column_group * GROUP + tl.arange(0, GROUP)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], live, other=0.0).to(tl.float32)
    size = tl.abs(x)
    at = row[:, None] * columns + column[None, :]
    turned_at = column[None, :] * rows + row[:, None]
    DTYPE: tl.constexpr = values_ptr.dtype.element_ty
    if BLOCKS:
        amax = tl.max(tl.max(size, 1), 0)
        values, scale = quantized(x, amax, LARGEST, DTYPE)
        tl.store(values_ptr + at, values, live)
        tl.store(scales_ptr + row_group * column_groups + column_group, scale)
        if TURNED:
            tl.store(turned_ptr + turned_at, values, live)
            tl.store(turned_scales_ptr + column_group * row_groups + row_group, scale)
    else:
        values, scale = quantized(x, tl.max(size, 1)[:, None], LARGEST, DTYPE)
        tl.store(values_ptr + at, values, live)
        tl.store(scales_ptr + row[:, None] * column_groups + column_group, scale, (row < rows)[:, None])
        if TURNED:
            values, scale = quantized(x, tl.max(size, 0)[None, :], LARGEST, DTYPE)
            tl.store(turned_ptr + turned_at, values, live)
            tl.store(turned_scales_ptr + column[None, :] * row_groups + row_group, scale, (column < columns)[None, :])


def _launch(x: Tensor, rows_per_scale: int, dtype: torch.dtype, turned: bool) -> tuple[Quantized, Quantized | None]:
    x = rows_of(x)
    rows, columns = x.shape
    row_groups, column_groups = cdiv(rows, GROUP), cdiv(columns, GROUP)
    blocks = rows_per_scale == GROUP
    values = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(row_groups if blocks else rows, column_groups, dtype=torch.float32, device=x.device)
    turned_values, turned_scales = values, scales
    if turned:
        turned_values = torch.empty(columns, rows, dtype=dtype, device=x.device)
        turned_shape = (column_groups if blocks else columns, row_groups)
        turned_scales = torch.empty(turned_shape, dtype=torch.float32, device=x.device)
    outputs = (values, scales, turned_values, turned_scales)
    sizes = (rows, columns, x.stride(0), row_groups, column_groups)
    flags = {"BLOCKS": blocks, "TURNED": turned, "LARGEST": torch.finfo(dtype).max, "GROUP": GROUP}
    config = tuning.select("fp8_quantize", x.device)
    _quantize_kernel[(row_groups, column_groups)](x, *outputs, *sizes, **flags, **config)
    quantized_x = Quantized(values, scales, rows_per_scale)
    return quantized_x, Quantized(turned_values, turned_scales, rows_per_scale) if turned else None


def quantize_rows(x: Tensor, dtype: torch.dtype = E4M3) -> Quantized:
    """One scale for each group of 128 neighbours in a row: activations and gradients.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        values `[rows, columns]`, scales `[rows, ceil(columns/128)]`.
    """
    return _launch(x, 1, dtype, False)[0] if dispatch.runs_triton(x) else quantize_reference(x, 1, dtype)


def quantize_rows_both_ways(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Quantized, Quantized]:
    """`quantize_rows` of x and of its transpose, reading x once.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        x with scales `[rows, ceil(columns/128)]`, and xᵀ `[columns, rows]` with scales `[columns, ceil(rows/128)]`.
    """
    if dispatch.runs_triton(x):
        straight, turned = _launch(x, 1, dtype, True)
        assert turned is not None
        return straight, turned
    return quantize_reference(x, 1, dtype), quantize_reference(x.t(), 1, dtype)


def quantize_blocks(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Quantized, Quantized]:
    """One scale for each 128×128 block, of x and of its transpose (the same numbers): weights.

    Args:
        x: `[rows, columns]`, any floating dtype.
        dtype: float8_e4m3fn or float8_e5m2.

    Returns:
        x with scales `[ceil(rows/128), ceil(columns/128)]`, and xᵀ with those scales transposed.
    """
    if dispatch.runs_triton(x):
        straight, turned = _launch(x, GROUP, dtype, True)
        assert turned is not None
        return straight, turned
    straight = quantize_reference(x, GROUP, dtype)
    turned = Quantized(straight.values.t().contiguous(), straight.scales.t().contiguous(), GROUP)
    return straight, turned

"""Activations that exist in FP8 alone, the FP8 codec of the MoE dispatch, and the FP8 copies of
weights.

The result of SwiGLU or a norm that only FP8 GEMMs read is never written in its wide dtype
(kernels/fp8/norm_swiglu.py). Autograd sees an `Fp8Tensor` with the shape and dtype of the wide
result, which gets a gradient like any tensor.

The codec encodes rows of activations as bytes to send them over the network: half the bytes of
bfloat16. A row becomes its values in e4m3, in groups of 128 whose scales are powers of two, and one
byte per group with the exponent of the scale. A blockwise GEMM with such scales quantises the row
to the same numbers, so nothing is lost where the experts are multiplied that way. Source:
DeepSeek-V3 (arXiv:2412.19437), section 3.3.3.

Ranks quantise their flat slices of a weight to the same numbers. A weight, or a stack of them
(experts), is divided into blocks of 128×128. Each rank finds the largest magnitude of each block in
its slice; the maximum over ranks is that of the whole weight. So the quantised slices are slices of
the quantised weight (data_parallel/fp8_all_gather.py gathers them). A `Band` is the part of a slice
in some adjacent block rows. Where its first and last row are not whole, zeros fill them, which
change no maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron5d.kernels import activation_backward, norm_backward
from megatron5d.kernels.dispatch import FirstOrderFunction, runs_triton
from megatron5d.kernels.fp8.norm_swiglu import (
    norm_quantized,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from megatron5d.kernels.fp8.quantize import (
    E4M3,
    GROUP,
    Quantized,
    cast_scaled,
    magnitude_of,
    quantize_rows,
)
from megatron5d.kernels.fp8.transpose import transpose_values
from megatron5d.topology.shard_spec import spec_of, state_of

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)


class Fp8Tensor(Tensor):
    """A tensor `[..., features]` whose elements are FP8 values with scales: the operand of an FP8
    GEMM.

    It can be detached and viewed with other leading dims. Any other operation raises, so nothing
    reads it by mistake.

    Args:
        qdata: `[..., features]` in FP8.
        scales: `[..., c]` float32, those of 1×128 groups.
        dtype: that autograd sees.
    """

    qdata: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, qdata: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        made = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=dtype, device=qdata.device)
        made.qdata, made.scales = qdata, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["qdata", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], dtype: torch.dtype, size, stride
    ) -> Fp8Tensor:
        return Fp8Tensor(inner["qdata"], inner["scales"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        x = next(each for each in args if isinstance(each, Fp8Tensor))
        qdata = x.qdata.view(args[1] if len(args) > 1 else x.shape) if func in _VIEWS else None
        if qdata is None or qdata.shape[-1] != x.shape[-1]:
            raise RuntimeError(f"{func} on an Fp8Tensor {tuple(x.shape)}: only FP8 GEMMs read it")
        return Fp8Tensor(qdata, x.scales.view(*qdata.shape[:-1], x.scales.shape[-1]), x.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Tensor({tuple(self.shape)}, {self.dtype})"


def _fp8_tensor(q: Quantized, shape: torch.Size, dtype: torch.dtype) -> Fp8Tensor:
    return Fp8Tensor(q.values.view(shape), q.scales.view(*shape[:-1], q.scales.shape[-1]), dtype)


class Turned(NamedTuple):
    """A weight gradient's operand, transposed already: values `[features, G·128]`, scales
    `[features, G]`."""

    values: Tensor
    scales: Tensor


class SwigluFp8(FirstOrderFunction):
    """`activate` for SwiGLU, perhaps with weights of rows, as an Fp8Tensor in 1×128 groups of
    e4m3.

    With `grad_in_fp8` the gradient is one too where a kernel makes it, and its values carry their
    transpose (`turned`).
    """

    @staticmethod
    def forward(ctx, gate_up, weights, powers_of_two: bool, overwrite: bool, grad_in_fp8: bool):
        ctx.overwrite, ctx.powers_of_two, ctx.grad_in_fp8 = overwrite, powers_of_two, grad_in_fp8
        ctx.save_for_backward(gate_up, weights)
        shape = torch.Size((*gate_up.shape[:-1], gate_up.shape[-1] // 2))
        q = swiglu_quantized(gate_up, weights=weights, powers_of_two=powers_of_two)
        return _fp8_tensor(q, shape, gate_up.dtype)

    @staticmethod
    def backward(ctx, dy):
        gate_up, weights = ctx.saved_tensors
        if not (ctx.grad_in_fp8 and runs_triton(gate_up) and dy.shape[-1] % GROUP == 0):
            return (
                *activation_backward(dy, gate_up, "swiglu", weights, overwrite=ctx.overwrite),
                None,
                None,
                None,
            )
        q, turned = swiglu_backward_quantized(dy, gate_up, powers_of_two=ctx.powers_of_two)
        grad = _fp8_tensor(q, gate_up.shape, gate_up.dtype)
        grad.qdata.turned = Turned(turned.values, turned.scales)  # type: ignore[attr-defined]
        return grad, None, None, None, None


class NormFp8(FirstOrderFunction):
    """`add_rms_norm`, or with `centered` `add_layer_norm`, of x alone: the norm as such an
    Fp8Tensor, and x."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps: float, centered: bool, powers_of_two: bool, settings):
        options = {"centered": centered, "powers_of_two": powers_of_two, "settings": settings}
        q, statistics = norm_quantized(x, weight, bias, eps, **options)
        ctx.eps, ctx.centered, ctx.settings = eps, centered, settings
        ctx.save_for_backward(x, weight, bias, *statistics)
        ctx.set_materialize_grads(False)
        return _fp8_tensor(q, x.shape, x.dtype), x

    @staticmethod
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None, None, None, None, None
        x, weight, bias, *statistics = ctx.saved_tensors
        inputs = (dy, x, weight, bias, ctx.eps, statistics, dx, ctx.settings)
        return *norm_backward(*inputs, centered=ctx.centered), None, None, None, None


_MANTISSA_BITS = 23  # of float32; the bits above them are the exponent


class Fp8DispatchCodec:
    """Encodes rows `[n, h]` as uint8 `[n, h + ceil(h/128)]`."""

    def encode(self, rows: Tensor) -> Tensor:
        """Encodes `[n, h]` of any floating dtype as bytes."""
        q = quantize_rows(rows, powers_of_two=True)
        exponents = (q.scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        return torch.cat((q.values.view(torch.uint8), exponents), 1)

    def decode(self, encoded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decodes bytes to `[n, h]` in `dtype`."""
        groups = -(-encoded.shape[1] // (GROUP + 1))  # h + ceil(h/128) bytes hold as many groups
        values, exponents = encoded.split([encoded.shape[1] - groups, groups], 1)
        scales = (exponents.to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
        return Quantized(values.contiguous().view(E4M3), scales, 1).dequantize(dtype)


_CHUNK = 1 << 22  # elements quantised at a time, so that float32 temporaries take some tens of MB


class QuantizedPair:
    """A quantised weight `[out, in]` and its transpose `[in, out]`, perhaps stacked by expert.

    Args:
        transposed: its transpose; None = made from `plain` when first read.
        is_gathered: `plain` is a view of what ZeRO-3 has gathered.
    """

    def __init__(
        self, plain: Quantized, transposed: Quantized | None = None, *, is_gathered: bool = False
    ) -> None:
        self.plain, self._transposed, self.is_gathered = plain, transposed, is_gathered
        self.made_from: tuple[int, int] | None = None  # `_version_of` the weight

    @property
    def transposed(self) -> Quantized:
        """The transpose, with which input gradients are computed."""
        if self._transposed is None:
            values, scales = transpose_values(self.plain.values), self.plain.scales.mT.contiguous()
            self._transposed = Quantized(values, scales, self.plain.rows_per_scale)
        return self._transposed

    @property
    def has_transposed(self) -> bool:
        """Whether the transpose has been made."""
        return self._transposed is not None

    def forget_transposed(self) -> None:
        """Drops the transpose; it is made again when it is read."""
        self._transposed = None

    @property
    def parts(self) -> list[Tensor]:
        """Values and scales of both."""
        return [
            part for each in (self.plain, self.transposed) for part in (each.values, each.scales)
        ]


def _version_of(weight: Tensor) -> tuple[int, int]:
    """Returns what changes when a weight is changed through torch."""
    return weight.data_ptr(), weight._version


def quantized_weight(weight: Tensor, make: Callable[[], QuantizedPair]) -> QuantizedPair:
    """Returns a weight's FP8 copies, made at the first use after a change and kept on the
    parameter.

    A change through the parameter itself is noticed. Code that writes its memory otherwise
    (optimiser, gathering) must call `forget_copies`.
    """
    pair = state_of(weight).fp8_copies
    if not isinstance(pair, QuantizedPair) or pair.made_from != _version_of(weight):
        pair = make()
        hold_quantized(weight, pair)
    return pair


def hold_quantized(weight: Tensor, pair: QuantizedPair) -> None:
    """Sets a weight's FP8 copies, which are valid until it changes."""
    pair.made_from = _version_of(weight)
    state_of(weight).fp8_copies = pair


def stack_of(parameter: Tensor) -> tuple[int, int, int]:
    """Returns the shape of a local matrix or stack of experts: (matrices, rows of one, columns)."""
    spec = spec_of(parameter)
    held = (
        {piece.offset[0] + i for piece in spec.pieces for i in range(piece.shape[0])}
        if spec.expert
        else {0}
    )
    columns = parameter.shape[-1]
    return len(held), prod(parameter.shape) // (len(held) * columns), columns


def stored_pair(weight: Tensor, values: Tensor, scales: Tensor) -> QuantizedPair:
    """Makes the FP8 copies of a weight from its gathered elements; the transpose is made when first
    read.

    Args:
        values: its elements in e4m3 as bytes, flat.
        scales: of every block, `[matrices, blocks down, blocks across]` float32.
    """
    stack = stack_of(weight)
    shape = stack if spec_of(weight).expert else stack[1:]
    plain = state_of(weight).gemms.stored(values.view(E4M3).view(shape), scales)
    return QuantizedPair(plain, is_gathered=True)


def blocks_in(stack: tuple[int, int, int]) -> tuple[int, int, int]:
    """Returns the number of 128×128 blocks of a stack: (matrices, blocks down, blocks across)."""
    count, rows, columns = stack
    return count, -(-rows // GROUP), -(-columns // GROUP)


@dataclass(frozen=True)
class Band:
    """A flat range of a stack of matrices, within adjacent block rows of one of them."""

    row: int  # its first block row, counted over all matrices
    origin: int  # flat index at which that block row begins
    start: int
    stop: int
    columns: int

    def blocks(self, values: Tensor) -> Tensor:
        """Returns the band's `values` as `[block rows, 128, block columns, 128]` float32, zeros
        where it has none."""
        ahead, rows = self.start - self.origin, -(-(self.stop - self.origin) // self.columns)
        rows += -rows % GROUP
        wide = torch.nn.functional.pad(
            values.float(), (ahead, rows * self.columns - ahead - values.numel())
        )
        wide = torch.nn.functional.pad(wide.view(rows, self.columns), (0, -self.columns % GROUP))
        return wide.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))

    def flat(self, blocks: Tensor) -> Tensor:
        """Returns the flat values of the band from what `blocks` returned."""
        rows = blocks.flatten(2, 3).flatten(0, 1)[:, : self.columns].reshape(-1)
        return rows[self.start - self.origin : self.stop - self.origin]


def bands(stack: tuple[int, int, int], start: int, stop: int) -> Iterator[Band]:
    """Divides a flat range of a stack (matrices, rows of one, columns) into bands of about `_CHUNK`
    elements, none of which crosses into a new matrix."""
    count, rows, columns = stack
    if rows % GROUP == 0:  # a block row lies in one matrix: the stack is one tall matrix
        count, rows = 1, count * rows
    height = GROUP * columns
    while start < stop:
        matrix, within = divmod(start, rows * columns)
        row = within // height
        origin = matrix * rows * columns + row * height
        end = min(stop, (matrix + 1) * rows * columns, origin + max(1, _CHUNK // height) * height)
        yield Band(matrix * -(-rows // GROUP) + row, origin, start, end, columns)
        start = end


def block_maxima(values: Tensor, stack: tuple[int, int, int], start: int) -> Tensor:
    """Finds the largest magnitude of a flat slice in each block of a stack; 0 in blocks outside the
    slice.

    Args:
        stack: (matrices, rows of one, columns).
        start: flat index of its first element in the stack.

    Returns:
        float32 `[matrices, blocks down, blocks across]`; infinite where an element is not finite.
    """
    found = torch.zeros(blocks_in(stack), device=values.device)
    rows = found.view(-1, found.shape[-1])
    for band in bands(stack, start, start + values.numel()):
        most = magnitude_of(band.blocks(values[band.start - start : band.stop - start])).amax(
            (1, 3)
        )
        rows[band.row : band.row + most.shape[0]] = most
    return found


def quantize_slice(
    values: Tensor,
    stack: tuple[int, int, int],
    start: int,
    maxima: Tensor,
    scales: Tensor,
    out: Tensor,
) -> None:
    """Quantises a flat slice of a stack to e4m3.

    Args:
        values, stack, start: as in `block_maxima`.
        maxima, scales: of every block, `[matrices, blocks down, blocks across]` float32.
        out: uint8, one byte for each of the values.
    """
    maxima, scales = (each.flatten(0, 1)[:, None, :, None] for each in (maxima, scales))
    for band in bands(stack, start, start + values.numel()):
        span = slice(band.start - start, band.stop - start)
        blocks = band.blocks(values[span])
        rows = slice(band.row, band.row + blocks.shape[0])
        fp8 = cast_scaled(blocks, maxima[rows], scales[rows], E4M3)
        out[span] = band.flat(fp8.view(torch.uint8))

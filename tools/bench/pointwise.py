"""Operations on hidden states that memory bounds: norms, activations, RoPE, quantization."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d import kernels
from megatron5d.kernels.fp8.norm_swiglu import (
    norm_quantized,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_reference, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of,
    amax_of_rows,
    quantize_by_row,
    quantize_tensor,
    quantize_tensor_both_ways,
    quantize_tensor_reference,
)
from megatron5d.kernels.fp8.transpose import (
    fp8_transpose,
    fp8_transpose_reference,
    transpose_values,
)
from megatron5d.tools.bench.harness import (
    OURS,
    Benchmark,
    Call,
    Calls,
    elementwise,
    forward_or_backward,
    liger,
    randn,
    with_compiled,
)

EPS = 1e-5


def _leaves(device: str, grad: bool, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(randn(device, *shape, grad=grad) for shape in shapes)


def rms_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    leaves = _leaves(device, backward, (rows, width), (width,))
    return with_compiled(
        partial(kernels.rms_norm, eps=EPS, settings=OURS),
        partial(kernels.rms_norm_reference, eps=EPS),
        leaves,
        backward,
        torch=lambda x, w: F.rms_norm(x, (width,), w, EPS),
        Liger=lambda x, w: liger("liger_rms_norm")(x, w, EPS, in_place=False),
    )


def layer_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    leaves = _leaves(device, backward, (rows, width), (width,), (width,))
    return with_compiled(
        partial(kernels.layer_norm, eps=EPS, settings=OURS),
        partial(kernels.layer_norm_reference, eps=EPS),
        leaves,
        backward,
        torch=lambda x, w, b: F.layer_norm(x, (width,), w, b, EPS),
        Liger=lambda x, w, b: liger("liger_layer_norm")(x, w, b, EPS),
    )


def add_rms_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """Sum of two tensors and its norm; the backward has gradients of both."""
    leaves = _leaves(device, backward, (rows, width), (rows, width), (width,))

    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return kernels.rms_norm_reference(total, weight, EPS), total

    return with_compiled(
        partial(kernels.add_rms_norm, eps=EPS, settings=OURS),
        reference,
        leaves,
        backward,
        Liger=lambda x, residual, w: liger("liger_fused_add_rms_norm")(
            x, residual, w, EPS, in_place=False
        ),
    )


def branch_rms_norm(device: str, rows: int, width: int) -> Calls:
    """Backward of the norm at the start of a residual branch, and of its residual stream."""
    leaves = _leaves(device, True, (rows, width), (width,))
    return with_compiled(
        lambda x, w, settings=OURS: kernels.add_rms_norm(x, None, w, EPS, settings),
        # `x * 1` stands for the stream, whose gradient is added to the norm's
        lambda x, w: (kernels.rms_norm_reference(x, w, EPS), x * 1),
        leaves,
        True,
        **{"ours, two passes": lambda x, w: (kernels.rms_norm(x, w, EPS, OURS), x.view_as(x))},
    )


def swiglu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """SwiGLU of gate and up in one tensor."""
    gate_up = randn(device, rows, 2 * width, grad=backward)
    halves = [half.detach().contiguous().requires_grad_(backward) for half in gate_up.chunk(2, -1)]
    compiled = torch.compile(kernels.activation_reference)
    return forward_or_backward(
        {
            "ours": (lambda: kernels.activate(gate_up, "swiglu"), (gate_up,)),
            "torch.compile": (lambda: compiled(gate_up, "swiglu"), (gate_up,)),
            "Liger, of two tensors": (lambda: liger("liger_swiglu")(*halves), tuple(halves)),
        },
        backward,
    )


def expert_swiglu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """SwiGLU of gate and up in one tensor, times a weight per row."""
    leaves = (
        randn(device, rows, 2 * width, grad=backward),
        torch.rand(rows, device=device, requires_grad=backward),
    )
    return with_compiled(
        lambda x, weights: kernels.activate(x, "swiglu", weights),
        lambda x, weights: kernels.activation_reference(x, "swiglu", weights),
        leaves,
        backward,
    )


def gelu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """GELU in its tanh form, as GPT-2 has it."""
    leaves = (randn(device, rows, width, grad=backward),)
    return with_compiled(
        lambda x: kernels.activate(x, "gelu_tanh"),
        lambda x: kernels.activation_reference(x, "gelu_tanh"),
        leaves,
        backward,
        torch=lambda x: F.gelu(x, approximate="tanh"),
    )


def rope(device: str, *, backward: bool, s: int, b: int, a: int, g: int, d: int) -> Calls:
    """Rotary positions of a query and g key heads, half-split."""
    q, k = (randn(device, s, b, heads, d, grad=backward) for heads in (a, g))
    qkv = randn(device, s, b, a + 2 * g, d, grad=backward)
    angle = randn(device, s, 1, d // 2, dtype=torch.float32)
    tables, angles = (angle.cos(), angle.sin()), torch.cat((angle, angle), -1).transpose(0, 1)
    qh, kh = (x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k))
    compiled = torch.compile(kernels.apply_rope_reference)
    # the kernel writes into the projection, which must not be a leaf
    projection = qkv * 1 if backward else qkv
    return forward_or_backward(
        {
            "ours": (lambda: kernels.apply_rope(q, k, *tables), (q, k)),
            "ours, in a projection": (
                lambda: kernels.apply_rope_to_projection(projection, (a, g), *tables),
                (qkv,),
            ),
            "torch.compile": (lambda: compiled(q, k, *tables), (q, k)),
            "Liger": (lambda: liger("liger_rope")(qh, kh, angles.cos(), angles.sin()), (qh, kh)),
        },
        backward,
    )


def quantized(device: str, rows: int, width: int) -> Calls:
    """Quantization of 1x128 rows, and of 128x128 blocks with their transpose."""
    x = randn(device, rows, width)
    compiled = torch.compile(lambda x: quantize_reference(x, 1))
    return {
        "ours": lambda: quantize_rows(x),
        "ours, blocks": lambda: quantize_blocks(x),
        "torch.compile": lambda: compiled(x),
    }


def one_scale(device: str, rows: int, width: int) -> Calls:
    """Quantization with one scale, in two passes: the first one finds the scale."""
    x = randn(device, rows, width)
    compiled = torch.compile(quantize_tensor_reference)
    return {
        "ours": lambda: quantize_tensor(x),
        "ours, both ways": lambda: quantize_tensor_both_ways(x),
        "ours, each row": lambda: quantize_by_row(x, amax_of_rows(x)),
        "ours, the maximum": lambda: amax_of(x),
        "torch": lambda: quantize_tensor_reference(x),
        "torch.compile": lambda: compiled(x),
    }


def transposed(device: str, rows: int, width: int) -> Calls:
    """FP8 rows transposed, as the weight gradient reads them."""
    x = quantize_rows(randn(device, rows, width))
    return {
        "ours": lambda: fp8_transpose(x, powers_of_two=True),
        "ours, values only": lambda: transpose_values(x.values),
        "torch": lambda: fp8_transpose_reference(x, powers_of_two=True),
        "torch, values only": lambda: x.values.t().contiguous(),
    }


def _to_float8(ours: Call, kernel: Call, reference: Call, *inputs: Tensor) -> Calls:
    compiled = torch.compile(lambda *inputs: quantize_reference(reference(*inputs), 1))
    return {
        "ours": lambda: ours(*inputs),
        "ours, two kernels": lambda: quantize_rows(kernel(*inputs)),
        "torch.compile": lambda: compiled(*inputs),
    }


def swiglu_to_float8(device: str, rows: int, width: int) -> Calls:
    """SwiGLU in FP8, without a bfloat16 output."""
    return _to_float8(
        swiglu_quantized,
        lambda gate_up: kernels.activate(gate_up, "swiglu"),
        lambda gate_up: kernels.activation_reference(gate_up, "swiglu"),
        randn(device, rows, 2 * width),
    )


def swiglu_backward_to_float8(device: str, rows: int, width: int) -> Calls:
    """SwiGLU's gradient in FP8, by rows and transposed, without a bfloat16 output."""
    dy, gate_up = randn(device, rows, width), randn(device, rows, 2 * width)

    def in_three_kernels() -> Any:
        plain = quantize_rows(kernels.activation_backward(dy, gate_up, "swiglu")[0])
        return plain, fp8_transpose(plain)

    return {
        "ours": lambda: swiglu_backward_quantized(dy, gate_up),
        "ours, three kernels": in_three_kernels,
    }


def norm_to_float8(device: str, *, centered: bool, rows: int, width: int) -> Calls:
    """RMSNorm, or LayerNorm with a bias, in FP8, without a bfloat16 output."""
    x, weight, bias = _leaves(device, False, (rows, width), (width,), (width,))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return norm_quantized(x, weight, bias, EPS, centered=centered, settings=OURS)[0]

    if centered:
        kernel = partial(kernels.layer_norm, eps=EPS, settings=OURS)
        reference = partial(kernels.layer_norm_reference, eps=EPS)
        return _to_float8(ours, kernel, reference, x, weight, bias)
    kernel = partial(kernels.rms_norm, eps=EPS, settings=OURS)
    reference = partial(kernels.rms_norm_reference, eps=EPS)
    return _to_float8(ours, kernel, reference, x, weight)


ROWS, FEED_FORWARD = {"rows": 16384, "width": 4096}, {"rows": 8192, "width": 14336}
EXPERTS = {"rows": 65536, "width": 2048}
WIDE = {"rows": 4096, "width": 18432}
TINY = {"rows": 6, "width": 136}
HEADS = {"s": 8192, "b": 2, "a": 32, "g": 8, "d": 128}
FEW_HEADS = {"s": 6, "b": 2, "a": 3, "g": 1, "d": 16}


def _pair(
    name: str,
    make: Call,
    bytes_each: tuple[int, int],
    sizes: dict[str, int],
    families: tuple[str, str] = ("", ""),
) -> dict[str, Benchmark]:
    """Rows of an operation's forward and backward."""
    return {
        f"{name} {direction} {sizes['rows']}x{sizes['width']}": elementwise(
            partial(make, backward=direction == "backward"), num_bytes, sizes, TINY, family
        )
        for direction, num_bytes, family in zip(("forward", "backward"), bytes_each, families)
    }


def _rope_row(backward: bool) -> Benchmark:
    make = partial(rope, backward=backward)
    return Benchmark(make, lambda s, b, a, g, d: s * b * (a + g) * d * 4, "GB/s", HEADS, FEW_HEADS)


POINTWISE = {
    "float8 rows 16384x4096": elementwise(quantized, 3, ROWS, TINY),
    "float8, one scale, 16384x4096": elementwise(one_scale, 5, ROWS, TINY),
    "float8 transposed 16384x4096": elementwise(transposed, 2, ROWS, TINY),
    "SwiGLU to float8 8192x14336": elementwise(swiglu_to_float8, 5, FEED_FORWARD, TINY),
    "SwiGLU backward to float8 8192x14336": elementwise(
        swiglu_backward_to_float8, 10, FEED_FORWARD, TINY
    ),
    "RMSNorm to float8 16384x4096": elementwise(
        partial(norm_to_float8, centered=False), 3, ROWS, TINY
    ),
    "LayerNorm to float8 16384x4096": elementwise(
        partial(norm_to_float8, centered=True), 3, ROWS, TINY
    ),
    **_pair("RMSNorm", rms_norm, (4, 6), ROWS, ("norm", "")),
    **_pair("RMSNorm", rms_norm, (4, 6), WIDE, ("norm", "norm")),
    **_pair("LayerNorm", layer_norm, (4, 6), ROWS, ("norm", "norm")),
    **_pair("sum and RMSNorm", add_rms_norm, (8, 8), ROWS),
    "RMSNorm beside its stream, backward 16384x4096": elementwise(
        branch_rms_norm, 8, ROWS, TINY, "norm"
    ),
    **_pair("SwiGLU", swiglu, (6, 10), FEED_FORWARD),
    **_pair("SwiGLU of experts", expert_swiglu, (6, 10), EXPERTS),
    **_pair("GELU", gelu, (4, 6), FEED_FORWARD),
    "RoPE, 32 and 8 heads, 16 k tokens": _rope_row(False),
    "RoPE backward, 32 and 8 heads, 16 k tokens": _rope_row(True),
}

"""What memory bounds, of hidden states: norms, activations, RoPE, and what is quantised."""

from collections.abc import Callable
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
from megatron5d.kernels.fp8.quantize import (
    fp8_transpose,
    fp8_transpose_reference,
    quantize_blocks,
    quantize_reference,
    quantize_rows,
    transpose_values,
)
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of,
    amax_of_rows,
    quantize_by_row,
    quantize_tensor,
    quantize_tensor_both_ways,
    quantize_tensor_reference,
)
from megatron5d.tools.bench.harness import (
    OURS,
    Benchmark,
    Calls,
    Forward,
    forward_or_backward,
    liger,
    random_tensor,
    with_compiled,
)

EPS = 1e-5


def rms_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    leaves = (
        random_tensor(device, rows, width, grad=backward),
        random_tensor(device, width, grad=backward),
    )
    return with_compiled(
        partial(kernels.rms_norm, eps=EPS, settings=OURS),
        partial(kernels.rms_norm_reference, eps=EPS),
        leaves,
        backward,
        torch=lambda x, w: F.rms_norm(x, (width,), w, EPS),
        Liger=lambda x, w: liger("liger_rms_norm")(x, w, EPS, in_place=False),
    )


def layer_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    leaves = tuple(
        random_tensor(device, *shape, grad=backward)
        for shape in ((rows, width), (width,), (width,))
    )
    return with_compiled(
        partial(kernels.layer_norm, eps=EPS, settings=OURS),
        partial(kernels.layer_norm_reference, eps=EPS),
        leaves,
        backward,
        torch=lambda x, w, b: F.layer_norm(x, (width,), w, b, EPS),
        Liger=lambda x, w, b: liger("liger_layer_norm")(x, w, b, EPS),
    )


def add_rms_norm(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """Returns the sum of two and its norm; backward, gradients of both arrive."""
    shapes = (rows, width), (rows, width), (width,)
    leaves = tuple(random_tensor(device, *shape, grad=backward) for shape in shapes)

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
    """Returns the backward of the norm that a residual branch begins with, and of the stream beside
    it."""
    leaves = random_tensor(device, rows, width, grad=True), random_tensor(device, width, grad=True)
    return with_compiled(
        lambda x, w, settings=OURS: kernels.add_rms_norm(x, None, w, EPS, settings),
        lambda x, w: (kernels.rms_norm_reference(x, w, EPS), x * 1),
        leaves,
        True,
        **{"ours, two passes": lambda x, w: (kernels.rms_norm(x, w, EPS, OURS), x.view_as(x))},
    )


def swiglu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """Takes gate and up side by side."""
    gate_up = random_tensor(device, rows, 2 * width, grad=backward)
    halves = [half.detach().contiguous().requires_grad_(backward) for half in gate_up.chunk(2, -1)]
    compiled = torch.compile(kernels.activation_reference)
    forwards: dict[str, Forward] = {
        "ours": (lambda: kernels.activate(gate_up, "swiglu"), (gate_up,)),
        "torch.compile": (lambda: compiled(gate_up, "swiglu"), (gate_up,)),
        "Liger, of two tensors": (lambda: liger("liger_swiglu")(*halves), tuple(halves)),
    }
    return forward_or_backward(forwards, backward)


def expert_swiglu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """Takes gate and up side by side, times a weight of each row."""
    leaves = (
        random_tensor(device, rows, 2 * width, grad=backward),
        torch.rand(rows, device=device, requires_grad=backward),
    )
    return with_compiled(
        lambda x, weights: kernels.activate(x, "swiglu", weights),
        lambda x, weights: kernels.activation_reference(x, "swiglu", weights),
        leaves,
        backward,
    )


def gelu(device: str, *, backward: bool, rows: int, width: int) -> Calls:
    """Returns the tanh form, as GPT-2 has it."""
    leaves = (random_tensor(device, rows, width, grad=backward),)
    ours, reference = (
        partial(each, kind="gelu_tanh") for each in (kernels.activate, kernels.activation_reference)
    )
    return with_compiled(
        ours, reference, leaves, backward, torch=partial(F.gelu, approximate="tanh")
    )


def rope(device: str, *, backward: bool, s: int, b: int, a: int, g: int, d: int) -> Calls:
    """Rotates q of a heads and k of g, half-split."""
    q, k = (random_tensor(device, s, b, heads, d, grad=backward) for heads in (a, g))
    qkv = random_tensor(device, s, b, a + 2 * g, d, grad=backward)
    angle = random_tensor(device, s, 1, d // 2, dtype=torch.float32)
    tables, whole = (angle.cos(), angle.sin()), torch.cat((angle, angle), -1).transpose(0, 1)
    qh, kh = (x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k))
    compiled = torch.compile(kernels.apply_rope_reference)
    transposed = qkv * 1 if backward else qkv  # a projection, which may be written over
    forwards: dict[str, Forward] = {
        "ours": (lambda: kernels.apply_rope(q, k, *tables), (q, k)),
        "ours, in a projection": (
            lambda: kernels.apply_rope_to_projection(transposed, (a, g), *tables),
            (qkv,),
        ),
        "torch.compile": (lambda: compiled(q, k, *tables), (q, k)),
        "Liger": (lambda: liger("liger_rope")(qh, kh, whole.cos(), whole.sin()), (qh, kh)),
    }
    return forward_or_backward(forwards, backward)


def quantisers(device: str, rows: int, width: int) -> Calls:
    """Quantises 1x128 rows, and 128x128 blocks with their transpose."""
    x = random_tensor(device, rows, width)
    compiled = torch.compile(lambda x: quantize_reference(x, 1))
    return {
        "ours": lambda: quantize_rows(x),
        "ours, blocks": lambda: quantize_blocks(x),
        "torch.compile": lambda: compiled(x),
    }


def one_scale(device: str, rows: int, width: int) -> Calls:
    """Takes two passes, as the scale is known only after the first."""
    x = random_tensor(device, rows, width)
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
    """Transposes FP8 rows as the weight gradient reads them."""
    x = quantize_rows(random_tensor(device, rows, width))
    return {
        "ours": lambda: fp8_transpose(x, powers_of_two=True),
        "ours, values only": lambda: transpose_values(x.values),
        "torch": lambda: fp8_transpose_reference(x, powers_of_two=True),
        "torch, values only": lambda: x.values.t().contiguous(),
    }


def _to_float8(ours: Callable, kernel: Callable, reference: Callable, *inputs: Tensor) -> Calls:
    compiled = torch.compile(lambda *inputs: quantize_reference(reference(*inputs), 1))
    return {
        "ours": lambda: ours(*inputs),
        "ours, two kernels": lambda: quantize_rows(kernel(*inputs)),
        "torch.compile": lambda: compiled(*inputs),
    }


def swiglu_to_float8(device: str, rows: int, width: int) -> Calls:
    """Writes nothing wide."""
    kernel, reference = (
        partial(each, kind="swiglu") for each in (kernels.activate, kernels.activation_reference)
    )
    return _to_float8(swiglu_quantized, kernel, reference, random_tensor(device, rows, 2 * width))


def swiglu_backward_to_float8(device: str, rows: int, width: int) -> Calls:
    """Writes the gradient by rows and transposed, and nothing wide."""
    dy, gate_up = random_tensor(device, rows, width), random_tensor(device, rows, 2 * width)

    def apart() -> Any:
        plain = quantize_rows(kernels.activation_backward(dy, gate_up, "swiglu")[0])
        return plain, fp8_transpose(plain)

    return {"ours": lambda: swiglu_backward_quantized(dy, gate_up), "ours, three kernels": apart}


def norm_to_float8(device: str, *, centered: bool, rows: int, width: int) -> Calls:
    """Computes RMSNorm, or LayerNorm with a bias; nothing wide is written."""
    x, weight, bias = (
        random_tensor(device, *shape) for shape in ((rows, width), (width,), (width,))
    )

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return norm_quantized(x, weight, bias, EPS, centered=centered, settings=OURS)[0]

    if centered:
        kernel, reference = (
            partial(kernels.layer_norm, eps=EPS, settings=OURS),
            partial(kernels.layer_norm_reference, eps=EPS),
        )
        return _to_float8(ours, kernel, reference, x, weight, bias)
    kernel, reference = (
        partial(kernels.rms_norm, eps=EPS, settings=OURS),
        partial(kernels.rms_norm_reference, eps=EPS),
    )
    return _to_float8(ours, kernel, reference, x, weight)


ROWS, FEED_FORWARD = {"rows": 16384, "width": 4096}, {"rows": 8192, "width": 14336}
EXPERTS = {"rows": 65536, "width": 2048}
WIDE = {"rows": 4096, "width": 18432}
TINY = {"rows": 6, "width": 136}
HEADS, FEW_HEADS = (
    {"s": 8192, "b": 2, "a": 32, "g": 8, "d": 128},
    {"s": 6, "b": 2, "a": 3, "g": 1, "d": 16},
)


def _row(
    make: Callable[..., Calls], bytes_each: int, sizes: dict[str, int], family: str | None = None
) -> Benchmark:
    """Counts the bytes that must move for each row and column."""
    families = {} if family is None else {"ours": family}
    return Benchmark(
        make, lambda rows, width: rows * width * bytes_each, "GB/s", sizes, TINY, families
    )


def _rope_row(backward: bool) -> Benchmark:
    make = partial(rope, backward=backward)
    return Benchmark(make, lambda s, b, a, g, d: s * b * (a + g) * d * 4, "GB/s", HEADS, FEW_HEADS)


POINTWISE = {
    "float8 rows 16384x4096": _row(quantisers, 3, ROWS),
    "float8, one scale, 16384x4096": _row(one_scale, 5, ROWS),
    "float8 transposed 16384x4096": _row(transposed, 2, ROWS),
    "SwiGLU to float8 8192x14336": _row(swiglu_to_float8, 5, FEED_FORWARD),
    "SwiGLU backward to float8 8192x14336": _row(swiglu_backward_to_float8, 10, FEED_FORWARD),
    "RMSNorm to float8 16384x4096": _row(partial(norm_to_float8, centered=False), 3, ROWS),
    "LayerNorm to float8 16384x4096": _row(partial(norm_to_float8, centered=True), 3, ROWS),
    "RMSNorm forward 16384x4096": _row(partial(rms_norm, backward=False), 4, ROWS, "norm"),
    "RMSNorm backward 16384x4096": _row(partial(rms_norm, backward=True), 6, ROWS),
    "RMSNorm forward 4096x18432": _row(partial(rms_norm, backward=False), 4, WIDE, "norm"),
    "RMSNorm backward 4096x18432": _row(partial(rms_norm, backward=True), 6, WIDE, "norm"),
    "LayerNorm forward 16384x4096": _row(partial(layer_norm, backward=False), 4, ROWS, "norm"),
    "LayerNorm backward 16384x4096": _row(partial(layer_norm, backward=True), 6, ROWS, "norm"),
    "sum and RMSNorm forward 16384x4096": _row(partial(add_rms_norm, backward=False), 8, ROWS),
    "sum and RMSNorm backward 16384x4096": _row(partial(add_rms_norm, backward=True), 8, ROWS),
    "RMSNorm beside its stream, backward 16384x4096": _row(branch_rms_norm, 8, ROWS, "norm"),
    "SwiGLU forward 8192x14336": _row(partial(swiglu, backward=False), 6, FEED_FORWARD),
    "SwiGLU backward 8192x14336": _row(partial(swiglu, backward=True), 10, FEED_FORWARD),
    "SwiGLU of experts forward 65536x2048": _row(
        partial(expert_swiglu, backward=False), 6, EXPERTS
    ),
    "SwiGLU of experts backward 65536x2048": _row(
        partial(expert_swiglu, backward=True), 10, EXPERTS
    ),
    "GELU forward 8192x14336": _row(partial(gelu, backward=False), 4, FEED_FORWARD),
    "GELU backward 8192x14336": _row(partial(gelu, backward=True), 6, FEED_FORWARD),
    "RoPE, 32 and 8 heads, 16 k tokens": _rope_row(False),
    "RoPE backward, 32 and 8 heads, 16 k tokens": _rope_row(True),
}

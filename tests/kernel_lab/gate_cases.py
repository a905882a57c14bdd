"""Cases of the compile gate: every operation, both ways, at shapes that select every tuned
configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from kernel_lab.binary import BESIDE
from torch import Tensor

from megatron5d import kernels
from megatron5d.kernels import activation, moe, routing, tuning
from megatron5d.kernels.embedding import accumulate_rows
from megatron5d.kernels.fp8.gemm import fp8_matmul, grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.norm_swiglu import (
    norm_quantized,
    swiglu_backward_quantized,
    swiglu_quantized,
)
from megatron5d.kernels.fp8.quantize import E4M3, E5M2, Quantized, quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of_rows,
    quantize_by_row,
    quantize_tensor,
    quantize_tensor_both_ways,
)
from megatron5d.kernels.fp8.transpose import fp8_transpose, transpose_values
from megatron5d.kernels.gemm import grouped_input_grad, grouped_matmul
from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm
from megatron5d.kernels.overlapped_gemm import (
    PeerBuffers,
    all_gather_gemm,
    gemm_reduce_scatter,
    sum_arrived,
)
from megatron5d.kernels.providers.torch_gemm import clear_padding
from megatron5d.kernels.symm_mem_flags import Arrivals, WaitTimeout, raise_flags, wait_flag

ALL = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
DAILY = ("sm_80", "sm_90", "sm_100")
ALIKE = ("sm_90",)  # others have the same PTX, sm_100 with arithmetic packed in pairs
HAVE_FP8 = ("sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Case:
    """One use of an operation.

    Args:
        run: calls public operations on meta tensors.
        promises: target -> instructions that at least one kernel of the case must contain.
        targets: where it must compile.
        nightly: compiled with --all only.
        daily: the targets for which it is compiled without --all.
    """

    run: Callable[[], object]
    promises: dict[str, tuple[str, ...]] = field(default_factory=dict)
    targets: tuple[str, ...] = ALL
    nightly: bool = False
    daily: tuple[str, ...] = DAILY


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


float32, int64 = partial(meta, dtype=torch.float32), partial(meta, dtype=torch.int64)


def fp8_rows(rows: int, width: int, dtype: torch.dtype = E4M3) -> Quantized:
    """A matrix with a scale for each 1×128 group."""
    return Quantized(meta(rows, width, dtype=dtype), float32(rows, width // 128), 1)


def forward_and_backward(outputs) -> None:
    """Runs the backward with a gradient of every differentiable output."""
    outputs = [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if t.requires_grad]
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])


def _norms(width: int) -> None:
    x, weight, bias = meta(4096, width, grad=True), meta(width, grad=True), meta(width, grad=True)
    forward_and_backward(kernels.rms_norm(x, weight, 1e-5))
    forward_and_backward(kernels.layer_norm(x, weight, bias, 1e-5))
    for residual in (None, meta(4096, width, grad=True)):
        forward_and_backward(kernels.add_rms_norm(x, residual, weight, 1e-5))
        forward_and_backward(kernels.add_layer_norm(x, residual, weight, bias, 1e-5))


def _pointwise() -> None:
    forward_and_backward(kernels.activate(meta(4096, 2 * 14336, grad=True), "swiglu"))
    for kind in ("gelu", "gelu_tanh"):
        forward_and_backward(kernels.activate(meta(4096, 8192, grad=True), kind))
    for kind in activation.GATED[1:]:
        forward_and_backward(kernels.activate(meta(4096, 2 * 2048, grad=True), kind))
    for kind in activation.KINDS:
        x, weights = meta(8192, 2 * 2048, grad=True), meta(8192, dtype=torch.float32, grad=True)
        forward_and_backward(kernels.activate(x, kind, weights))


def _rope(rotary_dim: int, q_dim: int, interleaved: bool) -> None:
    q, k = meta(4096, 2, 32, q_dim, grad=True), meta(4096, 2, 8, q_dim, grad=True)
    tables = float32(4096, 1, rotary_dim // 2), float32(4096, 1, rotary_dim // 2), interleaved
    forward_and_backward(kernels.apply_rope(q, k, *tables))
    forward_and_backward(kernels.apply_rope_to_projection(q * 1, (24, 4), *tables))
    forward_and_backward(kernels.apply_rope_to_ends(q * 1, k[..., :rotary_dim], *tables))


def _vocabulary() -> None:
    for logits in (meta(4096, 32000, grad=True), float32(4096, 32000, grad=True)):
        forward_and_backward(kernels.cross_entropy(logits, int64(4096)))


def _attention(
    d: int, dv: int, dtype: torch.dtype = torch.bfloat16, batch: int = 2, heads: int = 4, **options
) -> None:
    q = meta(4096, batch, 4 * heads, d, dtype=dtype, grad=True)
    k, v = (meta(4096, batch, heads, dim, dtype=dtype, grad=True) for dim in (d, dv))
    forward_and_backward(kernels.attention(q, k, v, scale=d**-0.5, **options))


def _attention_forward(d: int, dv: int) -> None:
    q, k, v = meta(4096, 2, 16, d), meta(4096, 2, 4, d), meta(4096, 2, 4, dv)
    kernels.attention(q, k, v, scale=d**-0.5)


def _multi_tensor(grad_dtype: torch.dtype) -> None:
    columns = dict.fromkeys(("master", "grad", "exp_avg", "exp_avg_sq"), [float32(4096, 4096)])
    columns |= {"grad": [meta(4096, 4096, dtype=grad_dtype)], "copy": [meta(4096, 4096)]}
    table = TensorTable(**columns)
    squared_norm(table)
    adamw_step(table, AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 3), float32(), float32(1))


def _fp8() -> None:
    x = meta(4096, 7168)
    rows, (blocks, _) = quantize_rows(x), quantize_blocks(x)
    fp8_matmul(rows, blocks)
    quantize_rows(x, powers_of_two=True)
    fp8_matmul(quantize_rows(meta(7168, 4096)), fp8_transpose(rows), into=float32(7168, 7168))
    transpose_values(rows.values)
    one_scale = Quantized(rows.values, float32(1, 1), 0)
    gradient = Quantized(meta(4096, 7168, dtype=E5M2), one_scale.scales, 0)
    for a in (one_scale, gradient):
        fp8_matmul(a, one_scale)


def _fp8_weight_grad() -> None:
    """As in a linear layer: both operands from the transpose, the scales of a group adjacent."""
    dy, x = (fp8_transpose(fp8_rows(4096, n), powers_of_two=True) for n in (7168, 2048))
    fp8_matmul(dy, x, into=float32(7168, 2048))


def _fp8_quantizers() -> None:
    quantize_rows(meta(4096, 7168))
    quantize_blocks(meta(4096, 7168))
    _fp8_tensor()


def _fp8_tensor() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = meta(4096, 7168, dtype=dtype)
        quantize_tensor_both_ways(x, powers_of_two=True)
        quantize_tensor(x, E5M2)
    x = meta(4096, 7168)
    quantize_by_row(x, amax_of_rows(x))


def _grouped() -> None:
    x, weight, offsets = meta(8192, 2048, grad=True), meta(64, 1408, 2048, grad=True), int64(65)
    forward_and_backward(grouped_matmul(x, weight, offsets))
    # the last tile ends in the next expert's rows
    grouped_input_grad(meta(4096, 1000), meta(64, 1000, 2048), offsets)
    clear_padding(meta(4096, 1000), offsets)


def _grouped_fp8() -> None:
    weight = Quantized(meta(64, 1408, 2048, dtype=E4M3), float32(64, 11, 16), 128)
    grouped_matmul_fp8(fp8_rows(8192, 2048), weight, int64(65))


def _grouped_fp8_weight_grad() -> None:
    offsets = int64(65)
    quantize_blocks(meta(64, 1408, 2048), powers_of_two=True)
    x = fp8_transpose(fp8_rows(8192, 2048), offsets, powers_of_two=True)
    dy = fp8_transpose(fp8_rows(8192, 1408, E5M2), offsets, keep_scales=True)
    grouped_weight_grad_fp8(x, x, offsets, float32(64, 2048, 2048))
    grouped_weight_grad_fp8(dy, x, offsets, meta(64, 1408, 2048))


def _overlap(size: int, transposed: bool) -> None:
    x, flags = meta(size, 1024, 4096), meta(size, dtype=torch.int32)
    weight = meta(4096, 1792) if transposed else meta(1792, 4096)
    addresses, buffers = int64(size), [meta(1024, 1792) for _ in range(size)]
    arrivals = Arrivals(flags, 1, WaitTimeout(900.0, flags.device))
    all_gather_gemm(x, weight, arrivals, 1, transposed)
    out = PeerBuffers(buffers, list(flags.split(1)), addresses, addresses, flags)
    gemm_reduce_scatter(x, weight, out, 1, 1, transposed)
    sum_arrived(meta(size, 1024, 1792), arrivals)
    wait_flag(arrivals, 1)
    raise_flags(out.flags, addresses, 1)


def _fp8_fused() -> None:
    scales = {"powers_of_two": True}
    for weights in (None, float32(4096)):
        swiglu_quantized(meta(4096, 2 * 2048), weights=weights, **scales)
    swiglu_backward_quantized(meta(4096, 2048), meta(4096, 2 * 2048), **scales)
    for width in (2048, 7168, 16384):
        x, weight = meta(4096, width), meta(width)
        norm_quantized(x, weight, None, 1e-5, centered=False, **scales)
        norm_quantized(x, weight, meta(width), 1e-5, centered=True, **scales)


def _moe() -> None:
    for experts, kind, bias in ((64, "softmax", None), (256, "sigmoid", float32(256))):
        logits = float32(8192, experts, grad=True)
        chosen, weights = routing.route(logits, 8, kind, True, 1.0, bias)
        order = moe.permutation(chosen, experts)
        rows, by_row = moe.permute_weighted(meta(8192, 2048, grad=True), weights, order)
        forward_and_backward((moe.unpermute(rows, order), by_row))
    routing.top_experts(float32(8192, 8), 4)


def _embedding() -> None:
    accumulate_rows(float32(16032, 4096), int64(8192), meta(8192, 4096))


BY_DESCRIPTORS = {
    "sm_80": ("mma",),
    "sm_90": ("wgmma", "bulk load"),
    "sm_100": ("tcgen05", "bulk load"),
}
# These order the data of other ranks before their flags.
FLAGS = ("system acquire", "system release")
OVERLAP = {
    "sm_80": ("mma", "async copy", *FLAGS),
    "sm_90": ("wgmma", "bulk load", *FLAGS),
    "sm_100": ("tcgen05", *FLAGS),
}
FP8_GEMM = {"sm_90": ("fp8 wgmma", "bulk load"), "sm_100": ("tcgen05",)}
DOCUMENTS = {"documents": int64(2, 4096)}
FEW = {"batch": 1, "heads": 1}  # so few that the keys' backward cuts its work into shares
ATTENTION = {
    "64": (64, 64, {}),
    "128": (128, 128, {}),
    "128-documents": (128, 128, DOCUMENTS),
    "128-few": (128, 128, FEW),
    "192-128": (192, 128, {}),
    "256": (256, 256, {}),
}
ATTENTION_NIGHTLY = {
    "128-full": (128, 128, {"causal": False}),
    "48": (48, 48, {}),
    "64-few": (64, 64, FEW),
    "96": (96, 96, {}),
    "96-window": (96, 96, {"window": 1024}),
    "96-few": (96, 96, FEW),
    "64-full-float16": (64, 64, {"causal": False, "dtype": torch.float16}),
    "128-window": (128, 128, {"window": 1024}),
    "64-window-sinks": (64, 64, {"window": 128, "sinks": meta(16, grad=True)}),
    "256-window-softcap": (256, 256, {"window": 1024, "softcap": 50.0}),
    "192-128-documents": (192, 128, DOCUMENTS),
}
AHEAD = {"64": (64, 64), "128": (128, 128), "192-128": (192, 128)}
# Triton 3.8 has too few registers for it, and 3.9 orders the exponentials behind the GEMM.
NOT_AHEAD = ("192-128",) if tuning.is_since("3.8") else ()


def _attention_cases(table: dict, nightly: bool) -> dict[str, Case]:
    return {
        f"attention-{name}": Case(
            partial(_attention, d, dv, **options),
            BY_DESCRIPTORS,
            nightly=nightly,
            daily=DAILY if name in ("128", "128-few") else ALIKE,
        )
        for name, (d, dv, options) in table.items()
    }


CASES: dict[str, Case] = {
    **_attention_cases(ATTENTION, nightly=False),
    **_attention_cases(ATTENTION_NIGHTLY, nightly=True),
    # The forward alone, on Hopper: its exponentials are computed while the next GEMM runs.
    **{
        f"attention-ahead-{name}": Case(
            partial(_attention_forward, *dims),
            {} if name in NOT_AHEAD else {"sm_90": (BESIDE,)},
            ALIKE,
        )
        for name, dims in AHEAD.items()
    },
    "fp8": Case(_fp8, {**FP8_GEMM, "sm_100": ("tcgen05", "bulk load")}, HAVE_FP8),
    "fp8-weight-grad": Case(_fp8_weight_grad, FP8_GEMM, HAVE_FP8),
    "fp8-tensor": Case(_fp8_tensor, targets=HAVE_FP8, daily=ALIKE),
    # its GEMMs take the plain path there
    "fp8-quantised": Case(_fp8_quantizers, targets=("gfx942",), nightly=True),
    "grouped": Case(_grouped, {**BY_DESCRIPTORS, "sm_80": ("mma", "async copy")}),
    "grouped-fp8": Case(_grouped_fp8, FP8_GEMM, HAVE_FP8),
    "grouped-fp8-weight-grad": Case(_grouped_fp8_weight_grad, FP8_GEMM, HAVE_FP8),
    "overlap": Case(lambda: _overlap(8, False), OVERLAP),
    "overlap-transposed": Case(lambda: _overlap(4, True), OVERLAP),
    "fp8-fused": Case(_fp8_fused, targets=HAVE_FP8, daily=ALIKE),
    "moe": Case(_moe),
    "embedding": Case(_embedding, daily=ALIKE),
    "adamw-bfloat16-gradients": Case(lambda: _multi_tensor(torch.bfloat16), daily=ALIKE),
    "adamw-float32-gradients": Case(lambda: _multi_tensor(torch.float32), nightly=True),
    "pointwise": Case(_pointwise, daily=ALIKE),
    "rope-128": Case(lambda: _rope(128, 128, False), daily=ALIKE),
    "rope-64-of-192-interleaved": Case(lambda: _rope(64, 192, True), daily=ALIKE),
    "vocabulary": Case(_vocabulary),
    **{
        f"norms-{width}": Case(partial(_norms, width), daily=ALIKE)
        for width in (128, 4096, 8192, 16384, 53248)
    },
}

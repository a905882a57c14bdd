"""How many rows an expert rank receives changes with every micro-batch; no kernel is compiled anew for it. Nor is one
for other lengths, batches and numbers of heads, which Triton would do for 1 and for multiples of 16.

In a fork: Triton compiles for a GPU that is not there (kernel_lab/capture.py).
"""

from pathlib import Path

import pytest
from forks import Fork

pytest.importorskip("triton")

COUNTED = """
import torch
from kernel_lab.capture import capture
from kernel_lab.gate_cases import E5M2, Quantized, forward_and_backward, meta
from triton import knobs
from megatron5d.kernels import moe
from megatron5d.kernels.activation import weighted_activation
from megatron5d.kernels.fp8.gemm import grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.norm_swiglu import swiglu_quantized
from megatron5d.kernels.fp8.quantize import E4M3, fp8_transpose, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import amax_of_rows, quantize_by_row
from megatron5d.kernels.gemm import grouped_input_grad, grouped_matmul

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
EXPERTS, TOKENS, H, F = 4, 4096, 1024, 512
offsets = meta(EXPERTS + 1, dtype=torch.int64)
up = meta(EXPERTS, 2 * F, H)
up_fp8 = Quantized(meta(EXPERTS, 2 * F, H, dtype=E4M3), meta(EXPERTS, 8, 8, dtype=torch.float32), 128)
numbers = meta(2 * TOKENS, dtype=torch.int64)
where = moe.Permutation(numbers.view(TOKENS, 2), numbers, offsets, numbers)


def fp8(rows, width, dtype):
    return Quantized(meta(rows, width, dtype=dtype), meta(rows, width // 128, dtype=torch.float32), 1)


def layer(rows):
    x = meta(rows, H)
    grouped_input_grad(grouped_matmul(x, up, offsets), up, offsets)
    y, weights = meta(rows, 2 * F, grad=True), meta(rows, dtype=torch.float32, grad=True)
    forward_and_backward(weighted_activation(y, weights, "swiglu"))
    forward_and_backward(moe.unpermute(meta(rows, H, grad=True), where))
    quantize_rows(x)
    quantize_by_row(x, amax_of_rows(x))
    swiglu_quantized(y.detach(), weights=weights.detach())
    x, dy = fp8(rows, H, E4M3), fp8(rows, 2 * F, E5M2)
    grouped_matmul_fp8(x, up_fp8, offsets)
    turned = [fp8_transpose(each, offsets) for each in (dy, x)]
    grouped_weight_grad_fp8(*turned, offsets, meta(EXPERTS, 2 * F, H, dtype=torch.float32))


with capture("sm_90"):
    layer(4096)
    first = len(compiled)
    assert first >= 8, compiled
    for rows in (4095, 4112, 1, 17, 8191):
        layer(rows)
print(compiled[first:])
"""


def test_no_kernel_is_compiled_for_another_number_of_rows():
    run = Fork(lambda: exec(COUNTED, {}), Path(__file__).parents[2]).wait()
    assert run.returncode == 0 and run.stdout.strip() == "[]", run.stdout + run.stderr[-3000:]


ATTENTION = """
from kernel_lab.capture import capture
from kernel_lab.gate_cases import forward_and_backward, meta
from triton import knobs
from megatron5d import kernels

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
with capture("sm_90"):
    for s, t, b, heads, groups in ((96, 96, 2, 4, 2), (97, 97, 1, 2, 1), (1, 1, 1, 1, 1), (512, 33, 16, 16, 16)):
        q, k, v = (meta(n, b, count, 16, grad=True) for n, count in ((s, heads), (t, groups), (t, groups)))
        forward_and_backward(kernels.attention(q, k, v, scale=0.25))
print(sorted(name.split(".")[-1] for name in compiled))
"""


def test_no_kernel_of_attention_is_compiled_for_other_sizes():
    """Except that of dk and dv, to which multiples of 16 queries spare registers."""
    run = Fork(lambda: exec(ATTENTION, {}), Path(__file__).parents[2]).wait()
    names = ["_delta_kernel", "_forward_kernel", *["_key_value_kernel"] * 3, "_query_kernel", "_sum_parts_kernel"]
    assert run.returncode == 0 and run.stdout.strip() == str(names), run.stdout + run.stderr[-3000:]

"""How many rows an expert rank receives changes with every micro-batch; no kernel is compiled anew for it.

In a process of its own: Triton compiles for a GPU that is not there (kernel_lab/capture.py).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
offsets = meta(EXPERTS + 1, dtype=torch.int32)
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
    moe.permutation(meta(rows, 2, dtype=torch.int64), EXPERTS)
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
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=Path(__file__).parents[2], env=environment | {"PYTHONPATH": "tests"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0 and run.stdout.strip() == "[]", run.stdout + run.stderr[-3000:]

"""After the first step no kernel is recompiled.

Neither for other numbers of experts' rows, which change with every micro-batch, other epochs, rates
and steps, and an evaluation; nor for other lengths, batches and numbers of heads, for which Triton
would recompile at 1 and at multiples of 16.

In a fork, because Triton compiles for a GPU that is not there (kernel_lab/capture.py).
"""

from pathlib import Path

import pytest
from forks import Fork

pytest.importorskip("triton")

COUNTED = """
import torch
from kernel_lab.capture import capture
from kernel_lab.gate_cases import E4M3, E5M2, Quantized, forward_and_backward, fp8_rows, meta
from triton import knobs
from megatron5d.kernels import moe
from megatron5d.kernels.activation import activate
from megatron5d.kernels.fp8.gemm import grouped_matmul_fp8, grouped_weight_grad_fp8
from megatron5d.kernels.fp8.norm_swiglu import swiglu_quantized
from megatron5d.kernels.fp8.quantize import quantize_rows
from megatron5d.kernels.fp8.transpose import fp8_transpose
from megatron5d.kernels.fp8.quantize_tensor import amax_of_rows, quantize_by_row
from megatron5d.kernels.gemm import grouped_input_grad, grouped_matmul

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
EXPERTS, TOKENS, H, F = 4, 4096, 1024, 512
offsets = meta(EXPERTS + 1, dtype=torch.int32)
up = meta(EXPERTS, 2 * F, H)
up_scales = meta(EXPERTS, 8, 8, dtype=torch.float32)
up_fp8 = Quantized(meta(EXPERTS, 2 * F, H, dtype=E4M3), up_scales, 128)
numbers = meta(2 * TOKENS, dtype=torch.int64)
order = moe.Permutation(numbers.view(TOKENS, 2), numbers, offsets, numbers)


def layer(rows):
    x = meta(rows, H)
    grouped_input_grad(grouped_matmul(x, up, offsets), up, offsets)
    y, weights = meta(rows, 2 * F, grad=True), meta(rows, dtype=torch.float32, grad=True)
    forward_and_backward(activate(y, "swiglu", weights))
    forward_and_backward(moe.unpermute(meta(rows, H, grad=True), order))
    moe.permutation(meta(rows, 2, dtype=torch.int64), EXPERTS)
    quantize_rows(x)
    quantize_by_row(x, amax_of_rows(x))
    swiglu_quantized(y.detach(), weights=weights.detach())
    x, dy = fp8_rows(rows, H), fp8_rows(rows, 2 * F, E5M2)
    grouped_matmul_fp8(x, up_fp8, offsets)
    transposed = [fp8_transpose(operand, offsets) for operand in (dy, x)]
    grouped_weight_grad_fp8(*transposed, offsets, meta(EXPERTS, 2 * F, H, dtype=torch.float32))


with capture("sm_90"):
    layer(4096)
    first = len(compiled)
    assert first >= 8, compiled
    for rows in (4095, 4112, 1, 17, 8191):
        layer(rows)
print(compiled[first:])
"""


LATER = """
import dataclasses
import torch
from kernel_lab.capture import capture
from kernel_lab.gate_cases import meta
from layouts import make_rows, micro_batch
from parity_configs import config_of
from triton import knobs
from whole_stage import WholeStage
from megatron5d.config.schema import PrecisionConfig
from megatron5d.kernels.multi_tensor import AdamWSettings, TensorTable, adamw_step, squared_norm
from megatron5d.kernels.overlapped_gemm import (
    PeerBuffers, all_gather_gemm, gemm_reduce_scatter, sum_arrived
)
from megatron5d.kernels.symm_mem_flags import Arrivals, WaitTimeout, raise_flags, wait_flag
from megatron5d.model.gpt import GPT
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
HEADS = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64}
SIZES = {"hidden_size": 128, "ffn_hidden_size": 256, **HEADS}
config = config_of("llama_gqa", gbs=1)
model = dataclasses.replace(config.model, num_layers=2, **SIZES)
precision = PrecisionConfig(dtype="bf16", fp8="blockwise")
config = dataclasses.replace(config, model=model, precision=precision)
stage = WholeStage(GPT(config, build_mesh(resolve(1), 0), "meta").phases)
batch = micro_batch(config, make_rows(config, 1)).to("meta")
weight, flags, addresses = meta(256, 128), meta(2, dtype=torch.int32), meta(2, dtype=torch.int64)
names = ("master", "grad", "exp_avg", "exp_avg_sq")
columns = {name: [meta(512, dtype=torch.float32)] for name in names}
table = TensorTable(**columns, copy=[meta(512)])


def step(number, epoch):
    stage.backward(number, torch.empty_like(stage.forward(number, None, batch)))
    arrivals = Arrivals(flags, epoch, WaitTimeout(900.0, flags.device))
    all_gather_gemm(meta(2, 64, 128), weight, arrivals, number % 2, False)
    buffers = [meta(64, 256) for _ in range(2)]
    out = PeerBuffers(buffers, list(flags.split(1)), addresses, addresses, flags)
    gemm_reduce_scatter(meta(2, 64, 128), weight, out, epoch, number % 2, False)
    sum_arrived(meta(2, 64, 256), arrivals)
    wait_flag(arrivals, number % 2)
    raise_flags(out.flags, addresses, epoch)
    squared_norm(table)
    settings = AdamWSettings(1e-3 / number, 0.9, 0.95, 1e-8, number)
    adamw_step(table, settings, meta(dtype=torch.float32), meta(1, dtype=torch.float32))


with capture("sm_90"):
    step(1, 1)
    first = len(compiled)
    assert first >= 20, compiled
    stage.evaluate(None, batch)
    for number, epoch in ((2, 15), (16, 16), (17, 2**20)):
        step(number, epoch)
print(compiled[first:])
"""


@pytest.mark.parametrize("script", [COUNTED, LATER], ids=["rows", "steps"])
def test_no_kernel_is_compiled_after_the_first_step(script):
    run = Fork(lambda: exec(script, {}), Path(__file__).parents[2]).wait()
    assert run.returncode == 0 and run.stdout.strip() == "[]", run.stdout + run.stderr[-3000:]


ATTENTION = """
from kernel_lab.capture import capture
from kernel_lab.gate_cases import forward_and_backward, meta
from triton import knobs
from megatron5d import kernels

compiled = []
knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
with capture("sm_90"):
    sizes = (96, 96, 2, 4, 2), (97, 97, 1, 2, 1), (1, 1, 1, 1, 1), (512, 33, 16, 16, 16)
    for s, t, b, heads, groups in sizes:
        shapes = (s, heads), (t, groups), (t, groups)
        q, k, v = (meta(n, b, count, 16, grad=True) for n, count in shapes)
        forward_and_backward(kernels.attention(q, k, v, scale=0.25))
print(sorted(name.split(".")[-1] for name in compiled))
"""


def test_no_kernel_of_attention_is_compiled_for_other_sizes():
    """Except the kernel of dk and dv, which saves registers for multiples of 16 queries."""
    run = Fork(lambda: exec(ATTENTION, {}), Path(__file__).parents[2]).wait()
    names = ["_delta_kernel", "_forward_kernel", *["_key_value_kernel"] * 3]
    names += ["_query_kernel", "_sum_parts_kernel"]
    assert run.returncode == 0 and run.stdout.strip() == str(names), run.stdout + run.stderr[-3000:]

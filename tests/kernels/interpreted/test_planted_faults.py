"""One fault at a time in a copy of a kernel's file: comparison with the reference, or the
interpreter, detects it."""

from functools import cache, partial
from unittest import mock

import pytest
import torch
from kernel_lab.attention import attention_results, make_qkv
from kernel_lab.faults import load_with_fault
from triton.runtime.errors import InterpreterError

from megatron5d import kernels
from megatron5d.kernels.flash_attention import backward, forward
from megatron5d.kernels.fp8 import transpose
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of_rows_reference,
    quantize_by_row_reference,
    quantize_tensor_reference,
)

pytestmark = pytest.mark.interpreted


def norm(module):
    x, weight = torch.randn(5, 7), torch.randn(7)
    exact = kernels.rms_norm_reference(x.double(), weight.double(), 1e-5)
    return module.rms_norm(x, weight, 1e-5), exact


def rope(module):
    q, k, angle = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 1, 8), torch.randn(5, 2, 4)
    inputs = q, k, angle.cos(), angle.sin()
    return module.apply_rope(*inputs)[0], kernels.apply_rope_reference(*inputs)[0]


def rope_of_projection(module):
    x, angle, dy = torch.randn(5, 2, 6, 8), torch.randn(5, 1, 4), torch.randn(5, 2, 6, 8)

    def rotated(rope):
        leaf = x.clone().requires_grad_()
        y = torch.cat(rope(leaf * 1, (2, 2), angle.cos(), angle.sin()), 2)
        return torch.cat((y, *torch.autograd.grad(y, leaf, dy)))

    return map(rotated, (module.apply_rope_to_projection, kernels.apply_rope_to_projection))


def statistics(module):
    logits, labels = torch.randn(3, 150) - 5, torch.tensor([0, 140, 7])
    row_max = logits.amax(1)
    exact = row_max, (logits - row_max[:, None]).exp().sum(1), logits[range(3), labels]
    return torch.stack(module.vocab_statistics(logits, labels, 0, 150)), torch.stack(exact)


def attention(module, **options):
    q, k, v = make_qkv(s=300 if options else 100, b=1, g=2, d=16)
    with mock.patch.object(forward, "forward", module.forward):
        return attention_results(q, k, v, scale=0.2, grad=False, **options)[0]


def attention_keys(module):
    """One KV head with three blocks of keys, which four processors share."""
    with mock.patch.object(backward, "launch_keys", module.launch_keys):
        _, _, *grads = attention_results(*make_qkv(s=260, b=1, a=4, d=16), scale=0.2)
    return (torch.cat([grad.flatten().double() for grad in side]) for side in zip(*grads))


def fp8_gemm(module):
    a = quantize_rows(torch.randn(70, 400) * torch.logspace(-2, 2, 400))
    b = quantize_blocks(torch.randn(130, 400))[0]
    return module.fp8_matmul(a, b), a.dequantize() @ b.dequantize().t()


def one_scale(module):
    x = torch.randn(130, 150)
    x[129, 149] = -50
    plain, transposed = (q.dequantize() for q in module.quantize_tensor_both_ways(x))
    exact = quantize_tensor_reference(x).dequantize()
    return torch.stack([plain, transposed.t()]), torch.stack([exact, exact])


def fp8_transpose(module):
    x = torch.randn(130, 140).to(torch.float8_e4m3fn)
    with mock.patch.object(transpose, "store_transposed", module.store_transposed):
        return transpose.transpose_values(x).float(), x.t().float()


def scales_of_rows(module):
    x = torch.randn(70, 150) * torch.logspace(-1, 1, 70)[:, None]
    quantized = module.quantize_by_row(x, module.amax_of_rows(x))
    exact = quantize_by_row_reference(x, amax_of_rows_reference(x))
    return (values.float() * scales for values, scales in (quantized, exact))


def weight_grad(module):
    dy, x, main_grad = torch.randn(100, 32), torch.randn(100, 48), torch.zeros(1, 32, 48)
    dy, x = dy.bfloat16(), x.bfloat16()
    module.grouped_weight_grad(dy, x, torch.tensor([0, 70]), main_grad)
    return main_grad[0], dy[:70].double().t() @ x[:70].double()


in_a_window = partial(attention, window=150)
# (file, run, {fault: (right, wrong)})
PLANTED = [
    (
        "norm",
        norm,
        {
            "no mask": ("row < num_rows, column < width", "row < num_rows, column >= 0"),
            "other eps": ("/ width + eps)", "/ width + 100 * eps + 0.1)"),
        },
    ),
    (
        "rope",
        rope,
        {
            "wrong stride": (
                "s * q_stride_s + b * q_stride_b",
                "s * q_stride_b + b * q_stride_s",
            ),
            "wrong sign": ("x1 * cos - x2 * sin", "x1 * cos + x2 * sin"),
        },
    ),
    (
        "rope",
        rope_of_projection,
        {
            "too few heads": ("(q, k), (q, k), cos", "(q, k), (q, k.clone()), cos"),
            "rotated forward": (
                "dk_out), cos, sin, ctx.interleaved, True",
                "dk_out), cos, sin, ctx.interleaved, False",
            ),
            "v on top of k": ("dv_out.copy_(dv)", "dk_out.copy_(dv)"),
        },
    ),
    (
        "vocab_cross_entropy",
        statistics,
        {
            "wrong padding": (
                'num_valid_columns, other=float("-inf")',
                "num_valid_columns, other=0.0",
            )
        },
    ),
    (
        "flash_attention/forward",
        attention,
        {
            "off-by-one tile": (
                "tl.range(begin, end, BLOCK_N)",
                "tl.range(begin, end - BLOCK_N if MASKED else end, BLOCK_N)",
            ),
            "no mask on the last keys": (
                "tl.range(begin, end, BLOCK_N)",
                "tl.range(begin, end if MASKED else end + BLOCK_N, BLOCK_N)",
            ),
            "scores of the same block": ("following = offset + BLOCK_N", "following = offset"),
            "no causal mask": ("tl.where(is_visible, ", "tl.where(is_visible | True, "),
            "no rescaling": ("out = out * shrink[:, None]", "out = out * 1.0"),
        },
    ),
    (
        "flash_attention/forward",
        in_a_window,
        {
            "edges alone": ("block_start(offset, span, MASKED, FLAGS, BLOCK_N)", "offset"),
            "wrong end of the edges": ("following, span[1])", "following, span[2])"),
        },
    ),
    (
        "flash_attention/backward_keys",
        attention_keys,
        {
            "no delta": ("(dp - delta[None, :])", "dp"),
            "late start": ("tl.range(begin, end", "tl.range(begin + BLOCK_M, end"),
            "a part missing": ("in range(program, (stop", "in range(program + 1, (stop"),
            "a part twice": ("(2 * other + (other == program))", "(2 * program + 1)"),
            "added to the next block": (
                "dk = tl.where(ends, 0.0, dk)",
                "dk = tl.where(ends, 1.0, 1.0) * dk",
            ),
        },
    ),
    (
        "fp8/tiles",
        fp8_transpose,
        {
            "rows in another order": (
                "tl.join(tl.join(a, c), tl.join(b, d))",
                "tl.join(tl.join(a, b), tl.join(c, d))",
            )
        },
    ),
    (
        "fp8/gemm",
        fp8_gemm,
        {
            "no promotion": ("total += product", "total = product"),
            "one side's scale": ("product * (a * b)[:, None]", "product * a[:, None]"),
        },
    ),
    (
        "fp8/quantize_tensor",
        one_scale,
        {
            "signed maximum": ("amax_along(amax_along(x, 1), 0)", "tl.max(tl.max(x, 1), 0)"),
            "maximum of some columns": (
                "amax_along(amax_along(x, 1), 0)",
                "tl.max(tl.min(tl.abs(x), 1), 0)",
            ),
        },
    ),
    (
        "fp8/quantize_tensor",
        scales_of_rows,
        {
            "one row's maximum": ("amax_ptr + row, row < rows", "amax_ptr + row * 0, row < rows"),
            "last tile's maximum": (
                "row * across + tl.program_id(0) % across",
                "row * across",
            ),
        },
    ),
    (
        "gemm",
        weight_grad,
        {"next expert's rows": ("BLOCK_R) < last)[:, None]", "BLOCK_R) >= 0)[:, None]")},
    ),
]
FAULTS = {
    name: (file, run, *texts) for file, run, faults in PLANTED for name, texts in faults.items()
}


def distance(run, module) -> float:
    torch.manual_seed(0)
    x, exact = (y.detach().double() for y in run(module))
    return float((x - exact).norm() / exact.norm())


@cache
def distance_without_fault(folder, file, run) -> float:
    return distance(run, load_with_fault(folder, file, "", ""))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_detected(fault, tmp_path):
    file, run, right, wrong = FAULTS[fault]
    assert distance_without_fault(tmp_path.parent, file, run) < 1e-2
    try:
        error = distance(run, load_with_fault(tmp_path, file, right, wrong))
    except InterpreterError:
        return
    assert not error < 3e-2, f"the planted fault moved the result by {error} only"

"""One fault at a time in a copy of a kernel's file: comparison with the reference, or the
interpreter, notices."""

import importlib.util
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from triton.runtime.errors import InterpreterError

from megatron5d import kernels
from megatron5d.kernels.flash_attention import backward
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.fp8 import transpose
from megatron5d.kernels.fp8.quantize import quantize_blocks, quantize_rows
from megatron5d.kernels.fp8.quantize_tensor import (
    amax_of_rows_reference,
    quantize_by_row_reference,
    quantize_tensor_reference,
)

pytestmark = pytest.mark.interpreted
ROOT = Path(kernels.__file__).parent


def with_fault(tmp_path, name, right, wrong):
    """The module with `right` replaced by `wrong`; without a fault where both are empty."""
    source = (ROOT / f"{name}.py").read_text()
    assert right in source, f"{name}.py no longer contains {right!r}: plant the fault anew"
    path = tmp_path / "planted.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"planted_{name.replace('/', '_')}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def norm(module):
    x, weight = torch.randn(5, 7), torch.randn(7)
    return module.rms_norm(x, weight, 1e-5), kernels.rms_norm_reference(
        x.double(), weight.double(), 1e-5
    )


def rope(module):
    q, k, angle = torch.randn(5, 2, 3, 8), torch.randn(5, 2, 1, 8), torch.randn(5, 2, 4)
    tables = angle.cos(), angle.sin()
    return module.apply_rope(q, k, *tables)[0], kernels.apply_rope_reference(q, k, *tables)[0]


def rope_of_projection(module):
    x, angle, dy = torch.randn(5, 2, 6, 8), torch.randn(5, 1, 4), torch.randn(5, 2, 6, 8)
    found = []
    for run in (module.apply_rope_to_projection, kernels.apply_rope_to_projection):
        leaf = x.clone().requires_grad_()
        parts = torch.cat(run(leaf * 1, (2, 2), angle.cos(), angle.sin()), 2)
        found.append(torch.cat((parts, *torch.autograd.grad(parts, leaf, dy))))
    return tuple(found)


def statistics(module):
    logits, labels = torch.randn(3, 150) - 5, torch.tensor([0, 140, 7])
    return torch.stack(module.vocab_statistics(logits, labels, 0, 150)), torch.stack(
        [
            logits.amax(1),
            (logits - logits.amax(1, keepdim=True)).exp().sum(1),
            logits[range(3), labels],
        ]
    )


def attention_inputs():
    return [torch.randn(100, 1, 2, 32).bfloat16() for _ in range(3)]


def attention_forward(module):
    q, k, v = attention_inputs()
    rule = AttentionRule(0.2)
    wide = (x.double() for x in (q, k, v))
    return module.forward(q, k, v, rule, None)[0], kernels.attention_reference(*wide, rule)[0]


def attention_in_a_window(module):
    q, k, v = (torch.randn(300, 1, 1, 16).bfloat16() for _ in range(3))
    rule = AttentionRule(0.2, window=150)
    wide = (x.double() for x in (q, k, v))
    return module.forward(q, k, v, rule, None)[0], kernels.attention_reference(*wide, rule)[0]


def attention_keys(module):
    """One KV head of three blocks of keys, which four processors share."""
    q, k, v = (torch.randn(260, 1, heads, 16).bfloat16() for heads in (4, 1, 1))
    with mock.patch.object(backward, "launch_keys", module.launch_keys):
        return attention_backward(backward, [q, k, v])


def attention_backward(module, inputs):
    rule = AttentionRule(0.2)
    wide = [x.double().requires_grad_() for x in inputs]
    out, lse = kernels.attention_reference(*wide, rule)
    dout = torch.randn(out.shape).bfloat16()
    got = module.backward(dout, *inputs, out.detach().bfloat16(), lse.detach().float(), rule)
    want = torch.autograd.grad(out, wide, dout.double())
    return torch.cat([g.flatten().double() for g in got]), torch.cat([w.flatten() for w in want])


def float8(module):
    a = quantize_rows(torch.randn(70, 400) * torch.logspace(-2, 2, 400))
    b = quantize_blocks(torch.randn(130, 400))[0]
    return module.fp8_matmul(a, b), a.dequantize() @ b.dequantize().t()


def float8_tensor(module):
    x = torch.randn(130, 150)
    x[129, 149] = -50
    want, (straight, transposed) = (
        quantize_tensor_reference(x).dequantize(),
        module.quantize_tensor_both_ways(x),
    )
    return torch.stack([straight.dequantize(), transposed.dequantize().t()]), torch.stack(
        [want, want]
    )


def float8_transposed(module):
    x = torch.randn(130, 140).to(torch.float8_e4m3fn)
    with mock.patch.object(transpose, "store_transposed", module.store_transposed):
        return transpose.transpose_values(x).float(), x.t().float()


def float8_rows(module):
    x = torch.randn(70, 150) * torch.logspace(-1, 1, 70)[:, None]
    got = module.quantize_by_row(x, module.amax_of_rows(x))
    want = quantize_by_row_reference(x, amax_of_rows_reference(x))
    return tuple(values.float() * scales for values, scales in (got, want))


def weight_grad(module):
    dy, x, main = (
        torch.randn(100, 32).bfloat16(),
        torch.randn(100, 48).bfloat16(),
        torch.zeros(1, 32, 48),
    )
    module.grouped_weight_grad(dy, x, torch.tensor([0, 70]), main)
    return main[0], dy[:70].double().t() @ x[:70].double()


TAIL = "dy = tl.where(live, dy, tl.zeros_like(dy))\n        x = tl.where(live, x, tl.zeros_like(x))"
FAULTS = {
    "dropped mask": (
        "norm",
        norm,
        "row < num_rows, column < width",
        "row < num_rows, column >= 0",
    ),
    "dropped eps": ("norm", norm, "/ width + eps)", "/ width + 100 * eps + 0.1)"),
    "wrong stride": (
        "rope",
        rope,
        "s * q_stride_s + b * q_stride_b",
        "s * q_stride_b + b * q_stride_s",
    ),
    "wrong sign": ("rope", rope, "x1 * cos - x2 * sin", "x1 * cos + x2 * sin"),
    "too few heads": (
        "rope",
        rope_of_projection,
        "_launch((q, k), (q, k), cos, sin, interleaved, False)",
        "_launch((q, k), (q, k.clone()), cos, sin, interleaved, False)",
    ),
    "not rotated back": (
        "rope",
        rope_of_projection,
        "(dq_out, dk_out), cos, sin, ctx.interleaved, True",
        "(dq_out, dk_out), cos, sin, ctx.interleaved, False",
    ),
    "v on top of k": (
        "rope",
        rope_of_projection,
        "dv_out.copy_(dv)",
        "dk_out.copy_(dv)",
    ),
    "wrong padding": (
        "vocab_cross_entropy",
        statistics,
        'num_valid_columns, other=float("-inf")',
        "num_valid_columns, other=0.0",
    ),
    "off-by-one tile": (
        "flash_attention/forward",
        attention_forward,
        "for offset in tl.range(begin, end, BLOCK_N)",
        "for offset in tl.range(begin, end - BLOCK_N if MASKED else end, BLOCK_N)",
    ),
    "no mask on the last keys": (
        "flash_attention/forward",
        attention_forward,
        "for offset in tl.range(begin, end, BLOCK_N)",
        "for offset in tl.range(begin, end if MASKED else end + BLOCK_N, BLOCK_N)",
    ),
    "scores not ahead": (
        "flash_attention/forward",
        attention_forward,
        "following = offset + BLOCK_N",
        "following = offset",
    ),
    "nothing but edges": (
        "flash_attention/forward",
        attention_in_a_window,
        "block_start(offset, span, MASKED, FLAGS, BLOCK_N)",
        "offset",
    ),
    "the edges' end": (
        "flash_attention/forward",
        attention_in_a_window,
        "following, span[1])",
        "following, span[2])",
    ),
    "no causal mask": (
        "flash_attention/forward",
        attention_forward,
        "tl.where(seen, ",
        "tl.where(seen | True, ",
    ),
    "no rescaling": (
        "flash_attention/forward",
        attention_forward,
        "out = out * shrink[:, None]",
        "out = out * 1.0",
    ),
    "no delta": ("flash_attention/backward_keys", attention_keys, "(dp - delta[None, :])", "dp"),
    "late start": (
        "flash_attention/backward_keys",
        attention_keys,
        "tl.range(begin, end, BLOCK_M)",
        "tl.range(begin + BLOCK_M, end, BLOCK_M)",
    ),
    "a part forgotten": (
        "flash_attention/backward_keys",
        attention_keys,
        "in range(program, (stop",
        "in range(program + 1, (stop",
    ),
    "a part twice": (
        "flash_attention/backward_keys",
        attention_keys,
        "(2 * other + (other == program))",
        "(2 * program + 1)",
    ),
    "the next block's share": (
        "flash_attention/backward_keys",
        attention_keys,
        "dk = tl.where(ends, 0.0, dk)",
        "dk = tl.where(ends, 1.0, 1.0) * dk",
    ),
    "rows of a column in another order": (
        "fp8/tiles",
        float8_transposed,
        "tl.join(tl.join(a, c), tl.join(b, d))",
        "tl.join(tl.join(a, b), tl.join(c, d))",
    ),
    "missing promotion": ("fp8/gemm", float8, "total += product", "total = product"),
    "one side's scale": ("fp8/gemm", float8, "product * (a * b)[:, None]", "product * a[:, None]"),
    "signed maximum": (
        "fp8/quantize_tensor",
        float8_tensor,
        "amax_along(amax_along(x, 1), 0)",
        "tl.max(tl.max(x, 1), 0)",
    ),
    "maximum of some columns": (
        "fp8/quantize_tensor",
        float8_tensor,
        "amax_along(amax_along(x, 1), 0)",
        "tl.max(tl.min(tl.abs(x), 1), 0)",
    ),
    "one row's maximum": (
        "fp8/quantize_tensor",
        float8_rows,
        "amax_ptr + row, row < rows",
        "amax_ptr + row * 0, row < rows",
    ),
    "last tile's maximum": (
        "fp8/quantize_tensor",
        float8_rows,
        "row * across + tl.program_id(0) % across",
        "row * across",
    ),
    "neighbours' rows": ("gemm", weight_grad, TAIL, "dy = dy\n        x = x"),
}


def distance(run, module):
    torch.manual_seed(0)
    got, want = (x.detach().double() for x in run(module))
    return float((got - want).norm() / want.norm())


@cache
def without_a_fault(folder, name, run):
    return distance(run, with_fault(folder, name, "", ""))


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_noticed(fault, tmp_path):
    name, run, right, wrong = FAULTS[fault]
    assert without_a_fault(tmp_path.parent, name, run) < 1e-2
    try:
        error = distance(run, with_fault(tmp_path, name, right, wrong))
    except InterpreterError:
        return
    assert not error < 3e-2, f"the planted fault moved the result by {error} only"

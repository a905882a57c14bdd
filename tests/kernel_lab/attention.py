"""Inputs of attention, and its results beside those of the full score matrix in float64."""

import torch
from torch import Tensor

from megatron5d import kernels
from megatron5d.kernels.choice import AUTO
from megatron5d.kernels.flash_attention.plain import AttentionRule


def make_qkv(s=97, t=None, b=2, a=2, g=1, d=32, dv=None, dtype=torch.bfloat16) -> list[Tensor]:
    """Random q `[s, b, a, d]`, k `[t, b, g, d]`, v `[t, b, g, dv]`."""
    t, dv = t or s, dv or d
    return [torch.randn(shape).to(dtype) for shape in ((s, b, a, d), (t, b, g, d), (t, b, g, dv))]


def attention_results(
    q, k, v, *, scale=None, sinks=None, grad=True, settings=AUTO, **options
) -> list[tuple[Tensor, Tensor]]:
    """Pairs (result, float64 result) of out, lse, dq, dk, dv and any dsinks.

    Args:
        scale: None = 1/sqrt(d).
        grad: False: out and lse alone.
        options: mask and soft-cap.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    rule = AttentionRule(scale, **options)
    exact = kernels.attention_reference(*wide[:3], rule, *wide[3:])
    sinks = leaves[3] if sinks is not None else None
    results = kernels.attention(*leaves[:3], scale=scale, sinks=sinks, settings=settings, **options)
    pairs = list(zip(results, exact))
    if grad:
        dout = torch.randn(exact[0].shape).to(q.dtype)
        grads = torch.autograd.grad(results[0], leaves, dout)
        pairs += zip(grads, torch.autograd.grad(exact[0], wide, dout.double()))
    return [(x.detach(), exact_x.detach()) for x, exact_x in pairs]

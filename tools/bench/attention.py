"""Attention, forward and backward: causal, in windows, and in packed documents."""

import functools
import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron5d import kernels
from megatron5d.tools.bench.harness import (
    OURS,
    Benchmark,
    Call,
    Calls,
    Forward,
    forward_or_backward,
    randn,
)


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Causal attention of torch, of `[b, heads, s, d]`."""
    grouped = q.shape[1] != k.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return run, (q, k, v)


def _flex(window: int, document: int, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Flex attention with the same mask, of `[b, heads, s, d]`."""
    s = q.shape[2]

    def is_visible(batch, head, query, key):
        visible = query >= key
        if window:
            visible = visible & (query - key < window)
        return visible & (query // document == key // document) if document else visible

    @functools.cache
    def prepare() -> tuple[Call, BlockMask]:
        mask = create_block_mask(is_visible, None, None, s, s, q.device)
        return torch.compile(flex_attention, dynamic=False), mask

    def run() -> Tensor:
        compiled, mask = prepare()
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)

    return run, (q, k, v)


def _varlen(s: int, window: int, document: int, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Flash attention over packed sequences, of `[s, b, heads, d]`."""
    length = document or s
    q, k, v = (
        x.detach().transpose(0, 1).flatten(0, 1).requires_grad_(x.requires_grad) for x in (q, k, v)
    )
    ends = torch.arange(0, q.shape[0] + 1, length, device=q.device, dtype=torch.int32)
    window_size = (window - 1 if window else -1, 0)

    def run() -> object:
        from torch.nn.attention.varlen import varlen_attn

        # older torch takes grouped heads without this option
        has_option = "enable_gqa" in inspect.signature(varlen_attn).parameters
        grouped = has_option and q.shape[1] != k.shape[1]
        options: dict[str, Any] = {"enable_gqa": True} if grouped else {}
        return varlen_attn(q, k, v, ends, ends, length, length, window_size=window_size, **options)

    return run, (q, k, v)


def attention(
    device: str,
    *,
    backward: bool,
    s: int,
    b: int,
    a: int,
    g: int,
    d: int,
    dv: int = 0,
    window: int = 0,
    document: int = 0,
) -> Calls:
    """Causal attention of a query heads over g key heads.

    Args:
        dv: head dim of the values; 0 = d.
        window: in tokens; 0 = none.
        document: tokens of each packed document; 0 = one.
    """
    sizes = ((a, d), (g, d), (g, dv or d))
    q, k, v = (randn(device, s, b, *heads, grad=backward) for heads in sizes)
    by_head = tuple(
        x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k, v)
    )
    documents = None
    if document:
        documents = (torch.arange(s, device=device) // document).expand(b, s).contiguous()
    options = {"scale": d**-0.5, "window": window or None, "documents": documents}
    ours = partial(kernels.attention, q, k, v, **options, settings=OURS)
    forwards: dict[str, Forward] = {"ours": (lambda **options: ours(**options)[0], (q, k, v))}
    if not window and not document:
        forwards["torch flash"] = _sdpa(SDPBackend.FLASH_ATTENTION, *by_head)
        forwards["cuDNN"] = _sdpa(SDPBackend.CUDNN_ATTENTION, *by_head)
    else:
        forwards["torch flash, packed"] = _varlen(s, window, document, q, k, v)
    # flex compiles for long: only where flash and cuDNN do not apply
    if window or document or dv:
        forwards["torch flex"] = _flex(window, document, *by_head)
    return forward_or_backward(forwards, backward)


def forward_flops(*, s, b, a, g, d, dv=0, window=0, document=0) -> float:
    """FLOPs of two GEMMs over all pairs of a query and a visible key."""
    pairs = s * (window - window / 2 * window / s if window else (document or s) / 2)
    return 2 * (d + (dv or d)) * pairs * b * a


BASE = {"s": 8192, "b": 2, "a": 16, "g": 16, "d": 128}
TINY = {"s": 64, "b": 1, "a": 2, "g": 2, "d": 32}
VARIANTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "causal, d 128, 8 k": ({}, {}),
    "causal, d 128, 8 k, 32 heads over 8": ({"b": 1, "a": 32, "g": 8}, {"g": 1}),
    "causal, d 128, 8 k, 4 heads over 1": ({"b": 1, "a": 4, "g": 1}, {"g": 1}),  # 8B at tp 8
    "causal, d 64, 8 k": ({"a": 32, "g": 32, "d": 64}, {"d": 16}),
    "causal, d 256, 8 k": ({"a": 8, "g": 8, "d": 256}, {"d": 64}),
    "causal, d 192 and 128, 8 k": ({"d": 192, "dv": 128}, {"d": 48, "dv": 32}),
    "window of 128, d 64, 8 k, 64 heads over 8": (
        {"window": 128, "b": 1, "a": 64, "g": 8, "d": 64},
        {"window": 8},
    ),
    "window of 1 k, d 128, 8 k": ({"window": 1024}, {"window": 24}),
    "documents of 1 k, d 128, 8 k": ({"document": 1024}, {"document": 24}),
}


def _row(backward: bool, sizes: dict[str, int], tiny: dict[str, int]) -> Benchmark:
    # S = QKᵀ and PV; the backward recomputes S, and has two GEMMs for each of them
    gemms = 5 if backward else 2

    def work(**sizes) -> float:
        return forward_flops(**sizes) * gemms / 2

    make = partial(attention, backward=backward)
    return Benchmark(make, work, "TFLOP/s", BASE | sizes, TINY | tiny, {"ours": "attention"})


ATTENTION = {
    f"attention {direction}, {name}": _row(direction == "backward", sizes, tiny)
    for name, (sizes, tiny) in VARIANTS.items()
    for direction in ("forward", "backward")
}

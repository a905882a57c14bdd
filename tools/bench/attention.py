"""Attention, both ways, at the shapes of models in use."""

import functools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from megatron5d import kernels
from megatron5d.tools.bench.harness import Benchmark, Calls, Forward, one_way, random


def _flex(
    s: int, window: int, document: int, device: str, tiles: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], Tensor]:
    """Makes torch's flex attention with the same mask; tensors are `[b, heads, s, d]`."""

    def seen(batch, head, query, key):
        visible = query >= key
        if window:
            visible = visible & (query - key < window)
        return visible & (query // document == key // document) if document else visible

    @functools.cache
    def ready() -> tuple[Callable[..., Tensor], BlockMask]:
        return torch.compile(flex_attention, dynamic=False), create_block_mask(seen, None, None, s, s, device)

    def run() -> Tensor:
        compiled, mask = ready()
        return compiled(*tiles, block_mask=mask, enable_gqa=True)

    return run


def _varlen(s: int, window: int, document: int, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """Makes torch's flash attention over packed sequences; tensors are `[s, b, heads, d]`."""
    length = document or s
    q, k, v = (x.detach().transpose(0, 1).flatten(0, 1).requires_grad_(x.requires_grad) for x in (q, k, v))
    ends = torch.arange(0, q.shape[0] + 1, length, device=q.device, dtype=torch.int32)
    seen = (window - 1 if window else -1, 0)

    def run() -> object:
        from torch.nn.attention.varlen import varlen_attn

        grouped = q.shape[1] != k.shape[1]
        return varlen_attn(q, k, v, ends, ends, length, length, window_size=seen, enable_gqa=grouped)

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
    """Benchmarks causal attention of a query heads over g key heads; window and document lengths, 0 = none."""
    sizes = ((a, d), (g, d), (g, dv or d))
    q, k, v = (random(device, s, b, *heads, grad=backward) for heads in sizes)
    qh, kh, vh = tiles = tuple(x.detach().permute(1, 2, 0, 3).contiguous().requires_grad_(backward) for x in (q, k, v))
    ids = (torch.arange(s, device=device) // document).expand(b, s).contiguous() if document else None
    ours = partial(kernels.attention, q, k, v, scale=d**-0.5, window=window or None, documents=ids)

    def torch_with(backend: SDPBackend) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(qh, kh, vh, is_causal=True, enable_gqa=a != g)

        return run

    forwards: dict[str, Forward] = {"ours": (lambda: ours()[0], (q, k, v))}
    if not window and not document:
        forwards["torch flash"] = torch_with(SDPBackend.FLASH_ATTENTION), tiles
        forwards["cuDNN"] = torch_with(SDPBackend.CUDNN_ATTENTION), tiles
    else:
        forwards["torch flash, packed"] = _varlen(s, window, document, q, k, v)
    if window or document or dv:  # it takes long to compile, and elsewhere flash and cuDNN are there
        forwards["torch flex"] = _flex(s, window, document, device, (qh, kh, vh)), tiles
    return one_way(forwards, backward)


def floating_point_operations(*, s, b, a, g, d, dv=0, window=0, document=0) -> float:
    """Counts the operations of the forward: two GEMMs over all pairs of a query and a key that it sees."""
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
    "window of 128, d 64, 8 k, 64 heads over 8": ({"window": 128, "b": 1, "a": 64, "g": 8, "d": 64}, {"window": 8}),
    "window of 1 k, d 128, 8 k": ({"window": 1024}, {"window": 24}),
    "documents of 1 k, d 128, 8 k": ({"document": 1024}, {"document": 24}),
}


def _rows(way: str, backward: bool) -> dict[str, Benchmark]:
    def work(**sizes) -> float:
        return floating_point_operations(**sizes) * (2.5 if backward else 1)  # five GEMMs for two

    make = partial(attention, backward=backward)
    return {
        f"attention {way}, {name}": Benchmark(make, work, "TFLOP/s", BASE | sizes, TINY | tiny, {"ours": "attention"})
        for name, (sizes, tiny) in VARIANTS.items()
    }


ATTENTION = {name: row for both in zip(_rows("forward", False).items(), _rows("backward", True).items())
             for name, row in both}  # fmt: skip

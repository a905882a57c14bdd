"""Attention by FlashAttention-4 (`pip install flash-attn-4`): also with windows, soft-cap, sinks.

It aligns its causal mask and its windows at the last query and key, ours are aligned at the first:
both mean the same where there is one key per query. Documents are left to Triton: the library takes
their lengths from the host, which does not know them. Zadouri et al. 2026, FlashAttention-4; the
signatures are those of `flash_attn/cute/interface.py`.
"""

import functools
import importlib.metadata
from types import ModuleType

import torch
from torch import Tensor

from megatron5d.kernels.choice import AttentionRequest
from megatron5d.kernels.dispatch import HALF_DTYPES
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.flash_attention.tiles import aligned


@functools.cache
def missing() -> str | None:
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return "flash-attn-4 is not installed: `pip install flash-attn-4`"
    return None


def supports(request: AttentionRequest, deterministic: bool) -> bool:
    r, dims, major = request, request.head_dims, request.capability // 10
    wide_on_blackwell = dims in ((192, 128), (256, 256))
    has_kernel = (major == 9 and max(dims) <= 256) or (
        major == 10 and (max(dims) <= 128 or wide_on_blackwell)
    )
    sinks_fit = not (r.sinks and major == 10 and max(dims) == 256)
    aligned_mask = not (r.causal or r.window) or r.q_shape[0] == r.k_shape[0]
    return (
        r.dtype in HALF_DTYPES
        and has_kernel
        and all(d % 8 == 0 for d in dims)
        and aligned_mask
        and sinks_fit
        and not (r.documents or r.positions)
    )


def interface() -> ModuleType:
    """The library, whose import takes seconds."""
    return importlib.import_module("flash_attn.cute.interface")


def _window(rule: AttentionRule) -> dict[str, int | None]:
    reach = None if rule.window is None else rule.window - 1
    return {
        "window_size_left": reach,
        "window_size_right": 0 if rule.causal and reach is not None else reach,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype, device=q.device)
    _, lse, *_ = interface()._flash_attn_fwd(
        *(aligned(x).transpose(0, 1) for x in (q, k, v)),
        softmax_scale=rule.scale,
        causal=rule.causal,
        softcap=rule.softcap,
        learnable_sink=sinks,
        return_lse=True,
        out=out.transpose(0, 1),
        **_window(rule),
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionRule,
    deterministic: bool,
) -> tuple[Tensor, ...]:
    gradients = interface()._flash_attn_bwd(
        *(aligned(x).transpose(0, 1) for x in (q, k, v, out, dout)),
        lse.contiguous(),
        rule.scale,
        rule.causal,
        rule.softcap,
        deterministic=deterministic,
        **_window(rule),
    )
    return tuple(gradient.transpose(0, 1).contiguous() for gradient in gradients[:3])

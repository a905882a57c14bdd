"""Attention by FlashAttention-4 (`pip install flash-attn-4`): also in windows, with soft-cap and
sinks.

Its causal mask and its windows are aligned at the last query and key, ours at the first: they mean
the same for as many keys as queries. Documents go to Triton: it takes their lengths from the host,
which does not know them. Zadouri et al. 2026, FlashAttention-4; signatures are those of
`flash_attn/cute/interface.py`.
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


def takes(request: AttentionRequest, deterministic: bool) -> bool:
    r, dims = request, (request.q_shape[3], request.value_dim)
    hopper, blackwell = r.capability // 10 == 9, r.capability // 10 == 10
    widths = (hopper and max(dims) <= 256) or (
        blackwell and (max(dims) <= 128 or dims in ((192, 128), (256, 256)))
    )
    special = r.documents or r.positions or (r.sinks and blackwell and max(dims) == 256)
    same = not (r.causal or r.window) or r.q_shape[0] == r.k_shape[0]
    return (
        r.dtype in HALF_DTYPES and widths and all(d % 8 == 0 for d in dims) and same and not special
    )


def interface() -> ModuleType:
    """Returns the library, whose import takes seconds."""
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
    return tuple(each.transpose(0, 1).contiguous() for each in gradients[:3])

"""Attention by cuDNN, through torch's operators: full, or causal with one key per query.

The operator caches the graph of a backward by the layouts of q, k and v alone. So out and dout
always get one layout, because a later call would otherwise run the graph of another layout (pytorch
#176915). Its backward accumulates dq by atomics: it is not used where every step must give the same
bits.
"""

import torch
from torch import Tensor

from megatron5d.kernels.choice import AttentionRequest
from megatron5d.kernels.dispatch import HALF_DTYPES
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.flash_attention.tiles import aligned

OLDEST = 90501  # the first that reads dout in its own layout
OLDEST_WIDE = {
    (9, 192, 128): 91100,
    (10, 192, 128): 91100,
    (9, 256, 256): 91900,
    (10, 256, 256): 92201,
}
"""By major capability and head dims beyond 128."""


def version() -> int:
    """91200 for cuDNN 9.12.0; 0 without it."""
    return torch.backends.cudnn.version() or 0


def missing() -> str | None:
    if not (installed := version()):
        return "this build of torch has no cuDNN"
    return f"cuDNN {installed} is older than {OLDEST}" if installed < OLDEST else None


def supports(request: AttentionRequest, deterministic: bool) -> bool:
    r, dims = request, request.head_dims
    plain = r.window is None and not (r.softcap or r.documents or r.positions or r.sinks)
    aligned_mask = not r.causal or r.q_shape[0] == r.k_shape[0]
    oldest = 0 if max(dims) <= 128 else OLDEST_WIDE.get((r.capability // 10, *dims))
    return (
        r.capability >= 80
        and r.dtype in HALF_DTYPES
        and all(d % 8 == 0 for d in dims)
        and oldest is not None
        and version() >= oldest
        and r.k_shape[0] > 1
        and plain
        and aligned_mask
        and not (r.backward and deterministic)
    )


def _heads_first(x: Tensor) -> Tensor:
    return aligned(x).permute(1, 2, 0, 3)  # [s, b, a, d] -> [b, a, s, d], a view


def forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(_heads_first, (q, k, v)), None, True, 0.0, rule.causal, False, scale=rule.scale
    )
    return out.permute(2, 0, 1, 3).contiguous(), lse.reshape(lse.shape[:3])


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
    dout, out = (x.contiguous().permute(1, 2, 0, 3) for x in (dout, out))
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # seed and offset of dropout
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        *map(_heads_first, (q, k, v)),
        out,
        lse.contiguous()[..., None],
        unused,
        unused,
        None,
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        rule.causal,
        scale=rule.scale,
    )
    return tuple(gradient.permute(2, 0, 1, 3).contiguous() for gradient in gradients)

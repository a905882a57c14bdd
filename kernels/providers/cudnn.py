"""Attention by cuDNN, through torch's own operators: full, or causal over as many keys as queries.

The operator keeps the graph of a backward by the layouts of q, k and v alone. So out and dout
always come in one layout of their own, lest a later call run the graph of another one (pytorch
#176915). Its backward adds up dq by
atomics: it is left to others where every step must give the same bits.
"""

import torch
from torch import Tensor

from megatron5d.kernels.choice import AttentionRequest
from megatron5d.kernels.dispatch import HALF_DTYPES
from megatron5d.kernels.flash_attention.plain import AttentionRule
from megatron5d.kernels.flash_attention.tiles import aligned

OLDEST = 90501  # which reads dout in its own layout
OLDEST_WIDE = {
    (9, 192, 128): 91100,
    (10, 192, 128): 91100,
    (9, 256, 256): 91900,
    (10, 256, 256): 92201,
}
"""By major capability and head dims beyond 128."""


def version() -> int:
    """Returns 91200 for cuDNN 9.12.0; 0 without it."""
    return torch.backends.cudnn.version() or 0


def missing() -> str | None:
    if not (found := version()):
        return "this build of torch has no cuDNN"
    return f"cuDNN {found} is older than {OLDEST}" if found < OLDEST else None


def takes(request: AttentionRequest, deterministic: bool) -> bool:
    r, dims = request, (request.q_shape[3], request.value_dim)
    special = r.window is not None or r.softcap or r.documents or r.positions or r.sinks
    same = not r.causal or r.q_shape[0] == r.k_shape[0]
    wide = max(dims) <= 128 or version() >= OLDEST_WIDE.get((r.capability // 10, *dims), 10**9)
    fits = r.dtype in HALF_DTYPES and all(d % 8 == 0 for d in dims) and wide and r.k_shape[0] > 1
    return (
        r.capability >= 80 and fits and same and not special and not (r.backward and deterministic)
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
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # dropout's seed and offset
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
    return tuple(each.permute(2, 0, 1, 3).contiguous() for each in gradients)

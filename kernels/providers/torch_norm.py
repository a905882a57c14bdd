"""RMSNorm and LayerNorm by torch. The residual stream, and the gradient that arrives beside the
norm's, are added by passes of their own."""

import torch
from torch import Tensor

from megatron5d.kernels.choice import NormRequest
from megatron5d.kernels.dispatch import rows_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def missing() -> str | None:
    return None


def takes(request: NormRequest, deterministic: bool) -> bool:
    return request.dtype == request.weight_dtype and request.dtype in DTYPES


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what `launch_forward` does: the norm, the stream as rows, mean and 1 / scale of each
    row."""
    total, width = x if residual is None else x + residual, list(weight.shape)
    if centered:
        y, mean, scale = torch.ops.aten.native_layer_norm(total, width, weight, bias, eps)
    else:
        y, scale = torch.ops.aten._fused_rms_norm(total, width, weight, eps)
        mean = scale
    return y, rows_of(total), mean.flatten(), scale.flatten()


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    dtotal: Tensor | None,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    width, rows, (mean, scale) = (
        list(weight.shape),
        rows_of(dy),
        (each[:, None] for each in statistics),
    )
    dbias = None
    if centered:
        wanted = [True, True, bias is not None]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            rows, rows_of(x), width, mean, scale, weight, bias, wanted
        )
    else:
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            rows, rows_of(x), width, scale, weight, [True, True]
        )
    dx = dx.view(dy.shape)
    return dx if dtotal is None else dx.add_(dtotal), dweight, dbias if bias is not None else None

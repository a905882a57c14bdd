"""RMSNorm and LayerNorm by torch.

The residual stream and its gradient are added in separate passes.
"""

import torch
from torch import Tensor

from megatron5d.kernels.choice import NormRequest
from megatron5d.kernels.dispatch import rows_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def missing() -> str | None:
    return None


def supports(request: NormRequest, deterministic: bool) -> bool:
    return request.dtype == request.weight_dtype and request.dtype in DTYPES


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm, stream as rows, mean and 1 / scale of each row, as `launch_forward` of norm.py."""
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
    inputs = (rows_of(dy), rows_of(x), list(weight.shape))
    mean, scale = (statistic[:, None] for statistic in statistics)
    dbias = None
    if centered:
        output_mask = [True, True, bias is not None]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            *inputs, mean, scale, weight, bias, output_mask
        )
    else:
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(*inputs, scale, weight, [True, True])
    dx = dx.view(dy.shape)
    return dx if dtotal is None else dx.add_(dtotal), dweight, dbias if bias is not None else None

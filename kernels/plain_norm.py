"""RMSNorm and LayerNorm in plain torch: references for the kernels, and the path without them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels.dispatch import FirstOrderFunction, statistics_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm; the result is rounded once, to the dtype of `x`."""
    return norm_reference(x, weight, eps=eps, centered=False)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes LayerNorm; the result is rounded once, to the dtype of `x`."""
    return norm_reference(x, weight, bias, eps=eps, centered=True)


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centered: bool
) -> Tensor:
    """Computes LayerNorm if `centered`, else RMSNorm."""
    wide = x.to(statistics_dtype(x.dtype))
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def norm_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """Computes (norm of x, x), whose gradients are added in the norm's backward.

    Args:
        x, weight, bias, eps, centered: as in `norm_reference`.
    """
    dtype, wide = x.dtype, statistics_dtype(x.dtype)
    if centered and dtype == weight.dtype == wide and (bias is None or bias.dtype == wide):
        return F.layer_norm(x, weight.shape, weight, bias, eps), x
    if centered:
        # F.layer_norm would sum the gradients of bfloat16 weights in bfloat16.
        bias = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias, eps).to(dtype), x
    if weight.dtype != dtype:
        return rms_norm_reference(x, weight, eps), x
    if dtype != wide:
        return F.rms_norm(x, weight.shape, weight, eps), x
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(FirstOrderFunction):
    """(x, weight) -> (norm of x, x), with half the operations of autograd's backward.

    In a small layer on a CPU the number of operations determines the time.
    """

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        # An unused output must not cost a tensor of zeros, nor the time to read it.
        ctx.set_materialize_grads(False)
        return normal * weight, x

    @staticmethod
    def backward(ctx, dy, dstream):
        if dy is None:
            return dstream, None, None
        normal, scale, weight = ctx.saved_tensors
        h = weight.numel()
        dy_normal = (dy * normal).reshape(-1, h)
        # As a matrix product: mv would load torch's compiler on the meta device.
        projection = dy_normal.mm(weight[:, None]).view(scale.shape)
        # g - n mean(g n), see norm.py
        dx = torch.addcmul(dy * weight, normal, projection, value=-1 / h)
        dx = dx.mul_(scale) if dstream is None else torch.addcmul(dstream, dx, scale)
        return dx, dy_normal.sum(0), None

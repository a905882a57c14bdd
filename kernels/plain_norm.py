"""RMSNorm and LayerNorm in plain torch: the references of kernels, and what runs where no kernel
does."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels.dispatch import FirstOrderFunction, statistics_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes RMSNorm in plain torch; the result is rounded once, to the dtype of `x`."""
    wide = x.to(statistics_dtype(x.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Computes LayerNorm in plain torch; the result is rounded once, to the dtype of `x`."""
    wide = x.to(statistics_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (y if bias is None else y + bias.to(wide.dtype)).to(x.dtype)


def norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float, centred: bool
) -> Tensor:
    """Computes `layer_norm_reference` if `centred`, else `rms_norm_reference`."""
    return (
        layer_norm_reference(x, weight, bias, eps)
        if centred
        else rms_norm_reference(x, weight, eps)
    )


def norm_in_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """Returns the norm of x, and x, whose gradients meet in the norm's backward; arguments as in
    `norm_reference`."""
    dtype, wide = x.dtype, statistics_dtype(x.dtype)
    if centred and dtype == weight.dtype == wide and (bias is None or bias.dtype == wide):
        return F.layer_norm(x, weight.shape, weight, bias, eps), x
    if centred:  # torch's own adds up the gradients of bfloat16 weights in bfloat16
        bias = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), weight.shape, weight.to(wide), bias, eps).to(dtype), x
    if weight.dtype != dtype:
        return rms_norm_reference(x, weight, eps), x
    if dtype != wide:
        return F.rms_norm(x, weight.shape, weight, eps), x
    return _RmsNorm.apply(x, weight, eps)


class _RmsNorm(FirstOrderFunction):
    """(x, weight) -> (norm of x, x), in half the operations of autograd's backward: in a small
    layer each counts."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.rsqrt((x * x).mean(-1, keepdim=True).add_(eps))
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        # where one of the two results is not used, nothing is read in its place
        ctx.set_materialize_grads(False)
        return normal * weight, x

    @staticmethod
    def backward(ctx, dy, dx):
        if dy is None:
            return dx, None, None
        normal, scale, weight = ctx.saved_tensors
        h = weight.numel()
        parts = (dy * normal).reshape(-1, h)
        # mv would load torch's compiler on the meta device
        along = parts.mm(weight[:, None]).view(scale.shape)
        # g - n mean(g n), as in norm.py
        own = torch.addcmul(dy * weight, normal, along, value=-1 / h)
        return own.mul_(scale) if dx is None else torch.addcmul(dx, own, scale), parts.sum(0), None

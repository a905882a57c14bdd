"""The weight gradient of a linear layer, added straight into its main gradient.

y = x Wᵀ gives dW = dyᵀ x. The main gradient is float32 while dy and x may be bfloat16: the GEMM accumulates in float32
and its result is never rounded to bfloat16 on the way (Micikevicius et al., arXiv:1710.03740, sec. 3).
"""

import torch
from torch import Tensor

from kernels import dispatch
from kernels.gemm import grouped_weight_grad


def accumulate_weight_grad_reference(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """`main_grad += dyᵀ x` in plain torch; inputs of the main gradient's dtype are multiplied without a copy."""
    main_grad.addmm_(dy.to(main_grad.dtype).t(), x.to(main_grad.dtype))


def accumulate_weight_grad_triton(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """`main_grad += dyᵀ x` as the weight gradient of a single expert that owns every row."""
    offsets = torch.tensor([0, dy.shape[0]], dtype=torch.int32).to(dy.device, non_blocking=True)
    grouped_weight_grad(dy, x, offsets, main_grad[None])


def accumulate_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds the weight gradient `dyᵀ x` into `main_grad`, in place.

    On a GPU the vendor's library does it in one call, where it can write float32 from narrower inputs.

    Args:
        main_grad: `[out, in]`, float32 or float64.
        dy: `[n, out]`, the gradient of the output; bfloat16, float16 or the main gradient's dtype.
        x: `[n, in]`, the layer's input; same dtype as `dy`.

    Raises:
        ValueError: shapes that do not belong together.
    """
    if dy.shape[0] != x.shape[0] or main_grad.shape != (dy.shape[1], x.shape[1]):
        shapes = f"dy {tuple(dy.shape)} transposed times x {tuple(x.shape)}"
        raise ValueError(f"main_grad {tuple(main_grad.shape)} is not {shapes}")
    if dy.is_meta and dispatch.PLANNED.get() is not None:
        return  # one product in place, which allocates nothing
    if dy.dtype == main_grad.dtype or not dispatch.runs_triton(dy):
        accumulate_weight_grad_reference(main_grad, dy, x)
    elif dy.is_cuda and main_grad.is_contiguous():
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        accumulate_weight_grad_triton(main_grad, dy, x)

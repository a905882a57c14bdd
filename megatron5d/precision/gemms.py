"""The three products of a linear layer, y = x·Wᵀ, as one object that its weight carries.

    forward        y  = x·Wᵀ
    input_grad     dx = dy·W
    weight_grad    dW += dyᵀ·x

What is multiplied, gathered over ranks and kept for the backward is an operand: tensors that all have the tokens as
their leading dims, so that a layer treats them alike and need not know what they are. Here it is the tensor itself;
fp8.py has the operands of 8 bits. A weight without a choice of its own is multiplied as it is: `gemms_of`.

The operation before a product is theirs as well where nothing else reads its result (`activate`, the norms): it may
then come in a form that only they understand.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels import activate, add_layer_norm, add_rms_norm
from kernels.grouped_matmul import grouped_input_grad, grouped_matmul, grouped_weight_grad
from megatron5d.precision.gradient import add_weight_grad, grad_buffer

Operand = tuple[Tensor, ...]


class Gemms:
    """Products in the dtype of the tensors."""

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        """What is multiplied for x.

        Args:
            x: `[..., features]`, an input, or a gradient of an output.
            gradient: it is a gradient.
        """
        return (x,)

    def activate(self, x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        """What stands between two matrices, for the second: `[..., 2f]` (swiglu) or `[..., f]` -> `[..., f]`."""
        return activate(x, kind, overwrite)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """RMSNorm for these products, `[..., in]` -> `[..., in]`, and x: gradients of both meet in one pass."""
        return add_rms_norm(x, None, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """LayerNorm, as `rms_norm`."""
        return add_layer_norm(x, None, weight, bias, eps)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        """`[..., in]`, `[out, in]` -> `[..., out]`."""
        return F.linear(x[0], weight)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """`[..., out]`, `[out, in]` -> `[..., in]`."""
        return dy[0] @ weight

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        """grad(weight) += dyᵀ·x."""
        add_weight_grad(weight, dy[0], x[0])


class ExpertGemms:
    """The same for the experts of a rank, over rows sorted by expert; weights are stacks `[E, out, in]`."""

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        """What is multiplied for x `[r, features]`."""
        return (x.contiguous() if gradient else x,)

    def activate(self, x: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        """As of Gemms."""
        return activate(x, kind, overwrite)

    def forward(self, x: Operand, parameter: Tensor, experts: int, offsets: Tensor) -> Tensor:
        """`[r, in]` -> `[r, out]`."""
        return grouped_matmul(x[0], by_expert(parameter.detach(), experts), offsets)

    def input_grad(self, dy: Operand, parameter: Tensor, experts: int, offsets: Tensor) -> Tensor:
        """`[r, out]` -> `[r, in]`."""
        return grouped_input_grad(dy[0], by_expert(parameter.detach(), experts), offsets)

    def weight_grad(self, parameter: Tensor, dy: Operand, x: Operand, experts: int, offsets: Tensor) -> None:
        """grad(parameter) += dyᵀ·x, expert by expert."""
        grouped_weight_grad(dy[0], x[0], offsets, by_expert(grad_buffer(parameter), experts))


def by_expert(stack: Tensor, experts: int) -> Tensor:
    """A local parameter or its gradient as `[experts, out, in]`, whatever pieces its dim 0 is made of."""
    return stack.view(experts, -1, stack.shape[-1])


PLAIN = Gemms()
PLAIN_EXPERTS = ExpertGemms()


def gemms_of(weight: Tensor, *others: Tensor) -> Gemms:
    """How the products of a linear layer's weight are made; of several with one input, as they are unless all agree."""
    gemms = getattr(weight, "gemms", PLAIN)
    return gemms if all(gemms_of(other) is gemms for other in others) else PLAIN


def expert_gemms_of(parameter: Tensor) -> ExpertGemms:
    """How the products of a stack of experts are made."""
    return getattr(parameter, "gemms", PLAIN_EXPERTS)

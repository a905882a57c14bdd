"""The three GEMMs of a linear layer, as an object in its weight's state (`gemms_of`).

    forward        y  = x·Wᵀ
    input_grad     dx = dy·W
    weight_grad    dW += dyᵀ·x

An operand is what is multiplied, gathered over ranks and kept for the backward: a tuple of tensors
with the tokens in their leading dims, opaque to layers. Here it is the tensor itself; in
fp8_recipes.py it is FP8 values and their scales. model/gpt.py sets `ParameterState.gemms`; a weight
without it is multiplied in its own dtype.

The operation before a GEMM (`activate`, the norms) is here as well, because its result may have a
format that only the GEMM can read.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor

from megatron5d.kernels import activate, add_layer_norm, add_rms_norm
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.gemm import grouped_input_grad, grouped_rows, grouped_weight_grad
from megatron5d.phases.wgrad import add_weight_grad, grad_target
from megatron5d.topology.shard_spec import state_of

Operand = tuple[Tensor, ...]


class Gemms:
    """GEMMs in the dtype of the tensors."""

    def operand(self, x: Tensor, gradient: bool = False) -> Operand:
        """Makes the operand of x.

        Args:
            x: `[..., features]`, an input of the layer, or a gradient of its output.
            gradient: x is a gradient.
        """
        return (x,)

    def kept(self, x: Tensor) -> Operand:
        """Makes the operand of an input x that is kept for the backward, recomputed with x where x
        is."""
        return (x,)

    def activate(
        self, x: Tensor, kind: str, overwrite: bool = False, *, reader: Gemms | None = None
    ) -> Tensor:
        """Applies the activation before the GEMM: `[..., 2f]` (gated) or `[..., f]` -> `[..., f]`.

        Args:
            x: comes from a GEMM.
            kind, overwrite: as in `kernels.activate`.
            reader: of the GEMM that x comes from, if nothing else reads x's gradient.
        """
        return activate(x, kind, overwrite=overwrite)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        """Returns (RMSNorm of x, x), both `[..., in]`; one backward pass adds up the gradients of
        both."""
        return add_rms_norm(x, None, weight, eps, settings)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        """Returns (LayerNorm of x, x), as `rms_norm`."""
        return add_layer_norm(x, None, weight, bias, eps, settings)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        """Multiplies `[..., in]`, `[out, in]` -> `[..., out]`."""
        return F.linear(x[0], weight)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """Multiplies `[..., out]`, `[out, in]` -> `[..., in]`."""
        return dy[0] @ weight

    def for_weight_grad(self, dy: Operand) -> Operand:
        """Returns a gradient's operand as `weight_grad` takes it and as it is kept until W, after
        `input_grad`."""
        return dy

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        """Adds dyᵀ·x to the weight's gradient; dy from `for_weight_grad`."""
        add_weight_grad(weight, dy[0], x[0])


class ExpertGemms:
    """GEMMs of a rank's experts in the dtype of the tensors.

    Rows of x are sorted by expert; those of expert e are offsets[e] ... offsets[e+1]-1. `parameter`
    is the stack of this rank's experts, `num_local` their number E/ep.

    Args:
        settings: which library may multiply on a GPU.
    """

    def __init__(self, settings: Settings = AUTO) -> None:
        self.settings = settings

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        """Makes the operand of x `[r, features]`."""
        return (x.contiguous() if gradient else x,)

    def kept(self, x: Tensor, offsets: Tensor) -> Operand:
        """Makes the operand of an input x, as in Gemms."""
        return (x,)

    def activate(self, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        """Applies the activation before the GEMM, times the weight `[r]` of each row; else as in
        Gemms."""
        return activate(x, kind, weights, overwrite=overwrite)

    def forward(self, x: Operand, parameter: Tensor, num_local: int, offsets: Tensor) -> Tensor:
        """Multiplies `[r, in]` -> `[r, out]`."""
        stack = by_expert(parameter, num_local)
        return grouped_rows(x[0], stack, offsets, self.settings)

    def input_grad(self, dy: Operand, parameter: Tensor, num_local: int, offsets: Tensor) -> Tensor:
        """Multiplies `[r, out]` -> `[r, in]`."""
        stack = by_expert(parameter, num_local)
        return grouped_input_grad(dy[0], stack, offsets, self.settings)

    def weight_grad(
        self, parameter: Tensor, dy: Operand, x: Operand, num_local: int, offsets: Tensor
    ) -> None:
        """Adds dyᵀ·x to the parameter's gradient, expert by expert."""
        main_grad, accumulate = grad_target(parameter)
        grouped_weight_grad(
            dy[0], x[0], offsets, by_expert(main_grad, num_local), accumulate=accumulate
        )


def by_expert(stack: Tensor, num_local: int) -> Tensor:
    """Views a local parameter, or its gradient, as `[E/ep, out, in]`."""
    return stack if stack.shape[0] == num_local else stack.view(num_local, -1, stack.shape[-1])


PLAIN = Gemms()
PLAIN_EXPERTS = ExpertGemms()


def gemms_of(weight: Tensor, *others: Tensor) -> Gemms:
    """Returns the GEMMs of a weight; PLAIN if other weights with the same input have different
    ones."""
    gemms = state_of(weight).gemms or PLAIN
    return PLAIN if others and any(gemms_of(other) is not gemms for other in others) else gemms


def expert_gemms_of(parameter: Tensor) -> ExpertGemms:
    """Returns the GEMMs of a stack of experts."""
    return state_of(parameter).gemms or PLAIN_EXPERTS


def forget_copies(parameters: Iterable[Tensor], gathered: bool = True) -> None:
    """Drops the copies that GEMMs have made of weights (fp8_tensor.py): the values have changed, or
    will be freed.

    Of copies that were `gathered` (ZeRO-3 in FP8) False drops the transpose alone.
    """
    for parameter in parameters:
        state = state_of(parameter)
        if state.fp8_copies is None:
            continue
        if state.fp8_copies.is_gathered and not gathered:
            state.fp8_copies.forget_transposed()
        else:
            state.fp8_copies = None

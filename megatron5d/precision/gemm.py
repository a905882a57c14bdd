"""The three GEMMs of a linear layer, as an object in its weight's state (`gemms_of`).

    forward        y  = x·Wᵀ
    input_grad     dx = dy·W
    weight_grad    dW += dyᵀ·x

An operand is what is multiplied, gathered over ranks and saved for the backward: a tuple of tensors
with the tokens in their leading dims, opaque to layers. Here it is the tensor itself; in
fp8_recipes.py it is FP8 values and their scales. model/gpt.py sets `ParameterState.gemms`; a weight
without it is multiplied in its own dtype.

The operation before a GEMM (`activate`, the norms) belongs here as well, because its result may
have a format that only the GEMM can read.
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
        """Converts x to an operand.

        Args:
            x: `[..., features]`, an input of the layer, or a gradient of its output.
            gradient: x is a gradient.
        """
        return (x,)

    def saved_operand(self, x: Tensor) -> Operand:
        """Converts an input to an operand that is saved for the backward; it is recomputed if x
        is."""
        return (x,)

    def activate(
        self, x: Tensor, kind: str, overwrite: bool = False, *, reader: Gemms | None = None
    ) -> Tensor:
        """Applies the activation before the GEMM: `[..., 2f]` (gated) or `[..., f]` -> `[..., f]`.

        Args:
            x: the output of another GEMM.
            kind, overwrite: as in `kernels.activate`.
            reader: the GEMMs of the layer that computes x, if nothing else reads x's gradient.
        """
        return activate(x, kind, overwrite=overwrite)

    def norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, settings: Settings = AUTO
    ) -> tuple[Tensor, Tensor]:
        """Computes (RMSNorm of x, x), or LayerNorm if there is a bias, both `[..., in]`; one
        backward pass adds their gradients."""
        if bias is None:
            return add_rms_norm(x, None, weight, eps, settings)
        return add_layer_norm(x, None, weight, bias, eps, settings)

    def forward(self, x: Operand, weight: Tensor) -> Tensor:
        """Multiplies `[..., in]`, `[out, in]` -> `[..., out]`."""
        return F.linear(x[0], weight)

    def input_grad(self, dy: Operand, weight: Tensor) -> Tensor:
        """Multiplies `[..., out]`, `[out, in]` -> `[..., in]`."""
        return dy[0] @ weight

    def for_weight_grad(self, dy: Operand) -> Operand:
        """Converts a gradient's operand, after `input_grad`, to the form that is kept for
        `weight_grad`."""
        return dy

    def weight_grad(self, weight: Tensor, dy: Operand, x: Operand) -> None:
        """Adds dyᵀ·x to the weight's gradient; dy from `for_weight_grad`."""
        add_weight_grad(weight, dy[0], x[0])


class ExpertGemms:
    """GEMMs of a rank's experts in the dtype of the tensors.

    Rows of x are sorted by expert; those of expert e are offsets[e] to offsets[e+1]-1. `parameter`
    is the stack of this rank's experts, `num_local` their number E/ep.

    Args:
        settings: which library may multiply on a GPU.
    """

    def __init__(self, settings: Settings = AUTO) -> None:
        self.settings = settings

    def operand(self, x: Tensor, offsets: Tensor, gradient: bool = False) -> Operand:
        """Converts x `[r, features]` to an operand."""
        return (x.contiguous() if gradient else x,)

    def saved_operand(self, x: Tensor, offsets: Tensor) -> Operand:
        """Converts an input to an operand, as in Gemms."""
        return (x,)

    def activate(self, x: Tensor, weights: Tensor, kind: str, overwrite: bool = False) -> Tensor:
        """Applies the activation before the GEMM, times the weight `[r]` of each row; otherwise as
        in Gemms."""
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
        stack = by_expert(main_grad, num_local)
        grouped_weight_grad(dy[0], x[0], offsets, stack, accumulate=accumulate)


def by_expert(stack: Tensor, num_local: int) -> Tensor:
    """Views a local parameter, or its gradient, as `[E/ep, out, in]`."""
    return stack if stack.shape[0] == num_local else stack.view(num_local, -1, stack.shape[-1])


PLAIN = Gemms()
PLAIN_EXPERTS = ExpertGemms()


def gemms_of(weight: Tensor, *same_input: Tensor) -> Gemms:
    """The GEMMs of a weight; PLAIN if weights that read the same input have different ones."""
    gemms = state_of(weight).gemms or PLAIN
    return PLAIN if any(gemms_of(w) is not gemms for w in same_input) else gemms


def expert_gemms_of(parameter: Tensor) -> ExpertGemms:
    """The GEMMs of a stack of experts."""
    return state_of(parameter).gemms or PLAIN_EXPERTS


def forget_copies(parameters: Iterable[Tensor], gathered: bool = True) -> None:
    """Drops the FP8 copies of weights (fp8_weights.py) whose values have changed or will be freed.

    Args:
        gathered: False: of a copy that ZeRO-3 has gathered, only the transpose is dropped.
    """
    for parameter in parameters:
        state = state_of(parameter)
        if state.fp8_copies is None:
            continue
        if state.fp8_copies.is_gathered and not gathered:
            state.fp8_copies.forget_transposed()
        else:
            state.fp8_copies = None

"""Attentions and activations by name, for plugins: each is one decorated class or function."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from megatron5d import kernels
from megatron5d.config import plugins
from megatron5d.config.schema import ModelConfig
from megatron5d.model.attention import AttentionBranch
from megatron5d.model.flops import COUNTS, AttentionCounts

ATTENTIONS: dict[str, type[AttentionBranch]] = {}  # those of plugins

Branch = TypeVar("Branch", bound=type[AttentionBranch])
Activation = Callable[[Tensor], Tensor]
Count = Callable[[ModelConfig], int]


def attention(
    name: str, *, matrices: Count, core: Count, vectors: Count = lambda model: 0
) -> Callable[[Branch], Branch]:
    """Decorator that makes an `AttentionBranch` a choice of `model.attention`.

    Args:
        matrices, core, vectors: as in `AttentionCounts`; the model's parameters, FLOPs and the
            planner's times follow from them.
    """

    def register(branch: Branch) -> Branch:
        ATTENTIONS[name] = branch
        COUNTS[name] = AttentionCounts(matrices, vectors, core)
        plugins.add_choice("model.attention", name)
        return branch

    return register


def activation(name: str, *, gated: bool = False) -> Callable[[Activation], Activation]:
    """Decorator that makes a function a choice of `model.activation`.

    Its function maps `[..., f]` -> `[..., f]`, or `[..., 2f]`, the gate first, -> `[..., f]` if it
    is gated, in differentiable operations of torch.
    """

    def register(function: Activation) -> Activation:
        kernels.register_activation(name, function)
        if gated:
            plugins.GATED.add(name)
        plugins.add_choice("model.activation", name)
        return function

    return register

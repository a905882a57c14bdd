"""What a stage tells data parallelism about its phases, so that weights are gathered and gradients reduced in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn


class PhaseHooks(Protocol):
    """Called by a stage as its phases begin and end; a unit that is gathered and reduced as one may have several."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        """A stage will run these phases, in this order forward; called when the stage is made."""

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        """The action after the one that starts now begins with this phase, whose weights may be gathered early."""

    def before_forward(self, phase: nn.Module) -> None:
        """Its weights are about to be read."""

    def after_forward(self, phase: nn.Module) -> None:
        """Its weights are not needed before another action runs it."""

    def before_recompute(self, phase: nn.Module) -> None:
        """A backward runs the phase forward again; its weights must stay until `after_backward`."""

    def after_recompute(self, phase: nn.Module) -> None:
        """It has run forward again."""

    def before_backward(self, phase: nn.Module) -> None:
        """B or I is about to read its weights; W reads none."""

    def after_backward(self, phase: nn.Module) -> None:
        """The gradient of its input is there; its weights are not needed before another action runs it."""

    def before_weight_grads(self, phase: nn.Module) -> None:
        """W is about to compute the weight gradients that I has put off."""

    def after_weight_grads(self, phase: nn.Module) -> None:
        """In B or W: all weight gradients of this phase and micro-batch have been added up."""


class NoHooks:
    """For a stage without data parallelism: no weights are gathered and no gradients reduced."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        pass

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        pass

    def _nothing(self, phase: nn.Module) -> None:
        pass

    before_forward = after_forward = before_recompute = after_recompute = _nothing
    before_backward = after_backward = before_weight_grads = after_weight_grads = _nothing

"""What a stage tells data parallelism about its phases, so that weights are gathered and gradients reduced in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

PASSES = ("forward", "again", "backward", "weights")
"""What a phase is run for: F; again, where a backward recomputes it; the gradient of its input, in B and I; and the
weight gradients. These are made in W, or in B together with the gradient of the input: then `weights` has no beginning,
and ends when `backward` has."""


class PhaseHooks(Protocol):
    """Called by a stage as its phases begin and end; a unit that is gathered and reduced as one may have several."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        """A stage will run these phases, in this order forward; called when the stage is made."""

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        """The action after the one that starts now begins with this phase, whose weights may be gathered early."""

    def before(self, phase: nn.Module, passing: str) -> None:
        """The phase is about to be run for one of PASSES. All but `weights` read its weights."""

    def after(self, phase: nn.Module, passing: str) -> None:
        """It has been run. The weights stay from `again` to the end of `backward`, and are not needed after others.

        At the end of `weights` all weight gradients of this phase and micro-batch have been added up.
        """


class NoHooks:
    """For a stage without data parallelism: no weights are gathered and no gradients reduced."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        pass

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        pass

    def before(self, phase: nn.Module, passing: str) -> None:
        pass

    def after(self, phase: nn.Module, passing: str) -> None:
        pass

"""What every phase of a stage may read beside its input (`MicroBatch`), and who is told when it
runs (`PhaseHooks`).

Data parallelism is told, so that weights are gathered and gradients reduced in time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

KINDS = ("forward", "recompute", "backward", "wgrad")
"""What a phase is run for: F; once more, where a backward recomputes it; the gradient of its input, in B and I; and the
weight gradients. These are made in W, or in B together with the gradient of the input: then `wgrad` has no beginning,
and ends when `backward` has."""


class PhaseHooks(Protocol):
    """Called by a stage as its phases begin and end; a unit that is gathered and reduced as one may
    have several."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        """Receives the phases that a stage will run, in forward order, when the stage is made."""

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        """Announces the first phase of the action after the one that starts now: its weights may be
        gathered early."""

    def before(self, phase: nn.Module, kind: str) -> None:
        """Announces that the phase is about to run for one of KINDS. All but `wgrad` read its
        weights."""

    def after(self, phase: nn.Module, kind: str) -> None:
        """Announces that it has run. Its weights stay from `recompute` to the end of `backward`;
        others release them.

        At the end of `wgrad` all weight gradients of this phase and micro-batch have been added up.
        """


class NoHooks:
    """For a stage without data parallelism: no weights are gathered and no gradients reduced."""

    def register(self, phases: Sequence[nn.Module]) -> None:
        pass

    def prefetch(self, phase: nn.Module, forward: bool) -> None:
        pass

    def before(self, phase: nn.Module, kind: str) -> None:
        pass

    def after(self, phase: nn.Module, kind: str) -> None:
        pass


IGNORED = -100  # a token or label that is padding; torch's cross_entropy ignores the same value


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one micro-batch on one data-parallel rank, b = mbs; whole until
    data/batch.py cuts them."""

    tokens: Tensor  # int64 [b, s/cp]: inputs; padding is 0
    labels: Tensor  # int64 [b, s/cp]: the token after each input; padding is IGNORED
    loss_mask: Tensor  # fp32 [b, s/cp]: 1 where the prediction counts, 0 where it does not
    # int64 [b, s/cp]: place in the sequence, or in its document under data.document_mask
    positions: Tensor
    # int64 [b, s]: document's number in its sequence; None = no such masks, or in `context`
    documents: Tensor | None
    padding: Tensor | None = None  # bool [b, s/cp]: True where the input is padding; None = nowhere
    # int64 [b], in training: numbers of the sequences among all that the run reads
    samples: Tensor | None = None
    # under cp: what attention computes on this rank (block_attention.ContextPlan) with multi-token
    # prediction of D depths (model/mtp.py: look_ahead):
    context: Any = None
    # int64 [D, b, s/cp]: the token 1, 2, ... D places after each input
    ahead_tokens: Tensor | None = None
    ahead_labels: Tensor | None = None  # int64 [D, b, s/cp]: the token after that
    ahead_mask: Tensor | None = None  # fp32 [D, b, s/cp]: 1 where the prediction counts

    @property
    def kind(self) -> frozenset[str]:
        """What there is: micro-batches of one kind run through the same kernels."""
        return frozenset(name for name, value in vars(self).items() if value is not None)

    @property
    def num_targets(self) -> Tensor:
        """Number of predictions that count, an fp32 scalar: this micro-batch's share of the loss's
        denominator."""
        return self.loss_mask.sum()

    @property
    def target_counts(self) -> Tensor:
        """fp64 `[1 + D]`: `num_targets`, and those of each depth of multi-token prediction."""
        depths = [] if self.ahead_mask is None else list(self.ahead_mask.sum((1, 2)))
        return torch.stack([self.num_targets, *depths]).double()

    @property
    def num_tokens(self) -> Tensor:
        """Number of inputs that are not padding, an fp64 scalar."""
        count = torch.full((), self.tokens.numel(), dtype=torch.float64, device=self.tokens.device)
        return count if self.padding is None else count - self.padding.sum()

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns `make()`, called once for each key: what phases compute from the micro-batch
        alone, and share.

        A stage keeps a copy of the micro-batch, without such results, so they live until its
        backward.
        """
        made = self.__dict__.setdefault("_made", {})
        if key not in made:
            made[key] = make()
        return made[key]

    def __copy__(self) -> MicroBatch:
        twin = object.__new__(MicroBatch)
        twin.__dict__.update(self.__dict__)
        twin.__dict__.pop("_made", None)
        return twin

    def to(self, device: torch.device | str, non_blocking: bool = True) -> MicroBatch:
        """Returns the same micro-batch on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        """Returns the same micro-batch in page-locked memory, from which copies to a GPU overlap
        with compute."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change) -> MicroBatch:
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        changed: dict[str, Any] = {name: change(value) for name, value in tensors.items()}
        return dataclasses.replace(self, **changed)

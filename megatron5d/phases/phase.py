"""What a stage runs (`Phase`), the data it reads (`MicroBatch`), and callbacks (`PhaseHooks`).

Data parallelism uses the callbacks to gather weights and reduce gradients in time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megatron5d.phases.activations import ActivationPolicy

KINDS = ("forward", "recompute", "backward", "wgrad")
"""Passes of a phase: F; its repetition where a backward recomputes it; the gradient of its input (B
and I); its weight gradients. Those are computed in W, or in B together with the gradient of the
input: then `wgrad` has no beginning, and ends when `backward` ends."""


class Phase(nn.Module):
    """A part of a layer that either computes or communicates, called as `phase(x, batch, defer)`.

    `batch` is the MicroBatch; `defer` takes the weight-gradient half of the backward (wgrad.py).
    """

    kind: str | None = None  # its name in profiles and in recompute.offload, such as "attention"
    activation_policy = ActivationPolicy()  # what it keeps for its backward
    capturable: bool = True  # False: CUDA graphs leave it out
    # whether its backward adds weight gradients itself instead of passing them to `defer`
    adds_grads_at_once: bool = False

    @cached_property
    def parameter_list(self) -> tuple[nn.Parameter, ...]:
        """The parameters, listed once: walking the modules takes as long as a small phase."""
        return tuple(self.parameters())


def phases_in(block: nn.Module) -> list[Phase]:
    """The children of a block, all of which must be phases, in order."""
    phases = []
    for child in block.children():
        assert isinstance(child, Phase), f"{type(child).__name__} must derive from Phase"
        phases.append(child)
    return phases


class PhaseHooks:
    """Callbacks before and after every pass of a phase; this base class does nothing."""

    def register(self, phases: Sequence[Phase]) -> None:
        """Receives the phases of a new stage, in forward order."""

    def prefetch(self, phase: Phase, forward: bool) -> None:
        """Announces the first phase of the next action, whose weights may be gathered early."""

    def before(self, phase: Phase, kind: str) -> None:
        """Runs before one of the KINDS of passes. All but `wgrad` read the phase's weights."""

    def after(self, phase: Phase, kind: str) -> None:
        """Runs after the pass.

        After `wgrad` all weight gradients of this phase and micro-batch are summed. Weights stay
        gathered from `recompute` to the end of `backward`; other passes release them at their end.
        """


IGNORED = -100  # padding among tokens or labels; torch's cross_entropy ignores the same value


@dataclass(frozen=True)
class MicroBatch:
    """The sequences of one micro-batch on one data-parallel rank, b = mbs.

    Sequences are complete until data/batch.py cuts them over cp.
    """

    tokens: Tensor  # int64 [b, s/cp]: inputs; padding is 0
    labels: Tensor  # int64 [b, s/cp]: the token after each input; padding is IGNORED
    loss_mask: Tensor  # fp32 [b, s/cp]: 1 where the prediction counts, 0 where it does not
    # int64 [b, s/cp]: position in the sequence, or in its document under data.document_mask
    positions: Tensor
    # int64 [b, s]: number of the document, another where it is padding; None = all inputs see each
    # other as far as the model's masks allow, or it is part of `context`
    documents: Tensor | None
    padding: Tensor | None = None  # bool [b, s/cp]: True where the input is padding; None = nowhere
    # int64 [b], in training: index of each sequence among all that the run reads
    samples: Tensor | None = None
    # with cp > 1: what attention computes on this rank (block_attention.ContextPlan)
    context: Any = None
    # multi-token prediction of D depths (model/mtp.py: look_ahead); int64 [D, b, s/cp]: the token
    # 1, 2, ... D positions after each input
    ahead_tokens: Tensor | None = None
    ahead_labels: Tensor | None = None  # int64 [D, b, s/cp]: the token after that
    ahead_mask: Tensor | None = None  # fp32 [D, b, s/cp]: 1 where the prediction counts

    @property
    def kind(self) -> frozenset[str]:
        """Names of the fields that are set: micro-batches of one kind run the same kernels."""
        return frozenset(name for name, value in vars(self).items() if value is not None)

    @property
    def num_targets(self) -> Tensor:
        """Number of predictions that count: this micro-batch's share of the loss's denominator."""
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

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make()`, called once per key; phases share what depends on the batch only.

        A stage keeps a copy of the micro-batch with an empty cache, so results live until its
        backward.
        """
        cache = self.__dict__.setdefault("_cache", {})
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def __copy__(self) -> MicroBatch:
        twin = object.__new__(MicroBatch)
        twin.__dict__.update(self.__dict__)
        twin.__dict__.pop("_cache", None)
        return twin

    def to(self, device: torch.device | str, non_blocking: bool = True) -> MicroBatch:
        """The same micro-batch on another device."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> MicroBatch:
        """The same micro-batch in page-locked memory: copies to a GPU then overlap with compute."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        changed: dict[str, Any] = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(self, **changed)

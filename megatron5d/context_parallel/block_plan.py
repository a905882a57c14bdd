"""What this rank's attention computes for one micro-batch: planned once, on the CPU, for all layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron5d.context_parallel.zigzag import (
    Call,
    Mask,
    SequenceLayout,
    even_layout,
    num_hops,
    plan_calls,
    visible_pairs,
)


@dataclass(frozen=True)
class ContextPlan:
    """Made by `Planner`; travels with the micro-batch (`MicroBatch.context`).

    Args:
        layout: which rows of this micro-batch's sequences each rank holds.
        outer_rank: of the queries.
        calls: of the attention kernel, for each outer rank's keys.
        hops: how many hops around the outer ranks keys must make; the same on all ranks.
        visible_pairs: for each outer rank, how many query-key pairs no mask hides.
        outer_rows: int64 `[s/outer]` per outer rank: the global rows it holds.
        own_rows: int64 `[s/cp]`: the global rows of this rank.
        documents: int64 `[b, s]` of whole rows, or None.
        causal, window: as in the model.
        whole: of layers without a window, where others have one.
    """

    layout: SequenceLayout
    outer_rank: int
    calls: list[list[Call]]
    hops: int
    visible_pairs: list[int]
    outer_rows: list[Tensor]
    own_rows: Tensor
    documents: Tensor | None
    causal: bool
    window: int | None
    whole: ContextPlan | None = None

    def of_window(self, window: int | None) -> ContextPlan:
        """Returns the plan of a layer with this window, or without one."""
        return self.whole if self.whole is not None and window is None else self

    def options(self, call: Call, source: int) -> dict[str, Any]:
        """Returns the mask arguments of one call of the attention kernel, to keys of outer rank `source`."""
        if not call.masked:
            return {"causal": call.causal}
        q_rows = self.outer_rows[self.outer_rank][slice(*call.queries)]
        k_rows = self.outer_rows[source][slice(*call.keys)]
        options: dict[str, Any] = {"causal": call.causal, "window": self.window}
        if self.window is not None:
            options |= {"q_positions": q_rows, "k_positions": k_rows, "causal": self.causal}
        if self.documents is not None:
            options |= {"documents": self.documents[:, q_rows], "k_documents": self.documents[:, k_rows]}
        return options


class Planner:
    """Makes the plans of all micro-batches of a run.

    Args:
        layout: how the sequence is cut; the documents of a micro-batch decide anew which rank holds which chunk.
        rank: this rank's position on the whole cp axis.
        causal, window: as in the model.
        some_whole: some layers have no window (model.window_layers).
        device: where the plans' index tensors will be used.
    """

    def __init__(
        self,
        layout: SequenceLayout,
        rank: int,
        *,
        causal: bool = True,
        window: int | None = None,
        some_whole: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout, self.rank, self.causal, self.window, self.device = layout, rank, causal, window, device
        self.some_whole = some_whole
        self._undivided = self._plan(None)

    def __call__(self, documents: Tensor | None) -> ContextPlan:
        """Returns `documents` int64 `[b, s]` must still be on the CPU: which blocks are empty depends on their
        values."""
        return self._undivided if documents is None else self._plan(documents)

    def _plan(self, documents: Tensor | None) -> ContextPlan:
        ids = None if documents is None else documents.numpy()
        windowed, unlimited = Mask(self.causal, self.window, ids), Mask(self.causal, None, ids)
        layout = even_layout(self.layout, unlimited if self.some_whole else windowed)  # all layers share it
        whole = self._of_mask(layout, unlimited, documents, None) if self.some_whole else None
        return self._of_mask(layout, windowed, documents, whole)

    def _of_mask(
        self, layout: SequenceLayout, mask: Mask, documents: Tensor | None, whole: ContextPlan | None
    ) -> ContextPlan:
        outer_rank = self.rank // layout.inner
        return ContextPlan(
            layout,
            outer_rank,
            plan_calls(layout, outer_rank, mask),
            num_hops(layout, mask),
            visible_pairs(layout, mask),
            [torch.from_numpy(layout.outer_rows(outer)).to(self.device) for outer in range(layout.outer)],
            torch.from_numpy(layout.rows(self.rank)).to(self.device),
            None if documents is None else documents.to(self.device),
            self.causal,
            mask.window,
            whole,
        )


def imbalance(plans: Iterable[ContextPlan]) -> float:
    """Returns how much longer attention takes than if all cp ranks had equally much to do; 1 = even.

    The ranks wait for each other in every layer, so the busiest one decides: the sum over micro-batches of the busiest
    rank's query-key pairs, divided by the sum of the mean.
    """
    plans = list(plans)
    busiest = sum(max(plan.visible_pairs) for plan in plans)
    return busiest / sum(sum(plan.visible_pairs) / len(plan.visible_pairs) for plan in plans)

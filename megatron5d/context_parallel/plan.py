"""What the attention of one micro-batch computes on this rank, decided once for all layers, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron5d.context_parallel.layout import Call, SequenceLayout, plan_calls, unmasked_pairs


@dataclass(frozen=True)
class ContextPlan:
    """
    Args:
        rank: outer rank of the queries.
        calls: per outer rank of keys.
        pairs: query-key pairs that no mask hides, of each outer rank's queries.
        rows: int64 `[s/outer]` per outer rank: the global rows it holds.
        documents: int64 `[b, s]` of whole rows, or None.
        window: as in the model.
    """

    rank: int
    calls: list[list[Call]]
    pairs: list[int]
    rows: list[Tensor]
    documents: Tensor | None
    window: int | None

    def options(self, call: Call, block: int) -> dict[str, Any]:
        """The mask arguments of one call; none at all where everything but the diagonal is seen."""
        if not call.masked:
            return {"causal": call.causal}
        q_rows = self.rows[self.rank][slice(*call.queries)]
        k_rows = self.rows[block][slice(*call.keys)]
        options: dict[str, Any] = {"causal": call.causal, "window": self.window}
        if self.window is not None:
            options |= {"q_positions": q_rows, "k_positions": k_rows, "causal": True}
        if self.documents is not None:
            options |= {"documents": self.documents[:, q_rows], "k_documents": self.documents[:, k_rows]}
        return options


class Planner:
    """Makes the plans of all micro-batches of a run.

    Args:
        layout: of the sequence.
        rank: outer rank of the queries.
        window: as in the model.
        device: where the plans' index tensors will be used.
    """

    def __init__(
        self, layout: SequenceLayout, rank: int, window: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.rank, self.window, self.device = layout, rank, window, device
        self._rows = [
            torch.cat([torch.arange(*span) for span in layout.chunks(outer)]).to(device)
            for outer in range(layout.outer)
        ]
        self._undivided = self._plan(None) if window is None else None

    def __call__(self, documents: Tensor | None) -> ContextPlan:
        """`documents` int64 `[b, s]` must still be on the CPU: which blocks are empty depends on their values."""
        if documents is None and self._undivided is not None:
            return self._undivided
        return self._plan(documents)

    def _plan(self, documents: Tensor | None) -> ContextPlan:
        listed = None if documents is None else documents.numpy()
        masks: dict[str, Any] = {"window": self.window, "documents": listed}
        calls = plan_calls(self.layout, self.rank, **masks)
        moved = None if documents is None else documents.to(self.device)
        return ContextPlan(self.rank, calls, unmasked_pairs(self.layout, **masks), self._rows, moved, self.window)


def balance(plans: Iterable[ContextPlan]) -> float:
    """How much longer cp ranks are busy than if the pairs of each micro-batch were dealt out evenly; 1 = even.

    The ranks wait for each other in every layer: Σ of the busiest rank's pairs over Σ of their mean, by micro-batch.
    """
    plans = list(plans)
    busiest = sum(max(plan.pairs) for plan in plans)
    return busiest / sum(sum(plan.pairs) / len(plan.pairs) for plan in plans)

"""Costs of pipeline stages from numbers (`pipeline.costs`): equal layers, and two ends that may weigh more or less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.model.split import split_layers
from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the stages of any placement, where every stage has whole layers.

    Sizes below are in shares of a rank: num_layers/pp layers with their compute are 1.

    Args:
        costs: of such a share, all-to-alls included.
        num_layers: of the model.
        embedding: compute on the first stage beside its layers.
        head: compute on the last stage beside its layers.
        dense: layers at the bottom that have no all-to-all.
        balance: what the split evens, one of BALANCES.
    """

    costs: Costs
    num_layers: int
    embedding: float = 0.0
    head: float = 0.0
    dense: float = 0.0
    balance: str = "stages"

    def layout(self, placement: Placement) -> list[int]:
        """Returns the layers of each stage.

        Raises:
            ValueError: fewer layers than ranks, or with `stages` than stages.
        """
        unit = self.num_layers / placement.num_ranks
        return split_layers(self.balance, [1.0] * self.num_layers, placement, self.embedding * unit, self.head * unit)

    def of(self, placement: Placement) -> StageCosts:
        """Returns the costs of every stage; raises as `layout`."""
        return self.dealt(self.layout(placement), placement)

    def dealt(self, layout: Sequence[int], placement: Placement) -> StageCosts:
        """Returns the costs of every stage for `[num_stages]` layers in each."""
        unit = self.num_layers / placement.num_ranks
        above = np.cumsum(layout)  # layers up to the end of each stage
        layers = np.array(layout) / unit
        experts = layers - np.diff(np.minimum(above, round(self.dense * unit)), prepend=0) / unit
        time = layers.copy()
        time[0] += self.embedding
        time[-1] += self.head
        c = self.costs
        compute = {"F": c.F, "I": c.I, "W": c.W, "B": c.I + c.W}
        a2a = {"F": c.a2aF, "I": c.a2aB, "W": 0.0, "B": c.a2aB}
        return StageCosts(
            compute=np.array([compute[op] * time for op in OPS]),
            a2a=np.array([a2a[op] * experts for op in OPS]),
            comm=c.comm,
            activation=layers,
            stash=layers,
        )

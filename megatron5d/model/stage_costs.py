"""What the stages of a model cost, from its FLOPs: for the search, and for schedules that order themselves by times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.config.pattern import blocks
from megatron5d.config.schema import Config
from megatron5d.model.flops import core_flops, head_flops, layer_flops
from megatron5d.model.partition import layout_of, parts_of
from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement

MESSAGE = 0.05  # latency between stages, in forwards through one rank's layers


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the stages of any placement, in forwards through one rank's share of the layers.

    A matrix product costs as much in I and in W as in F; attention between queries, keys and values costs twice in I
    and nothing in W; full recompute adds the layers' F to their I. All-to-alls are not modelled: where experts lie on
    several ranks, `pipeline.costs` states them.

    Args:
        config: the architecture, train.seq_len, recompute, and how layers are dealt to stages.
    """

    config: Config

    def of(self, placement: Placement) -> StageCosts:
        """Return the costs of every stage.

        Raises:
            ValueError: the model has too few layers for the placement.
        """
        config = self.config
        model, seq_len = config.model, config.train.seq_len
        parts = parts_of(layout_of(config, placement.num_stages))
        core = core_flops(model, seq_len) / 3
        held = [[*part.layers, *(blocks(model)[model.num_layers :] if part.head else [])] for part in parts]
        layers = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in held])
        unit = layers.sum() / placement.num_ranks
        cores = np.array([core * len(mine) for mine in held])
        head = np.array([head_flops(model) / 3 if part.head else 0.0 for part in parts])
        again = np.array([self._recomputed(stage, mine) for stage, mine in enumerate(held)])
        f = layers + head
        compute = {"F": f, "I": f + cores + again, "W": f - cores, "B": 2 * f + again}
        share = np.array([len(mine) for mine in held]) * (placement.num_ranks / model.num_layers)
        return StageCosts(
            compute=np.array([compute[op] for op in OPS]) / unit,
            a2a=np.zeros((len(OPS), len(parts))),
            comm=MESSAGE,
            activation=share,
            stash=share,
        )

    def _recomputed(self, stage: int, held: Sequence[int]) -> float:
        """FLOPs of the forwards that the backward of a stage, which holds these blocks, runs again."""
        model, recompute = self.config.model, self.config.recompute
        count = recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
        again = held[:count] if recompute.mode == "full" else ()
        return sum(layer_flops(model, i, self.config.train.seq_len) for i in again) / 3

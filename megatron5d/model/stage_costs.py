"""What the stages of a model cost, from its FLOPs: for the search, and for schedules that order themselves by times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.model.flops import core_flops, head_flops, layer_flops
from megatron5d.model.partition import layers_per_stage, stage_specs
from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the stages of any placement, in forwards through one rank's share of the layers.

    A matrix product costs as much in I and in W as in F; attention between queries, keys and values costs twice in I
    and nothing in W; full recompute adds the layers' F to their I, and `recompute.logit_tokens` the head's. What a
    device sends takes as long as `pipeline.flops_per_byte` FLOPs a byte: of a mixture whose experts lie on several
    ranks, a token's copies on their way to the experts and back, in F and again in I; between stages, hidden states.

    Args:
        config: the architecture, train.seq_len, recompute, parallel, precision, and how layers are dealt to stages.
    """

    config: Config

    def of(self, placement: Placement) -> StageCosts:
        """Returns the costs of every stage.

        Raises:
            ValueError: the model has too few layers for the placement.
        """
        config = self.config
        model, seq_len = config.model, config.train.seq_len
        specs = stage_specs(layers_per_stage(config, placement))
        core = core_flops(model, seq_len) / 3
        held = [[*spec.layers, *(blocks(model)[model.num_layers :] if spec.head else [])] for spec in specs]
        layers = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in held])
        unit = layers.sum() / placement.num_ranks
        cores = np.array([core * len(mine) for mine in held])
        head = np.array([head_flops(model) / 3 if spec.head else 0.0 for spec in specs])
        twice = [self._recomputed(stage, mine) for stage, mine in enumerate(held)]
        again = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in twice])
        again += head if config.recompute.logit_tokens else 0.0
        f = layers + head
        compute = {"F": f, "I": f + cores + again, "W": f - cores, "B": 2 * f + again}
        sent, sent_again = (np.array([sum(self._sent(i) for i in mine) for mine in lists]) for lists in (held, twice))
        a2a = {"F": sent, "I": sent + sent_again, "W": 0 * sent, "B": sent + sent_again}
        share = np.array([len(mine) for mine in held]) * (placement.num_ranks / model.num_layers)
        return StageCosts(
            compute=np.array([compute[op] for op in OPS]) / unit,
            a2a=np.array([a2a[op] for op in OPS]) / unit,
            comm=self._hidden_state() * (1 if config.parallel.sp else config.parallel.tp) / unit,
            activation=share,
            stash=share,
        )

    def _hidden_state(self) -> float:
        """FLOPs in whose time one token's hidden state is sent, if the ranks of tp share it as they share the FLOPs."""
        config = self.config
        return config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype] * config.pipeline.flops_per_byte

    def _sent(self, block: int) -> float:
        """The same of a token's copies to the experts of a block and back; those of this rank's own stay."""
        model, ep = self.config.model, self.config.parallel.ep
        return 2 * model.top_k * (1 - 1 / ep) * self._hidden_state() if is_moe(model, block) else 0.0

    def _recomputed(self, stage: int, held: Sequence[int]) -> Sequence[int]:
        """Blocks whose forward the backward of a stage, which holds these, runs again."""
        recompute = self.config.recompute
        count = recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
        return held[:count] if recompute.mode == "full" else ()

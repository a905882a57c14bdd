"""Costs of pipeline stages: from a model's FLOPs, or from numbers (`pipeline.costs`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.config.derived import is_moe, window_of
from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.model.flops import core_flops, head_flops, layer_flops
from megatron5d.model.partition import layers_per_stage, split_layers, stage_specs
from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import OPS, Placement


def run_costs(config: Config) -> Costs | ModelCosts:
    """Returns what the stages cost: as `pipeline.costs` says, else by FLOPs.

    Raises:
        ValueError: `pipeline.costs` cannot be read.
    """
    if not config.pipeline.costs:
        return ModelCosts(config)
    try:
        return parse_costs(config.pipeline.costs)
    except ValueError as error:
        raise ValueError(f"pipeline.{error}") from None


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the stages of any placement, in forwards through one rank's share of the layers.

    A GEMM costs as much in I and in W as in F; attention between queries, keys and values costs
    twice in I and nothing in W; full recompute adds the layers' F to their I, and
    `recompute.logit_tokens` the head's. What a device sends takes as long as
    `pipeline.flops_per_byte` FLOPs a byte: of a mixture whose experts lie on several ranks, a
    token's copies on their way to the experts and back, in F and again in I; between stages, hidden
    states.

    Args:
        config: the architecture, train.seq_len, recompute, parallel, precision, and how layers are
            dealt to stages.
    """

    config: Config

    def of(self, placement: Placement) -> StageCosts:
        """Returns the costs of every stage.

        Raises:
            ValueError: the model has too few layers for the placement.
        """
        config = self.config
        model, seq_len = config.model, config.train.seq_len
        specs = stage_specs(layers_per_stage(config, placement), model)
        held = [spec.blocks(model) for spec in specs]
        layers = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in held])
        unit = layers.sum() / placement.num_ranks
        cores = np.array(
            [
                sum(core_flops(model, seq_len, window_of(model, i)) for i in mine) / 3
                for mine in held
            ]
        )
        head = np.array([head_flops(model) / 3 if spec.head else 0.0 for spec in specs])
        twice = [self._recomputed(stage, mine) for stage, mine in enumerate(held)]
        again = np.array([sum(layer_flops(model, i, seq_len) for i in mine) / 3 for mine in twice])
        again += head if config.recompute.logit_tokens else 0.0
        f = layers + head
        compute = {"F": f, "I": f + cores + again, "W": f - cores, "B": 2 * f + again}
        sent, sent_again = (
            np.array([sum(self._sent(i) for i in mine) for mine in lists])
            for lists in (held, twice)
        )
        a2a = {"F": sent, "I": sent + sent_again, "W": 0 * sent, "B": sent + sent_again}
        share = np.array([len(mine) for mine in held]) * (placement.num_ranks / model.num_layers)
        return StageCosts(
            compute=np.array([compute[op] for op in OPS]) / unit,
            a2a=np.array([a2a[op] for op in OPS]) / unit,
            comm=np.array([spec.sent for spec in specs])
            * (self._hidden_state() * (1 if config.parallel.sp else config.parallel.tp) / unit),
            activation=share,
            stash=share,
        )

    def _hidden_state(self) -> float:
        """Returns FLOPs in whose time one token's hidden state is sent, if the ranks of tp share it
        as they share the FLOPs."""
        config = self.config
        return (
            config.model.hidden_size
            * ELEMENT_BYTES[config.precision.dtype]
            * config.pipeline.flops_per_byte
        )

    def _sent(self, block: int) -> float:
        """Returns the same of a token's copies to the experts of a block and back; those of this
        rank's own stay."""
        model, ep = self.config.model, self.config.parallel.ep
        return (
            2 * model.top_k * (1 - 1 / ep) * self._hidden_state() if is_moe(model, block) else 0.0
        )

    def _recomputed(self, stage: int, held: Sequence[int]) -> Sequence[int]:
        """Blocks whose forward the backward of a stage, which holds these, runs again."""
        recompute = self.config.recompute
        count = (
            recompute.num_layers
            if recompute.stage_layers is None
            else recompute.stage_layers[stage]
        )
        return held[:count] if recompute.mode == "full" else ()


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
        return split_layers(
            self.balance,
            [1.0] * self.num_layers,
            placement,
            self.embedding * unit,
            self.head * unit,
        )

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

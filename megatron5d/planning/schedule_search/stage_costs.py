"""Costs of pipeline stages: from a model's FLOPs, or from numbers (`pipeline.costs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron5d.config.derived import is_moe, window_of
from megatron5d.config.schema import ELEMENT_BYTES, Config, PipelineConfig
from megatron5d.model.flops import core_flops, head_flops, layer_flops
from megatron5d.model.partition import layers_per_stage, split_layers, stage_specs
from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import Placement


def run_costs(config: Config) -> Costs | ModelCosts:
    """Costs of a run's stages: those of `pipeline.costs`, else by FLOPs.

    Raises:
        ValueError: `pipeline.costs` cannot be read.
    """
    if not config.pipeline.costs:
        return ModelCosts(config)
    try:
        return parse_costs(config.pipeline.costs)
    except ValueError as error:
        raise ValueError(f"pipeline.{error}") from None


def costs_are_known(config: Config, device_type: str) -> bool:
    """Whether the costs of a run are those of its device; the default of flops_per_byte is a GPU's.

    Args:
        config: of the run.
        device_type: such as `cuda` or `cpu`.
    """
    pipeline = config.pipeline
    is_default = pipeline.flops_per_byte == PipelineConfig.flops_per_byte
    return device_type != "cpu" or pipeline.costs is not None or not is_default


@dataclass(frozen=True)
class ModelCosts:
    """Costs of the stages of any placement, in forwards through one rank's share of the layers.

    A GEMM costs as much in I and in W as in F; attention between queries, keys and values costs
    twice in I and nothing in W; full recompute adds the layers' F to their I, and
    `recompute.logit_tokens` the head's.

    A byte sent costs as much time as `pipeline.flops_per_byte` FLOPs. Between stages, hidden states
    are sent. In a mixture whose experts are on several ranks, a token's copies are sent to the
    experts and back, in F and again in I.

    Args:
        config: the architecture, train.seq_len, recompute, parallel, precision, and how layers are
            divided over stages.
    """

    config: Config

    def of(self, placement: Placement) -> StageCosts:
        """Costs of every stage.

        Raises:
            ValueError: the model has too few layers for the placement.
        """
        config = self.config
        specs = stage_specs(layers_per_stage(config, placement), config.model)
        blocks = [spec.blocks(config.model) for spec in specs]
        recomputed = [self._recomputed(stage, indices) for stage, indices in enumerate(blocks)]
        layers = _sums(self._layer, blocks) / 3
        unit = layers.sum() / placement.num_ranks
        cores = _sums(self._core, blocks) / 3
        head = np.array([head_flops(config.model) / 3 if spec.head else 0.0 for spec in specs])
        repeated = _sums(self._layer, recomputed) / 3
        repeated += head if config.recompute.logit_tokens else 0.0
        f = layers + head
        sent, sent_again = _sums(self._sent, blocks), _sums(self._sent, recomputed)
        state_cost = self._hidden_state() * (1 if config.parallel.sp else config.parallel.tp)
        num_layers = np.array([len(indices) for indices in blocks])
        share = num_layers * (placement.num_ranks / config.model.num_layers)
        return StageCosts(
            compute=np.array([f, f + cores + repeated, f - cores, 2 * f + repeated]) / unit,
            a2a=np.array([sent, sent + sent_again, 0 * sent, sent + sent_again]) / unit,
            comm=np.array([spec.num_states for spec in specs]) * (state_cost / unit),
            activation=share,
            stash=share,
        )

    def _layer(self, block: int) -> float:
        return layer_flops(self.config.model, block, self.config.train.seq_len)

    def _core(self, block: int) -> float:
        model = self.config.model
        return core_flops(model, self.config.train.seq_len, window_of(model, block))

    def _hidden_state(self) -> float:
        """FLOPs that take as long as sending one token's hidden state over all ranks of tp."""
        config = self.config
        element_bytes = ELEMENT_BYTES[config.precision.dtype]
        return config.model.hidden_size * element_bytes * config.pipeline.flops_per_byte

    def _sent(self, block: int) -> float:
        """FLOPs that take as long as sending a token's copies to the experts of a block and back.

        Copies to this rank's own experts are not sent.
        """
        model, ep = self.config.model, self.config.parallel.ep
        if not is_moe(model, block):
            return 0.0
        return 2 * model.top_k * (1 - 1 / ep) * self._hidden_state()

    def _recomputed(self, stage: int, blocks: Sequence[int]) -> Sequence[int]:
        """The blocks of a stage whose backward runs their forward again."""
        recompute = self.config.recompute
        count = (
            recompute.num_layers
            if recompute.stage_layers is None
            else recompute.stage_layers[stage]
        )
        return blocks[:count] if recompute.mode == "full" else ()


def _sums(cost: Callable[[int], float], blocks: Sequence[Sequence[int]]) -> np.ndarray:
    """`[num_stages]` cost of the blocks of each stage."""
    return np.array([sum(map(cost, indices)) for indices in blocks])


@dataclass(frozen=True)
class LayerCosts:
    """Costs of the stages of any placement, where every stage has a whole number of layers.

    Sizes below are in shares of a rank: num_layers/pp layers with their compute are 1.

    Args:
        costs: of such a share, all-to-alls included.
        num_layers: of the model.
        embedding: compute of the first stage in addition to its layers.
        head: compute of the last stage in addition to its layers.
        dense: layers at the bottom that have no all-to-all.
        balance: what the split balances, one of BALANCES.
    """

    costs: Costs
    num_layers: int
    embedding: float = 0.0
    head: float = 0.0
    dense: float = 0.0
    balance: str = "stages"

    def layout(self, placement: Placement) -> list[int]:
        """Number of layers of each stage.

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
        """Costs of every stage.

        Raises:
            ValueError: as `layout`.
        """
        layout, unit = self.layout(placement), self.num_layers / placement.num_ranks
        ends = np.cumsum(layout)  # layers up to the end of each stage
        layers = np.array(layout) / unit
        experts = layers - np.diff(np.minimum(ends, round(self.dense * unit)), prepend=0) / unit
        time = layers.copy()
        time[0] += self.embedding
        time[-1] += self.head
        costs = self.costs
        return StageCosts(costs.compute * time, costs.a2a * experts, costs.comm, layers, layers)

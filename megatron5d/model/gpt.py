"""The GPT as a list of phases, modules called as `phase(x, batch, defer)`:

embedding
per layer   the phases of a block (model/block.py)
head
per depth of multi-token prediction   its input, the phases of a block, its head
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import Config
from megatron5d.model.block import TransformerBlock
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.embedding_head import TIED, Embedding, Head
from megatron5d.model.options import choose_gemms, choose_overlap, mark_replicas, set_recompute
from megatron5d.model.partition import StageSpec
from megatron5d.tensor_parallel.embedding import vocab_weight
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import Mesh

if TYPE_CHECKING:
    from megatron5d.expert_parallel.load_balancing import Balancer


class GPT(nn.Module):
    """The phases that one rank holds of the model, in the order in which a micro-batch passes them.

    Args:
        config: the whole run's configuration.
        mesh: this rank's axes.
        device: of the parameters; "meta" allocates nothing.
        stages: what this rank holds, by stage; None = the whole model as stage 0.
        replicas: which parameters the mirrored pipeline rank holds too: "all", "tied" (the embedding) or "none".
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        stages: Mapping[int, StageSpec] | None = None,
        replicas: str = "none",
    ) -> None:
        super().__init__()
        self.stages = dict(sorted((stages or {0: StageSpec(range(config.model.num_layers), True, True)}).items()))
        self.balancer = self._balancer(config, mesh, device, replicas)
        shared = BlockInputs(config, mesh, device, self.balancer)
        self.room = shared.room if config.moe.exchange == "planned" else None
        self.embedding = Embedding(shared) if any(spec.embedding for spec in self.stages.values()) else None
        self.layers = nn.ModuleDict()
        for stage, spec in self.stages.items():
            for place, i in enumerate(spec.layers):
                block = self.layers[str(i)] = TransformerBlock(shared, i)
                set_recompute(block.children(), config.recompute, stage, place)
        self.head: Head | None = None
        self.mtp_blocks = nn.ModuleList()
        for stage, spec in self.stages.items():
            if spec.head:
                self._add_head(shared, stage, len(spec.layers))
        mark_replicas(self.parameters(), replicas)
        choose_gemms(self.parameters(), config, mesh)
        self.overlap = choose_overlap(self.parameters(), config, mesh)

    def _add_head(self, shared: BlockInputs, stage: int, num_layers: int) -> None:
        """Adds the head and the blocks of multi-token prediction, which share it and the embedding."""
        model, own = shared.model, None if self.embedding is None else self.embedding.tokens.weight
        self.head = Head(shared, own if model.tie_embeddings else None)
        if model.num_mtp_layers == 0:
            return
        from megatron5d.model.mtp import mtp_block

        table = self.head.output.weight if own is None and model.tie_embeddings else own
        if table is None:
            table = vocab_weight(model.vocab_size, model.hidden_size, TIED, shared.tp, model.init_std, **shared.factory)
        for depth in range(model.num_mtp_layers):
            block = mtp_block(shared, depth, table, self.head.output)
            set_recompute(block[:-1], shared.config.recompute, stage, num_layers + depth)  # its head is not recomputed
            self.mtp_blocks.append(block)

    def _balancer(self, config: Config, mesh: Mesh, device: torch.device | str, replicas: str) -> Balancer | None:
        """Builds the balancer of this rank's MoE layers; a rank without any takes part in its collectives."""
        if not config.model.num_experts:
            return None
        from megatron5d.expert_parallel.load_balancing import Balancer

        mine = [i for spec in self.stages.values() for i in spec.layers]
        if any(spec.head for spec in self.stages.values()):
            mine += blocks(config.model)[config.model.num_layers :]
        here = [i for i in mine if is_moe(config.model, i)]
        stage = mesh["stage_pair" if replicas == "all" else "stage"]
        return Balancer(config.model, config.moe, here, mesh["cp_tp"], stage, device)

    def units_of(self, stage: int) -> list[list[nn.Module]]:
        """Returns the phases of a local stage in units of data parallelism, which are gathered and reduced as one."""
        spec = self.stages[stage]
        units: list[list[nn.Module]] = [list(self.layers[str(i)].children()) for i in spec.layers]
        if spec.embedding and self.embedding is not None:
            units.insert(0, [self.embedding])
        if spec.head and self.head is not None:
            units += [[self.head], *(list(phases.children()) for phases in self.mtp_blocks)]
        return units

    def phases_of(self, stage: int) -> list[nn.Module]:
        """Returns the phases of a local stage in order."""
        return [phase for unit in self.units_of(stage) for phase in unit]

    @property
    def units(self) -> list[list[nn.Module]]:
        """The units of all local stages in order: embedding, layers, head, blocks of multi-token prediction."""
        return [unit for stage in self.stages for unit in self.units_of(stage)]

    @property
    def phases(self) -> list[nn.Module]:
        """The phases of all local stages in order."""
        return [phase for unit in self.units for phase in unit]

    def initialize(self, seed: int) -> None:
        """Fills all weights at random, from the seed and each parameter's global name: the same on any layout."""
        for parameter in self.parameters():
            initialize(parameter, seed)

    def weights(self) -> list[torch.Tensor]:
        """Returns what a checkpoint keeps of the local model: parameters, and the routers' biases, which are
        buffers."""
        return [*self.parameters(), *(buffer for buffer in self.buffers() if hasattr(buffer, "spec"))]

"""The GPT as a list of phases, modules called as `phase(x, batch, defer)`:

embedding
per layer   the phases of a block (model/block.py)
head
per depth of multi-token prediction   its input, the phases of a block, its head; those on other stages before the head
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron5d.config.derived import is_moe
from megatron5d.config.schema import Config
from megatron5d.model.block import TransformerBlock
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.embedding_head import TIED, Embedding, Head
from megatron5d.model.options import choose_gemms, choose_overlap, mark_replicas, set_recompute
from megatron5d.model.partition import StageSpec, whole_model
from megatron5d.tensor_parallel.embedding import vocab_weight
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import NOTHING_SHARED, Mesh, Shared

if TYPE_CHECKING:
    from megatron5d.expert_parallel.load_balancing import Balancer


class GPT(nn.Module):
    """The phases that one rank holds of the model, in the order in which a micro-batch passes them.

    Args:
        config: the whole run's configuration.
        mesh: this rank's axes.
        device: of the parameters; "meta" allocates nothing.
        stages: what this rank holds, by stage; None = the whole model as stage 0.
        replicas: which pipeline ranks hold parameters together.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        stages: Mapping[int, StageSpec] | None = None,
        replicas: Shared = NOTHING_SHARED,
    ) -> None:
        super().__init__()
        self.stages = dict(sorted((stages or {0: whole_model(config.model)}).items()))
        self.balancer = self._balancer(config, mesh, device, replicas)
        shared = BlockInputs(config, mesh, device, self.balancer)
        self.room = shared.room if config.moe.exchange == "planned" else None
        self.embedding = Embedding(shared) if any(spec.embedding for spec in self.stages.values()) else None
        self._tables = [] if self.embedding is None else [self.embedding.tokens.weight]  # of this rank, at most one
        self.layers = nn.ModuleDict()
        for stage, spec in self.stages.items():
            for place, i in enumerate(spec.layers):
                block = self.layers[str(i)] = TransformerBlock(shared, i)
                set_recompute(block.children(), config.recompute, stage, place)
        self.head: Head | None = None
        self.mtp_blocks = nn.ModuleDict()
        for stage, spec in self.stages.items():
            if spec.head:
                self.head = Head(shared, self._table(shared) if config.model.tie_embeddings else None, spec.mtp.start)
            for place, depth in enumerate(spec.mtp, len(spec.layers)):
                self._add_mtp_block(shared, depth, stage, place)
        mark_replicas(self.parameters(), replicas)
        choose_gemms(self.parameters(), config, mesh)
        self.overlap = choose_overlap(self.parameters(), config, mesh)

    def _table(self, shared: BlockInputs) -> nn.Parameter:
        """Returns this rank's part of the embedding, which all its stages share."""
        if not self._tables:
            v, h, std = shared.model.vocab_size, shared.model.hidden_size, shared.model.init_std
            self._tables.append(vocab_weight(v, h, TIED, shared.tp, std, **shared.factory))
        return self._tables[0]

    def _add_mtp_block(self, shared: BlockInputs, depth: int, stage: int, place: int) -> None:
        """Adds a block of multi-token prediction, which shares the embedding, and the head if that is on its stage."""
        from megatron5d.model.mtp import mtp_block

        output = self.head.output if self.stages[stage].head and self.head is not None else None
        block = self.mtp_blocks[str(depth)] = mtp_block(shared, depth, self._table(shared), output)
        set_recompute(block[:-1], shared.config.recompute, stage, place)  # its head is not recomputed

    def _balancer(self, config: Config, mesh: Mesh, device: torch.device | str, replicas: Shared) -> Balancer | None:
        """Builds the balancer of this rank's MoE layers; a rank without any takes part in its collectives."""
        if not config.model.num_experts:
            return None
        from megatron5d.expert_parallel.load_balancing import Balancer

        mine = [i for spec in self.stages.values() for i in spec.blocks(config.model)]
        here = [i for i in mine if is_moe(config.model, i)]
        stage = mesh["stage_pair" if "pair" in replicas else "stage"]
        return Balancer(config.model, config.moe, here, mesh["cp_tp"], stage, device)

    def units_of(self, stage: int) -> list[list[nn.Module]]:
        """Returns the phases of a local stage in units of data parallelism, which are gathered and reduced as one."""
        spec = self.stages[stage]
        units: list[list[nn.Module]] = [list(self.layers[str(i)].children()) for i in spec.layers]
        if spec.embedding and self.embedding is not None:
            units.insert(0, [self.embedding])
        if spec.head and self.head is not None:
            units.append([self.head])
        return units + [list(self.mtp_blocks[str(depth)].children()) for depth in spec.mtp]

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

"""The GPT as a list of phases, which are modules called as `phase(x, batch, defer)`:

    embedding
    for each layer                           the phases of a block (model/block.py)
    head
    for each depth of multi-token prediction its input, the phases of a block, its head; depths on
                                             earlier stages than the head precede it

After the phases are built, this file sets their activation policy, and for parameters the GEMMs,
the overlap with tp collectives, and which pipeline ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.derived import is_moe, quantized_matrices
from megatron5d.config.schema import Config, RecomputeConfig
from megatron5d.kernels.choice import Settings
from megatron5d.model.block import TransformerBlock
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.embedding_head import TIED, Embedding, Head
from megatron5d.model.partition import StageSpec, full_model
from megatron5d.phases.activations import (
    KEEP_ALL,
    ActivationPolicy,
    HasRecomputedParts,
    RecomputedParts,
)
from megatron5d.phases.phase import Phase, phases_in
from megatron5d.precision.gemm import PLAIN, ExpertGemms, Gemms
from megatron5d.tensor_parallel.overlap import NO_OVERLAP, Chunked, Overlap
from megatron5d.topology.grid import SharedRanks
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import NO_SHARED_RANKS, Mesh
from megatron5d.topology.shard_spec import spec_of, state_of

if TYPE_CHECKING:
    from megatron5d.model.moe_inputs import MoEInputs


def is_recomputed(recompute: RecomputeConfig, stage: int, position: int) -> bool:
    """Whether the block at a position of a stage, from 0, is recomputed, fully or in parts."""
    count = (
        recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
    )
    return recompute.mode != "none" and (count is None or position < count)


def set_recompute(
    phases: Iterable[Phase], recompute: RecomputeConfig, stage: int, position: int
) -> None:
    """Sets which activations a block's phases keep for their backward, and where.

    Args:
        phases: of the block; those without a `kind`, the join of MTP, recompute no parts.
        recompute: the settings.
        stage, position: of the block, as in `is_recomputed`.
    """
    recomputes, min_bytes = is_recomputed(recompute, stage, position), recompute.offload_min_bytes
    full = recomputes and recompute.mode == "full"
    parts = RecomputedParts(recompute.parts) if recomputes and not full else KEEP_ALL
    group = position // recompute.group_layers if full else None
    input_host_bytes = min_bytes if full and "inputs" in recompute.offload else None
    for phase in phases:
        host_bytes = min_bytes if not full and phase.kind in recompute.offload else None
        phase.activation_policy = ActivationPolicy(parts, group, host_bytes, input_host_bytes)
        for module in phase.modules() if phase.kind else ():
            if isinstance(module, HasRecomputedParts):
                module.parts = parts


def mark_replicas(parameters: Iterable[nn.Parameter], replicas: SharedRanks) -> None:
    """Records in the specs which parameters other pipeline ranks hold too."""
    for parameter in parameters:
        spec, shared = spec_of(parameter), "pair" if "pair" in replicas else ""
        if spec.name == TIED and "tied" in replicas:
            shared = "tied"
        state_of(parameter).spec = replace(spec, shared=shared)


def fp8_gemms(config: Config, mesh: Mesh, settings: Settings) -> tuple[Gemms, ExpertGemms]:
    """Builds the FP8 GEMMs of linear layers, and of experts.

    Comm: none here; every tensorwise GEMM all_reduces one number over cp_tp for each input and
        gradient, and over tp for each weight; experts one number per expert over etp.
    """
    from megatron5d.precision.fp8_recipes import (
        BlockwiseExpertGemms,
        BlockwiseGemms,
        TensorwiseExpertGemms,
        TensorwiseGemms,
    )

    powers_of_two = config.precision.fp8_pow2_scales
    if config.precision.fp8 == "blockwise":
        return BlockwiseGemms(powers_of_two, settings), BlockwiseExpertGemms(powers_of_two)
    of_tokens, of_weight, of_experts = (
        partial(all_reduce, axis=mesh[axis], op="max") for axis in ("cp_tp", "tp", "etp")
    )
    linear = TensorwiseGemms(powers_of_two, of_tokens, of_weight, settings)
    return linear, TensorwiseExpertGemms(powers_of_two, of_experts)


def choose_gemms(
    parameters: Iterable[nn.Parameter], config: Config, mesh: Mesh, settings: Settings
) -> None:
    """Sets the GEMMs of experts, and of weights that are multiplied in FP8."""
    quantized = {f"{name}.weight" for name in quantized_matrices(config)}
    plain_experts = ExpertGemms(settings)
    linear, experts = fp8_gemms(config, mesh, settings) if quantized else (PLAIN, plain_experts)
    for parameter in parameters:
        spec = spec_of(parameter)
        if spec.name in quantized:
            state_of(parameter).gemms = experts if spec.expert else linear
        elif spec.expert:
            state_of(parameter).gemms = plain_experts


def choose_overlap(parameters: Iterable[nn.Parameter], config: Config, mesh: Mesh) -> Overlap:
    """Sets and returns the overlap of GEMMs and tp collectives (`parallel.tp_overlap`).

    Raises:
        ValueError: `fused` is not possible on this machine; raised on every rank.
    """
    mode, tp = config.parallel.tp_overlap, mesh["tp"]
    if mode == "none" or tp.size == 1:
        return NO_OVERLAP
    parameters = list(parameters)
    overlap: Overlap = Chunked()
    if mode == "fused":
        from megatron5d.tensor_parallel.fused_overlap import Fused

        overlap = Fused(tp, parameters[0].device, config.parallel.timeout_s)
    for parameter in parameters:
        state_of(parameter).overlap = overlap
    return overlap


class GPT(nn.Module):
    """One rank's phases of the model, in the order in which a micro-batch passes them.

    Args:
        config: of the run.
        mesh: this rank's axes.
        device: of the parameters; "meta" allocates nothing.
        stages: the part of the model on each of this rank's stages; None = all of it on stage 0.
        replicas: the pipeline ranks that share parameters.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        stages: Mapping[int, StageSpec] | None = None,
        replicas: SharedRanks = NO_SHARED_RANKS,
    ) -> None:
        super().__init__()
        self.stages = dict(sorted((stages or {0: full_model(config.model)}).items()))
        moe = self._moe_inputs(config, mesh, device, replicas)
        self.balancer = None if moe is None else moe.balancer
        self.send_capacity = None if moe is None else moe.send_capacity
        inputs = BlockInputs(config, mesh, device, moe)
        self._build_phases(inputs)
        mark_replicas(self.parameters(), replicas)
        choose_gemms(self.parameters(), config, mesh, inputs.kernels)
        self.overlap = choose_overlap(self.parameters(), config, mesh)

    def _build_phases(self, inputs: BlockInputs) -> None:
        recompute, specs = inputs.config.recompute, self.stages.values()
        self.embedding = Embedding(inputs) if any(spec.embedding for spec in specs) else None
        # this rank's embedding weight, if a stage has needed it
        self._tables = [] if self.embedding is None else [self.embedding.tokens.weight]
        self.layers = nn.ModuleDict()
        for stage, spec in self.stages.items():
            for position, layer in enumerate(spec.layers):
                block = self.layers[str(layer)] = TransformerBlock(inputs, layer)
                set_recompute(phases_in(block), recompute, stage, position)
        self.head: Head | None = None
        self.mtp_blocks = nn.ModuleDict()
        for stage, spec in self.stages.items():
            if spec.head:
                tied = self._table(inputs) if inputs.model.tie_embeddings else None
                self.head = Head(inputs, tied, spec.mtp.start)
            for position, depth in enumerate(spec.mtp, len(spec.layers)):
                self._add_mtp_block(inputs, depth, stage, position)

    def _table(self, inputs: BlockInputs) -> nn.Parameter:
        """This rank's part of the embedding, which all its stages share."""
        if not self._tables:
            self._tables.append(inputs.vocab_weight(TIED))
        return self._tables[0]

    def _add_mtp_block(self, inputs: BlockInputs, depth: int, stage: int, position: int) -> None:
        """Adds a prediction block; it shares the embedding, and a head on the same stage."""
        from megatron5d.model.mtp import mtp_block

        output = self.head.output if self.stages[stage].head and self.head is not None else None
        block = self.mtp_blocks[str(depth)] = mtp_block(inputs, depth, self._table(inputs), output)
        # The last phase, its head, is never recomputed.
        set_recompute(phases_in(block)[:-1], inputs.config.recompute, stage, position)

    def _moe_inputs(
        self, config: Config, mesh: Mesh, device: torch.device | str, replicas: SharedRanks
    ) -> MoEInputs | None:
        """Builds what the MoE layers of this rank share; None for a dense model."""
        if not config.model.num_experts:
            return None
        from megatron5d.model.moe_inputs import moe_inputs

        blocks = [i for spec in self.stages.values() for i in spec.blocks(config.model)]
        layers = [i for i in blocks if is_moe(config.model, i)]
        stage = mesh["stage_pair" if "pair" in replicas else "stage"]
        return moe_inputs(config, mesh, device, layers, stage)

    def units_of(self, stage: int) -> list[list[Phase]]:
        """The phases of a local stage in units, which data parallelism gathers and reduces."""
        spec = self.stages[stage]
        units: list[list[Phase]] = [phases_in(self.layers[str(layer)]) for layer in spec.layers]
        if spec.embedding and self.embedding is not None:
            units.insert(0, [self.embedding])
        if spec.head and self.head is not None:
            units.append([self.head])
        return units + [phases_in(self.mtp_blocks[str(depth)]) for depth in spec.mtp]

    def phases_of(self, stage: int) -> list[Phase]:
        """The phases of a local stage in order."""
        return [phase for unit in self.units_of(stage) for phase in unit]

    @property
    def units(self) -> list[list[Phase]]:
        """The units of all local stages in order: embedding, layers, head, prediction blocks."""
        return [unit for stage in self.stages for unit in self.units_of(stage)]

    @property
    def phases(self) -> list[Phase]:
        """The phases of all local stages in order."""
        return [phase for unit in self.units for phase in unit]

    def initialize(self, seed: int) -> None:
        """Initializes all weights from the seed and their global names, the same on any layout."""
        for parameter in self.parameters():
            initialize(parameter, seed)

    def weights(self) -> list[torch.Tensor]:
        """What checkpoints store of the local model: parameters, and routers' biases (buffers)."""
        return [
            *self.parameters(),
            *(buffer for buffer in self.buffers() if state_of(buffer).spec is not None),
        ]

"""The GPT as a list of phases, modules called as `phase(x, batch, defer)`:

embedding
per layer   attention, mlp    or    attention, dispatch, experts, combine
head
per depth of multi-token prediction   its input, the phases of a block, its head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron5d.autograd.recompute import KEEP_ALL, ActivationPolicy, RecomputedParts
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import Config, RecomputeConfig
from megatron5d.expert_parallel.load_balancing import Balancer
from megatron5d.expert_parallel.router import Jitter
from megatron5d.model.attention import Attention, context_attention
from megatron5d.model.embedding_head import TIED, Embedding, Head
from megatron5d.model.mla import Mla
from megatron5d.model.mlp import Mlp
from megatron5d.model.moe import MoeCombine, MoeDispatch, MoeExperts, TokenShare
from megatron5d.model.mtp import MtpHead, MtpInput, WithLossSums
from megatron5d.model.options import choose_gemms, choose_overlap
from megatron5d.model.partition import StageSpec
from megatron5d.model.rope import RotaryTables, rotary_dim
from megatron5d.tensor_parallel.embedding import vocab_weight
from megatron5d.topology.axis import Axis
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import spec_of

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


BlockMaker = Callable[[int, RecomputedParts], list[nn.Module]]
"""(global index of a block, parts of it that are recomputed) -> its phases."""


def block_maker(config: Config, mesh: Mesh, balancer: Balancer | None, common: dict[str, Any]) -> BlockMaker:
    """Makes what all blocks of this rank share, and returns a function that builds one block.

    Args:
        config, mesh: as in Gpt.
        balancer: of all MoE blocks of this rank; None = there are none.
        common: arguments of every phase: sp, and dtype and device of the parameters.
    """
    model = config.model
    rope = None
    if model.position == "rope":
        rope = RotaryTables(rotary_dim(model), model.rope_theta, model.rope_scaling, common["dtype"], common["device"])
    context = context_attention(config, mesh)
    attention: Callable[..., nn.Module] = (
        partial(Mla, compress=config.parallel.cp_compress_kv) if model.attention == "mla" else Attention
    )
    share = TokenShare(mesh["tp"], config.parallel.sp)
    jitter = Jitter(config.moe.jitter, config.train.seed, config.train.seq_len) if config.moe.jitter else None
    routing: dict[str, Any] = {"share": share, "balancer": balancer, "jitter": jitter}

    def block(i: int, recomputed: RecomputedParts) -> list[nn.Module]:
        factory = {"parts": recomputed, **common}
        phases: list[nn.Module] = [attention(model, i, mesh, rope=rope, context=context, **factory)]
        if balancer is None or i not in balancer.layers:
            return [*phases, Mlp(model, i, mesh, **factory)]
        dispatch = MoeDispatch(model, config.moe, i, mesh, **routing, **factory)
        return [*phases, dispatch, MoeExperts(model, i, mesh, **factory), MoeCombine(share)]

    return block


def is_recomputed(recompute: RecomputeConfig, stage: int, place: int) -> bool:
    """Whether the block at a place of a stage, counted from 0, is recomputed, as a whole or in parts."""
    count = recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
    return recompute.mode != "none" and (count is None or place < count)


def _recomputed_parts(recompute: RecomputeConfig, stage: int, place: int) -> RecomputedParts:
    """The parts that are recomputed of the block at a place of a stage (recompute.mode=selective)."""
    selective = recompute.mode == "selective" and is_recomputed(recompute, stage, place)
    return RecomputedParts(recompute.parts) if selective else KEEP_ALL


def _set_policies(
    phases: list[nn.Module], recompute: RecomputeConfig, stage: int, place: int, parts: RecomputedParts
) -> None:
    """Tells the phases of the block at a place of a stage which activations they keep, and where."""
    full, least = recompute.mode == "full" and is_recomputed(recompute, stage, place), recompute.offload_min_bytes
    group = place // recompute.group_layers if full else None
    input_host_bytes = least if full and "inputs" in recompute.offload else None
    for phase in phases:
        host_bytes = least if not full and getattr(phase, "kind", None) in recompute.offload else None
        phase.activation_policy = ActivationPolicy(parts, group, host_bytes, input_host_bytes)  # type: ignore[assignment]


class Gpt(nn.Module):
    """The phases that one rank holds of the model, in the order in which a micro-batch passes them.

    Args:
        config: the whole run's configuration (model, moe, parallel.sp, precision, recompute, train.z_loss).
        mesh: this rank's axes.
        device: of the parameters; "meta" allocates nothing.
        stages: what this rank holds, by stage; None = the whole model as stage 0.
        shared: which parameters the mirrored pipeline rank holds too: "all", "tied" (the embedding) or "none".
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        device: torch.device | str = "cpu",
        stages: Mapping[int, StageSpec] | None = None,
        shared: str = "none",
    ) -> None:
        super().__init__()
        model = config.model
        self.stages = dict(sorted((stages or {0: StageSpec(range(model.num_layers), True, True)}).items()))
        dtype = DTYPES[config.precision.dtype]
        common: dict[str, Any] = {"sp": config.parallel.sp, "dtype": dtype, "device": device}
        has_embedding = any(spec.embedding for spec in self.stages.values())
        self.embedding = Embedding(model, mesh, **common) if has_embedding else None
        self.balancer = self._balancer(config, mesh, device, shared)
        block = block_maker(config, mesh, self.balancer, common)
        self.layers = nn.ModuleDict()
        for stage, spec in self.stages.items():
            for place, i in enumerate(spec.layers):
                parts = _recomputed_parts(config.recompute, stage, place)
                phases = block(i, parts)
                _set_policies(phases, config.recompute, stage, place, parts)
                self.layers[str(i)] = nn.ModuleList(phases)
        self.head, self.mtp_blocks = None, nn.ModuleList()
        if any(spec.head for spec in self.stages.values()):
            tied = self.embedding.tokens.weight if self.embedding is not None and model.tie_embeddings else None
            slice_tokens = config.recompute.logit_tokens
            self.head = Head(model, mesh, z_coef=config.train.z_loss, tied=tied, slice_tokens=slice_tokens, **common)
            self._add_mtp_blocks(config, mesh["tp"], block, common)
        self._mark_shared(shared)
        choose_gemms(self.parameters(), config, mesh)
        self.overlap = choose_overlap(self.parameters(), config, mesh)

    def _add_mtp_blocks(self, config: Config, tp: Axis, block: BlockMaker, common: dict[str, Any]) -> None:
        """Adds the blocks of multi-token prediction, which use the model's own embedding and head."""
        assert self.head is not None
        output, model = self.head.output, config.model
        if model.num_mtp_layers == 0:
            return
        if self.embedding is not None:
            table = self.embedding.tokens.weight
        elif model.tie_embeddings:
            table = output.weight
        else:
            factory = {name: common[name] for name in ("dtype", "device")}
            table = vocab_weight(model.vocab_size, model.hidden_size, TIED, tp, model.init_std, **factory)
        last, spec = next(item for item in self.stages.items() if item[1].head)
        for depth in range(model.num_mtp_layers):
            place = len(spec.layers) + depth
            parts = _recomputed_parts(config.recompute, last, place)
            phases: list[nn.Module] = [MtpInput(model, depth, tp, table=table, **common)]
            phases += [WithLossSums(phase) for phase in block(model.num_layers + depth, parts)]
            _set_policies(phases, config.recompute, last, place, parts)  # its head is not recomputed
            phases.append(MtpHead(model, depth, tp, output=output, **common))
            self.mtp_blocks.append(nn.ModuleList(phases))

    def _balancer(self, config: Config, mesh: Mesh, device: torch.device | str, shared: str) -> Balancer | None:
        """The balancer of this rank's MoE layers; a rank without any still takes part in its collectives."""
        if not config.model.num_experts:
            return None
        mine = [i for spec in self.stages.values() for i in spec.layers]
        if any(spec.head for spec in self.stages.values()):
            mine += blocks(config.model)[config.model.num_layers :]
        here = [i for i in mine if is_moe(config.model, i)]
        stage = mesh["stage_pair" if shared == "all" else "stage"]
        return Balancer(config.model, config.moe, here, mesh["cp_tp"], stage, device)

    def _mark_shared(self, shared: str) -> None:
        """Notes in the specs which parameters the mirrored pipeline rank holds too."""
        for parameter in self.parameters():
            spec = spec_of(parameter)
            if shared == "all" or (shared == "tied" and spec.name == TIED):
                parameter.spec = replace(spec, shared="pair")  # type: ignore[attr-defined]

    def units_of(self, stage: int) -> list[list[nn.Module]]:
        """The phases of a local stage in units of data parallelism, which are gathered and reduced as one."""
        spec = self.stages[stage]
        units: list[list[nn.Module]] = [list(self.layers[str(i)].children()) for i in spec.layers]
        if spec.embedding and self.embedding is not None:
            units.insert(0, [self.embedding])
        if spec.head and self.head is not None:
            units += [[self.head], *(list(phases.children()) for phases in self.mtp_blocks)]
        return units

    def phases_of(self, stage: int) -> list[nn.Module]:
        """The phases of a local stage in order."""
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
        """What a checkpoint keeps of the local model: parameters, and the routers' biases, which are buffers."""
        return [*self.parameters(), *(buffer for buffer in self.buffers() if hasattr(buffer, "spec"))]

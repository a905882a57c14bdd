"""The transformer block as its phases: attention, then an MLP or dispatch, experts, combine; each
adds its residual.

A phase is called as `phase(x, batch, defer)`. Hidden states between blocks are `[s/cp/tp, b, h]`
(without sp `[s/cp, b, h]`). model/gpt.py attaches the recompute policy, FP8 and the overlap of tp
afterwards.
"""

from __future__ import annotations

from torch import nn

from megatron5d.config.derived import is_moe
from megatron5d.model.attention import SelfAttention
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.mlp import MLP
from megatron5d.phases.phase import Phase


class TransformerBlock(nn.Module):
    """One block; its children are its phases, in order. `layer`, here and in them, is its global
    index."""

    def __init__(self, shared: BlockInputs, layer: int) -> None:
        super().__init__()
        if shared.model.attention == "mla":
            from megatron5d.model.mla import MultiLatentAttention

            self.attention: Phase = MultiLatentAttention(shared, layer)
        else:
            self.attention = SelfAttention(shared, layer)
        if is_moe(shared.model, layer):
            from megatron5d.model.moe import MoECombine, MoEDispatch, MoEExperts

            # norm, router, permute; tokens leave       all_to_all ep
            self.dispatch = MoEDispatch(shared, layer)
            # shared expert, grouped GEMMs; outputs leave all_to_all ep
            self.experts = MoEExperts(shared, layer)
            # unpermute, sum of each token's outputs, residual
            self.combine = MoECombine(shared, layer)
        else:
            self.mlp = MLP(shared, layer)

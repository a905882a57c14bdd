"""The transformer block as a list of phases: attention, then an MLP or dispatch, experts, combine.

A phase is called as `phase(x, batch, defer)`. Hidden states between blocks are `[s/cp/tp, b, h]`
(sp; else `[s/cp, b, h]`). model/gpt.py sets recomputation, FP8 GEMMs and the overlap of tp.
"""

from __future__ import annotations

from torch import nn

from megatron5d.config.derived import is_moe
from megatron5d.model.attention import SelfAttention
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.mlp import MLP
from megatron5d.phases.phase import Phase


class TransformerBlock(nn.Module):
    """A block, whose children are its phases in order.

    Args:
        inputs: what blocks are built from.
        layer: global index of the block.
    """

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__()
        kind = inputs.model.attention
        if kind == "mla":
            from megatron5d.model.mla import MultiLatentAttention

            self.attention: Phase = MultiLatentAttention(inputs, layer)
        elif kind == "gqa":
            self.attention = SelfAttention(inputs, layer)
        else:
            from megatron5d.model.registry import ATTENTIONS

            self.attention = ATTENTIONS[kind](inputs, layer)
        if is_moe(inputs.model, layer):
            from megatron5d.model.moe import MoECombine, MoEDispatch, MoEExperts

            # norm, router, permute; tokens are sent       all_to_all ep
            self.dispatch = MoEDispatch(inputs, layer)
            # shared expert, grouped GEMMs; outputs are sent  all_to_all ep
            self.experts = MoEExperts(inputs, layer)
            # unpermute, sum of each token's outputs, residual
            self.combine = MoECombine(inputs, layer)
        else:
            self.mlp = MLP(inputs, layer)

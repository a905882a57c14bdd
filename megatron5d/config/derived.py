"""Which layers of a model are mixtures of experts."""

from __future__ import annotations

from megatron5d.config.schema import ModelConfig


def moe_layers(model: ModelConfig) -> list[int]:
    """Global indices of the MoE layers, ascending.

    `moe_layers` lists them; otherwise layer i is one if i >= first_k_dense and moe_interval divides i + 1 (as
    Hugging Face's `decoder_sparse_step`).
    """
    if not model.num_experts:
        return []
    if model.moe_layers is not None:
        return sorted(model.moe_layers)
    return [i for i in range(model.first_k_dense, model.num_layers) if (i + 1) % model.moe_interval == 0]


def blocks(model: ModelConfig) -> range:
    """Global indices of all blocks: the layers, then those of multi-token prediction."""
    return range(model.num_layers + model.num_mtp_layers)


def is_moe(model: ModelConfig, block: int) -> bool:
    """Whether a block is a mixture of experts; blocks of multi-token prediction are if the last layer is."""
    return min(block, model.num_layers - 1) in moe_layers(model)

"""Upcycling: a dense checkpoint becomes a mixture of experts."""

from __future__ import annotations

import argparse

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.load import SavedWeights, whole_checkpoint
from megatron5d.checkpoint.upcycle import upcycled, upcycled_weights
from megatron5d.config.schema import Config
from megatron5d.model.block_inputs import DTYPES
from megatron5d.tools.conversion.new_checkpoint import check_empty, save_weights
from megatron5d.train.state import twin

PRINTED = ("num_experts", "top_k", "moe_ffn_hidden_size", "first_k_dense", "routed_scaling_factor")


def upcycle(args: argparse.Namespace) -> int:
    """Writes a checkpoint of step 0, and prints its folder and the overrides of its architecture; returns 0.

    Raises:
        ValueError: no whole checkpoint, one that cannot become such a mixture, or `out` holds checkpoints.
    """
    check_empty(args.out)
    folder = whole_checkpoint(args.checkpoint, "--checkpoint")
    config = saved_config(folder)
    sparse = upcycled(config.model, args.num_experts, args.top_k, args.granularity, args.first_k_dense)
    weights = SavedWeights(folder, DTYPES["fp32"], twin)  # of a run in bf16 its masters, with which training continues
    tensors = upcycled_weights(weights, config.model, sparse, args.noise, args.seed)
    written = Config(model=sparse, precision=config.precision, data=config.data)
    folder = save_weights(args.out, dict(tensors), written)
    print(f"wrote {folder}: {' '.join(f'model.{name}={getattr(sparse, name)}' for name in PRINTED)}")
    return 0

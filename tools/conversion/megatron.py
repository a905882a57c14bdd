"""Conversion from and to checkpoints of Megatron-LM, with one tensor in memory at a time."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.safetensors_folder import check_names
from megatron5d.checkpoint.hf.weights import lazy_weights
from megatron5d.checkpoint.load import SavedWeights, whole_checkpoint
from megatron5d.checkpoint.megatron.arguments import args_of, model_config_of
from megatron5d.checkpoint.megatron.checkpoint import MegatronCheckpoint
from megatron5d.checkpoint.megatron.names import EMBEDDING, IGNORED, entries
from megatron5d.checkpoint.megatron.writer import write_release
from megatron5d.config.schema import Config, DataConfig, PrecisionConfig, TrainConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.train.hf_export import check_complete
from megatron5d.train.state import twin
from tools.conversion.new_checkpoint import check_empty, save_weights, widest_dtype


def from_megatron(args: argparse.Namespace) -> int:
    """Writes a checkpoint of step 0, and prints its folder; returns 0.

    Raises:
        ValueError: the folder is no Megatron checkpoint, holds a model that ours does not compute, or lacks tensors; or
            `out` holds checkpoints.
    """
    check_empty(args.out)
    stored = MegatronCheckpoint(args.megatron)
    rows = stored.tensors[EMBEDDING].shape[0]
    model = model_config_of(stored.args, rows, args.vocab_size)
    stored.fit(model)
    table = entries(model)
    check_names(stored, table, IGNORED)
    if unread := sum(name.startswith("mtp.") for name in stored.tensors):
        print(f"{stored.folder}: {unread} tensors of multi-token prediction are not read", file=sys.stderr)
    if rows > model.vocab_size:
        print(f"{rows - model.vocab_size} rows that pad the vocabulary are left out", file=sys.stderr)
    passed_over = re.compile("|".join(IGNORED))
    wide = {entry.hf_name for entry in table if entry.wide}
    kinds = {each.dtype for name, each in stored.tensors.items() if name not in wide and not passed_over.search(name)}
    dtype = args.dtype or widest_dtype(kinds)
    seq_len = getattr(stored.args, "seq_length", None) or model.max_positions
    config = Config(model=model, precision=PrecisionConfig(dtype=dtype), train=TrainConfig(seq_len=seq_len))
    print(f"wrote {save_weights(args.out, dict(lazy_weights(table, stored, DTYPES[dtype])), config)}")
    return 0


def to_megatron(args: argparse.Namespace) -> int:
    """Writes a `torch_dist` release, and prints its folder; returns 0.

    Raises:
        ValueError: no whole checkpoint, an architecture that Megatron-Core does not compute, or `out` holds a
            checkpoint of Megatron-LM.
    """
    folder = whole_checkpoint(args.checkpoint, "--checkpoint")
    config = saved_config(folder)
    dtype = args.dtype or config.precision.dtype
    theirs = args_of(config.model, dtype, config.train.seq_len, _tokenizer(config.data))
    weights = SavedWeights(folder, DTYPES[dtype], twin)
    check_complete(weights, entries(config.model), folder)
    print(f"wrote {write_release(args.out, config.model, theirs, weights.read, DTYPES[dtype])}")
    return 0


def _tokenizer(data: DataConfig) -> str | None:
    return None if data.tokenizer is None else str(Path(data.tokenizer).resolve())

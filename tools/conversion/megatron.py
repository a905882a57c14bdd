"""Conversion from and to checkpoints of Megatron-LM, with one tensor in memory at a time."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.entry import Entry
from megatron5d.checkpoint.hf.safetensors_folder import check_names
from megatron5d.checkpoint.hf.weights import lazy_weights
from megatron5d.checkpoint.load import PREFIX, LazyTensor, SavedWeights, whole_checkpoint
from megatron5d.checkpoint.megatron.arguments import args_of, model_config_of
from megatron5d.checkpoint.megatron.checkpoint import MegatronTensors, open_checkpoint
from megatron5d.checkpoint.megatron.names import EMBEDDING, IGNORED, entries
from megatron5d.checkpoint.megatron.writer import write_release
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.tools.conversion.new_checkpoint import check_empty, save_weights, widest_dtype
from megatron5d.train.hf_export import check_complete
from megatron5d.train.state import Progress, twin

# Our kinds of the optimiser's state, and Megatron-Core's.
_OPTIMIZER = {"master": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def from_megatron(args: argparse.Namespace) -> int:
    """Writes a checkpoint, and prints its folder; returns 0. It is of step 0 where the optimiser's state is not read.

    Raises:
        ValueError: the folder is no Megatron checkpoint, holds a model that ours does not compute, or lacks tensors; or
            `out` holds checkpoints.
    """
    check_empty(args.out)
    found = open_checkpoint(args.megatron)
    stored, theirs = found.weights, found.args
    rows = stored.tensors[EMBEDDING].shape[0]
    model = model_config_of(theirs, rows, args.vocab_size)
    table = entries(model)
    wide = {entry.hf_name for entry in table if entry.wide}
    passed_over = re.compile("|".join(IGNORED))
    kinds = {each.dtype for name, each in stored.tensors.items() if name not in wide and not passed_over.search(name)}
    dtype = args.dtype or widest_dtype(kinds)
    if unread := sum(name.startswith("mtp.") for name in stored.tensors):
        print(f"{stored.folder}: {unread} tensors of multi-token prediction are not read", file=sys.stderr)
    if rows > model.vocab_size:
        print(f"{rows - model.vocab_size} rows that pad the vocabulary are left out", file=sys.stderr)
    tensors = dict(_fitting(stored, table, model, DTYPES[dtype]))
    progress = Progress()
    if _OPTIMIZER["exp_avg"] in found.optimizer and getattr(theirs, "optimizer", "adam") == "adam":
        own = [entry for entry in table if not entry.wide]
        for kind, name in _OPTIMIZER.items():
            if name in found.optimizer:
                state = _fitting(found.optimizer[name], own, model, torch.float32)
                tensors |= {f"optim.{kind}.{key.removeprefix(PREFIX)}": tensor for key, tensor in state.items()}
        samples = getattr(theirs, "consumed_train_samples", 0)
        progress = Progress(step=found.iteration, consumed_samples=samples, tokens=samples * theirs.seq_length)
    elif found.optimizer:
        print(f"{stored.folder}: the optimiser's state ({', '.join(found.optimizer)}) is not read: only that of Adam "
              "by parameter is, as --dist-ckpt-optim-fully-reshardable saves it", file=sys.stderr)  # fmt: skip
    train = TrainConfig(seq_len=getattr(theirs, "seq_length", None) or model.max_positions)
    config = Config(model=model, precision=PrecisionConfig(dtype=dtype), train=train)
    print(f"wrote {save_weights(args.out, tensors, config, progress)}")
    return 0


def _fitting(
    stored: MegatronTensors, table: list[Entry], model: ModelConfig, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Returns the tensors of a table, each read when it is written; raises ValueError where some are missing or
    misshapen."""
    stored.fit(model)
    check_names(stored, table, IGNORED)
    return lazy_weights(table, stored, dtype)


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

"""Conversion from and to checkpoints of Megatron-LM, with one tensor in memory at a time."""

from __future__ import annotations

import argparse
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.files import Entry
from megatron5d.checkpoint.hf.safetensors_folder import check_names
from megatron5d.checkpoint.hf.weights import lazy_weights
from megatron5d.checkpoint.load import (
    WEIGHT_PREFIX,
    LazyTensor,
    SavedTensors,
    SavedWeights,
    resolve_checkpoint,
)
from megatron5d.checkpoint.megatron.names import (
    EMBEDDING,
    IGNORED,
    megatron_args,
    megatron_entries,
    model_config_from_args,
)
from megatron5d.checkpoint.megatron.reader import TRACKER, MegatronTensors, open_checkpoint
from megatron5d.checkpoint.megatron.writer import RELEASE, STATES, TrainingState, write_checkpoint
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.tools.conversion.new_checkpoint import (
    check_empty,
    save_weights,
    unfinished,
    widest_dtype,
)
from megatron5d.train.hf_export import check_tensor_names
from megatron5d.train.state import Progress, read_record, twin_key

# of kinds of the optimiser's state: by one or the other layout of Megatron-Core
_OTHER_NAMES = {"fp32_param": "param"}


def from_megatron(args: argparse.Namespace) -> int:
    """Writes a checkpoint, and prints its folder; returns 0. It is of step 0 where the optimiser's
    state is not read.

    Raises ValueError: the folder is no Megatron checkpoint, holds a model that ours does not
    compute, or lacks tensors; or `out` holds checkpoints.
    """
    check_empty(args.out)
    found = open_checkpoint(args.megatron)
    stored, theirs = found.weights, found.args
    rows = stored.tensors[EMBEDDING].shape[0]
    model = model_config_from_args(theirs, rows, args.vocab_size)
    table = megatron_entries(model)
    wide = {entry.stored_name for entry in table if entry.wide}
    passed_over = re.compile("|".join(IGNORED))
    kinds = {
        each.dtype
        for name, each in stored.tensors.items()
        if name not in wide and not passed_over.search(name)
    }
    dtype = args.dtype or widest_dtype(kinds)
    if unread := sum(name.startswith("mtp.") for name in stored.tensors):
        print(
            f"{stored.folder}: {unread} tensors of multi-token prediction are not read",
            file=sys.stderr,
        )
    if rows > model.vocab_size:
        print(
            f"{rows - model.vocab_size} rows that pad the vocabulary are left out", file=sys.stderr
        )
    tensors = dict(_fitting(stored, table, model, DTYPES[dtype]))
    progress = Progress()
    kept = {_OTHER_NAMES.get(kind, kind): state for kind, state in found.optimizer.items()}
    if "exp_avg" in kept and getattr(theirs, "optimizer", "adam") == "adam":
        own = [entry for entry in table if not entry.wide]
        for kind, name in STATES.items():
            if name in kept:
                state = _fitting(kept[name], own, model, torch.float32)
                tensors |= {
                    f"optim.{kind}.{key.removeprefix(WEIGHT_PREFIX)}": tensor
                    for key, tensor in state.items()
                }
        samples = getattr(theirs, "consumed_train_samples", 0)
        progress = Progress(
            step=found.iteration, consumed_samples=samples, tokens=samples * theirs.seq_length
        )
    elif found.optimizer:
        print(
            f"{stored.folder}: the optimiser's state ({', '.join(found.optimizer)}) is not read: only that of Adam "
            "by parameter is, as --dist-ckpt-optim-fully-reshardable saves it",
            file=sys.stderr,
        )
    train = TrainConfig(seq_len=getattr(theirs, "seq_length", None) or model.max_positions)
    config = Config(model=model, precision=PrecisionConfig(dtype=dtype), train=train)
    print(f"wrote {save_weights(args.out, tensors, config, progress)}")
    return 0


def _fitting(
    stored: MegatronTensors, table: list[Entry], model: ModelConfig, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Returns the tensors of a table, each read when it is written; raises ValueError where some
    are missing or misshapen."""
    stored.fit(model)
    check_names(stored, table, IGNORED)
    return lazy_weights(table, stored, dtype)


def to_megatron(args: argparse.Namespace) -> int:
    """Writes a `torch_dist` release, or with the optimiser an iteration, and prints its folder;
    returns 0.

    Raises ValueError: no whole checkpoint, an architecture that Megatron-Core does not compute, an
    optimiser that it does not have, or `out` holds a checkpoint of Megatron-LM.
    """
    folder = resolve_checkpoint(args.checkpoint, "--checkpoint")
    if old := sorted(
        path.name for name in (TRACKER, RELEASE, "iter_*") for path in args.out.glob(name)
    ):
        raise ValueError(
            f"{args.out} already holds a checkpoint of Megatron-LM ({old[0]}); give another directory"
        )
    config = saved_config(folder)
    dtype = args.dtype or config.precision.dtype
    theirs = megatron_args(config.model, dtype, config.train.seq_len, _tokenizer(config.data))
    weights = SavedWeights(folder, DTYPES[dtype], twin_key)
    check_tensor_names(weights, megatron_entries(config.model), folder)
    training = _training(folder, config, theirs) if args.optimizer else None
    with unfinished(args.out) as half:
        written = write_checkpoint(
            half, config.model, theirs, weights.read, DTYPES[dtype], training
        )
    print(f"wrote {args.out / written.name}")
    return 0


def _training(folder: Path, config: Config, theirs: Namespace) -> TrainingState:
    """Returns Adam's state and its groups as Megatron-Core's distributed optimizer keeps them, and
    how far the run is."""
    optim, saved = config.optim, SavedTensors(folder)
    progress = Progress(**read_record(folder)["progress"])
    if (
        optim.name != "adamw"
        or optim.lr_scale
        or optim.decay_scale
        or optim.decay_exclude
        or optim.freeze
    ):
        raise ValueError(
            f"--optimizer: Megatron-LM groups parameters for Adam by their dims alone; {folder} has "
            f"optim.name = {optim.name}, lr_scale, decay_scale, decay_exclude or freeze"
        )
    if not any(key.startswith("optim.exp_avg.") for key in saved.tensors):
        raise ValueError(f"--optimizer: {folder} holds weights alone")
    if config.model.num_experts:
        raise ValueError(
            "--optimizer: Megatron-Core keeps Adam's groups of experts apart where "
            "--expert-model-parallel-size is above 1, and only there: write weights alone"
        )

    def reader(kind: str) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
        def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
            key = f"optim.{kind}.{name}"  # of a run in fp32 the weights are the masters
            return saved.read(
                key if kind != "master" or key in saved.tensors else WEIGHT_PREFIX + name,
                offset,
                shape,
            )

        return read

    vars(theirs)["consumed_train_samples"] = progress.consumed_samples
    return TrainingState(
        progress.step, {kind: reader(kind) for kind in STATES}, _common(config, progress)
    )


def _common(config: Config, progress: Progress) -> dict[str, Any]:
    """Returns groups of parameters, the schedule and the layout of the state, as Megatron-LM saves
    them."""
    optim, samples = config.optim, config.train.gbs
    plain = {
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr": learning_rate(optim, max(progress.step, 1), config.train.steps),
        "betas": tuple(optim.betas),
        "eps": optim.eps,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "step": progress.step - progress.skipped,
        "is_expert_parallel": False,
    }
    groups = [plain | {"wd_mult": wd, "weight_decay": wd * optim.weight_decay} for wd in (1.0, 0.0)]
    state = {
        "param_state_sharding_type": "fully_reshardable",
        "optimizer": {"param_groups": groups},
    }
    schedule = {
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": optim.warmup_steps * samples,
        "num_steps": progress.consumed_samples,
        "lr_decay_steps": config.train.steps * samples,
        "lr_decay_style": optim.schedule.replace("wsd", "WSD"),
        "start_wd": optim.weight_decay,
        "end_wd": optim.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
    format_of = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    return {
        "optimizer": state,
        "opt_param_scheduler": schedule,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": format_of,
    }


def _tokenizer(data: DataConfig) -> str | None:
    return None if data.tokenizer is None else str(Path(data.tokenizer).resolve())

"""Conversion from and to checkpoints of Megatron-LM, with one tensor in memory at a time."""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.safetensors_folder import check_names
from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.hf.weights import lazy_weights
from megatron5d.checkpoint.layout import LazyTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedTensors, SavedWeights, resolve_checkpoint
from megatron5d.checkpoint.megatron.arguments import (
    megatron_args,
    model_config_from_args,
    training_notes,
)
from megatron5d.checkpoint.megatron.names import EMBEDDING, IGNORED, megatron_entries
from megatron5d.checkpoint.megatron.reader import (
    TRACKER,
    MegatronCheckpoint,
    MegatronTensors,
    open_checkpoint,
)
from megatron5d.checkpoint.megatron.writer import RELEASE, STATES, TrainingState, write_checkpoint
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.tools.conversion.new_checkpoint import (
    print_written,
    save_weights,
    stored_dtype,
    writes_checkpoint,
)
from megatron5d.topology.owned_output import staged
from megatron5d.train.hf_export import check_tensor_names
from megatron5d.train.state import Progress, read_record, twin_key

Shape = tuple[int, ...]
# kinds of the optimizer's state that Megatron-Core spells in two ways
_SPELLINGS = {"fp32_param": "param"}


@writes_checkpoint
def from_megatron(args: Namespace) -> None:
    """Writes a checkpoint, of step 0 without the optimizer's state, and prints its folder.

    Raises:
        ValueError: the folder is not a Megatron checkpoint, its model is one that ours does not
            compute, tensors are missing, or `out` has checkpoints.
    """
    megatron = open_checkpoint(args.megatron)
    stored, arguments = megatron.weights, megatron.args
    rows = stored.tensors[EMBEDDING].shape[0]
    model = model_config_from_args(arguments, rows, args.vocab_size, args.ignore_arguments)
    entries = megatron_entries(model)
    dtype = args.dtype or stored_dtype(stored.tensors, entries, IGNORED)
    note = partial(print, file=sys.stderr)
    for line in training_notes(arguments):
        note(f"{stored.folder}: {line}")
    if unread := sum(name.startswith("mtp.") for name in stored.tensors):
        note(f"{stored.folder}: {unread} tensors of multi-token prediction are not read")
    if rows > model.vocab_size:
        note(f"{rows - model.vocab_size} rows that pad the vocabulary are left out")

    # tensors are read when they are written
    tensors = _fitted(stored, entries, model, DTYPES[dtype])
    progress = Progress()
    state = _adam_state(megatron, entries, model)
    if state:
        samples = getattr(arguments, "consumed_train_samples", 0)
        progress = Progress(
            step=megatron.iteration,
            consumed_samples=samples,
            tokens=samples * arguments.seq_length,
        )
    elif megatron.optimizer:
        note(
            f"{stored.folder}: the optimizer's state ({', '.join(megatron.optimizer)}) is not "
            "read: it must be that of Adam, saved by parameter "
            "(--dist-ckpt-optim-fully-reshardable)"
        )
    train = TrainConfig(seq_len=getattr(arguments, "seq_length", None) or model.max_positions)
    config = Config(model=model, precision=PrecisionConfig(dtype=dtype), train=train)
    folder = save_weights(args.out, tensors | state, config, progress)
    source = f"iteration {megatron.iteration} of {stored.folder}"
    print_written(folder, config, source, progress if state else None)


def _adam_state(
    megatron: MegatronCheckpoint, entries: list[Entry], model: ModelConfig
) -> dict[str, LazyTensor]:
    """Adam's state by our keys; empty where it is not saved by parameter."""
    kinds = {_SPELLINGS.get(kind, kind): stored for kind, stored in megatron.optimizer.items()}
    if "exp_avg" not in kinds or getattr(megatron.args, "optimizer", "adam") != "adam":
        return {}
    # tensors that are wide in every model have no gradient, and so no state
    trained = [entry for entry in entries if not entry.wide]
    return {
        f"optim.{kind}.{key.removeprefix(WEIGHT_PREFIX)}": tensor
        for kind, name in STATES.items()
        if name in kinds
        for key, tensor in _fitted(kinds[name], trained, model, torch.float32).items()
    }


def _fitted(
    stored: MegatronTensors, entries: list[Entry], model: ModelConfig, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Tensors of the entries, each read when it is written.

    Raises:
        ValueError: one is missing or has another shape.
    """
    stored.fit(model)
    check_names(stored, entries, IGNORED)
    return lazy_weights(entries, stored, dtype)


def to_megatron(args: Namespace) -> None:
    """Writes a `torch_dist` release, or an iteration with the optimizer, and prints its folder.

    Raises:
        ValueError: there is no complete checkpoint, Megatron-Core lacks its architecture or its
            optimizer, or `out` has a checkpoint of Megatron-LM.
    """
    folder = resolve_checkpoint(args.checkpoint, "--checkpoint")
    config = saved_config(folder)
    dtype = args.dtype or config.precision.dtype
    with staged(args.out, _check_vacant) as staging:
        arguments = megatron_args(
            config.model, dtype, config.train.seq_len, _tokenizer(config.data)
        )
        # the master weights, where the dtype is wider than that of the run
        weights = SavedWeights(folder, DTYPES[dtype], twin_key)
        check_tensor_names(weights, megatron_entries(config.model), folder)
        training = _training_state(folder, config, arguments) if args.optimizer else None
        written = write_checkpoint(
            staging, config.model, arguments, weights.read, DTYPES[dtype], training
        )
    print(f"wrote {args.out / written.name}")


def _check_vacant(out: Path) -> None:
    """Raises ValueError where a folder has a checkpoint of Megatron-LM."""
    patterns = (TRACKER, RELEASE, "iter_*")
    if old := sorted(path.name for pattern in patterns for path in out.glob(pattern)):
        raise ValueError(
            f"{out} already holds a checkpoint of Megatron-LM ({old[0]}): give another folder"
        )


def _training_state(folder: Path, config: Config, arguments: Namespace) -> TrainingState:
    """Adam's state and groups as Megatron-Core's distributed optimizer saves them."""
    optim, saved = config.optim, SavedTensors(folder)
    progress = Progress(**read_record(folder)["progress"])
    grouped = optim.lr_scale or optim.decay_scale or optim.decay_exclude or optim.freeze
    if optim.name != "adamw" or grouped:
        raise ValueError(
            "--optimizer requires optim.name=adamw without lr_scale, decay_scale, decay_exclude "
            f"and freeze: Megatron-LM groups parameters by their dims alone ({folder} has "
            f"optim.name = {optim.name})"
        )
    if not any(key.startswith("optim.exp_avg.") for key in saved.tensors):
        raise ValueError(f"--optimizer: {folder} has weights only")
    if config.model.num_experts:
        raise ValueError(
            "--optimizer: Megatron-Core groups experts' parameters apart where "
            "--expert-model-parallel-size is above 1, and only there: write weights only"
        )

    def reader(kind: str) -> Callable[[str, Shape, Shape], Tensor]:
        def read(name: str, offset: Shape, shape: Shape) -> Tensor:
            key = f"optim.{kind}.{name}"
            if kind == "master" and key not in saved.tensors:
                key = WEIGHT_PREFIX + name  # of a run in fp32 the weights are the masters
            return saved.read(key, offset, shape)

        return read

    vars(arguments)["consumed_train_samples"] = progress.consumed_samples
    readers = {kind: reader(kind) for kind in STATES}
    return TrainingState(progress.step, readers, _common(config, progress))


def _common(config: Config, progress: Progress) -> dict[str, Any]:
    """Parameter groups, schedule and layout of the state, as Megatron-LM saves them."""
    optim, gbs = config.optim, config.train.gbs
    group = {
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
    groups = [group | {"wd_mult": wd, "weight_decay": wd * optim.weight_decay} for wd in (1.0, 0.0)]
    state = {
        "param_state_sharding_type": "fully_reshardable",
        "optimizer": {"param_groups": groups},
    }
    schedule = {
        "max_lr": optim.lr,
        "min_lr": optim.min_lr,
        "lr_warmup_steps": optim.warmup_steps * gbs,
        "num_steps": progress.consumed_samples,
        "lr_decay_steps": config.train.steps * gbs,
        "lr_decay_style": optim.schedule.replace("wsd", "WSD"),
        "start_wd": optim.weight_decay,
        "end_wd": optim.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": 0,
    }
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "distrib_optim_fully_reshardable_mem_efficient": False,
    }
    return {
        "optimizer": state,
        "opt_param_scheduler": schedule,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": metadata,
    }


def _tokenizer(data: DataConfig) -> str | None:
    return None if data.tokenizer is None else str(Path(data.tokenizer).resolve())

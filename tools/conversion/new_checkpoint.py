"""Checkpoints of step 0, made of other weights: of a mean of several, or of experts from a dense model (upcycling)."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config, saved_steps, step_folder
from megatron5d.checkpoint.load import PREFIX, LazyTensor, SavedWeights, lazy_tensor, whole_checkpoint
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.upcycle import upcycled, upcycled_weights
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.model.block_inputs import DTYPES
from megatron5d.train.state import Progress, run_record, twin

_STORED = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}  # FP8 without loss


def widest_dtype(kinds: Iterable[str]) -> str:
    """Returns the dtype that holds tensors of these kinds, spelled as safetensors does, without loss."""
    return max((_STORED.get(kind, "fp32") for kind in kinds), key=["bf16", "fp32", "fp64"].index)


def check_empty(out: Path) -> None:
    """Raises ValueError where a directory already holds checkpoints."""
    if steps := saved_steps(out):
        raise ValueError(f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any")


def save_weights(out: Path, tensors: dict[str, Any], config: Config, progress: Progress | None = None) -> Path:
    """Writes weights as the checkpoint of a step, by default 0; returns its folder."""
    progress = progress or Progress()
    Saver(out, keep=0).save(progress.step, tensors, run_record(progress, to_dict(config)))
    return whole_checkpoint(out, "--out")


def average(args: argparse.Namespace) -> int:
    """Writes the mean of the weights as a checkpoint of step 0, and prints its folder; returns 0.

    Of a run in bf16 the masters are averaged. Sums are in fp64, one part of a tensor at a time.

    Raises ValueError: no whole checkpoint, other tensors than in the first one, weights that do not fit the
    checkpoints, or `out` holds checkpoints.
    """
    check_empty(args.out)
    folders = _folders(args.path, args.last)
    shares = args.weights or [1.0] * len(folders)
    if len(shares) != len(folders) or sum(shares) <= 0:
        raise ValueError(f"--weights gives {shares} for {len(folders)} checkpoints; one each, with a sum above 0")
    sources = [SavedWeights(folder, torch.float32, twin) for folder in folders]
    first = {name: tuple(each.size) for name, each in sources[0].tensors.items()}
    for folder, source in zip(folders, sources):
        sizes = {name: tuple(each.size) for name, each in source.tensors.items()}
        for name in sorted(first.keys() | sizes.keys()):
            if first.get(name) != sizes.get(name):
                raise ValueError(f"{name} is {first.get(name)} in {folders[0]} and {sizes.get(name)} in {folder}")
    factors = [share / sum(shares) for share in shares]
    tensors = {PREFIX + name: _mean(name, sources, factors) for name in first}
    print(f"wrote {save_weights(args.out, dict(tensors), saved_config(folders[-1]))}: the mean of {len(folders)}")
    return 0


def _folders(paths: list[Path], last: int | None) -> list[Path]:
    """Returns the checkpoints to average: the newest whole one of each path, or the last ones of a directory."""
    if last is None:
        return [whole_checkpoint(path, "PATH") for path in paths]
    if len(paths) != 1:
        raise ValueError(f"--last {last} is of one directory, and {len(paths)} are given")
    steps = saved_steps(paths[0])[-last:]
    if len(steps) < last:
        raise ValueError(f"--last {last}: {paths[0]} holds {len(steps)} whole checkpoints")
    return [step_folder(paths[0], step) for step in steps]


def _mean(name: str, sources: list[SavedWeights], factors: list[float]) -> LazyTensor:
    """Returns the mean of a tensor, in the parts of the first source."""
    saved = sources[0].tensors[name]
    dtype = torch.promote_types(saved.dtype, torch.float32)
    parts = {offset: item.extent for offset, item in saved.items.items()}

    def make(offset: tuple[int, ...]) -> Tensor:
        total = torch.zeros(parts[offset], dtype=torch.float64)
        for source, factor in zip(sources, factors):
            total += factor * source.read(name, offset, parts[offset]).double()
        return total.to(dtype)

    return lazy_tensor(saved.size, parts, dtype, make)


PRINTED = ("num_experts", "top_k", "moe_ffn_hidden_size", "first_k_dense", "routed_scaling_factor")


def upcycle(args: argparse.Namespace) -> int:
    """Writes a checkpoint of step 0, and prints its folder and the overrides of its architecture; returns 0.

    Raises ValueError: no whole checkpoint, one that cannot become such a mixture, or `out` holds checkpoints.
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

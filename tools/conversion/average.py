"""Weighted means of checkpoints and Hugging Face folders."""

import math
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config, saved_steps, step_folder
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.checkpoint.hf.weights import folder_model
from megatron5d.checkpoint.layout import LazyTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedWeights, resolve_checkpoint
from megatron5d.config.schema import Config
from megatron5d.tools.conversion.examine import lazy_reader
from megatron5d.tools.conversion.huggingface import imported
from megatron5d.tools.conversion.new_checkpoint import (
    print_written,
    save_weights,
    writes_checkpoint,
)
from megatron5d.train.preflight.resume import model_differences, tokenizer_differences
from megatron5d.train.state import read_record, twin_key

Shape = tuple[int, ...]
# share of the learning rate that is left after a share x of a decay
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - math.sqrt(x),
}


class _Weight(NamedTuple):
    shape: Shape
    dtype: torch.dtype
    shards: dict[Shape, Shape]  # offset -> extent
    read: Callable[[Shape, Shape], Tensor]  # the rectangle at an offset, of a shape


class _Source(NamedTuple):
    folder: Path
    config: Config
    step: int | None  # of a run; None = a Hugging Face folder
    weights: dict[str, _Weight]


@writes_checkpoint
def average(args: Namespace) -> None:
    """Writes the mean of weights as a checkpoint of step 0, and prints its folder.

    Of a run in bf16 the master weights are averaged. Sums are in fp64, one shard at a time.

    Raises:
        ValueError: there is no complete checkpoint, sources are of different models, or weights
            do not match.
    """
    folders = _folders(args.path, args.last)
    if args.weights and args.decay:
        raise ValueError("--weights and --decay both set the shares of checkpoints; leave one out")
    with ExitStack() as stack:
        sources = [_open(folder, stack) for folder in folders]
        for source in sources[1:]:
            _check_same_model(sources[0], source)
        if args.decay:
            shares = decay_shares(args.decay, _steps(sources))
        else:
            shares = _shares(args.weights or [1.0] * len(folders), len(folders))
        # one shard is in memory at a time: means are computed as they are written
        tensors = {name: _mean(name, sources, shares) for name in sources[0].weights}
        config = sources[-1].config
        folder = save_weights(args.out, dict(tensors), config)
    listed = ", ".join(f"{share:.4g}" for share in shares)
    note = f" with weights {listed}" if args.weights or args.decay else ""
    print_written(folder, config, f"{len(folders)} models, their mean{note}", None)


def decay_shares(decay: str, steps: list[float]) -> list[float]:
    """Shares of checkpoints of a constant learning rate whose mean imitates a decay of that rate.

    The mean is θ_0 + Σ_i w_i · (θ_i − θ_{i−1}), where w_i is the sum of shares from i on: each
    update counts as if the rate had been w_i of itself. The decay begins with the first checkpoint
    and would reach 0 one interval after the last. A linear decay of equal intervals is the plain
    mean.

    Args:
        decay: a key of DECAYS.
        steps: increasing.

    Returns:
        One share per checkpoint; their sum is 1.

    Source: Tian et al. 2025, WSM, arXiv:2507.17634, section 3.
    """
    count, total = len(steps), (steps[-1] - steps[0]) or 1
    progress = [(step - steps[0]) / total * (count - 1) / count for step in steps]
    rates = [DECAYS[decay](x) for x in progress] + [0.0]
    return [rate - following for rate, following in pairwise(rates)]


def _shares(weights: list[float], count: int) -> list[float]:
    if len(weights) != count or sum(weights) <= 0:
        raise ValueError(
            f"--weights requires one weight per checkpoint with a sum above 0 (got {weights} for "
            f"{count} checkpoints)"
        )
    return [weight / sum(weights) for weight in weights]


def _steps(sources: list[_Source]) -> list[float]:
    """Steps of the checkpoints, or their numbers where Hugging Face folders have none."""
    steps = [source.step for source in sources if source.step is not None]
    if len(steps) < len(sources):
        return [float(number) for number in range(len(sources))]
    if any(step >= following for step, following in pairwise(steps)):
        raise ValueError(f"--decay requires checkpoints of increasing steps (got {steps})")
    return [float(step) for step in steps]


def _folders(paths: list[Path], last: int | None) -> list[Path]:
    """Folders to average: Hugging Face folders as they are, of other paths the newest complete
    checkpoint; with `last` the last ones of a single directory."""
    if last is None:
        return [
            path if (path / "config.json").is_file() else resolve_checkpoint(path, "PATH")
            for path in paths
        ]
    if len(paths) != 1:
        raise ValueError(f"--last {last} requires one directory (got {len(paths)})")
    steps = saved_steps(paths[0])[-last:]
    if len(steps) < last:
        raise ValueError(f"--last {last}: {paths[0]} has {len(steps)} complete checkpoints")
    return [step_folder(paths[0], step) for step in steps]


def _open(folder: Path, stack: ExitStack) -> _Source:
    if (folder / "config.json").is_file():
        model = folder_model(folder)
        config, tensors = imported(model, stack.enter_context(SafetensorsFolder(folder)))
        weights = {}
        for key, tensor in tensors.items():
            shards = {offset: tuple(view.shape) for offset, view in tensor.shards.items()}
            weights[key] = _Weight(tuple(tensor.shape), tensor.dtype, shards, lazy_reader(tensor))
        return _Source(folder, config, None, weights)
    saved, weights = SavedWeights(folder, torch.float32, twin_key), {}
    for name, entry in saved.tensors.items():
        shards = {offset: item.extent for offset, item in entry.items.items()}
        weights[WEIGHT_PREFIX + name] = _Weight(
            tuple(entry.size), entry.dtype, shards, _reader(saved, name)
        )
    step = read_record(folder)["progress"]["step"]
    return _Source(folder, saved_config(folder), step, weights)


def _reader(saved: SavedWeights, name: str) -> Callable[[Shape, Shape], Tensor]:
    return lambda offset, shape: saved.read(name, offset, shape)


def _check_same_model(first: _Source, other: _Source) -> None:
    """Raises ValueError where two sources are of different models, and a mean of neither."""
    lines = model_differences(other.config.model, first.config.model)
    lines += tokenizer_differences(other.config, first.config)
    for key in sorted(first.weights.keys() | other.weights.keys()):
        shape, other_shape = (
            source.weights[key].shape if key in source.weights else None
            for source in (first, other)
        )
        if shape != other_shape:
            name = key.removeprefix(WEIGHT_PREFIX)
            lines.append(f"{name} is {shape} in {first.folder}, {other_shape} in {other.folder}")
    if lines:
        raise ValueError(
            f"averaging requires one model and one tokenizer (got {other.folder} and "
            f"{first.folder}): {'; '.join(lines[:8])}"
        )


def _mean(key: str, sources: list[_Source], shares: list[float]) -> LazyTensor:
    """Weighted sum of a tensor, in the shards of the first source."""
    weight = sources[0].weights[key]
    dtype = torch.promote_types(weight.dtype, torch.float32)

    def make(offset: Shape) -> Tensor:
        extent = weight.shards[offset]
        total = torch.zeros(extent, dtype=torch.float64)
        for source, share in zip(sources, shares):
            total += share * source.weights[key].read(offset, extent).double()
        return total.to(dtype)

    return LazyTensor(weight.shape, weight.shards, dtype, make)

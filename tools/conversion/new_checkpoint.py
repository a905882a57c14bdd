"""Writing a new checkpoint, as every conversion does, and the average of several."""

import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import named_steps, saved_config, saved_steps, step_folder
from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.layout import LazyTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedWeights, resolve_checkpoint
from megatron5d.checkpoint.save import SaveFailed, Saver
from megatron5d.config.checks import run_checks
from megatron5d.config.convert import to_dict
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config
from megatron5d.topology.owned_output import owned
from megatron5d.train.state import Progress, run_record, twin_key

# dtype of safetensors -> the narrowest of ours that holds its values without loss
_LOSSLESS = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}


def stored_dtype(
    tensors: Mapping[str, Any], entries: Iterable[Entry], ignored: Iterable[str]
) -> str:
    """The dtype of ours that holds all tensors without loss.

    Args:
        tensors: by name, with a `dtype` as safetensors spells it.
        entries: those that are wide in every model do not count.
        ignored: patterns of names that do not count.
    """
    wide = {entry.stored_name for entry in entries if entry.wide}
    pattern = re.compile("|".join(ignored))
    dtypes = {
        _LOSSLESS.get(tensor.dtype, "fp32")
        for name, tensor in tensors.items()
        if name not in wide and not pattern.search(name)
    }
    return max(dtypes, key=["bf16", "fp32", "fp64"].index)


def check_empty(out: Path) -> None:
    """Raises ValueError where a directory has checkpoints."""
    if steps := named_steps(out):
        raise ValueError(
            f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any"
        )


def writes_checkpoint(command: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    """Makes a command own the directory `out`, which must be without checkpoints, while it runs."""

    @wraps(command)
    def run(args: Namespace) -> None:
        with owned(args.out, checkpoints=True):
            check_empty(args.out)
            command(args)

    return run


def save_weights(
    out: Path, tensors: dict[str, Any], config: Config, progress: Progress | None = None
) -> Path:
    """Writes weights as the checkpoint of a step, by default 0, and returns its folder.

    Raises:
        ConfigError: no model can be built from this configuration.
        OSError: a source is damaged, or a file cannot be written.
    """
    # only the architecture matters: other keys are of the run that will read the weights
    faults = run_checks(config, 1, files=False)
    if model_faults := [
        fault for fault in faults if all(knob.startswith("model.") for knob in fault.knobs)
    ]:
        raise ConfigError(model_faults)
    progress = progress or Progress()
    try:
        Saver(out, keep=0).save(progress.step, tensors, run_record(progress, to_dict(config)))
    except SaveFailed as error:
        # its advice is for a run, which has earlier checkpoints
        raise OSError(f"{out} is not written: {error.__cause__}") from error
    return resolve_checkpoint(out, "--out")


@writes_checkpoint
def average(args: Namespace) -> None:
    """Writes the mean of weights as a checkpoint of step 0, and prints its folder.

    Of a run in bf16 the master weights are averaged. Sums are in fp64, one shard at a time.

    Raises:
        ValueError: there is no complete checkpoint, tensors or weights do not match, or `out` has
            checkpoints.
    """
    folders = _checkpoints(args.path, args.last)
    weights = args.weights or [1.0] * len(folders)
    if len(weights) != len(folders) or sum(weights) <= 0:
        raise ValueError(
            f"--weights requires one weight per checkpoint with a sum above 0 (got {weights} for "
            f"{len(folders)} checkpoints)"
        )
    sources = [SavedWeights(folder, torch.float32, twin_key) for folder in folders]
    shapes, *other_shapes = (
        {name: tuple(tensor.size) for name, tensor in source.tensors.items()} for source in sources
    )
    for folder, compared in zip(folders[1:], other_shapes):
        for name in sorted(shapes.keys() | compared.keys()):
            one, other = shapes.get(name), compared.get(name)
            if one != other:
                raise ValueError(f"{name} is {one} in {folders[0]}, {other} in {folder}")
    # one shard is in memory at a time: means are computed as they are written
    factors = [weight / sum(weights) for weight in weights]
    tensors = {WEIGHT_PREFIX + name: _mean(name, sources, factors) for name in shapes}
    folder = save_weights(args.out, dict(tensors), saved_config(folders[-1]))
    print(f"wrote {folder}: the mean of {len(folders)}")


def _checkpoints(paths: list[Path], last: int | None) -> list[Path]:
    """The newest complete checkpoint of each path, or the last ones of a single directory."""
    if last is None:
        return [resolve_checkpoint(path, "PATH") for path in paths]
    if len(paths) != 1:
        raise ValueError(f"--last {last} requires one directory (got {len(paths)})")
    steps = saved_steps(paths[0])[-last:]
    if len(steps) < last:
        raise ValueError(f"--last {last}: {paths[0]} has {len(steps)} complete checkpoints")
    return [step_folder(paths[0], step) for step in steps]


def _mean(name: str, sources: list[SavedWeights], factors: list[float]) -> LazyTensor:
    """Weighted sum of a tensor, in the shards of the first source."""
    saved = sources[0].tensors[name]
    dtype = torch.promote_types(saved.dtype, torch.float32)
    shards = {offset: item.extent for offset, item in saved.items.items()}

    def make(offset: tuple[int, ...]) -> Tensor:
        total = torch.zeros(shards[offset], dtype=torch.float64)
        for source, factor in zip(sources, factors):
            total += factor * source.read(name, offset, shards[offset]).double()
        return total.to(dtype)

    return LazyTensor(saved.size, shards, dtype, make)

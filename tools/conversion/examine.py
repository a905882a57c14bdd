"""Examines checkpoints: their contents, whether every byte is intact, and how two differ."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.checkpoint.hf.weights import folder_model, hf_weights, prediction_layers
from megatron5d.checkpoint.layout import LazyTensor, overlap, slices
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedTensors, file_error, resolve_checkpoint
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.tools.conversion.processes import in_processes
from megatron5d.train.preflight.resume import model_differences, tokenizer_differences
from megatron5d.train.state import read_record

BLOCK_ELEMENTS = 1 << 23  # compared at a time
Shape = tuple[int, ...]
Read = Callable[[Shape, Shape], Tensor]
"""Reads the rectangle of a tensor at an offset, of a shape."""


def inspect(args: Namespace) -> None:
    """Prints the contents of a checkpoint, and which run saved it.

    Raises:
        ValueError: there is no complete checkpoint, or its index or run.json is damaged.
    """
    saved = SavedTensors(resolve_checkpoint(args.path, "PATH"))
    run, config = read_record(saved.folder), saved_config(saved.folder)
    layout, default = to_dict(config.parallel), to_dict(Config().parallel)
    files = {path.name: path.stat().st_size for path in sorted(saved.folder.iterdir())}
    properties: dict[str, Any] = {
        "path": str(saved.folder),
        "version": run.get("version"),
        "commit": run.get("commit"),
        **run["progress"],
        "model": config.model.name,
        "bytes": sum(files.values()),
        "num_files": len(files),
        "layout": {key: value for key, value in layout.items() if value != default[key]},
    }
    tensors = {
        key: {
            "shape": list(tensor.size),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": prod(tensor.size) * tensor.dtype.itemsize,
        }
        for key, tensor in sorted(saved.tensors.items())
    }
    if args.json:
        print(json.dumps(properties | {"files": files, "tensors": tensors}, indent=1))
        return
    for key, value in properties.items():
        print(f"{key:18} {value:,}" if isinstance(value, int) else f"{key:18} {value}")
    for key, tensor in tensors.items():
        print(f"{key:60} {tensor['dtype']:9} {tensor['bytes']:>15,}  {tensor['shape']}")


def verify(args: Namespace) -> int:
    """Reads every byte of a checkpoint, and prints what is damaged.

    Returns:
        1 if anything is, else 0.

    Raises:
        ValueError: there is no complete checkpoint, or its index is damaged.
    """
    torch.set_num_threads(1)  # so that this process can be forked
    saved = SavedTensors(resolve_checkpoint(args.path, "PATH"))
    files = list(saved.files().items())
    dtypes = {key: tensor.dtype for key, tensor in saved.tensors.items()}
    errors = saved.errors_outside_tensors()

    def check(number: int) -> tuple[int, str | None]:
        name, items = files[number]
        path = saved.folder / name
        return path.stat().st_size, file_error(path, saved.save, items, dtypes, finite=True)

    total = sum((saved.folder / name).stat().st_size for name, _ in files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for size, error in in_processes(check, len(files), args.workers):
            errors += [error] if error else []
            bar.update(size)
    intact = f"{saved.folder} is intact: {len(files)} files of tensors, {total:,} bytes"
    print("\n".join(errors) or intact)
    return 1 if errors else 0


def diff(args: Namespace) -> int:
    """Compares the tensors of two checkpoints or Hugging Face folders, and prints differences.

    Of two checkpoints the optimizer's state is compared, too, if both contain it.

    Returns:
        1 if tensors differ, else 0.

    Raises:
        ValueError: one of them is neither, or is damaged.
    """
    with ExitStack() as stack:
        one, other = (_readers(path, stack) for path in (args.one, args.other))
        if not all(any(key.startswith("optim.") for key in side) for side in (one, other)):
            one, other = (
                {key: reader for key, reader in side.items() if key.startswith(WEIGHT_PREFIX)}
                for side in (one, other)
            )
        lines = [f"{key} is only in {args.one}" for key in one.keys() - other.keys()]
        lines += [f"{key} is only in {args.other}" for key in other.keys() - one.keys()]
        common = sorted(one.keys() & other.keys())
        rounded = 0  # tensors whose values are equal in bf16
        for key in tqdm(common, unit="tensor", disable=None):
            (shape, read_one), (other_shape, read_other) = one[key], other[key]
            if shape != other_shape:
                lines.append(f"{key} is {list(shape)} and {list(other_shape)}")
                continue
            largest, is_rounding = _difference(shape, read_one, read_other)
            if largest > args.tolerance and is_rounding:
                rounded += 1
            elif largest > args.tolerance:
                lines.append(f"{key} differs by {largest:.3g} of its largest value")
    if rounded and not args.bf16:
        lines.append(f"{rounded} tensors differ by rounding to bf16 alone, which --bf16 accepts")
    equal = f"equal: {len(common)} tensors" + f" within {args.tolerance:g}" * bool(args.tolerance)
    equal += f", {rounded} of them within rounding to bf16" * bool(rounded)
    print("\n".join(sorted(lines)) or equal)
    _print_other_models(args.one, args.other)
    return 1 if lines else 0


def _print_other_models(one: Path, other: Path) -> None:
    """Prints differences of the models that have no tensor."""
    config, other_config = _saved_config(one), _saved_config(other)
    lines = model_differences(other_config.model, config.model)
    for line in lines + tokenizer_differences(other_config, config):
        # no config.json says how many of these layers are used
        if not line.startswith("model.num_mtp_layers "):
            print(f"{other} and {one} are of other models: {line}", file=sys.stderr)


def _saved_config(path: Path) -> Config:
    if (path / "config.json").is_file():
        model = folder_model(path)
        return Config(model=replace(model, from_hf=str(path)))
    return saved_config(resolve_checkpoint(path, "PATH"))


def _readers(path: Path, stack: ExitStack) -> dict[str, tuple[Shape, Read]]:
    """Shape of each tensor of a checkpoint or Hugging Face folder, and its reader."""
    if (path / "config.json").is_file():
        stored = stack.enter_context(SafetensorsFolder(path))
        model = folder_model(path)
        model = replace(model, num_mtp_layers=len(prediction_layers(model, stored)))
        lazy = hf_weights(model, stored, torch.float64)
        return {key: (tuple(tensor.shape), lazy_reader(tensor)) for key, tensor in lazy.items()}
    saved = SavedTensors(resolve_checkpoint(path, "PATH"))

    def reader(key: str) -> Read:
        return lambda offset, shape: saved.read(key, offset, shape)

    return {key: (tuple(tensor.size), reader(key)) for key, tensor in saved.tensors.items()}


def lazy_reader(tensor: LazyTensor) -> Read:
    """Reader of a tensor of a Hugging Face folder, whose shards it reads whole."""

    def read(offset: Shape, shape: Shape) -> Tensor:
        values = torch.empty(shape, dtype=torch.float64)
        for start, view in tensor.shards.items():
            if shared := overlap(start, view.shape, offset, shape):
                in_shard, in_rectangle, extent = shared
                shard = tensor.values(start)
                values[slices(in_rectangle, extent)] = shard[slices(in_shard, extent)]
        return values

    return read


def _difference(shape: Shape, one: Read, other: Read) -> tuple[float, bool]:
    """Largest difference of two tensors, relative to the first one's largest value, and whether
    values that differ are each other's, rounded to bf16.

    The difference is infinite where only one of two values is finite.
    """
    largest_difference, largest_value, is_rounding = 0.0, 0.0, True
    for offset, extent in _blocks(shape):
        a, b = one(offset, extent).double(), other(offset, extent).double()
        # inf - inf is NaN, which would hide that both are equal
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, (a - b).abs().nan_to_num(float("inf"), float("inf")))
        largest_difference = max(largest_difference, difference.max().item())
        is_rounding &= bool((same | (a.bfloat16() == b) | (b.bfloat16() == a)).all())
        largest_value = max(largest_value, a.nan_to_num(0, 0, 0).abs().max().item())
    if largest_difference and largest_value:
        largest_difference /= largest_value
    return largest_difference, is_rounding


def _blocks(shape: Shape) -> Iterator[tuple[Shape, Shape]]:
    """Yields offset and shape of blocks of a tensor along its first dim."""
    if not shape:
        yield (), ()
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    for row in range(0, shape[0] if prod(shape) else 0, rows):
        yield (row, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - row), *shape[1:])

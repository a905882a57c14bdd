"""Looks into checkpoints: what is in one, whether every byte is sound, and how two differ."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.import_config import read_model_config
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.checkpoint.hf.weights import hf_weights, prediction_layers
from megatron5d.checkpoint.layout import overlap
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedTensors, file_error, resolve_checkpoint
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.topology.launcher import die_with_parent
from megatron5d.train.state import read_record

BLOCK_ELEMENTS = 1 << 23  # of each of two tensors, compared at a time
# an offset and a shape -> that rectangle of a tensor
Read = Callable[[tuple[int, ...], tuple[int, ...]], Tensor]


def inspect(args: argparse.Namespace) -> int:
    """Prints what a checkpoint holds, and of which run it is; returns 0. Raises ValueError: no
    whole checkpoint, or its index or run.json is damaged."""
    saved = SavedTensors(resolve_checkpoint(args.path, "PATH"))
    run, config = read_record(saved.folder), saved_config(saved.folder)
    layout, default = to_dict(config.parallel), to_dict(Config().parallel)
    files = {path.name: path.stat().st_size for path in sorted(saved.folder.iterdir())}
    about: dict[str, Any] = {
        "path": str(saved.folder),
        **{key: run.get(key) for key in ("version", "commit")},
    }
    about |= run["progress"] | {
        "model": config.model.name,
        "bytes": sum(files.values()),
        "num_files": len(files),
    }
    about["layout"] = {key: value for key, value in layout.items() if value != default[key]}
    tensors = {
        key: {
            "shape": list(each.size),
            "dtype": str(each.dtype).removeprefix("torch."),
            "bytes": prod(each.size) * each.dtype.itemsize,
        }
        for key, each in sorted(saved.tensors.items())
    }
    if args.json:
        print(json.dumps(about | {"files": files, "tensors": tensors}, indent=1))
        return 0
    for key, value in about.items():
        print(f"{key:18} {value:,}" if isinstance(value, int) else f"{key:18} {value}")
    for key, each in tensors.items():
        print(f"{key:60} {each['dtype']:9} {each['bytes']:>15,}  {each['shape']}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Reads every byte of a checkpoint, and prints what is wrong; returns 1 where something is.
    Raises ValueError: no whole checkpoint, or its index is damaged."""
    torch.set_num_threads(1)  # of each process; one that has more cannot be forked
    saved = SavedTensors(resolve_checkpoint(args.path, "PATH"))
    files, dtypes = (
        list(saved.files().items()),
        {key: each.dtype for key, each in saved.tensors.items()},
    )
    faults = saved.faults_outside()

    def check(number: int) -> tuple[int, str | None]:
        name, items = files[number]
        path = saved.folder / name
        return path.stat().st_size, file_error(path, saved.save, items, dtypes, finite=True)

    total = sum((saved.folder / name).stat().st_size for name, _ in files)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        for size, fault in in_processes(check, len(files), args.workers):
            faults += [fault] if fault else []
            bar.update(size)
    print(
        "\n".join(faults)
        or f"{saved.folder} is sound: {len(files)} files of tensors, {total:,} bytes"
    )
    return 1 if faults else 0


def diff(args: argparse.Namespace) -> int:
    """Compares the tensors of two checkpoints or Hugging Face folders; returns 1 where some differ.

    Of a folder and a checkpoint the weights are compared, of two checkpoints all that the optimiser
    keeps, too.

    Raises ValueError: one of them is neither, or is damaged.
    """
    with ExitStack() as stack:
        one, other = (_tensors(path, stack) for path in (args.one, args.other))
        if not all(any(key.startswith("optim.") for key in each) for each in (one, other)):
            one, other = (
                {key: each for key, each in found.items() if key.startswith(WEIGHT_PREFIX)}
                for found in (one, other)
            )
        lines = [f"{key} is only in {args.one}" for key in one.keys() - other.keys()]
        lines += [f"{key} is only in {args.other}" for key in other.keys() - one.keys()]
        for key in tqdm(sorted(one.keys() & other.keys()), unit="tensor", disable=None):
            if one[key][0] != other[key][0]:
                lines.append(f"{key} is {list(one[key][0])} and {list(other[key][0])}")
            elif (worst := _difference(*one[key], other[key][1])) > args.tolerance:
                lines.append(f"{key} differs by {worst:.3g} of its largest value")
    common = len(one.keys() & other.keys())
    print(
        "\n".join(sorted(lines))
        or f"the same: {common} tensors" + f" within {args.tolerance:g}" * bool(args.tolerance)
    )
    return 1 if lines else 0


def _tensors(path: Path, stack: ExitStack) -> dict[str, tuple[tuple[int, ...], Read]]:
    """Returns, by key, shape and what reads a rectangle of it."""
    if (path / "config.json").is_file():
        stored = stack.enter_context(SafetensorsFolder(path))
        model = read_model_config(path)
        model = replace(model, num_mtp_layers=len(prediction_layers(model, stored)))
        lazy = hf_weights(model, stored, torch.float64)
        return {key: (tuple(each.shape), _reader_of(each)) for key, each in lazy.items()}
    saved = SavedTensors(resolve_checkpoint(path, "PATH"))

    def reader(key: str) -> Read:
        return lambda offset, shape: saved.read(key, offset, shape)

    return {key: (tuple(each.size), reader(key)) for key, each in saved.tensors.items()}


def _reader_of(tensor: Any) -> Read:
    """Reads a rectangle of a tensor of a Hugging Face folder; the parts that it lies in are read
    whole."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape, dtype=torch.float64)
        for at, view in tensor.shards.items():
            if shared := overlap(at, view.shape, offset, shape):
                here, there = (
                    [slice(a - c, b - c) for a, b, c in zip(*shared, start)]
                    for start in (offset, at)
                )
                values[tuple(here)] = tensor.values(at)[tuple(there)]
        return values

    return read


def _difference(shape: tuple[int, ...], one: Read, other: Read) -> float:
    """Returns largest difference of two tensors, of the first one's largest value; infinite where
    only one is not finite."""
    worst = largest = 0.0
    for offset, extent in _blocks(shape):
        a, b = one(offset, extent).double(), other(offset, extent).double()
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, (a - b).abs().nan_to_num(float("inf"), float("inf")))
        worst, largest = (
            max(worst, difference.max().item()),
            max(largest, a.nan_to_num(0, 0, 0).abs().max().item()),
        )
    return worst / largest if worst and largest else worst


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields offset and shape of stretches of a tensor along its first dim."""
    if not shape:
        yield (), ()
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, prod(shape[1:])))
    for row in range(0, shape[0] if prod(shape) else 0, rows):
        yield (row, *(0,) * (len(shape) - 1)), (min(rows, shape[0] - row), *shape[1:])


T = TypeVar("T")
_FORKED: list[Callable[[int], Any]] = []  # what a forked process calls


def in_processes(work: Callable[[int], T], count: int, num_workers: int) -> Iterator[T]:
    """Calls `work` with 0 ... count-1 in forked processes, and yields what it returns in the order
    in which calls end.

    What this process has opened and computed reaches the others by fork; it must use a single
    thread of torch's. Values and errors must be picklable. With one worker the calls are made in
    this process.

    Raises OSError: a process was killed. Raises Exception: the first one that `work` raised.
    """
    if min(count, num_workers) <= 1:
        yield from map(work, range(count))
        return
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(count, num_workers), fork, _begin, (work, os.getpid()))
    try:
        for call in as_completed([pool.submit(_call, number) for number in range(count)]):
            yield call.result()
    except BrokenProcessPool as error:
        raise OSError("a process that worked for this one was killed (out of memory?)") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(work: Callable[[int], Any], parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends without a traceback; the parent tells
    _FORKED.append(work)


def _call(number: int) -> Any:
    return _FORKED[-1](number)

"""Writes safetensors folders that Hugging Face reads, with the tensors of one file in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron5d.checkpoint.hf.safetensors_folder import INDEX, SINGLE, Entry

_PART = "part-{:05d}.safetensors.tmp"


def stored_tensors(
    entries: Iterable[Entry],
    read: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor in the form in which it is stored, computed when it is asked for.

    Args:
        entries: the model's table.
        read: returns the rectangle of our tensor with a (global name, offset, shape).
        dtype: to which the tensors are cast; those of `wide` entries to no less than fp32.

    Returns:
        (name on disk, tensor) pairs in the order of the table.
    """
    for entry in entries:
        tensor = read(entry.name, entry.our_offset, entry.our_shape).to(entry.dtype(dtype))
        if entry.expert is not None:
            tensor = tensor.squeeze(0)
        yield entry.hf_name, tensor.t() if entry.transposed else tensor


def save_folder(folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int = 5 << 30) -> int:
    """Writes tensors in the order given, starting a new file before one would grow beyond the limit.

    Args:
        folder: created if it does not exist. It must not hold safetensors files, which would be read with the new ones.
        tensors: (name on disk, tensor) pairs, taken one by one; contiguous or not.
        max_shard_bytes: size limit of one file; a larger tensor gets a file of its own.

    Returns:
        Total size of the tensors, in bytes.

    Raises:
        ValueError: the folder already holds safetensors files.
        OSError: a file cannot be written; names it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = sorted(path.name for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")])
    if old:
        raise ValueError(f"{folder} already holds {', '.join(old)}: give an empty folder, old files would mix with new")
    for half in folder.glob(_PART.format(0).replace("00000", "*")):  # of an export that was interrupted
        half.unlink()
    parts: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        part = folder / _PART.format(len(parts))
        try:
            save_file(pending, part, metadata={"format": "pt"})
        except SafetensorError as error:
            part.unlink(missing_ok=True)
            raise OSError(f"{part} cannot be written: {error}") from error
        parts.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    _name_files(folder, parts, total_bytes)
    return total_bytes


def _name_files(folder: Path, parts: list[list[str]], total_bytes: int) -> None:
    """Renames the files to their final names, which contain their number, and then writes the index."""
    if len(parts) == 1:
        os.replace(folder / _PART.format(0), folder / SINGLE)
        return
    weight_map = {}
    for i, names in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        os.replace(folder / _PART.format(i), folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

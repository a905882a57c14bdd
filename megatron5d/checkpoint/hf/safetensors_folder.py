"""Safetensors folders as Hugging Face has them: read rectangle by rectangle, written one file at a
time.

A table of entries says which rows of our tensors are which tensor on disk; tensors missing in the
folder or the table are errors. FP8 weights as DeepSeek publishes V3 (`w`, and `w_scale_inv` for
128×128 blocks) are read as their values.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron5d.checkpoint.hf.files import (
    INDEX,
    SINGLE,
    WEIGHTS,
    Entry,
    check_no_model_files,
    weight_files,
    wrong_kind,
)
from megatron5d.checkpoint.layout import ShardedTensor, overlap
from megatron5d.topology.shard_spec import ShardSpec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FP8_DTYPE = "F8_E4M3"
SCALES = "_scale_inv"  # behind the name of an FP8 tensor: what its blocks are multiplied by
BLOCK = 128  # rows and columns of such a block
_LISTED = 40  # how many names of one kind of fault a message lists


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a file says about one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it: F32, BF16, F8_E4M3, ...


class SafetensorsFolder:
    """The tensors of one folder, of one file or several. A context manager: the files are open
    within it.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and the files that it lists.

    Raises:
        ValueError: there are no such files, or one is missing or damaged; names it.
        OSError: a file cannot be opened.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open = ExitStack()
        self._handles: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.scales: dict[str, StoredTensor] = {}  # of the FP8 tensors, by their names
        # tensors in files where the index does not place them
        self._stray: list[tuple[str, str]] = []
        for file, listed in weight_files(self.folder).items():
            handle = self._handle(file)
            names = set(handle.keys())
            if lacking := sorted(set(listed or ()) - names):
                raise ValueError(
                    f"{self.folder / INDEX} places {lacking[0]} in {file}, which does not hold it"
                )
            # a copy elsewhere than the index says is a stale one
            for name in names if listed is None else listed:
                view = handle.get_slice(name)
                self.tensors[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
            self._stray += [
                (name, file) for name in sorted(names - set(names if listed is None else listed))
            ]
        if unlisted := [(name, file) for name, file in self._stray if name not in self.tensors]:
            name, file = unlisted[0]
            raise ValueError(
                f"{self.folder / file} holds {name}, which {INDEX} does not name ({len(unlisted)} such tensors): files "
                "of several saves are mixed; copy the folder again"
            )
        for name in [name for name, tensor in self.tensors.items() if tensor.dtype == FP8_DTYPE]:
            if name + SCALES in self.tensors:
                self.scales[name] = self.tensors.pop(name + SCALES)

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            path = self.folder / file
            if not path.is_file():
                raise ValueError(f"{self.folder / INDEX} lists {file}, which is not there")
            try:
                self._handles[file] = self._open.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                known = wrong_kind(path)
                raise ValueError(
                    f"{path} is {known or f'not a whole safetensors file: {error}'}"
                ) from error
        return self._handles[file]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Reads the rectangle of `shape` at `offset` of one stored tensor.

        Returns:
            In its stored dtype; an FP8 tensor with scales is dequantised to fp32.
        """
        stops = [start + extent for start, extent in zip(offset, shape)]
        values = self._slices(self.tensors[name].file, name, offset, stops)
        if name not in self.scales:
            return values
        first, last = [start // BLOCK for start in offset], [-(-stop // BLOCK) for stop in stops]
        scales = self._slices(self.scales[name].file, name + SCALES, first, last).float()
        for dim, (start, extent) in enumerate(zip(offset, shape)):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, start % BLOCK, extent)
        return values.float() * scales

    def _slices(
        self, file: str, name: str, starts: Sequence[int], stops: Sequence[int]
    ) -> torch.Tensor:
        return self._handle(file).get_slice(name)[
            tuple(slice(*ends) for ends in zip(starts, stops))
        ]


@torch.no_grad()
def load_shards(
    held: Sequence[tuple[ShardSpec, ShardedTensor]],
    entries: Sequence[Entry],
    folder: str | Path,
    ignored: Sequence[str] = (),
) -> None:
    """Fills what this rank holds of a model from a folder. No communication.

    Args:
        held: parameters, or slices of them; values are cast to their dtype.
        entries: the table of the whole model, so that all ranks find the same faults.
        ignored: regular expressions for stored names that are not weights (masks, rotary tables).

    Raises:
        ValueError: tensors are missing, unexpected, quantised or of another shape; lists all of
            them.
        OSError: a file cannot be opened.
    """
    table = defaultdict(list)
    for entry in entries:
        table[entry.name].append(entry)
    with SafetensorsFolder(folder) as stored:
        check_names(stored, entries, ignored)
        _check_parameters([spec for spec, _ in held], table)
        for spec, tensor in held:
            for offset, view in tensor.shards.items():
                written = sum(_fill(view, offset, entry, stored) for entry in table[spec.name])
                assert written == view.numel(), (
                    f"{spec.name} at {offset}: {written} of {view.numel()} elements written"
                )


class Stored(Protocol):
    """Tensors on disk, in whatever format."""

    folder: Path
    tensors: dict[str, StoredTensor]
    scales: dict[str, StoredTensor]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor: ...


def check_names(stored: Stored, entries: Sequence[Entry], ignored: Sequence[str]) -> None:
    """Compares the table with the folder; arguments and errors as in `load_shards`."""
    wanted = {entry.stored_name: entry for entry in entries}
    missing = [name for name in wanted if name not in stored.tensors]
    unexpected = [
        name
        for name in stored.tensors
        if name not in wanted and not any(re.search(text, name) for text in ignored)
    ]
    shapes, dtypes = [], []
    for name in (name for name in wanted if name in stored.tensors):
        tensor, shape = stored.tensors[name], wanted[name].stored_shape
        if tensor.shape != shape:
            shapes.append(
                f"{name}: {list(tensor.shape)} on disk, {list(shape)} by the configuration"
            )
        if name in stored.scales:
            shapes += _misshapen_scales(name, stored)
        elif tensor.dtype not in DTYPES:
            readable = f"{', '.join(DTYPES)}, and {FP8_DTYPE} beside {name}{SCALES}"
            dtypes.append(f"{name}: {tensor.dtype}, readable are {readable}")
    troubles = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "of another dtype": dtypes,
    }
    if any(troubles.values()):
        raise ValueError(
            f"{stored.folder} does not fit the model:{''.join(map(_listing, *zip(*troubles.items())))}"
        )


def _misshapen_scales(name: str, stored: Stored) -> list[str]:
    """Returns a line if there is not one scale for each block of an FP8 tensor."""
    found, shape = stored.scales[name].shape, stored.tensors[name].shape
    wanted = [-(-size // BLOCK) for size in shape]
    told = f"{name}{SCALES}: {list(found)} on disk, {wanted} by the {BLOCK}×{BLOCK} blocks of {list(shape)}"
    return [] if list(found) == wanted else [told]


def unsupported_quantization(config: dict[str, Any]) -> list[str]:
    """Returns what a config.json says that is not as in the FP8 releases that are read; null is a
    folder without."""
    given = config.get("quantization_config")
    if given is None:
        return []
    if not isinstance(given, dict):
        return [f"quantization_config = {given!r}: only an object of settings is supported"]
    if given.get("quant_method") == "mxfp4":
        return [
            "quantization_config.quant_method = 'mxfp4': only bf16 weights of this family are supported; load the "
            "model with transformers' Mxfp4Config(dequantize=True) and save it"
        ]
    wanted = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    found = {"fmt": "e4m3"} | given
    return [
        f"quantization_config.{key} = {found.get(key)!r}: only {value!r} is supported"
        for key, value in wanted.items()
        if found.get(key) != value
    ]


def _listing(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f"\n    ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"\n  {len(names)} {what}:" + "".join(f"\n    {name}" for name in names[:_LISTED]) + more


def _check_parameters(specs: list[ShardSpec], table: dict[str, list[Entry]]) -> None:
    """Makes sure that the entries of each parameter cover its rows without gaps or overlaps."""
    troubles = []
    for spec in specs:
        stacked = any(entry.expert is not None for entry in table[spec.name])
        per_expert = spec.shape[1] if stacked else 0  # rows are counted through all experts
        reached = 0
        for entry in sorted(table[spec.name], key=lambda entry: entry.model_offset):
            start, stop = (row + per_expert * (entry.expert or 0) for row in entry.rows)
            shape = (
                (1, stop - start, *spec.shape[2:]) if stacked else (stop - start, *spec.shape[1:])
            )
            if start != reached or entry.model_shape != shape:
                troubles.append(
                    f"{spec.name} {list(spec.shape)}: {entry} does not continue at row {reached}"
                )
            reached = stop
        if reached != (spec.shape[0] * per_expert if stacked else spec.shape[0]):
            troubles.append(
                f"{spec.name} {list(spec.shape)}: the folder's family gives it {reached} rows"
            )
    if troubles:
        raise ValueError(
            f"the model is not one that this Hugging Face family can hold:{_listing('parts', troubles)}"
        )


def _fill(view: torch.Tensor, at: tuple[int, ...], entry: Entry, stored: SafetensorsFolder) -> int:
    """Copies the intersection of a stored tensor and a local rectangle; returns its number of
    elements."""
    shared = overlap(at, view.shape, entry.model_offset, entry.model_shape)
    if shared is None:
        return 0
    begin, end = shared
    place = tuple(slice(a - b, c - b) for a, c, b in zip(begin, end, at))
    offset = tuple(a - b for a, b in zip(begin, entry.model_offset))
    shape = tuple(c - a for a, c in zip(begin, end))
    if entry.expert is not None:
        offset, shape = offset[1:], shape[1:]
    # rows are scattered on disk: all of them, or of the experts here
    if entry.heads is not None or entry.interleaved:
        first, count = (offset[0], shape[0]) if entry.interleaved else (0, entry.stored_shape[0])
        whole = stored.read(
            entry.stored_name,
            (first, *(0 for _ in entry.stored_shape[1:])),
            (count, *entry.stored_shape[1:]),
        )
        places = zip((offset[0] - first, *offset[1:]), shape)
        values = entry.from_stored(whole)[tuple(slice(o, o + n) for o, n in places)]
    elif entry.transposed:
        swapped = [(*dims[:-2], dims[-1], dims[-2]) for dims in (offset, shape)]
        values = entry.from_stored(stored.read(entry.stored_name, *swapped))
    else:
        values = stored.read(entry.stored_name, offset, shape)
    view[place].copy_(values if entry.expert is None else values.unsqueeze(0))
    return values.numel()


_PART = "part-{:05d}-{:05d}.safetensors.tmp"  # rank, number


def stored_tensors(
    entries: Iterable[Entry],
    read: Callable[[str, tuple[int, ...], tuple[int, ...]], torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor in the form in which it is stored, computed when it is asked for.

    Args:
        read: returns the rectangle of our tensor with a (global name, offset, shape).
        dtype: to which the tensors are cast; those of `wide` entries to no less than fp32.

    Returns:
        (name on disk, tensor) pairs in the order of the table.

    Raises:
        ValueError: a finite value becomes infinite (fp16 ends at 65,504).
    """
    for entry in entries:
        exact = read(entry.name, entry.model_offset, entry.model_shape)
        tensor = exact.to(entry.dtype(dtype))
        if dtype == torch.float16 and (tensor.isinf() & exact.isfinite()).any():
            raise ValueError(
                f"{entry.stored_name} reaches {exact.abs().max():.4g}, and fp16 ends at {torch.finfo(dtype).max:.0f}: "
                "write it with --dtype bf16"
            )
        if entry.expert is not None:
            tensor = tensor.squeeze(0)
        yield entry.stored_name, entry.to_stored(tensor)


def save_folder(
    folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int = 5 << 30
) -> int:
    """Writes tensors in the order given, starting a new file before one would grow beyond the
    limit.

    Args:
        folder: created if it does not exist, for without weights.
        tensors: (name on disk, tensor) pairs, taken one by one; contiguous or not.
        max_shard_bytes: size limit of one file; a larger tensor gets a file of its own.

    Returns:
        Total size of the tensors, in bytes.

    Raises:
        ValueError: the folder already holds weights.
        OSError: a file cannot be written; names it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_no_model_files(folder, WEIGHTS)
    for half in folder.glob("part-*.safetensors.tmp"):  # of an export that was interrupted
        half.unlink()
    parts, total_bytes = write_shards(folder, tensors, max_shard_bytes)
    finalize_files(folder, parts, total_bytes)
    return total_bytes


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int, rank: int = 0
) -> tuple[list[tuple[str, list[str]]], int]:
    """Writes one rank's files of a folder; arguments and errors as in `save_folder`. Returns the
    name of each file, which is not its last one, and of the tensors in it; total size of these, in
    bytes."""
    parts: list[tuple[str, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        part = folder / _PART.format(rank, len(parts))
        try:
            part.touch()
            # by the user's umask; safetensors makes a file that only its owner reads
            mode = part.stat().st_mode
            save_file(pending, part, metadata={"format": "pt"})
            part.chmod(mode)
        except SafetensorError as error:
            part.unlink(missing_ok=True)
            raise OSError(f"{part} cannot be written: {error}") from error
        parts.append((part.name, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    return parts, total_bytes


def finalize_files(folder: Path, parts: Sequence[tuple[str, list[str]]], total_bytes: int) -> None:
    """Renames the files of all ranks to their final names, which contain their number, and then
    writes the index."""
    if len(parts) == 1:
        os.replace(folder / parts[0][0], folder / SINGLE)
        return
    weight_map = {}
    for i, (part, names) in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        os.replace(folder / part, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

"""Hugging Face's folders of safetensors: read rectangle by rectangle, written one file at a time.

A table of entries says which rows of our tensors are which stored tensor; tensors missing in the
folder or in the table are errors. FP8 weights as DeepSeek publishes V3 (`w`, and `w_scale_inv` for
128×128 blocks) are dequantized as they are read.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron5d.checkpoint.hf.families import Settings
from megatron5d.checkpoint.hf.files import (
    INDEX,
    SINGLE,
    WEIGHTS,
    check_no_model_files,
    weight_files,
    wrong_kind,
)
from megatron5d.checkpoint.hf.tensor_table import ANCHORS, Entry
from megatron5d.checkpoint.layout import Dims, ParameterShards, ReadRectangle, overlap, slices
from megatron5d.topology.shard_spec import ShardSpec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FP8_DTYPE = "F8_E4M3"
SCALES = "_scale_inv"  # suffix of the tensor with the factors of an FP8 tensor's blocks
BLOCK = 128  # rows and columns of such a block
_LISTED = 40  # names of one kind that an error message lists
_SHARD = "part-{:05d}-{:05d}.safetensors.tmp"  # rank, number


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a file says about one tensor."""

    file: str
    shape: Dims
    dtype: str  # as safetensors spells it: F32, BF16, F8_E4M3, ...


class SafetensorsFolder:
    """The tensors of a folder with one file or several. A context manager: the files are open
    within it.

    A prefix that all names share, such as torch.compile's `_orig_mod.` or the `module.` of
    DistributedDataParallel, is stripped.

    Args:
        folder: with model.safetensors, or model.safetensors.index.json and the files that it lists.

    Attributes:
        prefix: that was stripped, or "".
        tensors: by their names without the prefix.
        scales: of the FP8 tensors, by these tensors' names.
        aliases: names that safetensors' save_model left out, and where it stored their tensors.

    Raises:
        ValueError: there are no such files, or one is missing or damaged; names it.
        OSError: a file cannot be opened.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open = ExitStack()
        self._handles: Settings = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.scales: dict[str, StoredTensor] = {}
        self.aliases: dict[str, str] = {}
        unindexed: list[tuple[str, str]] = []  # (tensor, file) pairs that are not in the index
        for file, indexed in weight_files(self.folder).items():
            handle = self._handle(file)
            stored = set(handle.keys())
            self.aliases |= handle.metadata() or {}
            names = stored if indexed is None else indexed
            if missing := sorted(set(names) - stored):
                raise ValueError(
                    f"{self.folder / INDEX} places {missing[0]} in {file}, which does not hold it"
                )
            for name in names:
                view = handle.get_slice(name)
                self.tensors[name] = StoredTensor(file, tuple(view.get_shape()), view.get_dtype())
            unindexed += [(name, file) for name in sorted(stored - set(names))]
        # a tensor that the index places elsewhere is a stale copy, which is never read
        unindexed = [(name, file) for name, file in unindexed if name not in self.tensors]
        if unindexed:
            name, file = unindexed[0]
            raise ValueError(
                f"{self.folder / file} holds {name}, which {INDEX} does not name "
                f"({len(unindexed)} such tensors): files of several saves are mixed; copy the "
                "folder again"
            )
        self._strip_prefix()
        for name in [name for name, tensor in self.tensors.items() if tensor.dtype == FP8_DTYPE]:
            if name + SCALES in self.tensors:
                self.scales[name] = self.tensors.pop(name + SCALES)

    def _strip_prefix(self) -> None:
        self.prefix = prefix = _shared_prefix(self.tensors)
        self.tensors = {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items()}
        self.aliases = {
            alias.removeprefix(prefix): name.removeprefix(prefix)
            for alias, name in self.aliases.items()
        }

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
                kind = wrong_kind(path) or f"not a complete safetensors file: {error}"
                raise ValueError(f"{path} is {kind}") from error
        return self._handles[file]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Reads the rectangle of `shape` at `offset` of one stored tensor.

        Returns:
            In its stored dtype; an FP8 tensor with scales is dequantized to fp32.
        """
        stored_name = self.prefix + name
        values = self._handle(self.tensors[name].file).get_slice(stored_name)[slices(offset, shape)]
        if name not in self.scales:
            return values
        blocks = tuple(
            slice(start // BLOCK, -(-(start + extent) // BLOCK))
            for start, extent in zip(offset, shape)
        )
        handle = self._handle(self.scales[name].file)
        scales = handle.get_slice(stored_name + SCALES)[blocks].float()
        for dim, (start, extent) in enumerate(zip(offset, shape)):
            scales = scales.repeat_interleave(BLOCK, dim).narrow(dim, start % BLOCK, extent)
        return values.float() * scales


def _shared_prefix(names: Collection[str]) -> str:
    """What precedes every name, if the names behind it are those of a supported family."""
    modules = os.path.commonprefix(list(names)).split(".")[:-1]
    prefixes = ["".join(f"{module}." for module in modules[:i]) for i in range(len(modules) + 1)]
    for anchors in ANCHORS:
        for prefix in prefixes:
            if any(prefix + anchor in names for anchor in anchors):
                return prefix
    return ""


@torch.no_grad()
def load_shards(
    shards: ParameterShards,
    entries: Sequence[Entry],
    folder: str | Path,
    ignored: Sequence[str] = (),
) -> None:
    """Fills what this rank holds of a model from a folder. No communication.

    Args:
        shards: parameters, or slices of them; values are cast to their dtype.
        entries: the table of the whole model, so that all ranks find the same errors.
        ignored: regular expressions for stored names that are not weights (masks, rotary tables).

    Raises:
        ValueError: tensors are missing, unexpected, quantized or of another shape; lists all of
            them.
        OSError: a file cannot be opened.
    """
    table = defaultdict(list)
    for entry in entries:
        table[entry.name].append(entry)
    with SafetensorsFolder(folder) as stored:
        check_names(stored, entries, ignored)
        _check_parameters([spec for spec, _ in shards], table)
        for spec, tensor in shards:
            for offset, view in tensor.shards.items():
                written = sum(_fill(view, offset, entry, stored) for entry in table[spec.name])
                assert written == view.numel(), (
                    f"{spec.name} at {offset}: {written} of {view.numel()} elements written"
                )


class Stored(Protocol):
    """Stored tensors in any format."""

    folder: Path
    tensors: dict[str, StoredTensor]
    scales: dict[str, StoredTensor]

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor: ...


def check_names(stored: Stored, entries: Sequence[Entry], ignored: Sequence[str]) -> None:
    """Compares the table with the folder; arguments and errors as in `load_shards`."""
    expected = {entry.stored_name: entry.stored_shape for entry in entries}
    missing = [name for name in expected if name not in stored.tensors]
    unexpected = [
        name
        for name in stored.tensors
        if name not in expected and not any(re.search(text, name) for text in ignored)
    ]
    shapes, dtypes = [], []
    for name, shape in expected.items():
        if name not in stored.tensors:
            continue
        tensor = stored.tensors[name]
        if tensor.shape != shape:
            shapes.append(
                f"{name}: {list(tensor.shape)} on disk, {list(shape)} by the configuration"
            )
        if name in stored.scales:
            scales = list(stored.scales[name].shape)
            blocks = [-(-size // BLOCK) for size in tensor.shape]
            if scales != blocks:
                shapes.append(
                    f"{name}{SCALES}: {scales} on disk, {blocks} by the {BLOCK}×{BLOCK} blocks of "
                    f"{list(tensor.shape)}"
                )
        elif tensor.dtype not in DTYPES:
            readable = f"{', '.join(DTYPES)}, and {FP8_DTYPE} beside {name}{SCALES}"
            dtypes.append(f"{name}: {tensor.dtype}, readable are {readable}")
    errors = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": shapes,
        "of another dtype": dtypes,
    }
    if any(errors.values()):
        lists = "".join(_listing(kind, lines) for kind, lines in errors.items())
        raise ValueError(f"{stored.folder} does not fit the model:{lists}")


def unsupported_quantization(config: Settings) -> list[str]:
    """Settings of a config.json's quantization that differ from those of the FP8 releases that are
    read; null means a folder that is not quantized."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return []
    if not isinstance(quantization, dict):
        return [f"quantization_config = {quantization!r}: only an object is supported"]
    if quantization.get("quant_method") == "mxfp4":
        return [
            "quantization_config.quant_method = 'mxfp4': only bf16 weights of this family are "
            "supported; load the model with transformers' Mxfp4Config(dequantize=True) and save it"
        ]
    supported = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    settings = {"fmt": "e4m3"} | quantization
    return [
        f"quantization_config.{key} = {settings.get(key)!r}: only {value!r} is supported"
        for key, value in supported.items()
        if settings.get(key) != value
    ]


def _listing(kind: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f"\n    ... and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"\n  {len(names)} {kind}:" + "".join(f"\n    {name}" for name in names[:_LISTED]) + more


def _check_parameters(specs: list[ShardSpec], table: dict[str, list[Entry]]) -> None:
    """Makes sure that the entries of each parameter fill it."""
    errors = []
    for spec in specs:
        size, filled = prod(spec.shape), sum(prod(e.model_shape) for e in table[spec.name])
        if filled != size:
            errors.append(f"{spec.name}: the folder's family fills {filled} of {size} elements")
    if errors:
        raise ValueError(
            "the model is not one that this Hugging Face family can hold:"
            f"{_listing('parameters', errors)}"
        )


def _fill(view: torch.Tensor, at: Dims, entry: Entry, stored: SafetensorsFolder) -> int:
    """Copies the intersection of a stored tensor and the local rectangle at `at`; returns its
    number of elements."""
    shared = overlap(at, view.shape, entry.model_offset, entry.model_shape)
    if shared is None:
        return 0
    in_view, offset, shape = shared
    target = view[slices(in_view, shape)]
    if entry.expert is not None:
        offset, shape, target = offset[1:], shape[1:], target[0]
    target.copy_(_read_entry(entry, offset, shape, stored))
    return target.numel()


def _read_entry(entry: Entry, offset: Dims, shape: Dims, stored: SafetensorsFolder) -> torch.Tensor:
    """Reads a rectangle of an entry in our order."""
    if entry.heads is not None or entry.interleaved:
        # rows are scattered in storage: read all of them, or all of the local experts
        first, count = (offset[0], shape[0]) if entry.interleaved else (0, entry.stored_shape[0])
        inner = entry.stored_shape[1:]
        values = stored.read(entry.stored_name, (first, *(0 for _ in inner)), (count, *inner))
        return entry.from_stored(values)[slices((offset[0] - first, *offset[1:]), shape)]
    if entry.transposed:
        offset, shape = ((*dims[:-2], dims[-1], dims[-2]) for dims in (offset, shape))
        return entry.from_stored(stored.read(entry.stored_name, offset, shape))
    return stored.read(entry.stored_name, offset, shape)


def stored_tensors(
    entries: Iterable[Entry], read: ReadRectangle, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor in its stored form, computed when the iterator reaches it.

    Args:
        read: reads a rectangle of our tensor.
        dtype: to which the tensors are cast; those of `wide` entries to no less than fp32.

    Yields:
        (stored name, tensor) pairs in the order of the table.

    Raises:
        ValueError: a finite value becomes infinite (fp16 ends at 65,504).
    """
    for entry in entries:
        exact = read(entry.name, entry.model_offset, entry.model_shape)
        if entry.scale != 1:
            exact = exact * entry.scale
        tensor = exact.to(entry.dtype(dtype))
        if dtype == torch.float16 and (tensor.isinf() & exact.isfinite()).any():
            raise ValueError(
                f"{entry.stored_name} reaches {exact.abs().max():.4g}, but fp16 ends at "
                f"{torch.finfo(dtype).max:.0f}; write it with --dtype bf16"
            )
        if entry.expert is not None:
            tensor = tensor.squeeze(0)
        yield entry.stored_name, entry.to_stored(tensor)


def save_folder(
    folder: str | Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int = 5 << 30
) -> int:
    """Writes tensors in the given order, starting a new file before one would exceed the limit.

    Args:
        folder: created if it does not exist; must not hold weights.
        tensors: (stored name, tensor) pairs, taken one by one; contiguous or not.
        max_shard_bytes: size limit of one file; a larger tensor gets a separate file.

    Returns:
        Total size of the tensors, in bytes.

    Raises:
        ValueError: the folder already holds weights.
        OSError: a file cannot be written; names it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_no_model_files(folder, WEIGHTS)
    for unfinished in folder.glob("part-*.safetensors.tmp"):  # of an interrupted export
        unfinished.unlink()
    shards, total_bytes = write_shards(folder, tensors, max_shard_bytes)
    finalize_files(folder, shards, total_bytes)
    return total_bytes


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int, rank: int = 0
) -> tuple[list[tuple[str, list[str]]], int]:
    """Writes one rank's files of a folder; arguments and errors as in `save_folder`.

    Returns:
        The temporary name of each file with the names of its tensors; and the total size of these,
        in bytes.
    """
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, torch.Tensor] = {}
    total_bytes = pending_bytes = 0

    def flush() -> None:
        shard = folder / _SHARD.format(rank, len(shards))
        try:
            shard.touch()
            # by the user's umask; safetensors makes files that only their owner can read
            mode = shard.stat().st_mode
            save_file(pending, shard, metadata={"format": "pt"})
            shard.chmod(mode)
        except SafetensorError as error:
            shard.unlink(missing_ok=True)
            raise OSError(f"{shard} cannot be written: {error}") from error
        shards.append((shard.name, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        if pending and pending_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.detach().cpu().contiguous()
        pending_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    return shards, total_bytes


def finalize_files(folder: Path, shards: Sequence[tuple[str, list[str]]], total_bytes: int) -> None:
    """Renames the files of all ranks to their final names, which contain the number of files, and
    then writes the index."""
    if len(shards) == 1:
        os.replace(folder / shards[0][0], folder / SINGLE)
        return
    weight_map = {}
    for i, (shard, names) in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(folder / shard, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

"""Finds the checkpoint that a run starts from, and loads it into any layout: each rank reads only
what it holds.

Weights can also be read without an optimizer: into local parameters (`load_weights`) or rectangle
by rectangle (`SavedWeights`).
"""

import socket
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron5d.checkpoint.folder import (
    MANIFEST,
    METADATA,
    TENSOR_SUFFIX,
    checkpoint_error,
    checksum_error,
    errors_of_newer,
    named_steps,
    newest_checkpoint,
    other_place,
    read_manifest,
    read_run,
    step_folder,
)
from megatron5d.checkpoint.index import SavedTensor, read_pickled_index
from megatron5d.checkpoint.layout import ShardedTensors, by_key, sharded_parameter
from megatron5d.checkpoint.reader import Reader
from megatron5d.checkpoint.tensor_file import DamagedFile, Save, SavedItem, TensorFile
from megatron5d.config.errors import Refused
from megatron5d.topology.all_ranks import first_failure, first_value, on_rank_0
from megatron5d.topology.shard_spec import spec_of

WEIGHT_PREFIX = "model."  # a weight's key in a checkpoint is this and its global name
# mismatched tensors that a message lists; the configuration keys that differ say more
_LISTED = 12


def find_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """Finds the checkpoint that a run starts from; None = new weights.

    Args:
        directory: of the run's own checkpoints.
        resume: checkpoint.resume: auto (the newest complete one in `directory`, if any), none, or a
            folder as in `resolve_checkpoint`.
        job: id of a SLURM job that was started again. It continues from its own saves in
            `directory`, whatever `resume` says: with the same command line it would otherwise start
            at the same step again after every time limit.

    Raises:
        ValueError: a folder was named that holds no complete checkpoint; or with auto, all
            checkpoints are damaged. Starting over, and later saving over them, is for the user to
            decide.
    """
    latest = newest_checkpoint(Path(directory)) if directory and (job or resume == "auto") else None
    searched = directory if resume == "auto" and latest is None else None
    if searched and (errors := errors_of_newer(Path(searched))):
        raise ValueError(
            f"checkpoint.resume=auto finds no complete checkpoint in {directory}: {errors[0]}; "
            "checkpoint.resume=none starts a new run"
        )
    if resume == "auto" or (latest is not None and read_run(latest).get("job") == job):
        return latest
    return None if resume == "none" else resolve_checkpoint(resume, "checkpoint.resume")


def agree_on_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """`find_checkpoint` with the same result on every rank; raises as `agree_on_folder`.

    Args:
        directory, resume: as in `find_checkpoint`.
        job: a rank without one takes that of the others: after a crash on one node torchrun may
            start the ranks of the other nodes again without counting it as a restart.

    Comm:
        That of `agree_on_folder`; with a directory and `resume` other than auto also that of
        `first_failure`.
    """
    if directory and resume != "auto":
        job = first_value(job or None) or ""
    if (directory is None and resume == "auto") or (resume == "none" and not (job and directory)):
        return None
    return agree_on_folder(lambda: find_checkpoint(directory, resume, job))


def agree_on_folder(find: Callable[[], Path | None]) -> Path | None:
    """Finds a checkpoint on rank 0, and makes sure that every other rank sees the same one there.

    Only rank 0 looks at every file. A checkpoint may have a file for each rank, and no file system
    serves thousands of ranks that each ask for thousands of files. The other ranks compare only the
    list of files.

    Raises:
        ValueError: on every rank, if a rank sees another checkpoint than rank 0 or cannot look
            there, or `find` raises it on rank 0.
        OSError: on every rank, if `find` raises it on rank 0.

    Comm:
        A broadcast of a path, and that of `first_failure`.
    """

    def find_on_rank_0() -> tuple[str | None, int | None]:
        folder = find()
        return None if folder is None else str(folder), _manifest_checksum(folder)

    path, checksum = on_rank_0(find_on_rank_0)
    agreed = None if path is None else Path(path)
    rank = dist.get_rank() if dist.is_initialized() else 0
    disagreement = None
    try:
        local = agreed if rank == 0 or _manifest_checksum(agreed) == checksum else None
        if rank and agreed is None:
            local = find()
        if local != agreed:
            disagreement = f"finds {local or 'none'}"
    except (ValueError, OSError) as error:  # raised below, on all ranks together
        disagreement = f"cannot look there: {error}"
    if disagreement:
        disagreement = f"on {socket.gethostname()} rank {rank} {disagreement}"
    if failed := first_failure(disagreement):
        raise ValueError(
            f"rank 0 continues from {agreed or 'no checkpoint'}, but {failed.text}{failed.more}: "
            "put checkpoints on a file system that all nodes share"
        )
    return agreed


def _manifest_checksum(folder: Path | None) -> int | None:
    """CRC-32 of a checkpoint's list of files, which tells two checkpoints apart; None without
    one."""
    try:
        return None if folder is None else zlib.crc32((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def resolve_checkpoint(folder: str | Path, knob: str) -> Path:
    """The checkpoint that a folder is, or the newest complete one in it.

    Args:
        folder: one checkpoint, or a directory of them.
        knob: the key or option that named it, for the message.

    Raises:
        ValueError: it holds no complete checkpoint.
    """
    newest = newest_checkpoint(Path(folder))
    if newest is not None:
        return newest
    errors = errors_of_newer(Path(folder))
    error = errors[0] if errors else checkpoint_error(Path(folder))
    if error:
        raise ValueError(
            f"{knob} = {folder}: {error}; name the folder of a complete checkpoint, or of several"
            f"{other_place(Path(folder))}"
        )
    return Path(folder)


def no_checkpoint_reason(folder: str | Path, knob: str) -> str | None:
    """Reason why `resolve_checkpoint` will find nothing in an existing folder; None where it may
    find something.

    Every rank calls this before the ranks have met, so it opens no file and looks for few names.
    """
    directory = Path(folder)
    try:
        steps = reversed(named_steps(directory))
        candidates = (directory, *(step_folder(directory, step) for step in steps))
        if any((candidate / MANIFEST).is_file() for candidate in candidates):
            return None
        resolve_checkpoint(folder, knob)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def load_tensors(
    folder: Path,
    tensors: ShardedTensors,
    differing: Sequence[str] = (),
    twin: Callable[[str], str | None] = lambda key: None,
) -> dict[str, tuple[str, torch.dtype]]:
    """Fills the shards of `tensors` from a checkpoint, whatever layout saved it.

    Args:
        tensors: by key; their shards are written in place, in their own dtype.
        differing: configuration keys whose values differ from the saved ones, as text for the error
            message.
        twin: gives another key under which the same values may be saved in another dtype, such as
            master weights. The twin is read if the key itself is not saved, or if it is saved in a
            dtype narrower than both the tensor's and the twin's.

    Returns:
        By key of `tensors`: the key that was read, and the dtype in which it is saved.

    Raises:
        Refused: on every rank, if keys or global shapes disagree: lists those of the first rank
            where they do.
        ValueError: on every rank, if a file is damaged or cannot be read: names it.

    Comm:
        A broadcast of the index; twice that of `first_failure`.
    """
    reader = Reader(folder, local_only=not dist.is_initialized())
    saved = reader.tensors()
    sources = {
        key: widest_source(key, twin(key), tensor.dtype, saved) for key, tensor in tensors.items()
    }

    # compare keys and shapes, so that all ranks raise together
    errors = [f"missing in the checkpoint: {key}" for key, source in sources.items() if not source]
    errors += [
        f"{key}: saved {tuple(saved[source].size)}, this model has {tuple(tensors[key].shape)}"
        for key, source in sources.items()
        if source and saved[source].size != tensors[key].shape
    ]
    if errors and not any(key.startswith("optim.") for key in saved):
        errors.append(
            f"it holds weights alone: init.from_checkpoint={folder} begins a new run with them"
        )
    errors.sort(key=lambda error: (": optim." in error, error))  # weights first
    shown = errors[:_LISTED] + [f"and {len(errors) - _LISTED} more"] * (len(errors) > _LISTED)
    if failed := first_failure("\n  ".join(shown) or None):
        raise Refused("\n  ".join([f"{folder} does not fit this model:", *differing, failed.text]))

    # a key may be read for itself and as another key's twin, so each gets a separate dict
    direct = {key: tensor for key, tensor in tensors.items() if sources[key] == key}
    twins = {source: tensors[key] for key, source in sources.items() if source and source != key}
    reader.fill([group for group in (direct, twins) if group])
    return {key: (source, saved[source].dtype) for key, source in sources.items() if source}


def widest_source(
    key: str, twin: str | None, dtype: torch.dtype, saved: Mapping[str, Any]
) -> str | None:
    """The key to read, of two with the same values: the first that is wide enough, else the wider.

    Args:
        key: the key under which the values are requested.
        twin: another key under which they may be saved; None = none.
        dtype: in which the values will be kept.
        saved: entries of the checkpoint's index, by key.

    Returns:
        None where neither is saved.
    """
    width = {k: saved[k].dtype.itemsize for k in (key, twin) if k is not None and k in saved}
    wide_enough = (k for k in width if width[k] >= dtype.itemsize)
    return next(wide_enough, max(width, key=lambda k: width[k], default=None))


@torch.no_grad()
def load_weights(parameters: Iterable[Tensor], folder: Path) -> None:
    """Fills local parameters from a complete checkpoint, whatever layout saved it; sets padding
    rows to zero.

    Args:
        parameters: local tensors with a ShardSpec; they keep their dtype.
        folder: a complete checkpoint; its optimizer state is not read.

    Raises:
        ValueError: names or global shapes disagree.

    Comm:
        That of `load_tensors`.
    """
    load_tensors(folder, by_key("model", ((spec_of(p), sharded_parameter(p)) for p in parameters)))


class SavedWeights:
    """The weights of a complete checkpoint, read a rectangle at a time by one process.

    Args:
        dtype: in which the weights will be used; None = the dtype in which they are saved.
        twin: as in `load_tensors`. Without it the weights themselves are read, even where masters
            are saved.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | None = None,
        twin: Callable[[str], str | None] = lambda key: None,
    ) -> None:
        self._reader = Reader(folder)
        saved = self._reader.tensors()
        self._keys = {
            key.removeprefix(WEIGHT_PREFIX): widest_source(
                key, twin(key), dtype or entry.dtype, saved
            )
            or key
            for key, entry in saved.items()
            if key.startswith(WEIGHT_PREFIX)
        }
        self.tensors = {name: saved[key] for name, key in self._keys.items()}

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a weight, in the dtype in which it is
        saved; raises as `Reader.fill`."""
        return self._reader.read(self._keys[name], offset, shape)


class SavedTensors:
    """All tensors of a complete checkpoint, including the optimizer's.

    Raises:
        ValueError: the index is damaged; names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, Reader(folder)
        self.tensors: dict[str, SavedTensor] = self._reader.tensors()
        self.save = self._reader.save
        self.read = self._reader.read

    def files(self) -> dict[str, list[tuple[str, SavedItem]]]:
        """Items of each file of tensors in the order of its bytes, each with the key of its
        tensor."""
        items: defaultdict[str, list[tuple[str, SavedItem]]] = defaultdict(list)
        for key, saved in self.tensors.items():
            for item in saved.items.values():
                items[item.file].append((key, item))
        return {file: sorted(items[file], key=lambda item: item[1].start) for file in sorted(items)}

    def errors_outside_tensors(self) -> list[str]:
        """What is wrong outside the files of tensors: files that are changed, foreign or
        missing."""
        manifest, indexed = read_manifest(self.folder), self.files()
        present = {path.name for path in self.folder.iterdir()}
        errors = [
            f"{self.folder / name} is not a file of this checkpoint"
            for name in present - {*manifest, MANIFEST}
        ]
        for name in manifest:
            if not name.endswith(TENSOR_SUFFIX):
                errors += [error] if (error := checksum_error(self.folder, name)) else []
            elif name not in indexed:
                errors.append(f"{self.folder / name} is not in the index")
        for key, saved in self.tensors.items():
            if sum(prod(item.extent) for item in saved.items.values()) != prod(saved.size):
                errors.append(
                    f"{self.folder}: the shards of {key} do not add up to {list(saved.size)} "
                    "elements"
                )
        # other tools load it, and may execute what it names
        if (pickled := self.folder / METADATA).is_file():
            try:
                read_pickled_index(pickled.read_bytes())
            except ValueError as error:
                errors.append(f"{pickled} is refused: {error}")
        return sorted(errors)


def file_error(
    path: Path,
    save: Save | None,
    items: Sequence[tuple[str, SavedItem]],
    dtypes: Mapping[str, torch.dtype],
    finite: bool = False,
) -> str | None:
    """Message if a file of tensors is not what was saved; None if it is intact.

    Args:
        save: that wrote the file; None = one of an earlier version.
        items: (key, item) pairs of the file.
        dtypes: by key.
        finite: also look for values that are not finite.
    """
    try:
        with TensorFile(path) as file:
            if file.header.save != save:
                return f"{path} is of another checkpoint, or its first bytes are damaged"
            for key, item in items:
                values = torch.empty(item.extent, dtype=dtypes[key])
                file.fill(key, dtypes[key], item, (0,) * values.dim(), values)
                file.check_around(key, dtypes[key], item)
                if finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    return (
                        f"{path} holds a value of {key} that is not finite, in the shard at "
                        f"{list(item.offset)}"
                    )
    except DamagedFile as error:
        return f"{path} {error}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    return None

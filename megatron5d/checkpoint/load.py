"""Finds the checkpoint that a run starts from, and loads it into any layout: each rank reads what
it holds.

Weights can be had without an optimiser, too: loaded into plain parameters (`load_weights`), read by
rectangle (`SavedWeights`), or computed as they are saved (`lazy_tensor`).
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
    read_manifest,
    read_run,
    step_folder,
)
from megatron5d.checkpoint.index import SavedTensor, read_pickled_index
from megatron5d.checkpoint.layout import ShardedTensor, by_key, sharded_parameter
from megatron5d.checkpoint.storage import Reader, read_tensors
from megatron5d.checkpoint.tensor_file import DamagedFile, Save, SavedItem, TensorFile
from megatron5d.config.errors import Refused
from megatron5d.topology.all_ranks import first_failure, first_value, on_rank_0
from megatron5d.topology.shard_spec import spec_of

# how many tensors that do not fit are named; the configuration keys that differ say more
LISTED = 12


def find_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """Returns the folder a run starts from; None = new weights.

    Args:
        resume: checkpoint.resume: auto (newest whole one, if any), none, or a folder as in
            `whole_checkpoint`.
        job: as in `restarted_job`. The job continues from its own saves in `directory`, whatever
            `resume` says: with the same command it would otherwise begin at the same step again
            after every time limit.

    Raises:
        ValueError: a folder was named and holds no whole checkpoint; or with auto, checkpoints are
            there and all are damaged: to begin anew, and in time to save over them, is for the user
            to say.
    """
    own = newest_checkpoint(Path(directory)) if directory and (job or resume == "auto") else None
    if (
        directory
        and resume == "auto"
        and own is None
        and (torn := errors_of_newer(Path(directory)))
    ):
        raise ValueError(
            f"checkpoint.resume = auto: {torn[0]}, and no older checkpoint in {directory} is whole either; "
            "checkpoint.resume=none begins anew"
        )
    if resume == "auto" or (own is not None and read_run(own).get("job") == job):
        return own
    return None if resume == "none" else resolve_checkpoint(resume, "checkpoint.resume")


def agree_on_checkpoint(directory: str | None, resume: str, job: str = "") -> Path | None:
    """Returns `find_checkpoint`, the same on every rank; raises and communicates as `agreed`.

    Args:
        directory: as in `find_checkpoint`, as is `resume`.
        job: "" on some ranks counts as the job of the others: after a crash on one node torchrun
            may start the ranks of the other nodes again without counting it as a restart.

    Comm: where a directory and `resume` other than auto are given, also as `first_failure`.
    """
    if directory and resume != "auto":
        job = first_value(job or None) or ""
    if (directory is None and resume == "auto") or (resume == "none" and not (job and directory)):
        return None
    return agree_on_folder(lambda: find_checkpoint(directory, resume, job))


def agree_on_folder(find: Callable[[], Path | None]) -> Path | None:
    """Returns what rank 0 finds on every rank, after each rank has made sure that it sees the same
    there.

    Only rank 0 looks at every file. A checkpoint may have a file for each rank, and no file system
    serves thousands of ranks that each ask for thousands of files. The other ranks only compare the
    list of files.

    Raises ValueError: on every rank, if a rank sees another checkpoint than rank 0, or cannot look
    there. Raises
    OSError, ValueError: on every rank, if `find` raises one on rank 0.

    Comm: a broadcast of a path, and as `first_failure`.
    """

    def find_sealed() -> tuple[str | None, int | None]:
        found = find()
        return None if found is None else str(found), _seal(found)

    path, seal = on_rank_0(find_sealed)
    chosen = None if path is None else Path(path)
    rank = dist.get_rank() if dist.is_initialized() else 0
    other = None
    try:
        here = chosen if rank == 0 or _seal(chosen) == seal else None
        if rank and chosen is None:
            here = find()
        if here != chosen:
            other = f"finds {here or 'none'}"
    except (ValueError, OSError) as error:  # raised below, on all ranks together
        other = f"cannot look there: {error}"
    if failed := first_failure(other and f"on {socket.gethostname()} rank {rank} {other}"):
        raise ValueError(
            f"rank 0 continues from {chosen or 'no checkpoint'}, and {failed.text}{failed.more}: the folders of "
            "checkpoints must be where all nodes see the same files"
        )
    return chosen


def _seal(folder: Path | None) -> int | None:
    """Returns the CRC-32 of a checkpoint's list of files, by which two are told apart; None where
    there is none."""
    try:
        return None if folder is None else zlib.crc32((folder / MANIFEST).read_bytes())
    except OSError:
        return None


def resolve_checkpoint(folder: str | Path, knob: str) -> Path:
    """Returns the checkpoint that a folder is, or the newest whole one that it holds.

    Args:
        folder: one checkpoint, or a directory of them.
        knob: what it was given as, for the message.

    Raises:
        ValueError: it holds no whole checkpoint.
    """
    found = newest_checkpoint(Path(folder))
    if found is not None:
        return found
    torn = errors_of_newer(Path(folder))
    fault = torn[0] if torn else checkpoint_error(Path(folder))
    if fault:
        of_run = Path(folder, "checkpoints")
        meant = f": {of_run}?" if of_run.is_dir() else ""
        raise ValueError(
            f"{knob} = {folder}: {fault}; name the folder of a whole checkpoint, or of some{meant}"
        )
    return Path(folder)


def no_checkpoint_reason(folder: str | Path, knob: str) -> str | None:
    """Returns why `whole_checkpoint` will find nothing in an existing folder, in words; None where
    it may find something.

    Every rank calls this before the ranks have met, so it opens no file and looks for few names.
    """
    directory = Path(folder)
    try:
        names = (
            directory,
            *(step_folder(directory, step) for step in reversed(named_steps(directory))),
        )
        if any((name / MANIFEST).is_file() for name in names):
            return None
        resolve_checkpoint(folder, knob)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def load_tensors(
    folder: Path,
    tensors: dict[str, ShardedTensor],
    differing: Sequence[str] = (),
    twin: Callable[[str], str | None] = lambda key: None,
) -> dict[str, tuple[str, torch.dtype]]:
    """Fills the parts of `tensors` from a checkpoint, whatever layout saved it.

    Args:
        tensors: by key; their parts are written in place, in their own dtype.
        differing: configuration keys whose values differ from the saved ones, as text for the error
            message.
        twin: gives another key under which the same values may be saved in another dtype, such as
            master weights. The twin is read if the key itself is not saved, or if it is saved in a
            dtype narrower than both the wanted one and the twin's.

    Returns:
        By key of `tensors`: the key that was read, and the dtype in which it is saved.

    Raises:
        Refused: on every rank, if keys or global shapes disagree: lists those of the first rank
            where they do.
        ValueError: on every rank, if a file is damaged or cannot be read: names it.

    Comm: a broadcast of `.metadata`; twice that of `first_failure`.
    """
    reader = Reader(folder, alone=not dist.is_initialized())
    saved = reader.tensors()
    sources = {
        key: widest_source(key, twin(key), tensor.dtype, saved) for key, tensor in tensors.items()
    }
    faults = [
        f"missing in the checkpoint: {key}" for key, source in sources.items() if source is None
    ]
    faults += [
        f"{key}: saved {tuple(saved[source].size)}, this model has {tuple(tensors[key].shape)}"
        for key, source in sources.items()
        if source is not None and saved[source].size != tensors[key].shape
    ]
    faults.sort(key=lambda fault: ("optim." in fault, fault))  # weights first
    shown = faults[:LISTED] + [f"and {len(faults) - LISTED} more"] * (len(faults) > LISTED)
    if failed := first_failure("\n  ".join(shown) or None):
        raise Refused("\n  ".join([f"{folder} does not fit this model:", *differing, failed.text]))
    own = {key: tensor for key, tensor in tensors.items() if sources[key] == key}
    twins = {
        source: tensors[key]
        for key, source in sources.items()
        if source is not None and source != key
    }
    read_tensors(reader, [part for part in (own, twins) if part])
    return {
        key: (source, saved[source].dtype) for key, source in sources.items() if source is not None
    }


def widest_source(
    key: str, twin: str | None, wanted: torch.dtype, saved: Mapping[str, Any]
) -> str | None:
    """Chooses which of two keys with the same values to read: the first wide enough, else the wider
    one.

    Args:
        key: the key under which the values are wanted.
        twin: another key under which they may be saved; None = none.
        wanted: dtype in which the values will be kept.
        saved: entries of the checkpoint's metadata, by key.

    Returns:
        None where neither is saved.
    """
    found = [each for each in (key, twin) if each is not None and each in saved]
    width = {each: saved[each].dtype.itemsize for each in found}
    enough = (each for each in found if width[each] >= wanted.itemsize)
    return next(enough, max(found, key=lambda each: width[each], default=None))


WEIGHT_PREFIX = "model."  # the key of a weight in a checkpoint is this and its global name


@torch.no_grad()
def load_weights(parameters: Iterable[Tensor], folder: Path) -> None:
    """Fills local parameters from a whole checkpoint, whatever layout saved it. Padding rows become
    zero.

    Args:
        parameters: local tensors with a ShardSpec; they keep their dtype.
        folder: a whole checkpoint; its optimiser state is not read.

    Raises:
        ValueError: names or global shapes disagree.

    Comm: as `load_tensors`.
    """
    load_tensors(
        folder, by_key("model", ((spec_of(each), sharded_parameter(each)) for each in parameters))
    )


class SavedWeights:
    """The weights of a whole checkpoint, read a rectangle at a time by one process.

    Args:
        wanted: dtype in which the weights will be used; None = the dtype in which the weights are
            saved.
        twin: as in `load_tensors`. Without it the weights themselves are read, even where masters
            are saved.
    """

    def __init__(
        self,
        folder: Path,
        wanted: torch.dtype | None = None,
        twin: Callable[[str], str | None] = lambda key: None,
    ) -> None:
        self._reader = Reader(folder)
        saved = self._reader.tensors()
        self._keys = {
            key.removeprefix(WEIGHT_PREFIX): widest_source(
                key, twin(key), wanted or entry.dtype, saved
            )
            or key
            for key, entry in saved.items()
            if key.startswith(WEIGHT_PREFIX)
        }
        self.tensors = {name: saved[key] for name, key in self._keys.items()}

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it
        is saved."""
        entry = self.tensors[name]
        values = torch.empty(tuple(shape), dtype=entry.dtype)
        tensor = ShardedTensor(entry.size, [(tuple(offset), values)], values.dtype)
        read_tensors(self._reader, [{self._keys[name]: tensor}])
        return values


class LazyTensor(ShardedTensor):
    """A tensor to be saved whose parts are computed when they are written, so that they are never
    all in memory."""

    make: Callable[[tuple[int, ...]], Tensor]

    def values(self, offset: tuple[int, ...]) -> Tensor:
        return self.make(offset)


def lazy_tensor(
    shape: Sequence[int],
    parts: dict[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    make: Callable[[tuple[int, ...]], Tensor],
) -> LazyTensor:
    """Makes a LazyTensor.

    Args:
        parts: the shape of each part, by its offset in the global tensor.
        make: computes the values of the part at an offset.
    """
    views = [
        (offset, torch.empty(extent, dtype=dtype, device="meta"))
        for offset, extent in parts.items()
    ]
    tensor = LazyTensor(shape, views, dtype)
    tensor.make = make
    return tensor


class SavedTensors:
    """All tensors of a whole checkpoint, the optimiser's too. Raises ValueError: its index is
    damaged; names the file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, Reader(folder)
        self.tensors: dict[str, SavedTensor] = self._reader.tensors()
        self.save = self._reader.save

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset` of a global tensor, in the dtype in which it
        is saved. Raises
        ValueError: a file is damaged; names it and the tensor. Raises OSError: a file cannot be
            read."""
        saved = self.tensors[key]
        values = torch.empty(tuple(shape), dtype=saved.dtype)
        self._reader.fill(
            [{key: ShardedTensor(saved.size, [(tuple(offset), values)], saved.dtype)}]
        )
        return values

    def files(self) -> dict[str, list[tuple[str, SavedItem]]]:
        """Returns the items of each file of tensors in the order of its bytes, each with the key of
        its tensor."""
        found: defaultdict[str, list[tuple[str, SavedItem]]] = defaultdict(list)
        for key, saved in self.tensors.items():
            for item in saved.items.values():
                found[item.file].append((key, item))
        return {name: sorted(found[name], key=lambda each: each[1].start) for name in sorted(found)}

    def faults_outside(self) -> list[str]:
        """Returns what is wrong outside the files of tensors: changed, foreign or missing files."""
        manifest, held = read_manifest(self.folder), self.files()
        there = {path.name for path in self.folder.iterdir()}
        faults = [
            f"{self.folder / name} is not a file of this checkpoint"
            for name in there - {*manifest, MANIFEST}
        ]
        faults += [
            fault
            for name in manifest
            if not name.endswith(TENSOR_SUFFIX) and (fault := checksum_error(self.folder, name))
        ]
        unheld = [name for name in manifest if name.endswith(TENSOR_SUFFIX) and name not in held]
        faults += [f"{self.folder / name} is not in the index" for name in unheld]
        for key, saved in self.tensors.items():
            if sum(prod(item.extent) for item in saved.items.values()) != prod(saved.size):
                faults.append(
                    f"{self.folder}: the parts of {key} are not {list(saved.size)} elements together"
                )
        if (pickled := self.folder / METADATA).is_file():  # which other tools load, and may execute
            try:
                read_pickled_index(pickled.read_bytes())
            except ValueError as error:
                faults.append(f"{pickled} is refused: {error}")
        return sorted(faults)


def file_error(
    path: Path,
    save: Save | None,
    items: Sequence[tuple[str, SavedItem]],
    dtypes: Mapping[str, torch.dtype],
    finite: bool = False,
) -> str | None:
    """Returns a message if a file of tensors is not what was saved; None if it is sound.

    Args:
        save: that wrote it; None = one of an earlier version.
        finite: also look for values that are not finite.
    """
    try:
        with TensorFile(path) as file:
            if file.about.save != save:
                return f"{path} is of another checkpoint, or its first bytes are damaged"
            for key, item in items:
                values = torch.empty(item.extent, dtype=dtypes[key])
                file.fill(key, dtypes[key], item, (0,) * values.dim(), values)
                file.check_around(key, dtypes[key], item)
                if finite and values.is_floating_point() and not bool(values.isfinite().all()):
                    return f"{path} holds a value of {key} that is not finite, in the part at {list(item.offset)}"
    except DamagedFile as error:
        return f"{path} {error}"
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {error}"
    return None

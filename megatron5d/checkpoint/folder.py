"""Checkpoint folders: their names, when one is whole, which is the newest, and which are removed.

<dir>/run.lock              the run that writes here (topology/lock_file.py)
<dir>/step-00000100.tmp/    being written; never read
<dir>/step-00000100/        whole: renamed after every rank has finished
    *.distcp                torch.distributed.checkpoint, tensors in global coordinates; each names its save
    index.json              which tensors there are, and where; of which save
    .metadata               the same as a pickle of DCP, for other tools
    run.json                step, samples taken, configuration
    files.json              size of every file in bytes, so that a truncated copy is noticed; CRC-32 of files without
                            tensors (tensors have their own checksums, which load.py checks)
<dir>/step-00000200.left/   whole, but the run went back to before it and has saved an earlier step since; never read,
                            never removed
<dir>/step-00000050.removed/  no longer wanted; the next start removes what an interruption left of it
<dir>/latest                name of the newest
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from megatron5d.config.convert import from_dict
from megatron5d.config.errors import ConfigError, Refused
from megatron5d.config.json_file import parse_json, read_json, write_whole
from megatron5d.config.schema import Config

_NAME = re.compile(r"step-(\d{8,})$")
MANIFEST = "files.json"
RUN_FILE = "run.json"
FORMAT = 1  # of run.json; raised when an older reader would misread it
METADATA = ".metadata"  # DCP's: which tensors there are, and where
TENSOR_SUFFIX = ".distcp"  # suffix of the files that hold tensors
LEFT_SUFFIX = ".left"  # after the name of a checkpoint that the run went back behind
_WRITING = ".tmp"
_REMOVED = ".removed"  # after the name of one that is being removed
_MOST_LAYERS = 100_000  # of a configuration that is believed
_REPLACED = ".replaced"  # after the name of one that was there when its step was saved again


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def write_manifest(folder: Path) -> None:
    """Writes the sizes and checksums of all files to files.json, as the last file before the folder
    is renamed."""
    entries: dict[str, dict[str, int]] = {}
    for name, size in sorted(_sizes(folder).items()):
        if name != MANIFEST:
            entries[name] = {"bytes": size}
        if name != MANIFEST and not name.endswith(TENSOR_SUFFIX):
            entries[name]["crc32"] = zlib.crc32((folder / name).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1))


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the bytes of every file in a folder, with one request to the file system for each."""
    with os.scandir(folder) as found:
        return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}


def read_manifest(folder: Path) -> dict[str, dict[str, int]]:
    """Returns the content of files.json: file name -> `bytes`, and `crc32` of files without tensors
    (not in old checkpoints). Raises ValueError: files.json is damaged."""
    entries = parse_json((folder / MANIFEST).read_bytes())
    if RUN_FILE not in entries:
        raise ValueError(f"it does not list {RUN_FILE}")
    return {
        name: entry if isinstance(entry, dict) else {"bytes": entry}
        for name, entry in entries.items()
    }


def checksum_error(folder: Path, name: str) -> str | None:
    """Returns a message if a file without tensors differs from its checksum; None if not, or if it
    has none."""
    saved = read_manifest(folder).get(name, {}).get("crc32")
    if saved is None or saved == zlib.crc32((folder / name).read_bytes()):
        return None
    return f"{folder / name} is damaged: its bytes are not those that were saved (CRC-32)"


def checkpoint_error(folder: Path) -> str | None:
    """Returns a message that says why a folder is not a whole checkpoint; None if it is one."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{folder} has no {MANIFEST}: its save did not finish, or it is not a checkpoint of ours"
    try:
        sizes = {name: entry.get("bytes") for name, entry in read_manifest(folder).items()}
    except ValueError as error:
        return f"{manifest} is damaged: {error}"
    there = _sizes(folder)
    for name, size in sizes.items():
        found = there.get(name)
        if found != size:
            had = "no file" if found is None else f"{found} bytes"
            return f"{folder / name} has {had} where {size} bytes were saved"
    return checksum_error(folder, RUN_FILE)


def named_steps(directory: Path) -> list[int]:
    """Steps of all folders with the name of a checkpoint, ascending; they need not be whole."""
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))


def saved_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in a directory, ascending."""
    return [step for step in named_steps(directory) if _is_whole(directory, step)]


def _is_whole(directory: Path, step: int) -> bool:
    """Returns whether a step's checkpoint is whole; looks at every file, of which there may be one
    per rank."""
    return checkpoint_error(step_folder(directory, step)) is None


def saved_after(directory: Path, step: int) -> list[int]:
    """Steps of the whole checkpoints that are later than a step, ascending."""
    return [
        later for later in named_steps(directory) if later > step and _is_whole(directory, later)
    ]


def errors_of_newer(directory: Path) -> list[str]:
    """Says why each folder newer than the newest whole checkpoint is not whole; the newest
    first."""
    found = []
    for step in reversed(named_steps(directory)):
        fault = checkpoint_error(step_folder(directory, step))
        if fault is None:
            break
        found.append(fault)
    return found


def errors_of_older(directory: Path) -> list[str]:
    """Says why each older folder that is not a whole checkpoint is none; the oldest first."""
    steps = named_steps(directory)
    last = next((step for step in reversed(steps) if _is_whole(directory, step)), 0)
    return [
        fault
        for step in steps
        if step < last and (fault := checkpoint_error(step_folder(directory, step)))
    ]


def newest_checkpoint(directory: Path) -> Path | None:
    """Returns the newest whole checkpoint, regardless of `latest`; None where there is none."""
    found = next(
        (step for step in reversed(named_steps(directory)) if _is_whole(directory, step)), None
    )
    return None if found is None else step_folder(directory, found)


def checkpoint_before(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint in the same directory before this one; None where there
    is none."""
    match = _NAME.fullmatch(folder.name)
    steps = [step for step in saved_steps(folder.parent) if match and step < int(match.group(1))]
    return step_folder(folder.parent, steps[-1]) if steps else None


def _reach_disk(path: Path) -> None:
    """Waits until a file, or the names in a folder, are safe from a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems allow it for files only
        if not (path.is_dir() and error.errno == errno.EINVAL):
            raise
    finally:
        os.close(handle)


class Keep(NamedTuple):
    """Which checkpoints stay; without any number all. The newest always does."""

    last: int = 0  # number of the newest
    every: int = 0  # those of steps that this divides
    best: int = 0  # number of those with the lowest validation loss

    @classmethod
    def of(cls, text: str) -> Keep:
        """Returns the policy of `checkpoint.keep`: K or last:K, every:N, best:K, joined by +."""
        entries = (entry.rpartition(":") for entry in text.split("+"))
        return cls(**{kind or "last": int(number) for kind, _, number in entries})


def _spare(directory: Path, keep: Keep) -> list[int]:
    """Steps of the checkpoints that need not stay; once enough newer ones are whole, also of those
    that are not."""
    whole = saved_steps(directory)
    newest_checkpoint = whole[-max(keep.last, 1) :]
    if not any(keep) or len(newest_checkpoint) < keep.last:
        return []
    stay = {step for step in whole if keep.every and step % keep.every == 0}
    if keep.best:
        losses = (
            (read_run(step_folder(directory, step)).get("valid_loss"), -step) for step in whole
        )
        known = sorted(each for each in losses if isinstance(each[0], float) and isfinite(each[0]))
        stay |= {-step for _, step in known[: keep.best]}
    return [
        step for step in named_steps(directory) if step < newest_checkpoint[0] and step not in stay
    ]


def commit(temporary: Path, keep: Keep, pinned: Path | None = None) -> Path:
    """Makes a finished `.tmp` folder the newest checkpoint and removes those that neither `keep`
    nor `pinned` names.

    Nothing is removed before all of the new one is on disk; DCP waits for its own files.
    Checkpoints of later steps, from before the run went back, are renamed to `.left`, so that
    `auto` does not resume from them.

    Returns the folder of the checkpoint.
    """
    write_manifest(temporary)
    for path in temporary.iterdir():
        if path.suffix != TENSOR_SUFFIX:
            _reach_disk(path)
    _reach_disk(temporary)
    final = temporary.with_suffix("")
    directory, step = final.parent, int(final.name.removeprefix("step-"))
    set_aside_later(directory, step)
    replaced = final.rename(_unused(final, _REPLACED)) if _exists(final) else None
    temporary.rename(final)
    _reach_disk(directory)
    point_latest_to(final)
    spare = [step_folder(directory, old) for old in _spare(directory, keep)]
    for folder in [*([replaced] if replaced else []), *spare]:
        if pinned is None or folder.resolve() != pinned.resolve():
            _remove(folder)
    return final


def point_latest_to(folder: Path) -> None:
    """Writes the name of a checkpoint to `latest` beside it."""
    write_whole(folder.parent / "latest", folder.name + "\n")


def set_aside_later(directory: Path, step: int) -> None:
    """Renames the whole checkpoints of steps after this one, from before the run went back, to
    `.left`."""
    for later in saved_after(directory, step):
        folder = step_folder(directory, later)
        folder.rename(_unused(folder, LEFT_SUFFIX))


def recover(directory: Path) -> list[str]:
    """Repairs a directory after a save that was interrupted; nobody may be writing there.

    A removal that was interrupted is finished.

    A `.tmp` folder that is complete becomes a checkpoint, unless later steps have been saved;
    others are removed, to free the disk. If a step was being saved again and the new checkpoint is
    not complete, the old one gets its name back.

    Returns what was done, for the log.
    """
    notes = []
    for gone in sorted(directory.glob(f"step-*{_REMOVED}*")):
        _remove(gone)
        notes.append(f"{gone} is removed to its end: its removal was interrupted")
    for half in sorted(
        path for path in directory.glob(f"step-*{_WRITING}") if _NAME.fullmatch(path.stem)
    ):
        if checkpoint_error(half) is None and not saved_after(
            directory, int(half.stem.removeprefix("step-"))
        ):
            notes.append(
                f"{commit(half, Keep())} was whole and had no name yet: its save was interrupted"
            )
        else:
            _remove(half)
            notes.append(f"{half} is removed: its save did not finish")
    for old in sorted(directory.glob(f"step-*{_REPLACED}*")):
        final = old.with_suffix("")
        if not _exists(final) and checkpoint_error(old) is None:
            notes.append(
                f"{old.rename(final)} is the old one: saving its step again was interrupted"
            )
        elif checkpoint_error(final) is None:
            _remove(old)
    return notes


def _exists(path: Path) -> bool:
    """Returns whether a path exists, also as a broken link."""
    return path.exists() or path.is_symlink()


def _unused(folder: Path, suffix: str) -> Path:
    """Returns the folder's name with the first of `suffix`, `suffix`2, ... that does not exist
    yet."""
    names = (
        folder.with_name(f"{folder.name}{suffix}{count if count > 1 else ''}")
        for count in itertools.count(1)
    )
    return next(name for name in names if not _exists(name))


def _remove(folder: Path) -> None:
    """Removes an old checkpoint, or only the link if it is one; warns where that is not possible.

    It loses its name first, so that what an interruption leaves is known for what it is.
    """
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        if _NAME.fullmatch(folder.name):
            folder = folder.rename(_unused(folder, _REMOVED))
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be removed ({error}); it takes room until you do", stacklevel=2
        )


def read_run(folder: Path) -> dict:
    """Returns the content of run.json in a whole checkpoint: `format`, `version`, `progress` and
    `config` (train/state.py). Raises Refused: the file is damaged, or a newer version wrote it."""
    fault = checksum_error(folder, RUN_FILE)
    if fault:
        raise Refused(fault)
    try:
        record = read_json(folder / RUN_FILE)
    except ValueError as error:
        raise Refused(error) from error
    if isinstance(saved := record.get("format"), int) and saved > FORMAT:
        raise Refused(
            f"{folder} has format {saved}, this version reads up to {FORMAT}; upgrade megatron5d"
        )
    return record


def saved_config(folder: Path) -> Config:
    """Returns the configuration of the run that saved a whole checkpoint; keys of later versions
    keep their defaults. Raises Refused: run.json is damaged, or holds what is no configuration;
    names the file and the keys."""
    return config_from_record(folder, read_run(folder).get("config"))


def config_from_record(folder: Path, saved: Any, groups: Mapping[str, Any] | None = None) -> Config:
    """Returns a configuration as run.json holds it; raises as `saved_config`.

    Args:
        saved: value of `config` in run.json.
        groups: only these groups and their keys are read, as nested mappings; None = all, and
            others are refused.
    """
    if not isinstance(saved, dict) or not all(isinstance(group, dict) for group in saved.values()):
        raise Refused(f"{folder / RUN_FILE} is refused: its config is no object of groups of keys")
    if groups is not None:
        saved = _shared(saved, groups)
    from megatron5d.config.checks.values import VALUE_CHECKS

    checks = [check for check in VALUE_CHECKS if check.knobs[0].startswith("model.")]
    try:
        config = from_dict(saved)
        faults = [fault.reason for check in checks if (fault := check.run(config, 1))]
        # of which a list is made before any file is compared
        if config.model.num_layers > _MOST_LAYERS:
            faults.append(f"model.num_layers = {config.model.num_layers} is above {_MOST_LAYERS}")
    except ConfigError as error:
        faults = [fault.reason for fault in error.faults]
    if faults:
        raise Refused(f"{folder / RUN_FILE} is refused: {'; '.join(faults)}")
    return config


def _shared(values: Any, known: Any) -> Any:
    """Returns what two nested mappings share; where one is no mapping, the values."""
    if not (isinstance(values, dict) and isinstance(known, Mapping)):
        return values
    return {key: _shared(value, known[key]) for key, value in values.items() if key in known}

"""Checkpoint folders: their names, when one is complete, which is the newest, which are removed.

<dir>/run.lock              the run that writes here (topology/lock_file.py)
<dir>/step-00000100.tmp/    being written; never read
<dir>/step-00000100/        complete: renamed after every rank has finished
    *.distcp                torch.distributed.checkpoint, tensors in global coordinates; each file
                            names its save
    index.json              which tensors there are, and where; of which save
    .metadata               the same as a pickle of DCP, for other tools
    run.json                step, samples consumed, configuration
    files.json              size of every file in bytes, which shows a truncated copy; CRC-32 of
                            files without tensors (tensors have their own, which reader.py checks)
<dir>/hf/step-00000100/     the same as a Hugging Face folder (train/hf_export.py)
<dir>/step-00000200.left/   complete, but the run went back to an earlier step and has saved since;
                            never read, never removed; so is hf/step-00000200.left/
<dir>/step-00000050.removed/  being removed; the next start finishes an interrupted removal
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
METADATA = ".metadata"  # DCP's index
TENSOR_SUFFIX = ".distcp"  # of files that hold tensors
EXPORTS = "hf"  # folder within checkpoint.dir: Hugging Face folders by step
LEFT_SUFFIX = ".left"  # of checkpoints later than the step to which the run went back
_WRITING_SUFFIX = ".tmp"
_REMOVED_SUFFIX = ".removed"
_REPLACED_SUFFIX = ".replaced"  # of a checkpoint whose step is saved again
_MAX_LAYERS = 100_000  # of a configuration that is believed


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def write_manifest(folder: Path) -> None:
    """Writes the sizes and checksums of all files to files.json, as the last file before the folder
    is renamed."""
    entries: dict[str, dict[str, int]] = {}
    for name, size in sorted(_sizes(folder).items()):
        if name != MANIFEST:
            entries[name] = {"bytes": size}
            if not name.endswith(TENSOR_SUFFIX):
                entries[name]["crc32"] = zlib.crc32((folder / name).read_bytes())
    (folder / MANIFEST).write_text(json.dumps(entries, indent=1))


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in a folder, with one request to the file system for each."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def read_manifest(folder: Path) -> dict[str, dict[str, int]]:
    """Reads files.json.

    Returns:
        File name -> `bytes`, and `crc32` of files without tensors (absent in old checkpoints).

    Raises:
        ValueError: files.json is damaged.
    """
    entries = parse_json((folder / MANIFEST).read_bytes())
    if RUN_FILE not in entries:
        raise ValueError(f"it does not list {RUN_FILE}")
    return {
        name: entry if isinstance(entry, dict) else {"bytes": entry}
        for name, entry in entries.items()
    }


def checksum_error(folder: Path, name: str) -> str | None:
    """Message if a file without tensors differs from its checksum; None if not, or if it has
    none."""
    saved = read_manifest(folder).get(name, {}).get("crc32")
    if saved is None or saved == zlib.crc32((folder / name).read_bytes()):
        return None
    return f"{folder / name} is damaged: its bytes are not those that were saved (CRC-32)"


def checkpoint_error(folder: Path) -> str | None:
    """Message that says why a folder is not a complete checkpoint; None if it is one."""
    if not folder.is_dir():
        return f"{folder} is not a folder"
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"{folder} has no {MANIFEST}: its save did not finish, or it is not a checkpoint"
    try:
        saved_sizes = {name: entry.get("bytes") for name, entry in read_manifest(folder).items()}
    except ValueError as error:
        return f"{manifest} is damaged: {error}"
    sizes = _sizes(folder)
    for name, saved in saved_sizes.items():
        if sizes.get(name) != saved:
            size = f"{sizes[name]} bytes" if name in sizes else "no file"
            return f"{folder / name} has {size} where {saved} bytes were saved"
    return checksum_error(folder, RUN_FILE)


def named_steps(directory: Path) -> list[int]:
    """Steps of all folders with the name of a checkpoint, ascending; they may be incomplete."""
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def saved_steps(directory: Path) -> list[int]:
    """Steps of all complete checkpoints in a directory, ascending."""
    return [step for step in named_steps(directory) if _is_complete(directory, step)]


def _is_complete(directory: Path, step: int) -> bool:
    """Whether a step's checkpoint is complete; looks at every file, of which there may be one per
    rank."""
    return checkpoint_error(step_folder(directory, step)) is None


def saved_after(directory: Path, step: int) -> list[int]:
    """Steps of the complete checkpoints that are later than a step, ascending."""
    later = (s for s in named_steps(directory) if s > step)
    return [s for s in later if _is_complete(directory, s)]


def errors_of_newer(directory: Path) -> list[str]:
    """Why each folder newer than the newest complete checkpoint is not complete, newest first."""
    errors = []
    for step in reversed(named_steps(directory)):
        error = checkpoint_error(step_folder(directory, step))
        if error is None:
            break
        errors.append(error)
    return errors


def errors_of_older(directory: Path) -> list[str]:
    """Why each folder older than the newest complete checkpoint is not complete, oldest first."""
    newest = _newest_step(directory) or 0
    older = (step for step in named_steps(directory) if step < newest)
    errors = (checkpoint_error(step_folder(directory, step)) for step in older)
    return [error for error in errors if error]


def _newest_step(directory: Path) -> int | None:
    steps = reversed(named_steps(directory))
    return next((step for step in steps if _is_complete(directory, step)), None)


def newest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint, whatever `latest` says; None where there is none."""
    step = _newest_step(directory)
    return None if step is None else step_folder(directory, step)


def other_place(folder: Path) -> str:
    """Advice to end the message about a folder without a checkpoint; empty where there is none."""
    if (of_run := folder / "checkpoints").is_dir():
        return f": {of_run}?"
    if (folder / "config.json").is_file():
        return "; a Hugging Face folder is read by from_hf, or convert.py from-hf"
    return ""


def checkpoint_before(folder: Path) -> Path | None:
    """The newest complete checkpoint in the same directory before this one; None where there is
    none."""
    match = _NAME.fullmatch(folder.name)
    steps = [step for step in saved_steps(folder.parent) if match and step < int(match[1])]
    return step_folder(folder.parent, steps[-1]) if steps else None


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # some network file systems sync only files
        if not (path.is_dir() and error.errno == errno.EINVAL):
            raise
    finally:
        os.close(handle)


class Keep(NamedTuple):
    """Which checkpoints are kept; all if every number is 0. The newest always is."""

    last: int = 0  # number of the newest
    every: int = 0  # those of steps that this divides
    best: int = 0  # number of those with the lowest validation loss

    @classmethod
    def of(cls, text: str) -> Keep:
        """The policy of `checkpoint.keep`: K or last:K, every:N, best:K, joined by +."""
        entries = (entry.rpartition(":") for entry in text.split("+"))
        return cls(**{kind or "last": int(number) for kind, _, number in entries})


def _removable(directory: Path, keep: Keep) -> list[int]:
    """Steps of the checkpoints that `keep` does not name, and of incomplete ones; none until enough
    newer ones are complete."""
    complete = saved_steps(directory)
    last = complete[-max(keep.last, 1) :]
    if not any(keep) or len(last) < keep.last:
        return []
    protected = {step for step in complete if keep.every and step % keep.every == 0}
    if keep.best:
        folders = (step_folder(directory, step) for step in complete)
        losses = zip((read_run(folder).get("valid_loss") for folder in folders), complete)
        finite = [(x, -step) for x, step in losses if isinstance(x, float) and isfinite(x)]
        protected |= {-step for _, step in sorted(finite)[: keep.best]}
    return [step for step in named_steps(directory) if step < last[0] and step not in protected]


def commit(temporary: Path, keep: Keep, pinned: Path | None = None) -> Path:
    """Makes a finished `.tmp` folder the newest checkpoint, and removes those that neither `keep`
    nor `pinned` names.

    Nothing is removed before all of the new checkpoint is on disk; the tensor files already are.
    Checkpoints of later steps, from before the run went back, are renamed to `.left`, so that
    `auto` does not resume from them.

    Returns:
        The folder of the checkpoint.
    """
    write_manifest(temporary)
    for path in temporary.iterdir():
        if path.suffix != TENSOR_SUFFIX:
            _sync(path)
    _sync(temporary)
    final = temporary.with_suffix("")
    directory, step = final.parent, int(final.name.removeprefix("step-"))
    set_aside_later(directory, step)
    replaced = [final.rename(_unused(final, _REPLACED_SUFFIX))] if _exists(final) else []
    temporary.rename(final)
    _sync(directory)
    point_latest_to(final)
    for folder in replaced + [step_folder(directory, old) for old in _removable(directory, keep)]:
        if pinned is None or folder.resolve() != pinned.resolve():
            _remove(folder)
    return final


def point_latest_to(folder: Path) -> None:
    """Writes the name of a checkpoint to `latest` in the same directory."""
    write_whole(folder.parent / "latest", folder.name + "\n")


def set_aside_later(directory: Path, step: int) -> None:
    """Renames complete checkpoints and exports of later steps, from before the run went back, to
    `.left`."""
    exports = directory / EXPORTS
    saved, exported = saved_after(directory, step), named_steps(exports)
    for later in sorted({*saved, *(number for number in exported if number > step)}):
        checkpoint, export = step_folder(directory, later), step_folder(exports, later)
        # a checkpoint and its export get the same suffix
        suffix = _unused_suffix(LEFT_SUFFIX, checkpoint, export)
        for folder in [checkpoint] * (later in saved) + [export] * (later in exported):
            folder.rename(folder.with_name(folder.name + suffix))


def set_aside(folder: Path) -> None:
    """Renames a folder to `.left`."""
    folder.rename(_unused(folder, LEFT_SUFFIX))


def recover(directory: Path) -> list[str]:
    """Repairs a directory after an interrupted save; no run may be writing there.

    An interrupted removal is finished. A complete `.tmp` folder becomes a checkpoint, unless later
    steps have been saved; others are removed, to free the disk. If a step was being saved again and
    the new checkpoint is incomplete, the old one gets its name back.

    Returns:
        Lines for the log: what was done.
    """
    notes = []
    for removed in sorted(directory.glob(f"step-*{_REMOVED_SUFFIX}*")):
        _remove(removed)
        notes.append(f"{removed} is now removed: its removal was interrupted")
    for temporary in sorted(directory.glob(f"step-*{_WRITING_SUFFIX}")):
        if not (match := _NAME.fullmatch(temporary.stem)):
            continue
        if checkpoint_error(temporary) is None and not saved_after(directory, int(match[1])):
            folder = commit(temporary, Keep())
            notes.append(
                f"{folder} was complete and only lacked its name: its save was interrupted"
            )
        else:
            _remove(temporary)
            notes.append(f"{temporary} is removed: its save did not finish")
    for old in sorted(directory.glob(f"step-*{_REPLACED_SUFFIX}*")):
        final = old.with_suffix("")
        if not _exists(final) and checkpoint_error(old) is None:
            notes.append(
                f"{old.rename(final)} is the old one: saving its step again was interrupted"
            )
        elif checkpoint_error(final) is None:
            _remove(old)
    return notes


def _exists(path: Path) -> bool:
    """Whether a path exists, also as a broken link."""
    return path.exists() or path.is_symlink()


def _unused(folder: Path, suffix: str) -> Path:
    """The folder's name with the first of `suffix`, `suffix`2, ... that does not exist yet."""
    return folder.with_name(folder.name + _unused_suffix(suffix, folder))


def _unused_suffix(suffix: str, *folders: Path) -> str:
    """The first of `suffix`, `suffix`2, ... with which none of the folders exists yet."""
    suffixes = itertools.chain([suffix], (f"{suffix}{count}" for count in itertools.count(2)))
    return next(
        text
        for text in suffixes
        if not any(_exists(folder.with_name(folder.name + text)) for folder in folders)
    )


def _remove(folder: Path) -> None:
    """Removes an old checkpoint, or only the link if it is one; warns where that is impossible.

    The folder is renamed first, so that an interrupted removal is recognized.
    """
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        if _NAME.fullmatch(folder.name):
            folder = folder.rename(_unused(folder, _REMOVED_SUFFIX))
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(
            f"{folder} cannot be removed ({error}); remove it yourself to free the disk",
            stacklevel=2,
        )


def read_run(folder: Path) -> dict:
    """Reads run.json of a complete checkpoint: `format`, `version`, `progress` and `config`
    (train/state.py).

    Raises:
        Refused: the file is damaged, or a newer version wrote it.
    """
    if damage := checksum_error(folder, RUN_FILE):
        raise Refused(damage)
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
    """Configuration of the run that saved a complete checkpoint; keys of later versions keep their
    defaults.

    Raises:
        Refused: run.json is damaged, or holds no configuration; names the file and the keys.
    """
    return config_from_record(folder, read_run(folder).get("config"))


def config_from_record(folder: Path, saved: Any, groups: Mapping[str, Any] | None = None) -> Config:
    """A configuration as run.json holds it; raises as `saved_config`.

    Args:
        saved: value of `config` in run.json.
        groups: groups and keys to read, as nested mappings, while others are ignored; None = all,
            while unknown ones are refused.
    """
    if not isinstance(saved, dict) or not all(
        isinstance(group, dict) or name == "plugins" for name, group in saved.items()
    ):
        raise Refused(f"{folder / RUN_FILE} is invalid: its config is no object of groups of keys")
    if groups is not None:
        saved = _common_keys(saved, groups) | {"plugins": saved.get("plugins", [])}
    from megatron5d.config.checks.values import VALUE_CHECKS

    checks = [check for check in VALUE_CHECKS if check.knobs[0].startswith("model.")]
    try:
        config = from_dict(saved)
        reasons = [fault.reason for check in checks if (fault := check.run(config, 1))]
        # lists of layers are built before any file is compared
        if config.model.num_layers > _MAX_LAYERS:
            reasons.append(f"model.num_layers = {config.model.num_layers} is above {_MAX_LAYERS}")
    except ConfigError as error:
        reasons = [fault.reason for fault in error.faults]
    if reasons:
        raise Refused(f"{folder / RUN_FILE} is invalid: {'; '.join(reasons)}")
    return config


def _common_keys(values: Any, known: Any) -> Any:
    """The keys of one nested mapping that another has, too; the values where one is no mapping."""
    if not (isinstance(values, dict) and isinstance(known, Mapping)):
        return values
    return {key: _common_keys(value, known[key]) for key, value in values.items() if key in known}

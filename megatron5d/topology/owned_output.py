"""Outputs that a tool owns while it writes them in several steps.

Two writers of one folder, or of one pair of token files, would mix their files without an error.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megatron5d.config.json_file import write_whole
from megatron5d.topology.lock_file import LockFile

STAGING = "unfinished.tmp"  # folder within an output that its files leave when all are written
_MOVED = "moved.json"  # in that folder: names of the files that are being moved out of it

Output = str | os.PathLike[str]


@contextmanager
def owned(
    *outputs: Output, option: str = "--out", is_folder: bool = False, checkpoints: bool = False
) -> Iterator[Callable[[], None]]:
    """Locks outputs against other processes and threads, whatever they write there.

    The lock file of an output stands beside it (`OUTPUT.lock`), so that a folder that must be empty
    stays empty. At the end, folders that were made for the outputs are removed if they are empty.

    Args:
        outputs: files, prefixes of files, or folders.
        option: command-line option or key that names the outputs, for messages.
        is_folder: the outputs are folders.
        checkpoints: the outputs are directories of checkpoints, which runs lock, too.

    Yields:
        A function that raises OSError where another process has taken over an output.

    Raises:
        ValueError: a file stands where a folder is required.
        OSError: another process or thread writes to an output, or it cannot be locked.
    """
    paths = {Path(os.path.realpath(output)): output for output in outputs}
    new_folders = []
    for path in paths:
        for folder in (path, *path.parents) if is_folder or checkpoints else path.parents:
            if folder.exists() and not folder.is_dir():
                raise ValueError(f"{option} requires a folder (got {folder}, which is a file)")
            if not folder.exists():
                new_folders.append(folder)
    try:
        with ExitStack() as on_exit:
            locks = []
            for path, output in sorted(paths.items()):
                for file in [_lock_file(path)] + [path / "run.lock"] * checkpoints:
                    locks.append(LockFile(file, f"{option} {output}"))
                    on_exit.callback(locks[-1].release)

            def check() -> None:
                for lock in locks:
                    lock.check()

            yield check
    finally:
        for folder in sorted(new_folders, reverse=True):
            with suppress(OSError):
                folder.rmdir()


def _lock_file(path: Path) -> Path:
    """The lock file of an output: beside it, or within a folder whose parent is read-only."""
    if path.is_dir() and not os.access(path.parent, os.W_OK) or not path.name:
        return path / ".lock"
    return path.with_name(f"{path.name}.lock")


@contextmanager
def staged(
    out: Output, check_vacant: Callable[[Path], None], option: str = "--out"
) -> Iterator[Path]:
    """Owns a folder, and gives one within it, whose files move to `out` at the end, weights last.

    An error leaves nothing in `out`. What a killed process has left there is removed by the next.

    Args:
        check_vacant: raises ValueError where `out` has files that the new ones would replace.
        option: as in `owned`.
    """
    with owned(out, option=option, is_folder=True) as check:
        folder, staging = Path(out), Path(out) / STAGING
        _remove_unfinished(folder)
        check_vacant(folder)
        try:
            staging.mkdir(parents=True)
            yield staging
            check()
            check_vacant(folder)
            paths = sorted(staging.iterdir(), key=_weights_last)
            moved = [path.name for path in paths if not (folder / path.name).exists()]
            write_whole(staging / _MOVED, json.dumps(moved))
            for path in paths:
                path.rename(folder / path.name)
        finally:
            _remove_unfinished(folder)


def _weights_last(path: Path) -> tuple[bool, bool, str]:
    return path.is_file(), path.match("*.safetensors*"), path.name


def _remove_unfinished(out: Path) -> None:
    """Removes the staging folder, and the files that left it unless all of them have."""
    staging = out / STAGING
    try:
        moved = json.loads((staging / _MOVED).read_bytes())
    except (OSError, ValueError):
        moved = []
    if any((staging / name).exists() for name in moved):
        for name in moved:
            if not (staging / name).exists():
                _remove(out / name)
    shutil.rmtree(staging, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_not_read(
    replaced: Iterable[Output], read: Iterable[Output], option: str = "--out"
) -> None:
    """Makes sure that a tool does not replace a file that it reads, also under another name.

    Raises:
        ValueError: it would; names the file.
    """
    sources = {os.path.realpath(path): path for path in read}
    for path in replaced:
        if source := sources.get(os.path.realpath(path)):
            link = "" if Path(source) == Path(path) else f", under the name {source}"
            raise ValueError(f"{option} {path} is one of the files that are read{link}")

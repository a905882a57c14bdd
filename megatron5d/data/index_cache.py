"""Arrays that are built once per node and mapped by every rank, under a name made of all they were built from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


def cached_arrays(
    folder: str | os.PathLike[str], inputs: dict, names: Collection[str], build: Callable[[], Arrays]
) -> Arrays:
    """Returns `build()`, from disk where somebody has built it before.

    Many ranks may call this at once: one builds under a lock while the others wait, and where the file system has no
    locks all build and the first to rename wins. A folder gets its final name when it is whole; where files have been
    deleted from it since, as clusters do on scratch file systems, it is built again.

    Args:
        folder: of the cache; made when missing.
        inputs: everything the arrays depend on, as JSON values.
        names: of the arrays.
        build: makes the arrays.

    Returns:
        name -> array; mapped read-only where the folder can be written, else in memory.

    Raises:
        ValueError: what was built before is damaged; names its folder.
    """
    folder = Path(folder)
    text = json.dumps(inputs, sort_keys=True)
    target = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if _has_all(target, names):
        return _load(target, names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock")):
            if not _has_all(target, names):
                shutil.rmtree(target, ignore_errors=True)
                _store(target, build(), text)
    except OSError as error:
        warnings.warn(
            f"data.cache_dir: {folder} cannot be written ({error}); every rank builds its own sample index in memory",
            stacklevel=2,
        )
        return build()
    return _load(target, names)


def _has_all(target: Path, names: Collection[str]) -> bool:
    return all((target / f"{name}.npy").is_file() for name in names)


def _load(target: Path, names: Collection[str]) -> Arrays:
    try:
        return {name: np.load(target / f"{name}.npy", mmap_mode="r") for name in names}
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"data.cache_dir: {target} is damaged ({error}); remove it, and it is built again") from error


def _store(target: Path, arrays: Arrays, inputs: str) -> None:
    temporary = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        temporary.chmod(0o755)  # mkdtemp makes it private, but the cache is shared with other users of the data
        for name, array in arrays.items():
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())  # a loss of power could otherwise keep the name and lose the content
        (temporary / "inputs.json").write_text(inputs)
        os.rename(temporary, target)
    except OSError:
        if not target.is_dir():  # else another rank was first, which is as good
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an advisory lock that dies with its process; does nothing where there are no locks."""
    with path.open("a") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass  # renaming is atomic anyway: the lock only saves work
        yield

"""Says which code a run is made of: version, commit, changes since. Kept beside its log and in its
checkpoints."""

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import megatron5d
from megatron5d.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parents[1]
# that git does not know yet and that a patch takes in
_NEW_FILES = ("*.py", "*.yaml", "*.sh", "*.sbatch")


def source_hash() -> str:
    """Returns a hash of every Python file that a run executes, of its path and its text."""
    total = hashlib.sha256()
    rooms = (PACKAGE, PACKAGE / "kernels")  # a link, which rglob does not follow
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        total.update(
            f"{path.relative_to(PACKAGE)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return total.hexdigest()


def _git(*arguments: str, codes: tuple[int, ...] = (0,)) -> str | None:
    """Returns what git says about this checkout, from whatever folder the run was started; None
    where there is none."""
    # its owner may be another user
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode in codes else None


@cache  # the code that this process runs is that of its start
def commit() -> str | None:
    """Returns this checkout's commit, `-dirty` where tracked files changed; None outside of a
    checkout."""
    top = _git("rev-parse", "--show-toplevel")
    # site-packages inside of somebody else's checkout
    if top is None or Path(top).resolve() != ROOT:
        return None
    head = _git("rev-parse", "HEAD")
    return head and head + (
        "-dirty" if _git("status", "--porcelain", "--untracked-files=no") else ""
    )


def versions() -> dict[str, str | None]:
    """Returns the versions of what decides on numbers and speed."""
    return {
        "megatron5d": megatron5d.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def code_here() -> dict[str, Any]:
    """Returns version, commit and hash of the code, and of what it runs on."""
    changes = _git("status", "--porcelain", "--", "kernels", "megatron5d") if commit() else None
    return {
        "source_hash": source_hash(),
        "commit": (commit() or "").removesuffix("-dirty") or None,
        "dirty": None if changes is None else bool(changes),
        "versions": versions(),
    }


def write_provenance(folder: Path, config: Config) -> None:
    """Writes config.yaml, and the changes since the commit, new source files too, as
    `code/<commit>-<hash>.patch`.

    `git checkout <commit> && git apply FILE` restores the code; outside of git there is no patch. A
    run resumed with other code gets another file.

    Raises OSError: it cannot be written.
    """
    from megatron5d.config.load import to_yaml  # Hydra's, which only a run with a folder needs

    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    if (name := commit()) is None:
        return
    changes = [_git("diff", "--no-ext-diff", "--no-color", "HEAD") or ""]
    new = (_git("ls-files", "--others", "--exclude-standard", "--", *_NEW_FILES) or "").splitlines()
    changes += [
        _git("diff", "--no-color", "--no-index", "/dev/null", path, codes=(0, 1)) or ""
        for path in new
    ]
    patch = "".join(f"{each}\n" for each in changes if each)
    name = (
        f"{name.removesuffix('-dirty')[:12]}-{hashlib.sha256(patch.encode()).hexdigest()[:8]}.patch"
    )
    (folder / "code" / name).write_text(f"commit {commit()}\nversions {versions()}\n\n{patch}")

"""Records which code a run uses: version, commit, uncommitted changes.

The record stands beside the run's log and in its checkpoints.
"""

import hashlib
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

import megatron5d
from megatron5d.config.plugins import LOADED
from megatron5d.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parents[1]
_NEW_FILES = ("*.py", "*.yaml", "*.sh", "*.sbatch")  # untracked files that a patch includes


def source_hash() -> str:
    """Hash of the paths and texts of all Python files that a run executes, plugins included."""
    digest = hashlib.sha256()
    for source in sorted(LOADED.values()):
        digest.update(source.encode())
    folders = (PACKAGE, PACKAGE / "kernels")  # kernels is a link, which rglob does not follow
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        file_hash = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(PACKAGE)}\n{file_hash}\n".encode())
    return digest.hexdigest()


def _git(*arguments: str, codes: tuple[int, ...] = (0,)) -> str | None:
    """Output of git for this checkout, from any working directory; None outside of a checkout."""
    # The owner of the checkout may be another user.
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.rstrip("\n") if run.returncode in codes else None


@cache  # this process runs the code of its start
def commit() -> str | None:
    """Commit of this checkout, `-dirty` if tracked files changed; None outside of a checkout."""
    top = _git("rev-parse", "--show-toplevel")
    # An installed package may lie inside another project's checkout.
    if top is None or Path(top).resolve() != ROOT:
        return None
    head = _git("rev-parse", "HEAD")
    is_dirty = _git("status", "--porcelain", "--untracked-files=no")
    return head and head + ("-dirty" if is_dirty else "")


def versions() -> dict[str, str | None]:
    """Versions of the software that decides numbers and speed."""
    return {
        "megatron5d": megatron5d.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def code_here() -> dict[str, Any]:
    """Commit and hash of the code, and versions of what it runs on."""
    changes = _git("status", "--porcelain", "--", "kernels", "megatron5d") if commit() else None
    return {
        "source_hash": source_hash(),
        "commit": (commit() or "").removesuffix("-dirty") or None,
        "dirty": None if changes is None else bool(changes),
        "versions": versions(),
    }


def write_provenance(folder: Path, config: Config) -> None:
    """Writes config.yaml, plugins, and uncommitted changes as `code/<commit>-<hash>.patch`.

    The patch includes new source files: `git checkout <commit> && git apply FILE` restores the
    code. Outside of git there is no patch. A run that is resumed with other code gets another file.

    Raises:
        OSError: the folder is not writable.
    """
    # Hydra, which only a run with a folder needs.
    from megatron5d.config.load import to_yaml

    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    for path, source in LOADED.items():
        (folder / "code" / Path(path).name).write_text(source)
    if (name := commit()) is None:
        return
    diffs = [_git("diff", "--no-ext-diff", "--no-color", "HEAD")]
    new = _git("ls-files", "--others", "--exclude-standard", "--", *_NEW_FILES) or ""
    for path in new.splitlines():
        # git diff --no-index exits with 1 where the files differ
        diffs.append(_git("diff", "--no-color", "--no-index", "/dev/null", path, codes=(0, 1)))
    patch = "".join(f"{diff}\n" for diff in diffs if diff)
    patch_hash = hashlib.sha256(patch.encode()).hexdigest()[:8]
    file = folder / "code" / f"{name.removesuffix('-dirty')[:12]}-{patch_hash}.patch"
    file.write_text(f"commit {name}\nversions {versions()}\n\n{patch}")

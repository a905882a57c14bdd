"""What a parity certificate says about configuration and code, and whether it still belongs to them."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import megatron5d
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config

FORMAT = 1
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kernels", "megatron5d")
_PASSIVE = ("init", "checkpoint", "log")  # groups that say where a run's files are
_MASKS = ("document_mask", "eod_mask_loss")  # of data: what decides about numbers on any files


def configuration_hash(config: Config) -> str:
    """A hash of everything that decides about a run's numbers except its files: the same for a run on other data."""
    found = {group: keys for group, keys in to_dict(config).items() if group not in _PASSIVE}
    found["data"] = {key: found["data"][key] for key in _MASKS}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def source_hash() -> str:
    """A hash of every Python file that a run executes, of its path and its text."""
    total = hashlib.sha256()
    for path in sorted(path for room in SOURCES for path in (ROOT / room).rglob("*.py")):
        total.update(f"{path.relative_to(ROOT)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def _git(*arguments: str) -> str | None:
    """What git says about this checkout; None where there is none."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def code_here() -> dict[str, Any]:
    """Version, commit and hash of the code, and of what it runs on."""
    changes = _git("status", "--porcelain", "--", *SOURCES)
    return {
        "source_hash": source_hash(),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "versions": {
            "megatron5d": megatron5d.__version__, "torch": torch.__version__, "python": platform.python_version(),
        },
    }  # fmt: skip


def strays_of(certificate: dict[str, Any], config: Config, world: int) -> list[str]:
    """Why a certificate says nothing about this configuration on so many ranks, run by this code; [] where it does.

    Raises:
        ValueError: it is no certificate, or a newer version wrote it.
    """
    try:
        told = certificate["format"], certificate["verdict"], certificate["world"]
        hashes = certificate["configuration_hash"], certificate["code"]["source_hash"]
        commit = certificate["code"]["commit"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no parity certificate: it lacks {error}") from error
    if told[0] > FORMAT:
        raise ValueError(f"the certificate has format {told[0]}, this version reads up to {FORMAT}")
    faults = []
    if told[1] != "equal":
        faults.append(f"its verdict is {told[1]!r}")
    if told[2] != world:
        faults.append(f"it was made on {told[2]} ranks, not on {world}")
    if hashes[0] != configuration_hash(config):
        faults.append("the configuration is another one")
    if hashes[1] != source_hash():
        faults.append(f"the code is not the one that was checked (commit {commit})")
    return faults

"""Keeps a run from replacing what another run left in its log.dir. Needs no torch."""

import os
from itertools import count
from pathlib import Path

from yaml import YAMLError

from megatron5d.config.convert import leaves, spelled, value_of
from megatron5d.config.errors import Fault
from megatron5d.config.load import from_yaml
from megatron5d.config.schema import Config


def log_folder_faults(config: Config, world: int) -> list[Fault]:
    """Refuses a log.dir that holds the configuration of another run, which this one would replace.

    The run is the same if its checkpoints are in the same place, seen from log.dir, or if nothing
    but a restart can tell the two apart.
    """
    folder = config.log.dir
    if folder is None:
        return []
    file = Path(folder) / "config.yaml"
    try:
        previous = from_yaml(file.read_text())
    except (OSError, ValueError, YAMLError):
        return []  # there is none, or nothing in it could be lost
    directory = _relative_checkpoints(config)
    if previous == config or directory is not None and directory == _relative_checkpoints(previous):
        return []
    key = "checkpoint.dir"
    if previous.checkpoint.dir == config.checkpoint.dir:
        key = next(key for key in leaves() if value_of(config, key) != value_of(previous, key))
    saved, current = (spelled(value_of(run, key)) for run in (previous, config))
    reason = f"log.dir={folder} holds another run: {file} has {key} = {saved} (got {current})"
    fix = f"log.dir={_unused(folder)}"
    if previous.checkpoint.dir is not None:
        fix += f", or checkpoint.dir={previous.checkpoint.dir} to continue that run"
    return [Fault("log-dir-is-free", ("log.dir",), reason, fix, True)]


def _relative_checkpoints(config: Config) -> str | None:
    """checkpoint.dir as seen from log.dir, which a moved folder and another spelling keep."""
    folder, log = config.checkpoint.dir, config.log.dir
    return folder and os.path.relpath(os.path.realpath(folder), os.path.realpath(log or "."))


def _unused(folder: str) -> str:
    names = (f"{folder.rstrip('/')}-{number}" for number in count(2))
    return next(name for name in names if not os.path.exists(name))

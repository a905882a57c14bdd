"""Configurations of runs that are planned or checked, for tools and reports.

An invalid one is rejected without torch, whose import takes seconds, wherever that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron5d.config.convert import to_dict
from megatron5d.config.errors import Fault
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.registry import schedule_faults


def planned_config(overrides: Sequence[str], world: int, files: bool = False) -> Config:
    """The configuration that pretrain.py would use for a command line.

    Args:
        overrides: as pretrain.py takes them.
        world: number of ranks.
        files: also check the files that the configuration names.

    Raises:
        ConfigError: it cannot run.
        ValueError: the number of ranks is below 1.
    """
    _check_world(world)
    return load_config(
        overrides,
        world=world,
        model_readers=MODEL_READERS,
        options=[schedule_faults],
        checks=[_pipeline_faults],
        files=files,
    )


def unplanned_config(overrides: Sequence[str], world: int) -> Config:
    """The configuration of a command line without checks, because its layout is still to be found.

    Args:
        overrides, world: as in `planned_config`.

    Raises:
        ConfigError: a key or value is misspelled.
        ValueError: the number of ranks is below 1.
    """
    _check_world(world)
    return load_config(overrides, model_readers=MODEL_READERS)


def _check_world(world: int) -> None:
    if world < 1:
        raise ValueError(f"--world requires at least 1 rank (got {world})")


def model_from_hf(folder: str) -> Mapping[str, Any]:
    """Fields of ModelConfig from the config.json of a Hugging Face folder."""
    from megatron5d.checkpoint.hf.import_config import model_config_from_hf

    return model_config_from_hf(folder)


def model_from_checkpoint(folder: str) -> Mapping[str, Any]:
    """Fields of ModelConfig from the run.json of a checkpoint, or the newest of a folder."""
    from megatron5d.checkpoint.folder import (
        RUN_FILE,
        newest_checkpoint,
        other_place,
        saved_config,
    )

    path = Path(folder)
    checkpoint = path if (path / RUN_FILE).is_file() else newest_checkpoint(path)
    if checkpoint is None:
        hint = other_place(path)
        raise ValueError(f"it is not a checkpoint, nor a folder with a complete one{hint}")
    return to_dict(saved_config(checkpoint).model)


MODEL_READERS = {"from_hf": model_from_hf, "from_checkpoint": model_from_checkpoint}


def _pipeline_faults(config: Config, world: int) -> Sequence[Fault]:
    from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults

    return pipeline_faults(config, world)

"""Configurations of runs that are only asked about, for tools/plan.py, tools/parity.py and reports.

A wrong one is refused without torch, whose import takes seconds, wherever that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron5d.config.errors import Fault
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.registry import schedule_faults


def planned_config(overrides: Sequence[str], world: int, files: bool = False) -> Config:
    """Returns what pretrain.py would make of a command line.

    Args:
        overrides: as pretrain.py takes them.
        world: number of ranks.
        files: whether the files of such a run are checked; they need not be there.

    Raises:
        ConfigError: it could not run.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(
        overrides,
        world=world,
        model_from_hf=model_from_hf,
        options=[schedule_faults],
        checks=[_pipeline_faults],
        files=files,
    )


def unplanned_config(overrides: Sequence[str], world: int) -> Config:
    """Returns what a command line says, before anybody has asked whether it could run: a layout is
    still to be found.

    Args:
        overrides, world: as in `planned_config`.

    Raises:
        ConfigError: it is spelled wrong.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(overrides, model_from_hf=model_from_hf)


def _check_world(world: int) -> None:
    if world < 1:
        raise ValueError(f"--world {world}: a run has at least 1 rank")


def model_from_hf(folder: str) -> Mapping[str, Any]:
    """Fields of ModelConfig that a Hugging Face folder's config.json gives."""
    from megatron5d.checkpoint.hf.import_config import model_config_from_hf

    return model_config_from_hf(folder)


def _pipeline_faults(config: Config, world: int) -> Sequence[Fault]:
    from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults

    return pipeline_faults(config, world)

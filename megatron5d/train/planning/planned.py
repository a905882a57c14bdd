"""Configurations of runs that are only asked about, for tools/plan.py and tools/parity.py."""

from __future__ import annotations

from collections.abc import Sequence

from megatron5d.checkpoint.hf.weights import model_config_from_hf
from megatron5d.config.checks.check import Law
from megatron5d.config.checks.files import FILE_LAWS
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.train.pipeline_layout import pipeline_faults, schedule_faults


def planned_config(overrides: Sequence[str], world: int, without: Sequence[Law] = FILE_LAWS) -> Config:
    """What pretrain.py would make of a command line.

    Args:
        overrides: as pretrain.py takes them.
        world: number of ranks.
        without: laws that are not asked; the files of such a run need not be there.

    Raises:
        ConfigError: it could not run.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(
        overrides,
        world=world,
        model_from_hf=model_config_from_hf,
        options=[schedule_faults],
        checks=[pipeline_faults],
        without=without,
    )


def unplanned_config(overrides: Sequence[str], world: int) -> Config:
    """What a command line says, before anybody has asked whether it could run: a layout is still to be found.

    Args:
        overrides, world: as in `planned_config`.

    Raises:
        ConfigError: it is spelled wrong.
        ValueError: no rank at all.
    """
    _check_world(world)
    return load_config(overrides, model_from_hf=model_config_from_hf)


def _check_world(world: int) -> None:
    if world < 1:
        raise ValueError(f"--world {world}: a run has at least 1 rank")

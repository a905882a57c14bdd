"""Trains a model: `python pretrain.py experiment=... [group.key=value ...]`, alone or under a
launcher."""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from megatron5d.train.signals import EndOnSignals, StopFlag

if __name__ == "__main__":
    # until the process ends: the imports below, and torch's later, take seconds
    EndOnSignals().__enter__()

from megatron5d.config.checks import run_checks
from megatron5d.config.command_line import print_anywhere
from megatron5d.config.errors import REFUSED, ConfigError, Fault, Refused, refuse
from megatron5d.config.load import answer_help, load_config
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.registry import schedule_faults
from megatron5d.topology.launcher import (
    Environment,
    rank_0_listens,
    read_environment,
    speaks_for_node,
)
from megatron5d.train.preflight.resume import architecture_faults

if TYPE_CHECKING:
    from megatron5d.topology.process import Process
    from megatron5d.train.meeting import Meeting

if __name__ == "__main__":
    # a rank killed by a signal prints where it was, such as a bus error in a mapped file
    faulthandler.enable()
    print_anywhere()
    answer_help(sys.argv[1:])


@EndOnSignals()  # for those that import main, too
def main(argv: Sequence[str]) -> int:
    """Runs one rank of a job. A wrong configuration is refused without torch where that is
    possible.

    Returns the exit code: 0 finished; 2 refused before anything was started; 75 stopped on a
    signal, all steps saved. Raises SystemExit: the configuration is refused (2), or the run fails
    for a reason that its message names (1).
    """
    try:
        environment = read_environment()
    except ValueError as error:
        if speaks_for_node():
            print(f"the launcher's variables are wrong: {error}", file=sys.stderr)
        return REFUSED
    config, trouble = Config(), None
    try:
        config = _load(argv, environment.world, environment.rank)
    except ConfigError as error:
        trouble = error
        everywhere = not all(fault.local for fault in error.faults)
        if environment.world == 1 or (everywhere and not rank_0_listens(environment)):
            refuse(error.faults, environment.rank)
    except Exception as error:
        _meeting(environment).crash(error)
        raise

    meeting = _meeting(environment)
    if trouble is not None:
        meeting.refuse(trouble.faults)
    return _run(config, meeting)


def _meeting(environment: Environment) -> Meeting:
    from megatron5d.train.meeting import Meeting

    return Meeting(
        environment,
        lambda theirs, world: (
            run_checks(theirs, world) or _late_faults(theirs, world, environment.rank)
        ),
    )


def _load(argv: Sequence[str], world: int, rank: int = 0, late: Any = None) -> Config:
    return load_config(
        argv,
        world=world,
        rank=rank,
        model_from_hf=_model_from_hf,
        options=[schedule_faults],
        checks=[architecture_faults, late or partial(_late_faults, rank=rank)],
    )


def _model_from_hf(folder: str) -> Mapping[str, Any]:
    from megatron5d.checkpoint.hf.import_config import model_config_from_hf

    return model_config_from_hf(folder)


def _late_faults(config: Config, world: int, rank: int = 0) -> list[Fault]:
    """Returns what is checked with torch, of a configuration whose model and layout are legal."""
    from megatron5d.planning.fit import memory_faults
    from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
    from megatron5d.train.preflight.data import data_faults, routing_faults
    from megatron5d.train.preflight.kernels import device_faults
    from megatron5d.train.preflight.parameters import glob_faults
    from megatron5d.train.state import checkpoint_faults

    checks = [
        pipeline_faults,
        device_faults,
        data_faults,
        routing_faults,
        glob_faults,
        checkpoint_faults,
        memory_faults,
    ]
    if config.checkpoint.hf_export is not None:
        # tokenizers and families: few runs need them
        from megatron5d.train.hf_export import export_faults

        checks.insert(-1, export_faults)
    if rank == 0 and config.log.wandb.mode != "disabled":
        # W&B takes a second to import: rank 0 logs
        from megatron5d.train.monitoring.trackers import wandb_faults

        checks.append(wandb_faults)
    return [fault for check in checks for fault in check(config, world)]


def _run(config: Config, meeting: Meeting) -> int:
    """Trains. What is for the user to mend ends in one message, all else in a call stack."""
    from torch import OutOfMemoryError

    from megatron5d.pipeline_parallel.executor import PipelineError
    from megatron5d.planning.fit import ways_out
    from megatron5d.topology.process import start_process, stop_process
    from megatron5d.train.guard import add_note, crash_message, ran_out_of_memory

    environment = meeting.environment
    try:
        config = meeting.agree(config)
        process = start_process(config.parallel.timeout_s, environment, meeting.store)
        try:
            return plan_and_train(config, process, meeting.notes)
        finally:
            stop_process()
    except (OSError, ValueError, ArithmeticError, OutOfMemoryError, PipelineError) as error:
        if ran_out_of_memory(error):
            add_note(error, ways_out(config, environment.world))
        said = (
            None
            if config.log.traceback
            else crash_message(error, environment.rank, environment.world)
        )
        if said is None:
            raise
        if isinstance(error, Refused):
            print(said, file=sys.stderr, flush=True)
            raise SystemExit(REFUSED) from error
        raise SystemExit(said) from error


def plan_and_train(config: Config, process: Process, notes: Sequence[str] = ()) -> int:
    """Obtains the pipeline's layout and the predictions, and trains with them.

    Returns the exit code, as of `train`.

    Comm: that of `agreed_layout` and `train`.
    """
    from megatron5d.planning.schedule_search.auto_schedule import agreed_layout
    from megatron5d.planning.time.predict import prediction_of
    from megatron5d.topology.all_ranks import on_every_rank
    from megatron5d.train.loop import train

    with StopFlag() as stop:
        layout = agreed_layout(config, process)
        predicted = on_every_rank(lambda: prediction_of(config, process, layout))
        return train(config, process, layout, predicted, stop, notes)


class _Undecided(Exception):
    """Nothing is wrong so far; the rest is checked with torch."""


def before_fork(argv: Sequence[str], world: int) -> None:
    """Prepares launch/fork.py's ranks: refuses once what needs no torch, then imports what all
    ranks need. Raises
    SystemExit: the configuration is refused (2), or `--help` or `--cfg` is answered (0)."""
    print_anywhere()

    def late(*_: object) -> list[Fault]:
        raise _Undecided

    try:
        _load(argv, world, late=late)
    except _Undecided:
        import_training()
    except ConfigError as error:
        if not all(fault.local for fault in error.faults):
            refuse(error.faults)
        import_training()


def import_training() -> None:
    """Imports torch and all that trains, which takes seconds."""
    for name in ("train.loop", "train.meeting", "planning.time.predict"):
        importlib.import_module(f"megatron5d.{name}")


def run() -> NoReturn:
    """Runs one rank with this process's arguments and ends the process."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the training loop, or a second Ctrl-C within it
        print(
            "ended by SIGINT; what was done since the last checkpoint is lost",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(130)  # 128 + SIGINT, as in a shell


if __name__ == "__main__":
    run()

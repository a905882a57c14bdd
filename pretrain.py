"""Trains a model: `python pretrain.py experiment=... [group.key=value ...]`.

This is one rank of a job, started by itself or by a launcher.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from megatron5d.train.signals import EndOnSignals, StopFlag

if __name__ == "__main__":
    # from the first moment: the imports below, and later torch's, take seconds
    EndOnSignals().__enter__()

from megatron5d.config.checks import run_checks
from megatron5d.config.command_line import print_anywhere
from megatron5d.config.errors import REFUSED, ConfigError, Fault, Refused, refuse
from megatron5d.config.load import Check, answer_help, leave_model_legal, load_config
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.registry import schedule_faults
from megatron5d.planning.planned_config import MODEL_READERS
from megatron5d.topology.launcher import (
    Environment,
    is_first_on_node,
    rank_0_listens,
    read_environment,
)
from megatron5d.train.preflight.log_folder import log_folder_faults
from megatron5d.train.preflight.resume import architecture_faults

if TYPE_CHECKING:
    from megatron5d.topology.process import Process
    from megatron5d.train.agreement import ConfigAgreement

if __name__ == "__main__":
    # a rank killed by a signal, such as SIGBUS in a mapped file, prints its stack
    faulthandler.enable()
    print_anywhere()
    answer_help(sys.argv[1:])


@EndOnSignals()  # also for programs that import main
def main(argv: Sequence[str]) -> int:
    """Runs one rank of a job. Wherever possible, a wrong configuration is refused without torch.

    Returns:
        The exit code: 0 finished; 2 the launcher's variables are wrong; 75 stopped on a signal
        with all steps saved.

    Raises:
        SystemExit: the configuration is refused (2), or the run fails for a reason that its message
            names (1).
    """
    try:
        environment = read_environment()
    except ValueError as error:
        if is_first_on_node():
            print(f"the launcher's variables are wrong: {error}", file=sys.stderr)
        return REFUSED

    late_checks = partial(_late_faults, rank=environment.rank)
    try:
        config = _load(argv, environment.world, environment.rank, [late_checks])
    except Exception as error:
        if isinstance(error, ConfigError) and _all_ranks_refuse(error, environment):
            refuse(error.faults, environment.rank)
        _agreement(environment).withdraw(error)
        raise
    return _train_with_others(config, _agreement(environment))


def _load(argv: Sequence[str], world: int, rank: int = 0, checks: Sequence[Check] = ()) -> Config:
    return load_config(
        argv,
        world=world,
        rank=rank,
        model_readers=MODEL_READERS,
        options=[schedule_faults],
        checks=[architecture_faults, log_folder_faults, *checks],
    )


def _late_faults(config: Config, world: int, rank: int) -> list[Fault]:
    """Faults that are found with torch, of a configuration whose model and layout are legal."""
    from megatron5d.planning.fit import memory_faults
    from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
    from megatron5d.train.preflight.checks import run_faults

    return [
        *pipeline_faults(config, world),
        *run_faults(config, world, rank),
        *memory_faults(config, world),
    ]


def _all_ranks_refuse(error: ConfigError, environment: Environment) -> bool:
    """Whether the other ranks refuse the configuration, too, so that none waits for this one."""
    if environment.world == 1:
        return True
    return error.concerns_all_ranks and not rank_0_listens(environment)


def _agreement(environment: Environment) -> ConfigAgreement:
    from megatron5d.train.agreement import ConfigAgreement

    def check(config: Config, world: int) -> list[Fault]:
        return run_checks(config, world) or _late_faults(config, world, environment.rank)

    return ConfigAgreement(environment, check)


def _train_with_others(config: Config, agreement: ConfigAgreement) -> int:
    """Joins the other ranks and trains. An error that the user can fix ends in one message."""
    from torch import OutOfMemoryError

    from megatron5d.pipeline_parallel.executor import PipelineError
    from megatron5d.planning.fit import suggestions
    from megatron5d.topology.process import start_process, stop_process
    from megatron5d.train.guard import add_note, crash_message, ran_out_of_memory

    environment = agreement.environment
    try:
        config = agreement.agree(config)
        process = start_process(config.parallel.timeout_s, environment, agreement.store)
        try:
            return plan_and_train(config, process, agreement.warnings)
        finally:
            stop_process()
    except (OSError, ValueError, ArithmeticError, OutOfMemoryError, PipelineError) as error:
        if ran_out_of_memory(error):
            add_note(error, suggestions(config, environment.world))
        text = crash_message(error, environment.rank, environment.world)
        if text is None or config.log.traceback:
            raise
        if isinstance(error, Refused):
            print(text, file=sys.stderr, flush=True)
            raise SystemExit(REFUSED) from error
        raise SystemExit(text) from error


def plan_and_train(config: Config, process: Process, notes: Sequence[str] = ()) -> int:
    """Obtains the pipeline's layout and the predictions, and trains with them.

    Args:
        notes: for the log.

    Returns:
        The exit code, as of `train`.

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


def before_fork(argv: Sequence[str], world: int) -> None:
    """Prepares the process from which launch/fork.py forks the ranks: checks what needs no torch
    and imports what all ranks need.

    Raises:
        SystemExit: the configuration is refused (2), or `--help` or `--cfg` is answered (0).
    """
    print_anywhere()
    try:
        _load(argv, world)
    except ConfigError as error:
        # the ranks refuse the rest, together with the faults of their late checks
        if error.concerns_all_ranks and not leave_model_legal(error.faults):
            refuse(error.faults)
    import_training()


def import_training() -> None:
    """Imports torch and all that trains, which takes seconds."""
    for name in ("train.loop", "train.agreement", "planning.time.predict"):
        importlib.import_module(f"megatron5d.{name}")


def run() -> NoReturn:
    """Runs one rank with this process's arguments and ends the process."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the training loop, or a second Ctrl-C within it
        print(
            "ended by SIGINT; all steps since the last checkpoint are lost",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(130)  # 128 + SIGINT, as in a shell


if __name__ == "__main__":
    run()

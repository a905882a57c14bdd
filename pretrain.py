"""Trains a model: `python pretrain.py experiment=... [group.key=value ...]`, alone or under a launcher."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Sequence

from megatron5d.train.signals import EndOnSignals

if __name__ == "__main__":
    EndOnSignals().__enter__()  # until the process ends: the imports alone take seconds

from megatron5d.config.errors import REFUSED, ConfigError, refuse
from megatron5d.config.load import answer_help, load_config
from megatron5d.config.schema import Config

if __name__ == "__main__":
    faulthandler.enable()  # a rank killed by a signal prints where it was, such as a bus error in a mapped file
    answer_help(sys.argv[1:])  # before the seconds that the imports below take

from torch import OutOfMemoryError

from megatron5d.checkpoint.hf.weights import model_config_from_hf
from megatron5d.pipeline_parallel.executor import PipelineError
from megatron5d.topology.process import start_process, stop_process
from megatron5d.topology.rendezvous import read_environment
from megatron5d.train.crash import crash_message
from megatron5d.train.loop import train
from megatron5d.train.monitoring.memory import memory_faults
from megatron5d.train.pipeline_layout import pipeline_faults, schedule_faults
from megatron5d.train.preflight import data_faults, device_faults, glob_faults
from megatron5d.train.state import checkpoint_faults


@EndOnSignals()  # for those that import main, too
def main(argv: Sequence[str]) -> int:
    """Runs one rank of a job.

    Args:
        argv: Hydra overrides.

    Returns:
        Exit code: 0 finished; 2 refused before anything was started; 75 stopped on a signal with all steps saved.

    Raises:
        SystemExit: the configuration is refused (2), or the run fails for a reason that its message names (1).
    """
    try:
        environment = read_environment()
    except ValueError as error:
        print(f"the launcher's variables are wrong: {error}", file=sys.stderr)
        return REFUSED
    try:
        config = load_config(
            argv,
            world=environment.world,
            rank=environment.rank,
            model_from_hf=model_config_from_hf,
            options=[schedule_faults],
            checks=[pipeline_faults, device_faults, data_faults, glob_faults, checkpoint_faults, memory_faults],
        )
    except ConfigError as error:
        refuse(error.faults, environment.rank, environment.local_rank)
    try:
        return _run(config)
    except (OSError, ValueError, ArithmeticError, OutOfMemoryError, PipelineError) as error:
        message = None if config.log.traceback else crash_message(error, environment.rank, environment.world)
        if message is None:
            raise
        raise SystemExit(message) from error


def _run(config: Config) -> int:
    process = start_process(config.parallel.timeout_s)
    try:
        return train(config, process)
    finally:
        stop_process()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before the training loop, or a second Ctrl-C within it
        print("ended by SIGINT; what was done since the last checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(130)  # 128 + SIGINT, as in a shell

"""What a run writes and no other run may: its checkpoints and its log. They are locked before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron5d.checkpoint.folder import recover
from megatron5d.checkpoint.lock_file import LockFile
from megatron5d.checkpoint.save import Saver
from megatron5d.config.load import to_yaml
from megatron5d.config.schema import Config
from megatron5d.topology.all_ranks import on_rank_0


@dataclass
class Outputs:
    """What rank 0 holds while the run goes on; all empty on other ranks.

    Args:
        lock: of checkpoint.dir; None where the run saves nothing.
        saver: writes to checkpoint.dir; set once it exists.
        notes: what was repaired in checkpoint.dir, for the log.
    """

    lock: LockFile | None = None
    saver: Saver | None = None
    notes: list[str] = field(default_factory=list)


@contextmanager
def locked_outputs(config: Config) -> Iterator[Outputs]:
    """Inside this context no other run writes to `checkpoint.dir` and `log.jsonl`.

    Raises:
        OSError: on every rank, if a run that is still going writes to one of them, or it cannot be written.

    Comm: a broadcast over the world; rank 0 may come to it as late as `lock_file.STALE_S`.
    """
    outputs = Outputs()
    with ExitStack() as on_exit:
        on_rank_0(lambda: _lock(config, outputs, on_exit))
        yield outputs


def _lock(config: Config, outputs: Outputs, on_exit: ExitStack) -> None:
    """Locks what the run writes, repairs checkpoint.dir, and writes the configuration to log.dir."""
    if config.checkpoint.dir is not None:
        folder = Path(config.checkpoint.dir)
        outputs.lock = LockFile(folder / "run.lock", f"checkpoint.dir = {folder}")
        on_exit.callback(_unlock_checkpoints, outputs)
        outputs.notes += recover(folder)
    if config.log.jsonl is not None:
        log = Path(config.log.jsonl)
        on_exit.callback(LockFile(log.with_name(f"{log.name}.lock"), f"log.jsonl = {log}").release)
    if config.log.dir is not None:
        folder = Path(config.log.dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))


def _unlock_checkpoints(outputs: Outputs) -> None:
    """Releases checkpoint.dir; while a save goes on in the background it stays locked until the process ends."""
    if outputs.lock is not None and not (outputs.saver is not None and outputs.saver.busy):
        outputs.lock.release()

"""The places that a run alone writes to, its checkpoints and its log: claimed and in order before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from megatron5d.checkpoint.folder import recover
from megatron5d.checkpoint.save import Saver
from megatron5d.config.load import to_yaml
from megatron5d.config.schema import Config
from megatron5d.topology.claim import Claim

CLAIM = "run.lock"  # in checkpoint.dir; beside a log, as its suffix: log.jsonl.lock


@dataclass
class Places:
    """What rank 0 holds, nothing on other ranks.

    Args:
        checkpoints: the claim of checkpoint.dir.
        saver: what writes there, once there is one.
        notes: what was found there, for the log.
    """

    checkpoints: Claim | None = None
    saver: Saver | None = None
    notes: list[str] = field(default_factory=list)


@contextmanager
def places(config: Config) -> Iterator[Places]:
    """Within, no other run writes to this one's `checkpoint.dir` and `log.jsonl`.

    Raises:
        OSError: a run that is still going has one of them, or it cannot be written; on every rank.

    Comm: a broadcast over the world, which rank 0 may come to late (topology/claim.py).
    """
    held, fault = Places(), list[str | None]([None])
    with ExitStack() as claims:
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                _claim(config, held, claims)
            except OSError as error:
                fault = [str(error)]
        if dist.is_initialized():
            dist.broadcast_object_list(fault, src=0)
        if fault[0] is not None:
            raise OSError(fault[0])
        yield held


def _claim(config: Config, held: Places, claims: ExitStack) -> None:
    """Claims the places, tidies them, and leaves the configuration in log.dir."""
    if config.checkpoint.dir is not None:
        folder = Path(config.checkpoint.dir)
        held.checkpoints = Claim(folder / CLAIM, f"checkpoint.dir = {folder}")
        claims.callback(_leave, held)
        held.notes += recover(folder)
    if config.log.jsonl is not None:
        log = Path(config.log.jsonl)
        claims.callback(Claim(log.with_name(f"{log.name}.lock"), f"log.jsonl = {log}").release)
    if config.log.dir is not None:
        folder = Path(config.log.dir)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(to_yaml(config))


def _leave(held: Places) -> None:
    """Gives checkpoint.dir free; where a crash leaves a save in the background behind, not before the process ends."""
    if held.checkpoints is not None and not (held.saver is not None and held.saver.busy):
        held.checkpoints.release()

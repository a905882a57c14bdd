"""Snapshots of a GPU's memory, for the usual viewer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron5d.config.schema import Config
from megatron5d.topology.process import Process
from megatron5d.train.guard import add_note, ran_out_of_memory
from megatron5d.train.monitoring.writers import harmless

_HISTORY = 100_000  # allocations that a snapshot remembers


@contextmanager
def memory_snapshots(config: Config, process: Process) -> Iterator[MemorySnapshots]:
    """Records allocations inside this context; `log.memory_snapshot` gets them when memory runs out."""
    snapshots = MemorySnapshots(config, process)
    try:
        yield snapshots
    except RuntimeError as error:
        if ran_out_of_memory(error):
            path = snapshots.dump("oom")
            add_note(error, f"what was allocated: {path or 'log.memory_snapshot=FOLDER writes it'}")
        raise


class MemorySnapshots:
    """Memory snapshots of this rank's GPU, for https://pytorch.org/memory_viz.

    Args:
        config: log.memory_snapshot, a folder or None; log.memory_snapshot_step.
    """

    def __init__(self, config: Config, process: Process) -> None:
        self.folder, self.step, self.rank = config.log.memory_snapshot, config.log.memory_snapshot_step, process.rank
        self.active = self.folder is not None and process.device.type == "cuda"
        self.note = None
        if self.folder is not None and not self.active:
            self.note = "log.memory_snapshot is for GPUs: on this CPU none will be taken"
        if self.active:
            torch.cuda.memory._record_memory_history(max_entries=_HISTORY)

    def after_step(self, step: int) -> None:
        """Takes the one that was asked for."""
        if step == self.step:
            self.dump(f"step{step}")

    def dump(self, name: str) -> Path | None:
        """Writes what is remembered; None where nothing is."""
        if not self.active or self.folder is None:
            return None
        path = Path(self.folder) / f"rank{self.rank}_{name}.pickle"
        with harmless(f"log.memory_snapshot = {self.folder}", lambda text: print(text, file=sys.stderr, flush=True)):
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
        return path

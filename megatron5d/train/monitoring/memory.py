"""Predicted memory at start-up, measured memory beside it after the first steps, and snapshots for the usual viewer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.checks import run_checks
from megatron5d.config.convert import changed, override_text
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.executor import PipelineError
from megatron5d.planning.fit import fit_text, nearest_fit, steps
from megatron5d.planning.memory_forecast import Forecaster, Target
from megatron5d.planning.rank_memory import RankMemory, gigabytes, table
from megatron5d.topology.process import Process
from megatron5d.train.build import Run
from megatron5d.train.crash import cause_of
from megatron5d.train.monitoring.writers import harmless
from megatron5d.train.pipeline_layout import PipelinePlan
from megatron5d.train.preflight import device_faults

MEASURED_AFTER = 3  # steps: by then every buffer has been used
_HISTORY = 100_000  # allocations that a snapshot remembers


def device_bytes(config: Config) -> int | None:
    """What one device has: as configured, else as this process's GPU says; None where nothing is known (a CPU)."""
    if config.log.device_memory_gb is not None:
        return round(config.log.device_memory_gb * 1e9)
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def target_here(config: Config) -> Target:
    """What the ranks of this run are, judged by this process and by what is configured of the device."""
    if torch.cuda.is_available() and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        return Target(f"sm_{major}{minor}", config.moe.planned_imbalance)
    return Target(None if config.log.device_memory_gb is None else "sm_90", config.moe.planned_imbalance)


def predict(config: Config, world: int, plan: PipelinePlan | None = None) -> dict[int, RankMemory]:
    """Memory of every pipeline rank of a run on devices like this process's."""
    return Forecaster(config, world, target_here(config), plan).ranks()


def memory_faults(config: Config, world: int) -> list[Fault]:
    """A lawful configuration that cannot fit its devices, where `log.memory_check = refuse` and a device is known."""
    have = device_bytes(config)
    if config.log.memory_check != "refuse" or have is None or device_faults(config, world):
        return []
    ranks = predict(config, world)
    lack = shortage(ranks, have)
    if lack is None:
        return []
    enough = fit_text(nearest_fit(config, world, target_here(config), have))
    return [Fault("memory", ("log.memory_check",), lack, f"{enough}; log.memory_check=warn to try all the same")]


def shortage(ranks: dict[int, RankMemory], have: int) -> str | None:
    """What is wrong where the devices are too small; None where they are not."""
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    if ranks[worst].needed <= have:
        return None
    kinds = sorted(ranks[worst].kinds().items(), key=lambda item: -item[1])[:4]
    largest = ", ".join(f"{kind} {gigabytes(count)}" for kind, count in kinds)
    return (
        f"pipeline rank {worst} needs {gigabytes(ranks[worst].needed)}, the device has {gigabytes(have)}; most of it: "
        f"{largest}"
    )


def _ways_out(config: Config, world: int) -> str:
    """Overrides that lower what a rank needs, the cheapest first; how many of them are enough is not said."""
    p = config.parallel
    divides = world > p.tp * p.pp * p.dp_replicate or config.model.num_experts > 0  # ZeRO, over dp_shard·cp or edp
    ways = [
        override_text(step)
        for step in steps(config)
        if (divides or "parallel.zero" not in step) and not run_checks(changed(config, step), world, files=False)
    ]
    return ", ".join([*ways, "a larger parallel.pp or cp"])


class MemoryReport:
    """Tells what was predicted before the first step and what was measured after some.

    Args:
        run: whose ranks are meant.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ranks: dict[int, RankMemory] = {}  # of every pipeline rank; on the rank that tells

    def predicted(self) -> str | None:
        """Text for the beginning; None where nothing is to be told. On rank 0."""
        config = self.run.config
        if config.log.memory_check == "off":
            return None
        try:
            self.ranks = predict(config, self.run.process.world, self.run.plan)
        except Exception as error:  # a layer that needs values cannot be counted; it trains all the same
            return f"memory could not be predicted: {type(error).__name__}: {error}"
        text = f"predicted memory of each rank, by pipeline rank:\n{table(self.ranks)}"
        have = device_bytes(config)
        lack = None if have is None else shortage(self.ranks, have)
        return text if lack is None else f"{text}\nWARNING: this will not fit: {lack}"

    @property
    def predicted_gb(self) -> float | None:
        """What this rank's tensors were predicted to take, in 10⁹ bytes; None where nothing was predicted."""
        mine = self.ranks.get(self.run.mesh["pp"].rank)
        return None if mine is None else mine.allocated / 1e9

    def measured(self) -> str | None:
        """Text after `MEASURED_AFTER` steps; called on every rank.

        Comm: all_reduce over the world of a number for every pipeline rank, on GPUs.
        """
        run = self.run
        if (
            run.config.log.memory_check == "off" or run.process.device.type != "cuda"
        ):  # a CPU's allocator counts nothing
            return None
        pp = run.mesh["pp"]
        most = torch.zeros(pp.size, dtype=torch.float64, device=run.process.device)
        most[pp.rank] = torch.cuda.max_memory_allocated(run.process.device)
        measured = all_reduce(most, run.mesh["world"], "max").tolist()
        lines = [
            f"  pp {rank}: predicted {gigabytes(mine.allocated)}, measured {gigabytes(round(found))} "
            f"({mine.allocated / found - 1:+.1%})"
            for (rank, mine), found in zip(sorted(self.ranks.items()), measured)
        ]
        return "\n".join(["memory allocated at most, by pipeline rank:", *lines])


@contextmanager
def memory_snapshots(config: Config, process: Process) -> Iterator[MemorySnapshots]:
    """Within, allocations are remembered: for `log.memory_snapshot` when memory runs out. The error tells ways out."""
    snapshots = MemorySnapshots(config, process)
    try:
        yield snapshots
    except (torch.OutOfMemoryError, PipelineError) as error:
        if isinstance(cause_of(error), torch.OutOfMemoryError):
            path = snapshots.dump("oom")
            ways = f"ways to need less, the cheapest first: {_ways_out(config, process.world)}"
            seen = f"what was allocated: {path or 'log.memory_snapshot=FOLDER writes it'}"
            error.__notes__ = [*getattr(error, "__notes__", []), ways, seen]  # type: ignore[union-attr]  # of Python 3.11
        raise


class MemorySnapshots:
    """Memory snapshots of this rank's GPU, for https://pytorch.org/memory_viz.

    Args:
        config: log.memory_snapshot, a folder or None; log.memory_snapshot_step.
        process: this rank.
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

"""Turns a step's result into a record and sends it to every writer of the run.

The first steps' measurements are printed beside what planning expects of the run.
"""

import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.errors import Refused
from megatron5d.model.flops import flops_per_token
from megatron5d.train.build import Run
from megatron5d.train.monitoring.stragglers import SlowRanks
from megatron5d.train.monitoring.wandb_environment import wandb_mode
from megatron5d.train.monitoring.writers import (
    InBackground,
    JsonLines,
    ProgressDisplay,
    Writers,
    harmless,
    memory_gb,
)
from megatron5d.train.step import StepResult

# of all bytes: an axis that carries less carries counts and norms, which nobody predicts
_SMALL = 1e-3


@dataclass(frozen=True)
class Prediction:
    """What is expected of a run; on ranks other than 0 the peak alone."""

    peak_tflops: float | None = None  # of one device, for MFU; None = unknown
    step_s: float | None = None  # seconds of a step; None = not predicted
    mfu: float | None = None
    # for each pipeline rank, the fraction of a step in which it waits; empty = not predicted
    bubble: Sequence[float] = ()
    # for each pipeline rank, axis -> bytes that it sends in a step
    sent: Sequence[Mapping[str, int]] = ()
    memory: Sequence[int] = ()  # for each pipeline rank, bytes that its tensors take at most
    report: Sequence[str] = ()  # lines for the beginning of the log

    def record(self, pp_rank: int) -> dict[str, Any]:
        """Returns what stands in every record of a pipeline rank beside what is measured."""
        found: dict[str, Any] = {
            "memory_predicted_gb": self.memory[pp_rank] / 1e9 if self.memory else None
        }
        if self.step_s is not None:
            found |= {"step_time_predicted_s": self.step_s, "mfu_predicted": self.mfu}
        if len(self.bubble) > 1:
            found["bubble_predicted"] = self.bubble[pp_rank]
        return found


def compare_step(
    run: Run, predicted: Prediction, result: StepResult, sent: Mapping[str, int]
) -> str | None:
    """Returns what one step has taken and sent beside what was predicted, as text; None where
    nothing was.

    Args:
        sent: axis -> bytes that this rank has sent in it.

    Comm: all_reduce over the world of a number for every pipeline rank, where there are several.
    """
    pp, process = run.mesh["pp"], run.process
    lines = []
    if predicted.sent and (axes := _compared(sent, predicted.sent[pp.rank])):
        lines.append(f"  bytes that rank 0 sent: {axes}")
    if pp.size > 1:
        bubble = torch.zeros(pp.size, dtype=torch.float64, device=process.device)
        bubble[pp.rank] = result.bubble * pp.size / process.world
        measured = all_reduce(bubble, run.mesh["world"]).tolist()
        if predicted.bubble:
            each = ", ".join(
                f"{found:.1%} ({told:.1%})" for found, told in zip(measured, predicted.bubble)
            )
            cores = os.cpu_count() or 1
            shared = f"; {process.world} ranks share {cores} core{'' if cores == 1 else 's'}"
            lines.append(
                f"  bubble by pipeline rank: {each}"
                + (shared if process.device.type != "cuda" and cores < process.world else "")
            )
    return (
        "\n".join([f"measured of step {run.progress.step} (predicted):", *lines]) if lines else None
    )


def compare_memory(run: Run, predicted: Prediction) -> str | None:
    """Returns the memory that tensors have taken at most beside what was predicted, as text; None
    on a CPU.

    Comm: all_reduce over the world of a number for every pipeline rank, on GPUs.
    """
    pp, device = run.mesh["pp"], run.process.device
    # a CPU's allocator counts nothing
    if run.config.log.memory_check == "off" or device.type != "cuda":
        return None
    most = torch.zeros(pp.size, dtype=torch.float64, device=device)
    most[pp.rank] = torch.cuda.max_memory_allocated(device)
    measured = all_reduce(most, run.mesh["world"], "max").tolist()
    lines = [
        f"  pp {rank}: predicted {told / 2**30:.2f} GiB, measured {found / 2**30:.2f} GiB ({told / found - 1:+.1%})"
        for rank, (told, found) in enumerate(zip(predicted.memory, measured))
    ]
    return "\n".join(["memory allocated at most, by pipeline rank:", *lines])


def _compared(sent: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Returns the bytes of each axis, the one that carries the most first."""
    least = _SMALL * sum(sent.values())
    axes = [
        axis
        for axis in {*sent, *predicted}
        if max(sent.get(axis, 0), predicted.get(axis, 0)) > least
    ]
    axes.sort(key=lambda axis: (-sent.get(axis, 0), axis))
    return ", ".join(
        f"{axis} {_size(sent.get(axis, 0))} ({_size(predicted.get(axis, 0))})" for axis in axes
    )


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


_MEASURED_AFTER = 3  # steps: by then every buffer has been used
_MEAN_OF = 20  # steps, whose mean loss stands in the last line


class Reporter:
    """Writes the records of one run; on every rank but 0 it computes and writes nothing."""

    def __init__(self, run: Run, predicted: Prediction) -> None:
        config, progress = run.config, run.progress
        self.run = run
        self.active = run.process.rank == 0
        self._predicted = predicted
        self._slow_ranks = SlowRanks(run)
        # steps; without those that data.skip_steps leaves out
        self._steps_here = self._computed = 0
        self._flops = flops_per_token(config.model, config.train.seq_len)
        self._pending: dict[str, Any] = {}
        self._display = ProgressDisplay(
            config.train.steps, progress.step, self.active and config.log.progress
        )
        self._losses = deque[float](maxlen=_MEAN_OF)
        self._valid_losses = dict[int, float]()
        self._writers = Writers(self.say)
        if self.active:
            self._add_writers()
        self._since, self._seconds, self._sent = time.perf_counter(), 0.0, dict[str, int]()
        self._waits = dict[str, float]()

    def _add_writers(self) -> None:
        config, progress = self.run.config, self.run.progress
        log, mode = config.log, wandb_mode(config.log.wandb.mode)
        if log.jsonl:
            self._writers.add(f"log.jsonl = {log.jsonl}", JsonLines(log.jsonl, progress.step))
        if not log.tensorboard and mode == log.wandb.mode == "disabled":
            return
        from megatron5d.train.monitoring.trackers import TensorBoard

        if log.tensorboard:
            with harmless(name := f"log.tensorboard = {log.tensorboard}", self.say):
                self._writers.add(name, TensorBoard(config, progress.step))
        if mode != log.wandb.mode:
            self.say(
                f"WANDB_MODE={mode} of the environment goes before log.wandb.mode = {log.wandb.mode}"
            )
        if mode != "disabled":
            self._add_wandb(mode)

    def _add_wandb(self, mode: str) -> None:
        """Starts W&B; where its server does not answer, offline, so that the run can be sent later.

        Raises Refused: as `Wandb`.
        """
        from megatron5d.train.monitoring.trackers import Wandb, run_facts

        progress, name = self.run.progress, f"log.wandb.mode = {mode} (Weights & Biases)"
        facts = run_facts(self.run.config, self.run.mesh.sizes)
        try:
            wandb = Wandb(self.run.config, mode, progress.wandb_id, facts)
        except Refused:
            raise
        except Exception as error:
            self.say(f"WARNING: {name}: {type(error).__name__}: {error}; the training continues")
            if mode == "online":
                self.say(
                    "Weights & Biases is written offline; send it with `wandb sync DIR/wandb/offline-run-*`"
                )
                self._add_wandb("offline")
            return
        progress.wandb_id = wandb.run_id
        self._writers.add(name, InBackground(wandb))
        if wandb.last > progress.step:
            self.say(
                f"Weights & Biases has the steps up to {wandb.last} of run {wandb.run_id} already: those from "
                f"{progress.step + 1} on are not sent again"
            )

    def start_clock(self) -> None:
        self.run.ledger.clear()
        self.run.ledger.timing = self._slow_ranks.active
        self._slow_ranks.start()
        self._since = time.perf_counter()

    def stop_clock(self) -> None:
        """Stops the clock of a step: evaluation and saving count neither as its time nor as its
        traffic."""
        self.run.ledger.timing, self._waits = False, self.run.ledger.take_waits()
        self._seconds, self._sent = (
            time.perf_counter() - self._since,
            self.run.ledger.bytes_by_axis(),
        )
        self._slow_ranks.step(self._seconds, self._waits)

    def add(self, name: str, value: float) -> None:
        self._pending[name] = value

    def step(self, result: StepResult, lr: float) -> None:
        """Records one step; written every `log.every` steps, at the first and last, and where there
        is more to tell.

        Comm: at a record that of SlowRanks; once, after some steps: of `compare_step` and
            `compare_memory`.
        """
        self._steps_here += 1
        self._computed += result.num_targets > 0
        config, step = self.run.config, self.run.progress.step
        last = config.train.stop_after or config.train.steps
        more = bool(self._pending or result.layers)  # an evaluation, the routers
        written = step % config.log.every == 0 or step in (1, last) or result.stop or more
        told, self._pending = self._pending, {}
        if math.isfinite(result.losses["loss"]):  # else the step was left out
            self._losses.append(result.losses["loss"])
        if "valid_loss" in told:
            self._valid_losses[step] = told["valid_loss"]
        slow = list[str]()
        if written:
            compared, slow = self._slow_ranks.compare()
            told |= compared
        measured = []
        if self._computed == _MEASURED_AFTER and result.num_targets > 0:
            measured = [compare_step(self.run, self._predicted, result, self._sent)]
            measured.append(compare_memory(self.run, self._predicted))
        if not self.active:
            return
        record = self._record(result, lr)
        tokens_per_s = record["tokens_per_s_per_gpu"] * self.run.process.world
        self._display.update(record["loss"], record["grad_norm"], tokens_per_s)
        if written:
            record |= told
            self._writers.write(record)
        if result.skipped is not None:
            self.say(f"step {step}: the update is skipped: {result.skipped}")
        for text in filter(None, [*measured, *slow]):
            self.say(text)

    def _record(self, result: StepResult, lr: float) -> dict[str, Any]:
        run, config = self.run, self.run.config
        rate, peak = (
            result.num_targets / self._seconds / run.process.world,
            self._predicted.peak_tflops,
        )
        record: dict[str, Any] = {
            "step": run.progress.step,
            "loss": result.losses["loss"],
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": run.progress.tokens,
            "step_time_s": self._seconds,
            "tokens_per_s_per_gpu": rate,
            "mfu": rate * self._flops / (peak * 1e12) if peak else None,
            "memory_gb": memory_gb(run.process.device),
            **self._predicted.record(run.mesh["pp"].rank),
            "consumed_samples": run.progress.consumed_samples,
        }
        if config.train.z_loss:
            record["z_loss"] = result.losses["z_loss"]
        record |= {
            name: value for name, value in result.losses.items() if name not in ("loss", "z_loss")
        }
        if config.optim.on_nonfinite == "skip" or config.optim.skip_norm or config.data.skip_steps:
            record["update_skipped"] = result.skipped is not None
        if config.moe.exchange == "planned":
            record["repeated"] = result.repeated
        if config.parallel.zero:
            record["zero_exposed_s"] = result.zero_exposed_s
        if config.parallel.pp > 1:
            record["bubble"] = result.bubble
        if config.parallel.cp > 1:
            record["cp_balance"] = result.cp_balance
        record |= result.layers
        for axis, num_bytes in self._sent.items():
            record[f"comm_{axis}_bytes"] = num_bytes
        record |= {f"comm_{axis}_exposed_s": seconds for axis, seconds in self._waits.items()}
        return record

    def say(self, text: str) -> None:
        if self.active:
            self._display.say(text)

    def close(self, code: int) -> None:
        """Ends the display and the writers of a process that is going to exit with a code."""
        self._slow_ranks.close()
        self._display.close()
        if self.active and self._steps_here and not code:
            self.say(self._result())
        self._writers.close(code)

    def _result(self) -> str:
        """Returns what the run has come to: one batch is noise."""
        losses = list(self._losses)
        told = f"finished step {self.run.progress.step}: "
        told += (
            f"training loss {sum(losses) / len(losses):.4f}"
            if losses
            else "no step had a finite loss"
        )
        told += f" (mean of the last {len(losses)} steps)" if len(losses) > 1 else ""
        if self._valid_losses:
            best = min(self._valid_losses, key=lambda step: self._valid_losses[step])
            last = max(self._valid_losses)
            told += f", validation loss {self._valid_losses[last]:.4f}"
            told += (
                "" if best == last else f" (least: {self._valid_losses[best]:.4f} at step {best})"
            )
        return told

"""Turns results of steps into records for all writers, and compares them with predictions."""

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
from megatron5d.topology.process import Process
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

# Share of all bytes below which an axis only carries counts and norms, which are not predicted.
_SMALL = 1e-3


@dataclass(frozen=True)
class Prediction:
    """Expected figures of a run; ranks other than 0 only know `peak_tflops`.

    Args:
        peak_tflops: of one device, for MFU; None = unknown.
        step_s: seconds of a step; None = not predicted.
        bubble: for each pipeline rank, the fraction of a step in which it waits; empty = not
            predicted.
        sent: for each pipeline rank, axis -> bytes that it sends in a step.
        memory: for each pipeline rank, peak bytes of its tensors.
        report: lines for the beginning of the log.
    """

    peak_tflops: float | None = None
    step_s: float | None = None
    mfu: float | None = None
    bubble: Sequence[float] = ()
    sent: Sequence[Mapping[str, int]] = ()
    memory: Sequence[int] = ()
    report: Sequence[str] = ()

    def record(self, pp_rank: int) -> dict[str, Any]:
        """Predicted fields of every record, for a pipeline rank."""
        memory_gb = self.memory[pp_rank] / 1e9 if self.memory else None
        fields: dict[str, Any] = {"memory_predicted_gb": memory_gb}
        if self.step_s is not None:
            fields |= {"step_time_predicted_s": self.step_s, "mfu_predicted": self.mfu}
        if len(self.bubble) > 1:
            fields["bubble_predicted"] = self.bubble[pp_rank]
        return fields


def compare_step(
    run: Run, predicted: Prediction, result: StepResult, sent: Mapping[str, int]
) -> str | None:
    """Measured and predicted figures of one step as text; None where nothing was predicted.

    Args:
        sent: axis -> bytes that this rank has sent in the step.

    Comm: all_reduce over the world of a number for every pipeline rank, where there are several.
    """
    pp, process = run.mesh["pp"], run.process
    lines = []
    if predicted.sent and (axes := _bytes_text(sent, predicted.sent[pp.rank])):
        lines.append(f"  bytes that rank 0 sent: {axes}")
    if pp.size > 1:
        bubble = torch.zeros(pp.size, dtype=torch.float64, device=process.device)
        bubble[pp.rank] = result.bubble * pp.size / process.world
        measured = all_reduce(bubble, run.mesh["world"]).tolist()
        if predicted.bubble:
            pairs = zip(measured, predicted.bubble)
            shares = ", ".join(f"{share:.1%} ({expected:.1%})" for share, expected in pairs)
            lines.append(f"  bubble by pipeline rank: {shares}{_shared_cores_note(process)}")
    title = f"step {run.progress.step}, measured (predicted):"
    return "\n".join([title, *lines]) if lines else None


def _shared_cores_note(process: Process) -> str:
    cores = os.cpu_count() or 1
    if process.device.type == "cuda" or cores >= process.world:
        return ""
    return f"; {process.world} ranks share {cores} core{'' if cores == 1 else 's'}"


def compare_memory(run: Run, predicted: Prediction) -> str | None:
    """Measured and predicted peak memory of tensors as text; None on a CPU.

    Comm: all_reduce over the world of a number for every pipeline rank, on GPUs.
    """
    pp, device = run.mesh["pp"], run.process.device
    # The allocator of a CPU keeps no statistics.
    if run.config.log.memory_check == "off" or device.type != "cuda":
        return None
    peaks = torch.zeros(pp.size, dtype=torch.float64, device=device)
    peaks[pp.rank] = torch.cuda.max_memory_allocated(device)
    measured = all_reduce(peaks, run.mesh["world"], "max").tolist()
    lines = ["peak memory allocated, by pipeline rank:"]
    for rank, (expected, peak) in enumerate(zip(predicted.memory, measured)):
        gib = f"predicted {expected / 2**30:.2f} GiB, measured {peak / 2**30:.2f} GiB"
        lines.append(f"  pp {rank}: {gib} ({expected / peak - 1:+.1%})")
    return "\n".join(lines)


def _bytes_text(sent: Mapping[str, int], predicted: Mapping[str, int]) -> str:
    """Measured (predicted) bytes of each axis, in descending order."""
    smallest = _SMALL * sum(sent.values())
    pairs = {axis: (sent.get(axis, 0), predicted.get(axis, 0)) for axis in {*sent, *predicted}}
    axes = [axis for axis, pair in pairs.items() if max(pair) > smallest]
    axes.sort(key=lambda axis: (-pairs[axis][0], axis))
    return ", ".join(f"{axis} {_size(pairs[axis][0])} ({_size(pairs[axis][1])})" for axis in axes)


def _size(num_bytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


_MEASURED_AFTER = 3  # steps: by then every buffer has been used
_MEAN_OF = 20  # last steps, whose mean loss the last line shows


class Reporter:
    """Writes the records of one run, on rank 0; elsewhere it only takes part in collectives."""

    def __init__(self, run: Run, predicted: Prediction) -> None:
        config, progress = run.config, run.progress
        self.run = run
        self.active = run.process.rank == 0
        self._predicted = predicted
        self._slow_ranks = SlowRanks(run)
        # of this process; `_num_computed` excludes steps of data.skip_steps
        self._num_steps = self._num_computed = 0
        self._flops = flops_per_token(config.model, config.train.seq_len)
        self._pending: dict[str, Any] = {}
        shows_progress = self.active and config.log.progress
        self._display = ProgressDisplay(config.train.steps, progress.step, shows_progress)
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
            self.say(f"WANDB_MODE={mode} overrides log.wandb.mode = {log.wandb.mode}")
        if mode != "disabled":
            self._add_wandb(mode)

    def _add_wandb(self, mode: str) -> None:
        """Starts W&B: offline if its server does not answer, so that the run can be sent later.

        Raises:
            Refused: as `Wandb`.
        """
        from megatron5d.train.monitoring.trackers import Wandb, run_facts

        progress, name = self.run.progress, f"log.wandb.mode = {mode} (Weights & Biases)"
        facts = run_facts(self.run.config, self.run.mesh.sizes)
        try:
            wandb = Wandb(self.run.config, mode, progress.wandb_id, facts)
        except Refused:
            raise
        except Exception as error:
            self.say(f"WARNING: {name}: {type(error).__name__}: {error}; training continues")
            if mode == "online":
                send = "`wandb sync DIR/wandb/offline-run-*`"
                self.say(f"Weights & Biases is written offline; send it with {send}")
                self._add_wandb("offline")
            return
        progress.wandb_id = wandb.run_id
        self._writers.add(name, InBackground(wandb))
        if wandb.last > progress.step:
            repeated = f"steps {progress.step + 1} to {wandb.last} of run {wandb.run_id}"
            self.say(f"Weights & Biases already has {repeated}: they are not sent again")

    def start_clock(self) -> None:
        self.run.ledger.clear()
        self.run.ledger.timing = self._slow_ranks.active
        self._slow_ranks.start()
        self._since = time.perf_counter()

    def stop_clock(self) -> None:
        """Stops the clock and the traffic of a step, which exclude evaluation and saving."""
        ledger = self.run.ledger
        ledger.timing, self._waits = False, ledger.take_waits()
        self._seconds, self._sent = time.perf_counter() - self._since, ledger.bytes_by_axis()
        self._slow_ranks.step(self._seconds, self._waits)

    def add(self, name: str, value: float) -> None:
        self._pending[name] = value

    def step(self, result: StepResult, lr: float) -> None:
        """Records one step.

        The record is written every `log.every` steps, at the first and the last step, and if it has
        an evaluation or figures of the routers.

        Comm: with a record that of SlowRanks; once, after some steps, that of `compare_step` and
            `compare_memory`.
        """
        self._num_steps += 1
        self._num_computed += result.num_targets > 0
        config, step = self.run.config, self.run.progress.step
        last = config.train.stop_after or config.train.steps
        has_more = bool(self._pending or result.layers)
        is_written = step % config.log.every == 0 or step in (1, last) or result.stop or has_more
        fields, self._pending = self._pending, {}
        if math.isfinite(result.losses["loss"]):  # else the step was skipped
            self._losses.append(result.losses["loss"])
        if "valid_loss" in fields:
            self._valid_losses[step] = fields["valid_loss"]

        # collective calls: on every rank
        slow: list[str] = []
        if is_written:
            compared, slow = self._slow_ranks.compare()
            fields |= compared
        measured = []
        if self._num_computed == _MEASURED_AFTER and result.num_targets > 0:
            measured = [compare_step(self.run, self._predicted, result, self._sent)]
            measured.append(compare_memory(self.run, self._predicted))
        if not self.active:
            return

        # output: on rank 0
        record = self._record(result, lr)
        tokens_per_s = record["tokens_per_s_per_gpu"] * self.run.process.world
        self._display.update(record["loss"], record["grad_norm"], tokens_per_s)
        if is_written:
            self._writers.write(record | fields)
        if result.skipped is not None:
            self.say(f"step {step}: no update: {result.skipped}")
        for text in filter(None, [*measured, *slow]):
            self.say(text)

    def _record(self, result: StepResult, lr: float) -> dict[str, Any]:
        run, peak = self.run, self._predicted.peak_tflops
        rate = result.num_targets / self._seconds / run.process.world
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
        record |= self._optional_fields(result)
        record |= result.layers
        record |= {f"comm_{axis}_bytes": num_bytes for axis, num_bytes in self._sent.items()}
        record |= {f"comm_{axis}_exposed_s": seconds for axis, seconds in self._waits.items()}
        return record

    def _optional_fields(self, result: StepResult) -> dict[str, Any]:
        """Fields of options that the configuration uses."""
        config, losses = self.run.config, result.losses
        optim, parallel = config.optim, config.parallel
        fields: dict[str, Any] = {"z_loss": losses["z_loss"]} if config.train.z_loss else {}
        fields |= {name: v for name, v in losses.items() if name not in ("loss", "z_loss")}
        skips = optim.on_nonfinite == "skip" or optim.skip_norm or config.data.skip_steps
        optional = [
            (skips, "update_skipped", result.skipped is not None),
            (config.moe.exchange == "planned", "repeated", result.repeated),
            (parallel.zero, "zero_exposed_s", result.zero_exposed_s),
            (parallel.pp > 1, "bubble", result.bubble),
            (parallel.cp > 1, "cp_balance", result.cp_balance),
        ]
        return fields | {name: value for is_used, name, value in optional if is_used}

    def say(self, text: str) -> None:
        if self.active:
            self._display.say(text)

    def close(self, code: int) -> None:
        """Ends the display and the writers of a process that will exit with this code."""
        self._slow_ranks.close()
        self._display.close()
        if self.active and self._num_steps and not code:
            self.say(self._summary())
        self._writers.close(code)

    def _summary(self) -> str:
        """Last line of the log, with a mean of losses, because that of one batch is noise."""
        losses, valid = list(self._losses), self._valid_losses
        text = f"finished step {self.run.progress.step}: "
        mean = f"training loss {sum(losses) / len(losses):.4f}" if losses else ""
        text += mean or "no step had a finite loss"
        text += f" (mean of the last {len(losses)} steps)" if len(losses) > 1 else ""
        if valid:
            best, last = min(valid, key=lambda step: valid[step]), max(valid)
            text += f", validation loss {valid[last]:.4f}"
            text += "" if best == last else f" (lowest: {valid[best]:.4f} at step {best})"
        return text

"""Turns a step's result into a record and sends it to every writer of the run."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

from megatron5d.model.flops import flops_per_token
from megatron5d.topology.rendezvous import wandb_mode
from megatron5d.train.build import Run
from megatron5d.train.monitoring.prediction import Prediction, compare_memory, compare_step
from megatron5d.train.monitoring.stragglers import SlowRanks
from megatron5d.train.monitoring.writers import InBackground, JsonLines, ProgressDisplay, Writers, memory_gb
from megatron5d.train.step import StepResult

_MEASURED_AFTER = 3  # steps: by then every buffer has been used
_MEAN_OF = 20  # steps, whose mean loss stands in the last line


class Reporter:
    """Writes the records of one run; on every rank but 0 it computes and writes nothing.

    Args:
        run: whose configuration says where to write.
        predicted: for it.
    """

    def __init__(self, run: Run, predicted: Prediction) -> None:
        config, progress = run.config, run.progress
        self.run = run
        self.active = run.process.rank == 0
        self._predicted = predicted
        self._slow_ranks = SlowRanks(run)
        self._steps_here = 0
        self._flops = flops_per_token(config.model, config.train.seq_len)
        self._pending: dict[str, Any] = {}
        self._display = ProgressDisplay(config.train.steps, progress.step, self.active and config.log.progress)
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
        from megatron5d.train.monitoring.trackers import TensorBoard, Wandb, run_facts

        if log.tensorboard:
            self._writers.add(f"log.tensorboard = {log.tensorboard}", TensorBoard(config, progress.step))
        if mode != log.wandb.mode:
            self.say(f"WANDB_MODE={mode} of the environment goes before log.wandb.mode = {log.wandb.mode}")
        if mode != "disabled":
            wandb = Wandb(config, mode, progress.wandb_id, run_facts(config, self.run.mesh.sizes))
            progress.wandb_id = wandb.run_id
            self._writers.add(f"log.wandb.mode = {mode} (Weights & Biases)", InBackground(wandb))
            if wandb.last > progress.step:
                self.say(
                    f"Weights & Biases has the steps up to {wandb.last} of run {wandb.run_id} already: those from "
                    f"{progress.step + 1} on are not sent again"
                )

    def start_clock(self) -> None:
        """Starts the clock of a step."""
        self.run.ledger.clear()
        self.run.ledger.timing = self._slow_ranks.active
        self._slow_ranks.start()
        self._since = time.perf_counter()

    def stop_clock(self) -> None:
        """Stops the clock of a step: evaluation and saving count neither as its time nor as its traffic."""
        self.run.ledger.timing, self._waits = False, self.run.ledger.take_waits()
        self._seconds, self._sent = time.perf_counter() - self._since, self.run.ledger.bytes_by_axis()
        self._slow_ranks.step(self._seconds, self._waits)

    def add(self, name: str, value: float) -> None:
        """Adds a figure to the next record."""
        self._pending[name] = value

    def step(self, result: StepResult, lr: float) -> None:
        """Records one step; written every `log.every` steps, at the first and last, and where there is more to tell.

        Comm: at a record that of SlowRanks; once, after some steps: of `compare_step` and `compare_memory`.
        """
        self._steps_here += 1
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
        if self._steps_here == _MEASURED_AFTER:
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
        rate, peak = result.num_targets / self._seconds / run.process.world, self._predicted.peak_tflops
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
        record |= {name: value for name, value in result.losses.items() if name not in ("loss", "z_loss")}
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
        """Prints a line on the console of rank 0."""
        if self.active:
            self._display.say(text)

    def close(self, code: int) -> None:
        """
        Args:
            code: with which this process is going to exit.
        """
        self._slow_ranks.close()
        self._display.close()
        if self.active and self._losses and not code:
            self.say(self._result())
        self._writers.close(code)

    def _result(self) -> str:
        """Returns what the run has come to: one batch is noise."""
        losses = list(self._losses)
        told = f"finished step {self.run.progress.step}: training loss {sum(losses) / len(losses):.4f}"
        told += f" (mean of the last {len(losses)} steps)" if len(losses) > 1 else ""
        if self._valid_losses:
            best = min(self._valid_losses, key=lambda step: self._valid_losses[step])
            last = max(self._valid_losses)
            told += f", validation loss {self._valid_losses[last]:.4f}"
            told += "" if best == last else f" (least: {self._valid_losses[best]:.4f} at step {best})"
        return told

"""What a run tells about itself: JSON lines, Weights & Biases, its progress. Rank 0 alone writes."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from tqdm import tqdm

from megatron5d.config.json_file import parse_json
from megatron5d.config.schema import LogConfig
from megatron5d.planning.clusters import cluster_of

LINE_EVERY_S = 10.0  # at most, where progress goes to a file


def peak_tflops(log: LogConfig, device: torch.device) -> float | None:
    """Peak of one device for MFU; None where it is not known (a CPU)."""
    if log.peak_tflops is not None:
        return log.peak_tflops
    if device.type != "cuda":
        return None
    known = cluster_of(torch.cuda.get_device_name(device))
    return None if known is None else known.flops / 1e12


def memory_gb(device: torch.device) -> float:
    """Peak memory of this rank in 10⁹ bytes: allocated on the device, or resident where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class JsonLines:
    """One JSON object a step. Records of steps that a resumed run will do again are taken out first.

    Args:
        path: of the file; one that is there already is renamed where the run is new, or where it is no log.
        done: steps already done; later records are dropped, and so is what is no record: a line cut off by a kill, or
            the zeros that a loss of power leaves.
    """

    def __init__(self, path: str | Path, done: int) -> None:
        self._path = path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"log.jsonl = {path} shall be a file, and a folder is there")
        if path.exists() and path.stat().st_size and (not done or not any(map(self._is_record, self._lines(path)))):
            self._set_aside(path)
        kept = [line for line in self._lines(path) if self._step_of(line) <= done]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, path)
        self._file = self._open()

    @staticmethod
    def _set_aside(path: Path) -> None:
        """The log of another run, or of this one before it began anew, gets a name that nothing has."""
        aside, number = path.with_name(f"{path.name}.left"), 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}.left{number}")
        path.rename(aside)
        print(f"{path} begins anew; what was there is {aside}", file=sys.stderr, flush=True)

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return self._path.open("a+", buffering=1)

    @staticmethod
    def _lines(path: Path) -> list[str]:
        return path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []

    @staticmethod
    def _step_of(line: str) -> float:
        """Infinite where the line is no record."""
        try:
            step = parse_json(line)["step"] if line.endswith("}\n") else math.inf
        except (ValueError, KeyError, TypeError):
            return math.inf
        return step if isinstance(step, (int, float)) else math.inf

    @classmethod
    def _is_record(cls, line: str) -> bool:
        return cls._step_of(line) < math.inf

    def write(self, record: dict[str, Any]) -> None:
        """One line; JSON has no NaN and no infinity, which become null."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            self._restore()
        told = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in record.items()}
        self._file.write(json.dumps(told, allow_nan=False) + "\n")

    def _restore(self) -> None:
        """Writes the file again, which is still open here though it was removed; one in its place is continued."""
        replaced = self._path.exists()
        print(f"{self._path} was {'replaced' if replaced else 'removed'} under way", file=sys.stderr, flush=True)
        removed, self._file = self._file, self._open()
        with removed:
            removed.seek(0)
            if not replaced:
                self._file.write(removed.read())

    def close(self) -> None:
        self._file.close()


class Wandb:
    """A Weights & Biases run that a resumed job continues under the same id.

    Args:
        log: mode, project, name, entity, folder.
        config: of the run, as nested dicts.
        run_id: of the run to continue; None starts one.

    Raises:
        ValueError: Weights & Biases cannot be reached, or knows no key.
    """

    def __init__(self, log: LogConfig, config: dict[str, Any], run_id: str | None) -> None:
        import wandb  # two seconds to import: only the rank that logs pays

        folder = log.wandb.dir or log.dir
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=log.wandb.project,
                name=log.wandb.name,
                entity=log.wandb.entity,
                mode=log.wandb.mode,  # type: ignore[arg-type]
                dir=folder,
                id=run_id,
                resume="allow",
                config=config,
                settings=wandb.Settings(silent=log.wandb.mode == "offline", console="off"),
            )
        except wandb.Error as error:  # no key, no network
            ways = "`wandb login`, or log.wandb.mode=offline"
            raise ValueError(f"log.wandb.mode = {log.wandb.mode}: {error} ({ways})") from error

    @property
    def run_id(self) -> str:
        return self._run.id

    def write(self, record: dict[str, Any]) -> None:
        self._run.log({key: value for key, value in record.items() if value is not None}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


class ProgressDisplay:
    """How far the steps are, on stderr: a bar on a terminal, and a line now and then in a job's log.

    Args:
        total: steps of the run.
        done: of these, before this process began.
        enabled: False shows nothing, and `say` still speaks.
    """

    def __init__(self, total: int, done: int, enabled: bool) -> None:
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, disable=not (enabled and on_terminal), unit="step", desc="train", mininterval=0.5
        )
        self._lines = enabled and not on_terminal
        self._total, self._done = total, done
        self._first: tuple[int, float] | None = None  # the first step here, slower than others, and when it was over
        self._said_at = -math.inf
        self._unsaid: str | None = None  # the line of the last step, where there was none

    def update(self, loss: float, grad_norm: float, tokens_per_s: float) -> None:
        """One more step is done."""
        self._done += 1
        told = f"loss {loss:.4f}, grad norm {grad_norm:.3f}, {tokens_per_s:,.0f} tokens/s"
        self._bar.set_postfix_str(told, refresh=False)
        self._bar.update()
        now = time.perf_counter()
        if self._lines:
            self._unsaid = f"step {self._done}/{self._total}: {told}"
            if self._first is None:
                self._first = self._done, now
            else:
                step, over = self._first
                left = (self._total - self._done) * (now - over) / (self._done - step)
                self._unsaid += f", {tqdm.format_interval(left)} left"
            if self._done == self._total or now - self._said_at >= LINE_EVERY_S:
                self._said_at = now
                self._say_progress()

    def _say_progress(self) -> None:
        if self._unsaid is not None:
            self.say(self._unsaid)
            self._unsaid = None

    def say(self, text: str) -> None:
        """A line above the bar; printed plainly where there is no bar."""
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """The last step is told too, also where a signal or train.stop_after made it the last."""
        self._say_progress()
        self._bar.close()

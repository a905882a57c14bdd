"""Time of a step by phase, and a trace for Perfetto: `log.profile`.

Two steps are profiled. The first one only reads the clock between phases, which does not slow it.
The second one is recorded by torch's profiler, which slows the host, with a range for each phase.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron5d.phases.phase import KINDS, Phase, PhaseHooks
from megatron5d.train.build import Run
from megatron5d.train.monitoring.writers import harmless

# What a step consists of besides its phases; gathering only under ZeRO.
GATHERING = "wait for gathered weights"
BETWEEN = "between phases: messages, loss"
END = "end: reduction, update"

Mark = tuple[str, str]
"""(kind of a phase, pass), or (one of the above, "")."""


class Laps:
    """Seconds from one call of `lap` to the next, by label; on a GPU those of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Mark, float | torch.cuda.Event]] = [((END, ""), self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, label: str, pass_kind: str = "") -> None:
        """Attributes the time since the last call to a label."""
        self._marks.append(((label, pass_kind), self._now()))

    def seconds(self) -> dict[Mark, float]:
        """Sums of all laps by label; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums = defaultdict[Mark, float](float)
        for (_, begin), (mark, end) in zip(self._marks, self._marks[1:]):
            if isinstance(begin, float):
                assert isinstance(end, float)
                sums[mark] += end - begin
            else:
                assert isinstance(end, torch.cuda.Event)
                sums[mark] += begin.elapsed_time(end) / 1e3
        return dict(sums)


class WatchedHooks(PhaseHooks):
    """Hooks that read the clock around other hooks, with a profiler range for each phase.

    Args:
        hooks: run unchanged.
        names: class and module path of every phase.
        ranges: mark phases for torch's profiler.
    """

    def __init__(
        self,
        hooks: PhaseHooks,
        names: Mapping[Phase, tuple[str, str]],
        laps: Laps,
        ranges: bool,
    ) -> None:
        self._hooks, self._names, self._laps, self._ranges = hooks, names, laps, ranges
        self._running: tuple[str, record_function | None] | None = None

    def register(self, phases: Sequence[Phase]) -> None:
        self._hooks.register(phases)

    def prefetch(self, phase: Phase, forward: bool) -> None:
        self._hooks.prefetch(phase, forward)

    def before(self, phase: Phase, kind: str) -> None:
        self._laps.lap(BETWEEN)
        self._hooks.before(phase, kind)
        self._laps.lap(GATHERING)
        name, path = self._names[phase]
        span = record_function(f"{path} {name} {kind}") if self._ranges else None
        if span is not None:
            span.__enter__()
        self._running = name, span

    def after(self, phase: Phase, kind: str) -> None:
        # In B the backward has also computed the weight gradients, and no phase runs.
        if self._running is not None:
            (name, span), self._running = self._running, None
            if span is not None:
                span.__exit__(None, None, None)
            self._laps.lap(name, kind)
        self._hooks.after(phase, kind)


class Profiler:
    """Profiles the steps of `log.profile_step`, on the ranks of `log.profile_ranks`."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        config, train = run.config.log, run.config.train
        assert config.profile is not None
        self._run, self._say = run, say
        self._num_steps = 0  # of this process
        self._folder = None
        remaining, first = (
            (train.stop_after or train.steps) - run.progress.step,
            config.profile_step,
        )
        if 0 < remaining <= first:
            say(f"log.profile_step = {first} requires more steps than remain (got {remaining})")
        if run.process.rank in config.profile_ranks:
            self._folder = Path(config.profile)
        phases = set(run.model.phases)
        self._names = {
            # Phases of multi-token prediction are wrapped in `PassThrough`.
            phase: (type(getattr(phase, "phase", phase)).__name__, path)
            for path, phase in run.model.named_modules()
            if phase in phases
        }

    def step(self) -> AbstractContextManager[None]:
        """Context of a step, which profiles it if it is one of the two."""
        self._num_steps += 1
        if self._folder is None:
            return nullcontext()
        if self._num_steps == self._run.config.log.profile_step:
            return self._timed(self._folder)
        if self._num_steps == self._run.config.log.profile_step + 1:
            return self._traced(self._folder)
        return nullcontext()

    @contextmanager
    def _timed(self, folder: Path) -> Iterator[None]:
        laps = Laps(self._run.process.device)
        with self._watched(laps, ranges=False):
            yield
        laps.lap(END)
        seconds, path = laps.seconds(), self._file(folder, "phases.json")
        rows = [{"what": k, "pass": p, "seconds": s} for (k, p), s in seconds.items()]
        with harmless(f"log.profile = {folder}", self._say):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rows, indent=1))
        step = self._run.progress.step + 1
        self._say(f"time of step {step} on this rank ({path}):\n{table(seconds)}")

    @contextmanager
    def _traced(self, folder: Path) -> Iterator[None]:
        device = self._run.process.device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded, self._watched(Laps(device), ranges=True):
            yield
            # gloo notifies the profiler at the end of a gather, and crashes if it no longer exists.
            self._run.sync.finish_gather()
        path = self._file(folder, "trace.json.gz")
        with harmless(f"log.profile = {folder}", self._say):
            folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            step = self._run.progress.step + 1
            self._say(f"trace of step {step}: {path}, for https://ui.perfetto.dev")

    @contextmanager
    def _watched(self, laps: Laps, ranges: bool) -> Iterator[None]:
        stages = self._run.trainer.pipeline.stages
        before = [stage.hooks for stage in stages]
        for stage in stages:
            stage.hooks = WatchedHooks(stage.hooks, self._names, laps, ranges)
        try:
            yield
        finally:
            for stage, hooks in zip(stages, before):
                stage.hooks = hooks

    def _file(self, folder: Path, name: str) -> Path:
        return folder / f"rank{self._run.process.rank}_step{self._run.progress.step + 1}_{name}"


def table(seconds: Mapping[Mark, float]) -> str:
    """Milliseconds of each kind of phase by pass, then the remaining time; shares of the step."""
    total, apart = sum(seconds.values()), (GATHERING, BETWEEN, END)
    kinds = {kind for kind, _ in seconds if kind not in apart}
    header = f"{'ms':<32}" + "".join(f"{kind:>10}" for kind in KINDS) + f"{'sum':>10}{'share':>8}"
    lines = [header]
    for kind in sorted(kinds, key=lambda kind: -_sum_of(kind, seconds)):
        by_pass = [seconds.get((kind, pass_kind), 0.0) for pass_kind in KINDS]
        lines.append(_line(kind, sum(by_pass), total, by_pass))
    for label in apart:
        if (duration := _sum_of(label, seconds)) >= 1e-3 * total:
            lines.append(_line(label, duration, total))
    return "\n".join([*lines, _line("step", total, total)])


def _sum_of(kind: str, seconds: Mapping[Mark, float]) -> float:
    return sum(duration for (label, _), duration in seconds.items() if label == kind)


def _line(name: str, duration: float, total: float, by_pass: Sequence[float] = ()) -> str:
    columns = "".join(f"{1e3 * s:>10.2f}" if s else f"{'':>10}" for s in by_pass)
    columns = f"{columns:<{10 * len(KINDS)}}"
    return f"{name:<32}{columns}{1e3 * duration:>10.2f}{duration / total:>8.1%}"

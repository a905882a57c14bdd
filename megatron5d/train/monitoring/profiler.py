"""Where the time of a step goes, phase by phase, and a trace for the usual viewers: `log.profile`.

Two steps are looked at. In the first one only the clock is read, between phases and nowhere else,
so that it takes as long as ever; the next is recorded by torch's profiler, which slows the host,
with a range for each phase.
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

GATHERING, BETWEEN, REST = (
    "wait for gathered weights",
    "between phases: messages, loss",
    "end: reduction, update",
)
"""What a step is besides its phases; the first one under ZeRO alone."""

Mark = tuple[str, str]
"""(a phase's kind, what it runs for), or (one of the above, "")."""


class Laps:
    """Seconds from one call to the next, by what has happened in between; on a GPU the stream's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Mark, float | torch.cuda.Event]] = [((REST, ""), self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, what: str, passing: str = "") -> None:
        """Attributes the time since the last call."""
        self._marks.append(((what, passing), self._now()))

    def seconds(self) -> dict[Mark, float]:
        """Sums of all laps; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        sums = defaultdict[Mark, float](float)
        for (_, begin), (what, end) in zip(self._marks, self._marks[1:]):
            if isinstance(begin, float) and isinstance(end, float):
                sums[what] += end - begin
            else:
                sums[what] += begin.elapsed_time(end) / 1e3  # type: ignore[union-attr, arg-type]
        return dict(sums)


class WatchedHooks:
    """Another one's hooks, with the clock read between them and a range of the profiler around each
    phase.

    Args:
        hooks: whose; they work as ever.
        names: of every phase, its kind and its place in the model.
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
        name, place = self._names[phase]
        span = record_function(f"{place} {name} {kind}") if self._ranges else None
        if span is not None:
            span.__enter__()
        self._running = name, span

    def after(self, phase: Phase, kind: str) -> None:
        # else, in B, the weight gradients were made in the backward, which is over
        if self._running is not None:
            (name, span), self._running = self._running, None
            if span is not None:
                span.__exit__(None, None, None)
            self._laps.lap(name, kind)
        self._hooks.after(phase, kind)


class Profiler:
    """Looks at the steps that the configuration names, on the ranks that it names."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        config, train = run.config.log, run.config.train
        assert config.profile is not None
        self._run, self._say = run, say
        self._steps_here = 0
        self._folder = None
        left = (train.stop_after or train.steps) - run.progress.step
        if 0 < left <= config.profile_step:
            say(
                f"log.profile: too few steps are left ({left}) for log.profile_step = {config.profile_step}"
            )
        if run.process.rank in config.profile_ranks:
            self._folder = Path(config.profile)
        phases = set(run.model.phases)
        self._names = {
            # `Carrying` wraps those of mtp
            phase: (type(getattr(phase, "phase", phase)).__name__, place)
            for place, phase in run.model.named_modules()
            if phase in phases
        }

    def step(self) -> AbstractContextManager[None]:
        """Profiles a step, where it is one to profile."""
        self._steps_here += 1
        if self._folder is None:
            return nullcontext()
        if self._steps_here == self._run.config.log.profile_step:
            return self._timed(self._folder)
        if self._steps_here == self._run.config.log.profile_step + 1:
            return self._traced(self._folder)
        return nullcontext()

    @contextmanager
    def _timed(self, folder: Path) -> Iterator[None]:
        laps = Laps(self._run.process.device)
        with self._watched(laps, ranges=False):
            yield
        laps.lap(REST)
        seconds, path = laps.seconds(), self._file(folder, "phases.json")
        told = [{"what": k, "pass": p, "seconds": s} for (k, p), s in seconds.items()]
        with harmless(f"log.profile = {folder}", self._say):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(told, indent=1))
        self._say(
            f"where the time of step {self._run.progress.step + 1} went on this rank ({path}):\n{table(seconds)}"
        )

    @contextmanager
    def _traced(self, folder: Path) -> Iterator[None]:
        device = self._run.process.device
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if device.type == "cuda" else []),
        ]
        with profile(activities=activities) as recorded, self._watched(Laps(device), ranges=True):
            yield
            # gloo tells the profiler when a gather is over, and dies where it has gone
            self._run.sync.finish_gather()
        path = self._file(folder, "trace.json.gz")
        with harmless(f"log.profile = {folder}", self._say):
            folder.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            self._say(
                f"a trace of step {self._run.progress.step + 1}: {path}, for https://ui.perfetto.dev"
            )

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
    """Milliseconds of each kind of phase by pass, then what lies between; shares of the whole
    step."""
    whole, rest = sum(seconds.values()), (GATHERING, BETWEEN, REST)
    kinds = sorted(
        {kind for kind, _ in seconds if kind not in rest}, key=lambda kind: -_of(kind, seconds)
    )
    lines = [
        f"{'ms':<32}" + "".join(f"{passing:>10}" for passing in KINDS) + f"{'sum':>10}{'share':>8}"
    ]
    for kind in kinds:
        each = [seconds.get((kind, passing), 0.0) for passing in KINDS]
        lines.append(_line(kind, sum(each), whole, each))
    for what in rest:
        if (taken := _of(what, seconds)) >= 1e-3 * whole:
            lines.append(_line(what, taken, whole))
    return "\n".join([*lines, _line("step", whole, whole)])


def _of(kind: str, seconds: Mapping[Mark, float]) -> float:
    return sum(taken for (what, _), taken in seconds.items() if what == kind)


def _line(name: str, taken: float, whole: float, each: Sequence[float] = ()) -> str:
    columns = "".join(f"{1e3 * part:>10.2f}" if part else f"{'':>10}" for part in each)
    return f"{name:<32}{columns:<{10 * len(KINDS)}}{1e3 * taken:>10.2f}{taken / whole:>8.1%}"

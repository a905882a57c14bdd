"""Schedules by name: a new one is one decorated function in one file of `schedules/`."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from megatron5d.config.errors import Fault, closest
from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel import schedules
from megatron5d.pipeline_parallel.program import Program

Generator = Callable[..., Program]
"""(num_ranks, num_microbatches, chunks) -> Program.

Raises ValueError for sizes that the schedule does not admit.
"""


@dataclass(frozen=True)
class Schedule:
    """One registered generator."""

    name: str  # as in `pipeline.schedule`
    generator: Generator  # the function that makes its Programs
    chunks: int  # stages per rank and copy, unless the user gives another number
    any_chunks: bool  # whether the user may give another number of them (two or more)


REGISTERED: dict[str, Schedule] = {}


def schedule(
    name: str, chunks: int = 1, any_chunks: bool = False
) -> Callable[[Generator], Generator]:
    """Decorator that registers a generator under `name`; its arguments are those of `Schedule`."""

    def register(generator: Generator) -> Generator:
        assert (
            name not in REGISTERED or REGISTERED[name].generator.__module__ == generator.__module__
        ), f"two schedules have the name {name!r}"
        REGISTERED[name] = Schedule(name, generator, chunks, any_chunks)
        return generator

    return register


def schedule_names() -> list[str]:
    """Names of all registered schedules."""
    return list(_load())


def find_schedule(name: str) -> Schedule:
    """Finds the schedule with this name.

    Raises:
        ValueError: an unknown name.
    """
    known = _load()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"pipeline.schedule={name} is unknown; {hint}the known schedules are {', '.join(known)}"
        )
    return known[name]


def build_program(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Program:
    """Builds the Program of a named schedule.

    Args:
        name: the schedule, as in `pipeline.schedule`.
        num_ranks: pipeline ranks (`parallel.pp`).
        num_microbatches: of one step, over both directions where there are two.
        chunks: stages per rank and copy (`parallel.vpp`); None = as the schedule needs.

    Raises:
        ValueError: an unknown name, or sizes that the schedule does not admit; the message has the
            nearest legal value.
    """
    entry = find_schedule(name)
    if num_ranks < 1 or num_microbatches < 1:
        raise ValueError(
            f"pipeline.schedule={name} with parallel.pp={num_ranks} and "
            f"num_microbatches={num_microbatches}: both must be at least 1"
        )
    chunks = entry.chunks if chunks is None else chunks
    if entry.any_chunks and chunks < 2:
        raise ValueError(
            f"pipeline.schedule={name} needs parallel.vpp > 1 (got {chunks}); set parallel.vpp=2"
        )
    if not entry.any_chunks and chunks != entry.chunks:
        raise ValueError(
            f"pipeline.schedule={name} needs parallel.vpp={entry.chunks} (got {chunks}); "
            f"set parallel.vpp={entry.chunks}"
        )
    return entry.generator(num_ranks, num_microbatches, chunks)


def _load() -> dict[str, Schedule]:
    _import_schedules()
    return dict(sorted(REGISTERED.items()))


@cache
def _import_schedules() -> None:
    for module in pkgutil.iter_modules(schedules.__path__):
        importlib.import_module(f"{schedules.__name__}.{module.name}")


def schedule_faults(config: Config, world: int) -> list[Fault]:
    """The fault of an unknown `pipeline.schedule`, if it is one."""
    name = config.pipeline.schedule
    if name == "auto" or ":" in name:  # other checks read files
        return []
    try:
        find_schedule(name)
    except ValueError as error:
        reason = f"{error}; auto searches for one, file:PATH reads one"
        fix = f"pipeline.schedule={closest(name, ['auto', *schedule_names()]) or '1f1b'}"
        return [Fault("unknown-schedule", ("pipeline.schedule",), reason, fix)]
    return []

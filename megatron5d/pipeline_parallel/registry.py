"""What makes a function of `schedules/` a schedule with a name; catalogue.py finds it."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron5d.pipeline_parallel.program import Program

Generator = Callable[..., Program]
"""(num_ranks, num_microbatches, chunks) -> Program; raises ValueError for sizes that the schedule does not admit."""


@dataclass(frozen=True)
class Schedule:
    """One registered generator.

    Args:
        name: what `pipeline.schedule` calls it.
        generator: the function that makes its Programs.
        chunks: stages per rank and copy where the user names none.
        any_chunks: whether the user may name another number of them (two or more).
    """

    name: str
    generator: Generator
    chunks: int
    any_chunks: bool


REGISTERED: dict[str, Schedule] = {}


def schedule(name: str, chunks: int = 1, any_chunks: bool = False) -> Callable[[Generator], Generator]:
    """Returns the decorator that registers a generator under `name`; its arguments are those of `Schedule`."""

    def register(generator: Generator) -> Generator:
        assert name not in REGISTERED or REGISTERED[name].generator.__module__ == generator.__module__, (
            f"two schedules are called {name!r}"
        )
        REGISTERED[name] = Schedule(name, generator, chunks, any_chunks)
        return generator

    return register

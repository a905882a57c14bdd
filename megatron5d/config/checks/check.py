"""What a check is, and the integer arithmetic that conditions and fixes share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from megatron5d.config.convert import value_of
from megatron5d.config.derived import sample_len
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config

Faults = Iterator[Fault]


@dataclass(frozen=True)
class Check:
    """One way in which a configuration cannot run."""

    id: str  # kebab-case, unique
    # keys that it depends on; it is not run if one of them has an illegal value by itself
    knobs: tuple[str, ...]
    # (config, world) -> yields the fault of a configuration that cannot run, and nothing of any
    # other
    find: Callable[[Config, int], Faults]
    needs: tuple[str, ...] = ()  # ids of checks; if one of them fails, this one is not run
    local: bool = False

    def run(self, config: Config, world: int) -> Fault | None:
        """Returns what is wrong with a configuration; None where it passes."""
        found = next(self.find(config, world), None)
        return found and replace(found, id=self.id, knobs=self.knobs, local=self.local)


def check(
    *knobs: str, id: str = "", needs: Sequence[str] = (), local: bool = False
) -> Callable[[Callable[[Config, int], Faults]], Check]:
    """Makes a Check of a function; without an id it is the function's name with hyphens. Arguments
    as of Check."""

    def decorate(find: Callable[[Config, int], Faults]) -> Check:
        return Check(id or find.__name__.replace("_", "-"), knobs, find, tuple(needs), local)

    return decorate


def divides(
    part: str, whole: str, id: str, fix: Callable[[Config, int], str] | None = None
) -> Check:
    """Makes the check that the value of one key divides another's; without a fix it is the nearest
    that does."""

    @check(whole, part, id=id)
    def find(c: Config, world: int) -> Faults:
        size, of = value_of(c, part), value_of(c, whole)
        if of % size:
            nearby = f"{part}={nearest(size, divisors(of))}" if fix is None else fix(c, world)
            yield fault(f"{whole} = {of} is not divisible by {part} = {size}", nearby)

    return find


def check_id(knob: str, ending: str = "") -> str:
    """Returns the id of a check of one key alone."""
    return f"{knob}{ending}".replace(".", "-").replace("_", "-")


def fault(reason: str, fix: str) -> Fault:
    """Makes the fault that a check yields; the check adds its id and its keys."""
    return Fault("", (), reason, fix)


def data_parallel(config: Config, world: int) -> int:
    """Returns dp, in ranks: what tp·cp·pp leave of the world (1 where they leave nothing)."""
    return max(1, world // (config.parallel.tp * config.parallel.cp * config.parallel.pp))


def nearest(value: int, legal: Iterable[int]) -> int:
    """Returns the legal number closest to `value`, of two equally close ones the smaller; 1 where
    none is legal."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate), default=1)


def divisors(value: int) -> list[int]:
    """Returns all divisors of a positive integer, ascending."""
    small = [d for d in range(1, isqrt(max(0, value)) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def seq_len_fix(config: Config, of: int) -> str:
    """Returns the sequence lengths on both sides that `of` divides, or padding up to the next."""
    length, padded = config.train.seq_len, f"train.seq_len={-(-config.train.seq_len // of) * of}"
    return f"train.seq_len={multiples(length, of)}, or padding: {padded} data.sample_len={sample_len(config)}"


def multiples(value: int, of: int) -> str:
    """Returns the multiples of `of` on both sides of `value`, as text."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)

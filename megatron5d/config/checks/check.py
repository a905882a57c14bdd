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
    """One reason for which a configuration cannot run."""

    id: str  # kebab-case, unique
    # keys that it depends on; the check is skipped if one of them is illegal by itself
    knobs: tuple[str, ...]
    # (config, world) -> yields the fault of an invalid configuration; only the first one counts
    find: Callable[[Config, int], Faults]
    needs: tuple[str, ...] = ()  # ids of checks; if one of them fails, this one is skipped
    local: bool = False  # about files or devices of this node

    def run(self, config: Config, world: int) -> Fault | None:
        """Fault of a configuration; None where it passes."""
        first = next(self.find(config, world), None)
        return first and replace(first, id=self.id, knobs=self.knobs, local=self.local)


def check(
    *knobs: str, id: str = "", needs: Sequence[str] = (), local: bool = False
) -> Callable[[Callable[[Config, int], Faults]], Check]:
    """Makes a Check of a function; its id is the function's name with hyphens unless given.

    Args:
        Others: as in `Check`.
    """

    def decorate(find: Callable[[Config, int], Faults]) -> Check:
        return Check(id or find.__name__.replace("_", "-"), knobs, find, tuple(needs), local)

    return decorate


def divides(
    divisor: str, dividend: str, id: str, fix: Callable[[Config, int], str] | None = None
) -> Check:
    """Makes the check that the value of one key divides another's.

    Args:
        fix: (config, world) -> the fix; None = the nearest divisor.
    """

    @check(dividend, divisor, id=id)
    def find(c: Config, world: int) -> Faults:
        size, total = value_of(c, divisor), value_of(c, dividend)
        if total % size:
            nearby = f"{divisor}={nearest(size, divisors(total))}" if fix is None else fix(c, world)
            yield fault(f"{dividend}={total} must be divisible by {divisor} (got {size})", nearby)

    return find


def check_id(knob: str, ending: str = "") -> str:
    """Id of a check of one key alone."""
    return f"{knob}{ending}".replace(".", "-").replace("_", "-")


def fault(reason: str, fix: str) -> Fault:
    """Makes the fault that a check yields; the check adds its id and its keys."""
    return Fault("", (), reason, fix)


def data_parallel(config: Config, world: int) -> int:
    """dp, in ranks: all remaining ranks, at least 1."""
    return max(1, world // (config.parallel.tp * config.parallel.cp * config.parallel.pp))


def nearest(value: int, legal: Iterable[int]) -> int:
    """Legal number closest to `value`, the smaller of two; 1 where none is legal."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate), default=1)


def divisors(value: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, isqrt(max(0, value)) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def seq_len_fix(config: Config, multiple: int) -> str:
    """Nearest sequence lengths of a multiple, or padding up to the next one."""
    length = config.train.seq_len
    padded = f"train.seq_len={-(-length // multiple) * multiple}"
    return (
        f"train.seq_len={multiples(length, multiple)}, "
        f"or padding: {padded} data.sample_len={sample_len(config)}"
    )


def multiples(value: int, base: int) -> str:
    """Multiples of `base` on both sides of `value`, as text."""
    below = value // base * base
    return f"{below} or {below + base}" if below else str(base)

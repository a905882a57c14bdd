"""What a law is, and the integer arithmetic that conditions and fixes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isqrt

from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config

Text = Callable[[Config, int], str]


@dataclass(frozen=True)
class Law:
    """One way in which a configuration cannot run, as data.

    Args:
        id: kebab-case, unique.
        knobs: config keys that it depends on; it is not checked if one of them has an illegal value by itself.
        broken: (config, world) -> whether the configuration breaks it.
        reason: (config, world) -> what is wrong, with the numbers.
        fix: (config, world) -> the nearest legal value, as an override.
        needs: ids of laws; if one of them is broken, this one is not checked.
        local: as in Fault.
    """

    id: str
    knobs: tuple[str, ...]
    broken: Callable[[Config, int], bool]
    reason: Text
    fix: Text
    needs: tuple[str, ...] = ()
    local: bool = False

    def fault(self, config: Config, world: int) -> Fault:
        """The fault of a configuration that breaks it."""
        return Fault(self.id, self.knobs, self.reason(config, world), self.fix(config, world), self.local)


def data_parallel(config: Config, world: int) -> int:
    """dp, in ranks: what tp·cp·pp leave of the world (1 where they leave nothing)."""
    return max(1, world // (config.parallel.tp * config.parallel.cp * config.parallel.pp))


def nearest(value: int, legal: Iterable[int]) -> int:
    """The legal number closest to `value`, of two equally close ones the smaller; 1 where none is legal."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate), default=1)


def divisors(value: int) -> list[int]:
    """All divisors of a positive integer, ascending."""
    small = [d for d in range(1, isqrt(max(0, value)) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def spelled(value: object) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def multiples(value: int, of: int) -> str:
    """The multiples of `of` on both sides of `value`, as text."""
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)


def tensor_parallel_sizes(config: Config, world: int) -> list[int]:
    """Every tp that fits the world, the heads, the MLP and (with sp) the sequence."""
    model, parallel, num_kv_heads = config.model, config.parallel, max(1, config.model.num_kv_heads)
    others = max(1, parallel.cp) * max(1, parallel.pp)
    return [
        tp
        for tp in divisors(model.num_heads)
        if world % (tp * others) == 0
        and model.ffn_hidden_size % tp == 0
        and (num_kv_heads % tp == 0 or tp % num_kv_heads == 0)
        and not (parallel.sp and (tp == 1 or config.train.seq_len % tp))
    ]


def tensor_parallel_fix(config: Config, world: int) -> str:
    """The override of the nearest legal tp."""
    sizes = tensor_parallel_sizes(config, world)
    if sizes:
        return f"parallel.tp={nearest(config.parallel.tp, sizes)}"
    overlapped = config.parallel.sp and config.parallel.tp_overlap != "none"
    return (
        "parallel.tp=1"
        + (" parallel.sp=false" if config.parallel.sp else "")
        + (" parallel.tp_overlap=none" if overlapped else "")
    )

"""Turns off one thing of a layout at a time, and runs it, to find which of them a difference needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from megatron5d.config.checks.check import data_parallel
from megatron5d.config.convert import value_of
from megatron5d.config.schema import Config, RecomputeConfig
from megatron5d.parity.variants import faults_of
from megatron5d.plan.search import Change
from megatron5d.planning.fit import changed, override_text

_NO_SP: Change = {"parallel.sp": False, "parallel.tp_overlap": "none"}
_ONE_CHUNK: Change = {"parallel.vpp": 1, "pipeline.layout": None, "pipeline.balance": "stages",
                      "recompute.stage_layers": None}  # fmt: skip
_NO_ZERO: Change = {"parallel.zero": 0, "parallel.regather": "per_microbatch", "parallel.reduce": "per_microbatch"}
# what is turned off, and what has no meaning without it; the first key gives the whole its name
OFF: tuple[Change, ...] = (
    {"parallel.tp": 1, **_NO_SP},
    _NO_SP,
    {"parallel.tp_overlap": "none"},
    {"parallel.cp": 1, "parallel.cp_inner": 1, "parallel.cp_method": "ring", "parallel.cp_compress_kv": False},
    {"parallel.cp_method": "ring", "parallel.cp_inner": 1},
    {"parallel.cp_compress_kv": False},
    {"parallel.pp": 1, "pipeline.schedule": "1f1b", **_ONE_CHUNK},
    {"pipeline.schedule": "1f1b", **_ONE_CHUNK},
    {"parallel.ep": 1, "parallel.ep_inner": 1},
    {"parallel.ep_inner": 1},
    {"parallel.etp": 1},
    {"parallel.dp_replicate": 1},
    _NO_ZERO,
    {"parallel.regather": "per_microbatch"},
    {"parallel.reduce": "per_microbatch"},
    {f"recompute.{name}": value for name, value in vars(RecomputeConfig()).items() if name != "offload_min_bytes"},
    {"recompute.offload": []},
    {"recompute.logit_tokens": None},
    {"optim.implementation": "auto"},
    {"optim.offload": False},
)
AXES = ("parallel.tp", "parallel.cp", "parallel.pp")


@dataclass(frozen=True)
class Ablation:
    """A configuration without one thing.

    Args:
        change: what is turned off, as overrides; "dp=1" where it is the ranks that are fewer.
        config: without it; lawful.
        world: ranks that remain; dp is as before.
    """

    change: str
    config: Config
    world: int


def ablations(config: Config, world: int) -> Iterator[Ablation]:
    """Everything that this configuration uses and could run without, one thing at a time; the mathematics stays."""
    if data_parallel(config, world) > 1:
        fewer = world // data_parallel(config, world)
        yield from _lawful("dp=1", _folded(changed(config, {"parallel.dp_replicate": 1}), fewer), fewer)
    for off in OFF:
        first, *_ = off
        change = {key: value for key, value in off.items() if value_of(config, key) != value}
        if first in change and not (first == "parallel.etp" and config.parallel.etp is None):
            size = value_of(config, first) if first in AXES else 1
            yield from _lawful(
                override_text({first: off[first]}), _folded(changed(config, change), world // size), world // size
            )


def _lawful(change: str, config: Config, world: int) -> Iterator[Ablation]:
    if not faults_of(config, world):
        yield Ablation(change, config, world)


def _folded(config: Config, world: int) -> Config:
    """With as many of the expert axes as fold into the ranks that are left."""
    p = config.parallel
    fold = world // p.pp
    etp = None if p.etp is None else gcd(p.etp, fold)
    ep = gcd(p.ep, fold // (etp or p.tp))
    return changed(config, {"parallel.etp": etp, "parallel.ep": ep, "parallel.ep_inner": gcd(p.ep_inner, ep)})

"""Whether a run fits its devices, and which overrides make it fit: the cheapest first, tried on the
memory forecast."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import Change, changed, override_text
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import RankMemory, gigabytes
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
from megatron5d.train.preflight.kernels import device_faults


def steps(config: Config) -> list[Change]:
    """Returns what may be changed, the cheapest first; each replaces what an earlier one has said
    of the same key."""
    parallel, train, mode = config.parallel, config.train, config.recompute.mode
    found: list[Change] = []
    if parallel.tp > 1 and not parallel.sp:
        found.append({"parallel.sp": True})
    if parallel.zero < 1:
        found.append({"parallel.zero": 1})
    mbs = train.mbs
    while mbs > 1:
        mbs //= 2
        found.append({"train.mbs": mbs})
    if mode == "none":
        found.append({"recompute.mode": "selective"})
    if config.recompute.logit_tokens is None:
        found.append({"recompute.logit_tokens": 1024})
    if parallel.zero < 2 and parallel.pp == 1:
        found.append({"parallel.zero": 2})
    if mode != "full":
        found.append({"recompute.mode": "full"})
    # others hold more micro-batches, or weight gradients
    if parallel.pp > 1 and config.pipeline.schedule != "1f1b":
        found.append(
            ({"parallel.vpp": 1} if parallel.vpp > 1 else {}) | {"pipeline.schedule": "1f1b"}
        )
    if parallel.zero < 3:
        found.append({"parallel.zero": 3})
    found += [{"parallel.tp": tp, "parallel.sp": True} for tp in (2, 4, 8) if tp > parallel.tp]
    return found


def nearest_fit(config: Config, world: int, target: Target, have: int) -> tuple[Change, int] | None:
    """Returns the steps, one after the other, until the run fits; then without those that turn out
    not to be needed.

    Args:
        config: a valid configuration that does not fit.
        world: number of ranks.
        target: what is planned for.
        have: bytes of one device.

    Returns:
        (overrides, bytes that the worst rank needs); None where none of this is enough.
    """

    def need(change: Change) -> int | None:
        return _need(changed(config, change), world, target)

    taken: Change = {}
    for step in steps(config):
        needed = need(taken | step)
        if needed is None:
            continue
        taken |= step
        if needed <= have:
            return _without_idle(taken, needed, need, have)
    return None


def _without_idle(
    taken: Change, needed: int, need: Callable[[Change], int | None], have: int
) -> tuple[Change, int]:
    for key in list(taken)[:-1]:
        fewer = {name: value for name, value in taken.items() if name != key}
        less = need(fewer)
        if less is not None and less <= have:
            taken, needed = fewer, less
    return taken, needed


def _need(config: Config, world: int, target: Target) -> int | None:
    """Returns bytes of the rank that needs most; None where the configuration is refused."""
    if run_checks(config, world, files=False) or pipeline_faults(config, world):
        return None
    ranks: dict[int, RankMemory] = Forecaster(config, world, target).ranks()
    return max(memory.needed for memory in ranks.values())


def fit_text(found: tuple[Change, int] | None) -> str:
    """Returns what `nearest_fit` has found, as overrides and what they need."""
    if found is None:
        return (
            "no recompute, schedule, sharding or tensor parallelism makes it fit: a larger parallel.pp or cp, or more "
            "ranks"
        )
    change, needed = found
    return f"{override_text(change)}, which needs {gigabytes(needed)}"


def device_bytes(config: Config) -> int | None:
    """Returns what one device has: as configured, else as this process's GPU says; None where
    nothing is known (a CPU)."""
    if config.log.device_memory_gb is not None:
        return round(config.log.device_memory_gb * 1e9)
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def target_here(config: Config) -> Target:
    """Returns what the ranks of this run are, judged by this process and by what is configured of
    the device."""
    if torch.cuda.is_available() and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        return Target(f"sm_{major}{minor}", config.moe.planned_imbalance)
    return Target(
        None if config.log.device_memory_gb is None else "sm_90", config.moe.planned_imbalance
    )


def memory_faults(config: Config, world: int) -> list[Fault]:
    """Returns why a run cannot fit its devices, where `log.memory_check = refuse` and a device is
    known."""
    have = device_bytes(config)
    if config.log.memory_check != "refuse" or have is None or device_faults(config, world):
        return []
    ranks = Forecaster(config, world, target_here(config)).ranks()
    lack = shortage(ranks, have)
    if lack is None:
        return []
    enough = fit_text(nearest_fit(config, world, target_here(config), have))
    return [
        Fault(
            "memory",
            ("log.memory_check",),
            lack,
            f"{enough}; log.memory_check=warn to try all the same",
        )
    ]


def shortage(ranks: dict[int, RankMemory], have: int) -> str | None:
    """Returns what is wrong where the devices are too small; None where they are not."""
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    if ranks[worst].needed <= have:
        return None
    kinds = sorted(ranks[worst].kinds().items(), key=lambda item: -item[1])[:4]
    largest = ", ".join(f"{kind} {gigabytes(count)}" for kind, count in kinds)
    return (
        f"pipeline rank {worst} needs {gigabytes(ranks[worst].needed)}, the device has {gigabytes(have)}; most of it: "
        f"{largest}"
    )


def ways_out(config: Config, world: int) -> str:
    """Returns overrides that lower what a rank needs, the cheapest first; how many of them are
    enough is not said."""
    p = config.parallel
    # ZeRO, over dp_shard·cp or edp
    divides = world > p.tp * p.pp * p.dp_replicate or config.model.num_experts > 0
    ways = [
        override_text(step)
        for step in steps(config)
        if (divides or "parallel.zero" not in step)
        and not run_checks(changed(config, step), world, files=False)
    ]
    return (
        f"ways to need less, the cheapest first: {', '.join([*ways, 'a larger parallel.pp or cp'])}"
    )

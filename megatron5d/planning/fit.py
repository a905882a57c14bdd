"""Whether a run fits its devices, and the cheapest overrides with which the forecast fits."""

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


def memory_savers(config: Config) -> list[Change]:
    """Changes that save memory, the cheapest first; a later value of a key replaces the earlier."""
    parallel, train, mode = config.parallel, config.train, config.recompute.mode
    changes: list[Change] = []
    if parallel.tp > 1 and not parallel.sp:
        changes.append({"parallel.sp": True})
    if parallel.zero < 1:
        changes.append({"parallel.zero": 1})
    mbs = train.mbs
    while mbs > 1:
        mbs //= 2
        changes.append({"train.mbs": mbs})
    if mode == "none":
        changes.append({"recompute.mode": "selective"})
    if config.recompute.logit_tokens is None:
        changes.append({"recompute.logit_tokens": 1024})
    if parallel.zero < 2 and parallel.pp == 1:
        changes.append({"parallel.zero": 2})
    if mode != "full":
        changes.append({"recompute.mode": "full"})
    # Other schedules hold more micro-batches, or weight gradients.
    if parallel.pp > 1 and config.pipeline.schedule != "1f1b":
        one_chunk = {"parallel.vpp": 1} if parallel.vpp > 1 else {}
        changes.append(one_chunk | {"pipeline.schedule": "1f1b"})
    if parallel.zero < 3:
        changes.append({"parallel.zero": 3})
    changes += [{"parallel.tp": tp, "parallel.sp": True} for tp in (2, 4, 8) if tp > parallel.tp]
    return changes


def nearest_fit(
    config: Config, world: int, target: Target, capacity: int
) -> tuple[Change, int] | None:
    """The first of `memory_savers` together with which the run fits, without unnecessary ones.

    Args:
        config: a valid configuration that does not fit.
        world: number of ranks.
        target: hardware.
        capacity: bytes of one device.

    Returns:
        (overrides, bytes that the largest rank needs); None where all changes are not enough.
    """

    def needed_by(change: Change) -> int | None:
        return _needed_bytes(changed(config, change), world, target)

    applied: Change = {}
    for change in memory_savers(config):
        needed = needed_by(applied | change)
        if needed is None:
            continue
        applied |= change
        if needed <= capacity:
            return _without_unnecessary(applied, needed, needed_by, capacity)
    return None


def _without_unnecessary(
    applied: Change, needed: int, needed_by: Callable[[Change], int | None], capacity: int
) -> tuple[Change, int]:
    for key in list(applied)[:-1]:
        fewer = {name: value for name, value in applied.items() if name != key}
        needed_by_fewer = needed_by(fewer)
        if needed_by_fewer is not None and needed_by_fewer <= capacity:
            applied, needed = fewer, needed_by_fewer
    return applied, needed


def _needed_bytes(config: Config, world: int, target: Target) -> int | None:
    """Bytes of the rank that needs most; None for an invalid configuration."""
    if run_checks(config, world, files=False) or pipeline_faults(config, world):
        return None
    ranks: dict[int, RankMemory] = Forecaster(config, world, target).ranks()
    return max(memory.needed for memory in ranks.values())


def fit_text(fit: tuple[Change, int] | None) -> str:
    """The result of `nearest_fit` as overrides, and the memory with them."""
    if fit is None:
        return (
            "a larger parallel.pp or cp, or more ranks: "
            "recompute, schedule, sharding and tensor parallelism are not enough"
        )
    change, needed = fit
    return f"{override_text(change)}, which needs {gigabytes(needed)}"


def device_bytes(config: Config) -> int | None:
    """Bytes of one device: as configured, else of this process's GPU; None on a CPU."""
    if config.log.device_memory_gb is not None:
        return round(config.log.device_memory_gb * 1e9)
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def target_here(config: Config) -> Target:
    """Hardware of this run's ranks, given this process's device and the configured one."""
    if torch.cuda.is_available() and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability()
        return Target(f"sm_{major}{minor}", config.moe.planned_imbalance)
    architecture = None if config.log.device_memory_gb is None else "sm_90"
    return Target(architecture, config.moe.planned_imbalance)


def memory_faults(config: Config, world: int) -> list[Fault]:
    """Why a run does not fit its devices, if `log.memory_check = refuse` and a device is known."""
    capacity = device_bytes(config)
    if config.log.memory_check != "refuse" or capacity is None or device_faults(config, world):
        return []
    target = target_here(config)
    reason = shortage(Forecaster(config, world, target).ranks(), capacity)
    if reason is None:
        return []
    fit = fit_text(nearest_fit(config, world, target, capacity))
    fix = f"{fit}; log.memory_check=warn to try anyway"
    return [Fault("memory", ("log.memory_check",), reason, fix)]


def shortage(ranks: dict[int, RankMemory], capacity: int) -> str | None:
    """Message about a rank that does not fit; None if all do."""
    largest = max(ranks, key=lambda rank: ranks[rank].needed)
    needed = ranks[largest].needed
    if needed <= capacity:
        return None
    kinds = sorted(ranks[largest].kinds().items(), key=lambda item: -item[1])[:4]
    most = ", ".join(f"{kind} {gigabytes(count)}" for kind, count in kinds)
    return (
        f"pipeline rank {largest} needs {gigabytes(needed)}, the device has {gigabytes(capacity)}; "
        f"mostly {most}"
    )


def suggestions(config: Config, world: int) -> str:
    """Overrides that save memory, the cheapest first, without a forecast of how much."""
    p = config.parallel
    # ZeRO shards over dp_shard·cp, or edp.
    can_shard = world > p.tp * p.pp * p.dp_replicate or config.model.num_experts > 0
    changes = [
        override_text(change)
        for change in memory_savers(config)
        if (can_shard or "parallel.zero" not in change)
        and not run_checks(changed(config, change), world, files=False)
    ]
    return (
        f"to need less, the cheapest first: {', '.join([*changes, 'a larger parallel.pp or cp'])}"
    )

"""Throughput and memory of many layouts of one model, planned or measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from megatron5d.config.load import keys_given
from megatron5d.planning.clusters import GIB, Cluster
from megatron5d.planning.planned_config import planned_config, unplanned_config
from megatron5d.tools.report.runs import read_run

if TYPE_CHECKING:
    from megatron5d.planning.layout_search import Candidate, LayoutSearch

AXES = ("tp", "cp", "pp", "ep", "zero")


def planned_records(
    overrides: Sequence[str], worlds: Sequence[int], cluster: Cluster, count: int
) -> list[dict[str, Any]]:
    """The fastest layouts that fit on each number of GPUs, one record per layout.

    Args:
        overrides: of pretrain.py; the search keeps the keys that they set.
        worlds: numbers of ranks.
        cluster: device and network.
        count: layouts per number of ranks.

    Raises:
        ConfigError: an override is invalid, or no number of ranks has a layout and the overrides
            rule out every layout of one of them.
        ValueError: no layout fits on any number of ranks.
    """
    records: list[dict[str, Any]] = []
    impossible: list[int] = []
    with tqdm(worlds, desc="numbers of GPUs", leave=False, disable=None) as bar:
        for world in bar:
            config = unplanned_config(overrides, world)
            # Imported after the checks: it takes seconds, and an error should come at once.
            from megatron5d.planning.layout_search import LayoutSearch

            search = LayoutSearch(config, world, cluster, fixed=keys_given(overrides))
            candidates = search.candidates(cluster.memory_bytes)
            best = search.best(candidates, cluster.memory_bytes, count)
            impossible += [] if search.has_legal_shape else [world]
            records += [_record(search, candidate, world) for candidate in best]
    if not records:
        for world in impossible:
            planned_config(overrides, world)  # raises ConfigError with the reason
        raise ValueError(
            f"no layout fits {cluster.memory_bytes / GIB:.0f} GiB "
            f"on {', '.join(map(str, worlds))} ranks"
        )
    return records


def _record(search: LayoutSearch, candidate: Candidate, world: int) -> dict[str, Any]:
    assert candidate.cost is not None
    change = candidate.change
    parallel = {
        name: change.get(f"parallel.{name}", getattr(search.config.parallel, name)) for name in AXES
    }
    return {
        "world": world,
        **parallel,
        "mbs": change.get("train.mbs", search.config.train.mbs),
        "tokens_per_s_per_gpu": candidate.cost.tokens_per_s_per_gpu,
        "mfu": candidate.cost.mfu,
        "memory_gib": candidate.needed / GIB,
    }


def measured_records(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """One record per run: its number of ranks, and its last logged throughput and memory.

    Raises:
        ValueError: a log holds no step.
    """
    records = []
    for log in logs:
        run = read_run(log)
        last = {field: points[-1][1] for field, points in run["fields"].items()}
        records.append(
            {
                "name": run["name"],
                "world": run["world"],
                "mfu": last.get("mfu"),
                "tokens_per_s_per_gpu": last.get("tokens_per_s_per_gpu"),
                "memory_gib": last["memory_gb"] * 1e9 / GIB if "memory_gb" in last else None,
            }
        )
    return records

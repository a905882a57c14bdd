"""Many layouts of one model as plots: throughput and memory over GPUs and micro-batch, and a heat
map of tp and pp."""

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


def planned(
    overrides: Sequence[str], worlds: Sequence[int], cluster: Cluster, count: int
) -> list[dict[str, Any]]:
    """Returns the fastest layouts that fit on each number of GPUs, one record a layout.

    Args:
        overrides: of pretrain.py; keys that they give stay as they are.
        cluster: device and network.
        count: layouts on each number of ranks.

    Raises:
        ConfigError: an override is wrong, or admits no layout of a number of ranks, where there is
            none of the others.
        ValueError: no layout fits on any of them.
    """
    records: list[dict[str, Any]] = []
    refused: list[int] = []
    with tqdm(worlds, desc="numbers of GPUs", leave=False, disable=None) as bar:
        for world in bar:
            config = unplanned_config(overrides, world)
            # seconds, which no refusal waits for
            from megatron5d.planning.layout_search import LayoutSearch

            search = LayoutSearch(config, world, cluster, fixed=keys_given(overrides))
            candidates = search.candidates(cluster.memory_bytes)
            found = search.best(candidates, cluster.memory_bytes, count)
            refused += [] if search.has_legal_shape else [world]
            records += [_record(search, each, world) for each in found]
    if not records:
        for world in refused:
            planned_config(overrides, world)  # says what is wrong
        raise ValueError(
            f"no layout fits {cluster.memory_bytes / GIB:.0f} GiB on {', '.join(map(str, worlds))} ranks"
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


def measured(logs: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns one record a run: its ranks, and what its log says of throughput and memory at the
    end. Raises
    ValueError: a log holds no step."""
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


def draw(records: Sequence[dict[str, Any]], title: str, out: Path) -> None:
    """Writes the plots of a sweep; the format follows from the name."""
    from matplotlib.figure import Figure

    worlds = sorted({record["world"] for record in records})
    best = [
        max(_of(records, "world", world), key=lambda each: each["tokens_per_s_per_gpu"])
        for world in worlds
    ]
    figure = Figure(figsize=(11, 8), layout="constrained")
    (rate, memory), (batch, heat) = figure.subplots(2, 2)
    figure.suptitle(title)
    rate.plot(
        [each["world"] for each in records],
        [each["tokens_per_s_per_gpu"] for each in records],
        ".",
        color="0.7",
    )
    rate.plot(worlds, [each["tokens_per_s_per_gpu"] for each in best], "o-", label="best")
    rate.set(xlabel="GPUs", ylabel="tokens/s a GPU", xscale="log", ylim=(0, None))
    memory.plot(worlds, [each["memory_gib"] for each in best], "o-", color="C1")
    memory.set(xlabel="GPUs", ylabel="GiB a rank, best layout", xscale="log", ylim=(0, None))
    for axes in (rate, memory):
        axes.set_xticks(worlds, [str(world) for world in worlds])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    if "tp" not in records[0]:
        batch.set_axis_off()
        heat.set_axis_off()
    else:
        last = _of(records, "world", worlds[-1])
        sizes = sorted({each["mbs"] for each in last})
        top = [
            max(each["tokens_per_s_per_gpu"] for each in _of(last, "mbs", size)) for size in sizes
        ]
        batch.bar([str(size) for size in sizes], top, color="C2")
        batch.set(
            xlabel=f"micro-batch (train.mbs), {worlds[-1]} GPUs", ylabel="tokens/s a GPU, best"
        )
        _heat_map(heat, last, worlds[-1])
    figure.savefig(out, dpi=120)


def _heat_map(axes: Any, records: Sequence[dict[str, Any]], world: int) -> None:
    tps, pps = (sorted({record[name] for record in records}) for name in ("tp", "pp"))
    cells = [
        [
            max(
                (100 * each["mfu"] for each in _of(_of(records, "tp", tp), "pp", pp)),
                default=float("nan"),
            )
            for tp in tps
        ]
        for pp in pps
    ]
    axes.imshow(cells, aspect="auto", cmap="viridis", origin="lower")
    axes.set_xticks(range(len(tps)), [str(tp) for tp in tps])
    axes.set_yticks(range(len(pps)), [str(pp) for pp in pps])
    axes.set(xlabel="tp", ylabel="pp", title=f"best MFU in %, {world} GPUs")
    for row, line in enumerate(cells):
        for column, value in enumerate(line):
            if value == value:  # a layout was found
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", color="white")


def _of(records: Sequence[dict[str, Any]], key: str, value: Any) -> list[dict[str, Any]]:
    return [record for record in records if record[key] == value]

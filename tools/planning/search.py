"""Runs `plan.py search`: the fastest layouts that fit."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from megatron5d.config.convert import override_text
from megatron5d.config.load import keys_given
from megatron5d.config.schema import Config
from megatron5d.planning.clusters import GIB, Cluster
from megatron5d.planning.layout_search import Candidate, LayoutSearch
from megatron5d.planning.memory.rank_memory import gigabytes
from megatron5d.planning.planned_config import planned_config
from megatron5d.tools.planning.options import check_fp8, cluster_of, device_bytes, run_text

PROGRESS_EVERY_S = 10.0
MAX_HOST_GPUS = 8  # more share fast links only in a rack of hosts, such as a GB200 NVL72
RACK_HOST_GPUS = 4  # of one host in such a rack
SBATCH_TASKS = 8  # per node, the default of launch/slurm.sbatch


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the fastest layouts; the result is the exit code."""
    cluster = cluster_of(options)
    available = device_bytes(options, cluster.memory_bytes)
    check_fp8(config, cluster.architecture)
    search = LayoutSearch(
        config, options.world, cluster, options.imbalance, keys_given(options.overrides)
    )
    with _progress("shapes of a layout") as count:
        candidates = search.candidates(available, count)
    if not search.has_legal_shape:
        planned_config(options.overrides, options.world)  # raises ConfigError with the reason
    with _progress(f"times and memories, of {len(candidates):,} layouts at most") as count:
        best = search.best(candidates, available, options.count, count)
    layouts = [(layout, override_text(search.overrides(layout))) for layout in best]
    if options.json:
        records = [
            _record(layout, overrides, _command(options, cluster, overrides))
            for layout, overrides in layouts
        ]
        result = {"world": options.world, "device": asdict(cluster), "layouts": records}
        print(json.dumps(result, indent=2))
    elif best:
        print(_layouts_table(layouts))
        print(
            f"Of {len(candidates):,} layouts on {options.world} x {cluster.name}, "
            f"{gigabytes(available)} each, for"
        )
        print(run_text(config))
        print(f"Run the first one: {_command(options, cluster, layouts[0][1])}")
    else:
        print(
            f"None of the layouts examined fits {gigabytes(available)}: "
            "try more ranks, or recompute.offload."
        )
        if (least := search.smallest()) is not None:
            overrides = override_text(search.overrides(least)) or "unchanged"
            print(f"The smallest of them needs {gigabytes(least.needed)}: {overrides}")
    return 0 if best else 1


def _layouts_table(layouts: list[tuple[Candidate, str]]) -> str:
    """Table of layouts, each with its overrides on one line; "" = the unchanged configuration."""
    lines = [f"{'step':>11}{'tokens/s/GPU':>14}{'MFU':>8}{'bubble':>8}{'memory':>10}  overrides"]
    for layout, overrides in layouts:
        cost = layout.cost
        assert cost is not None
        figures = f"{cost.step_s:>9.3f} s{cost.tokens_per_s_per_gpu:>14,.0f}{cost.mfu:>8.1%}"
        bubble = f"{cost.seconds['bubble'] / cost.step_s:>8.1%}"
        lines.append(
            f"{figures}{bubble}{layout.needed / GIB:>7.1f} GiB  {overrides or '(unchanged)'}"
        )
    return "\n".join(lines)


def _record(layout: Candidate, overrides: str, command: str) -> dict[str, Any]:
    assert layout.cost is not None
    return {
        "overrides": overrides,
        "needed_bytes": layout.needed,
        **layout.cost.record(),
        "command": command,
    }


@contextmanager
def _progress(items: str) -> Iterator[Callable[[], None]]:
    """Shows how many candidates were tried: a bar on a terminal, a line every 10 s elsewhere."""
    with tqdm(desc=items, unit="", leave=False, disable=None) as bar:
        number, printed = 0, time.perf_counter()

        def count() -> None:
            nonlocal number, printed
            number += 1
            bar.update()
            if bar.disable and (now := time.perf_counter()) - printed >= PROGRESS_EVERY_S:
                printed = now
                print(f"tried {number:,} {items}", file=sys.stderr, flush=True)

        yield count


def _command(options: argparse.Namespace, cluster: Cluster, overrides: str) -> str:
    """Command that starts a layout on this cluster: the user's overrides, then the layout's."""
    words = list(options.overrides)
    if not any(word.startswith(("data.train=", "experiment=quickstart")) for word in words):
        words.append("data.train=[data/corpus]")
    return f"{_launch(options.world, cluster.node)} {shlex.join(words)} {overrides}".rstrip()


def _launch(world: int, node: int) -> str:
    """Launcher with its options: one rank per GPU, equally many on every host."""
    host_gpus = node if node <= MAX_HOST_GPUS else RACK_HOST_GPUS
    if world <= host_gpus:
        return f"bash launch/local.sh {world}"
    per_node = next(n for n in range(host_gpus, 0, -1) if world % n == 0)
    tasks = "" if per_node == SBATCH_TASKS else f" --ntasks-per-node={per_node}"
    gpus = f"--nodes={world // per_node} --gpus-per-node={per_node}"
    return f"sbatch {gpus}{tasks} launch/slurm.sbatch"

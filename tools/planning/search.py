"""Answer plan.py search: the fastest layouts that fit."""

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
from megatron5d.tools.planning.asked import bytes_given, check_fp8, cluster_of, what

TOLD_EVERY_S = 10.0
# GPUs; more share fast links in a rack of hosts, as of a GB200 NVL72
MOST_IN_A_HOST, RACK_HOST = 8, 4
SBATCH_TASKS = 8  # of a node, as launch/slurm.sbatch has it


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the layouts that were found, and returns the exit code."""
    cluster = cluster_of(options)
    have = bytes_given(options, cluster.memory_bytes)
    check_fp8(config, cluster.architecture)
    search = LayoutSearch(
        config, options.world, cluster, options.imbalance, keys_given(options.overrides)
    )
    with _counting("shapes of a layout") as count:
        candidates = search.candidates(have, count)
    if not search.has_legal_shape:
        planned_config(options.overrides, options.world)  # says what is wrong
    with _counting(f"times and memories, of {len(candidates):,} layouts at most") as count:
        found = search.best(candidates, have, options.count, count)
    layouts = [(each, override_text(search.overrides(each))) for each in found]
    if options.json:
        records = [_record(each, line, _command(options, cluster, line)) for each, line in layouts]
        print(
            json.dumps(
                {"world": options.world, "device": asdict(cluster), "layouts": records}, indent=2
            )
        )
    elif found:
        print(_layouts_table(layouts))
        print(
            f"Of {len(candidates):,} layouts on {options.world} x {cluster.name}, {gigabytes(have)} each, for"
        )
        print(what(config))
        print(f"Run the first one: {_command(options, cluster, layouts[0][1])}")
    else:
        print(
            f"No layout that was looked at fits {gigabytes(have)}: try more ranks, or recompute.offload."
        )
        if (least := search.smallest()) is not None:
            words = override_text(search.overrides(least)) or "as given"
            print(f"The smallest of them needs {gigabytes(least.needed)}: {words}")
    return 0 if found else 1


def _layouts_table(layouts: list[tuple[Candidate, str]]) -> str:
    """Returns a table of layouts, each given with its overrides as one line; "" = the configuration
    as given."""
    lines = [f"{'step':>11}{'tokens/s/GPU':>14}{'MFU':>8}{'bubble':>8}{'memory':>10}  overrides"]
    for each, overrides in layouts:
        cost = each.cost
        assert cost is not None
        figures = f"{cost.step_s:>9.3f} s{cost.tokens_per_s_per_gpu:>14,.0f}{cost.mfu:>8.1%}"
        bubble = f"{cost.seconds['bubble'] / cost.step_s:>8.1%}"
        lines.append(f"{figures}{bubble}{each.needed / GIB:>7.1f} GiB  {overrides or '(as given)'}")
    return "\n".join(lines)


def _record(found: Candidate, overrides: str, command: str) -> dict[str, Any]:
    """Returns a layout as a JSON object."""
    assert found.cost is not None
    return {
        "overrides": overrides,
        "needed_bytes": found.needed,
        **found.cost.record(),
        "command": command,
    }


@contextmanager
def _counting(what: str) -> Iterator[Callable[[], None]]:
    """Shows how many candidates were tried: a bar on a terminal, and a line every 10 s
    elsewhere."""
    with tqdm(desc=what, unit="", leave=False, disable=None) as bar:
        number, told = 0, time.perf_counter()

        def count() -> None:
            nonlocal number, told
            number += 1
            bar.update()
            if bar.disable and (now := time.perf_counter()) - told >= TOLD_EVERY_S:
                told = now
                print(f"looked at {number:,} {what}", file=sys.stderr, flush=True)

        yield count


def _command(options: argparse.Namespace, cluster: Cluster, found: str) -> str:
    """Returns what starts the run of a layout on this cluster; the keys that were given, then those
    that were found."""
    words = list(options.overrides)
    if not any(word.startswith(("data.train=", "experiment=quickstart")) for word in words):
        words.append("data.train=[data/corpus]")
    return f"{_launch(options.world, cluster.node)} {shlex.join(words)} {found}".rstrip()


def _launch(world: int, node: int) -> str:
    """Returns the launcher with its options: one rank a GPU, as many in every host."""
    host = node if node <= MOST_IN_A_HOST else RACK_HOST
    if world <= host:
        return f"bash launch/local.sh {world}"
    each = next(n for n in range(host, 0, -1) if world % n == 0)
    tasks = "" if each == SBATCH_TASKS else f" --ntasks-per-node={each}"
    return f"sbatch --nodes={world // each} --gpus-per-node={each}{tasks} launch/slurm.sbatch"

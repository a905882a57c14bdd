"""The `search` subcommand of tools/schedule.py: its options, and what it prints beside a Program's figures."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron5d.pipeline_parallel.search.policy import PAIRS
from megatron5d.pipeline_parallel.search.problem import DEFAULT, CostModel

if TYPE_CHECKING:  # the search compiles its core with numba, for which no other subcommand should wait
    from megatron5d.pipeline_parallel.search.search import SearchResult


SEARCH_S = 10.0
"""Time limit where the options set none."""


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Adds what only `search` knows to a parser that already has sizes and costs."""
    parser.add_argument(
        "--memory", type=float, default=1.25, metavar="X", help="at most X·pp activations per rank (default 1.25)"
    )
    parser.add_argument("--copies", type=int, default=1, choices=(1, 2), help="most copies of the parameters")
    parser.add_argument("--seconds", type=float, help=f"time limit (default {SEARCH_S:g}; with --evaluations none)")
    parser.add_argument("--evaluations", type=int, metavar="N", help="end after N list schedules; repeats exactly")
    parser.add_argument("--seed", type=int, default=0, help="of all chance")
    parser.add_argument(
        "--placements", metavar="LIST", help=f"such as loop:4,zigzag:2; default: {','.join(DEFAULT)} as copies admit"
    )
    parser.add_argument(
        "--pairs", default=",".join(PAIRS), metavar="LIST", help="which actions may overlap; empty for none"
    )
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="keep the result there, and take it from there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the Program in PyTorch's CSV format")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_search(options: argparse.Namespace, costs: Sequence[CostModel]) -> SearchResult:
    """Returns the result of the search that the options ask for.

    Raises:
        ValueError: Options that `search_program` refuses.
    """
    from megatron5d.pipeline_parallel.search.search import search_program

    pairs = [pair for pair in options.pairs.split(",") if pair]
    unknown = [pair for pair in pairs if pair not in PAIRS]
    if unknown:
        raise ValueError(f"--pairs: {unknown[0]!r} is none of {', '.join(PAIRS)}")
    return search_program(
        options.pp,
        options.microbatches,
        costs,
        memory=options.memory * options.pp,
        copies=options.copies,
        seconds=SEARCH_S if options.seconds is None and options.evaluations is None else options.seconds,
        evaluations=options.evaluations,
        seed=options.seed,
        placements=options.placements.split(",") if options.placements else None,
        pairs=pairs,
        cache=options.cache,
    )


def search_figures(result: SearchResult) -> dict[str, Any]:
    """Returns what the search says beyond the figures of the Program itself."""
    return {
        "placement": result.placement,
        "lower_bound": round(result.lower_bound, 9),
        "best_named": result.named[0] if result.named else None,
        "best_named_makespan": round(result.named[1], 9) if result.named else None,
        "evaluations": result.evaluations,
        "elapsed_s": round(result.elapsed_s, 3),
        "compiled": result.compiled,
    }

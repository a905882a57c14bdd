"""Runs `plan.py context`: bytes sent by each method of context parallelism."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron5d.config.checks.context import FLOPS_PER_BYTE, choices
from megatron5d.config.schema import Config


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the table or the record; the result is the exit code."""
    if config.parallel.cp == 1:
        raise ValueError("plan.py context requires parallel.cp > 1 (got 1)")
    methods = choices(config, options.node)
    if options.json:
        print(
            json.dumps(
                {
                    "world": options.world,
                    "node": options.node,
                    "choices": [asdict(method) for method in methods],
                }
            )
        )
        return 0
    print(
        f"MB that a rank sends per layer and sequence of {config.train.seq_len:,} tokens, "
        "forward and backward:"
    )
    print(
        f"{'parallel.cp_method':<20}{'cp_inner':>9}{'in a node':>12}"
        f"{'between nodes':>15}{'hidden from tokens':>20}"
    )
    for choice in methods:
        name = "ring, allgather" if choice.method == "ring" else choice.method
        length = f"{choice.hidden_from:,}" if choice.hidden_from else "-"
        sent = f"{choice.inside / 1e6:>12,.1f}{choice.between / 1e6:>15,.1f}"
        print(f"{name:<20}{choice.cp_inner:>9}{sent}{length:>20}")
    print(
        "Hidden: a hop ends before the attention that it overlaps, "
        f"at {FLOPS_PER_BYTE:,.0f} FLOP per byte."
    )
    print(
        f"Sorted by bytes between nodes of {options.node} ranks, then inside them. Heads are "
        "exchanged only inside a node (docs/long_context.md)."
    )
    return 0

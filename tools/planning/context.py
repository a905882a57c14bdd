"""Answer plan.py context: bytes that each method of context parallelism sends."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron5d.config.checks.context import FLOPS_PER_BYTE, choices
from megatron5d.config.schema import Config


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the table or the record, and returns the exit code."""
    if config.parallel.cp == 1:
        raise ValueError("parallel.cp = 1 cuts no sequence: nothing is sent; set parallel.cp")
    found = choices(config, options.node)
    if options.json:
        print(
            json.dumps(
                {
                    "world": options.world,
                    "node": options.node,
                    "choices": [asdict(each) for each in found],
                }
            )
        )
        return 0
    print(
        f"MB that a rank sends in one layer for one sequence of {config.train.seq_len:,} tokens, there and back:"
    )
    print(
        f"{'parallel.cp_method':<20}{'cp_inner':>9}{'in a node':>12}{'between nodes':>15}{'hidden from tokens':>20}"
    )
    for each in found:
        name = "ring, allgather" if each.method == "ring" else each.method
        length = f"{each.hidden_from:,}" if each.hidden_from else "-"
        sent = f"{each.inside / 1e6:>12,.1f}{each.between / 1e6:>15,.1f}"
        print(f"{name:<20}{each.cp_inner:>9}{sent}{length:>20}")
    print(
        f"Hidden: a hop is over before the attention that it runs under, at {FLOPS_PER_BYTE:,.0f} FLOP a byte."
    )
    print(
        f"Least between nodes of {options.node} first, then least inside them; heads are exchanged inside a node alone "
        "(docs/long_context.md)."
    )
    return 0

"""Check that a configuration computes the same numbers on its layout as one process: on the CPU, in
fp64, in seconds.

    python tools/parity.py --world 16 experiment=quickstart python tools/parity.py --world 8
    model=tiny_moe parallel.tp=2 parallel.sp=true parallel.ep=4 parallel.zero=2 python
    tools/parity.py --world 8 --bisect model=tiny parallel.tp=2 parallel.pp=2
    pipeline.schedule=zb_h1 python tools/parity.py --world 16 --certificate parity.json
    experiment=quickstart python tools/parity.py --world 16 --precision bf16 experiment=quickstart
    python tools/parity.py --check parity.json

Words without dashes are overrides as pretrain.py takes them. The configuration is trained for a few
steps on random tokens, on forked ranks and by one process without parallelism, and everything is
compared: samples, hidden states, losses, gradient norm, what routers did, every gradient and weight
of every step, moments. Sizes are made small first, with every feature kept; layout, schedule, ZeRO
and recompute are the configured ones. Its data need not exist, unless --data asks to use the first
tokens of it. With --precision bf16 both run in bf16, and the ranks may be at most twice as far from
one process in fp64 as one process in bf16 is. Exit code 0: equal; 1: different, or the ranks
failed; 2: refused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.convert import parse_json
from megatron5d.config.errors import ConfigError, names_file, names_option, refuse
from megatron5d.planning.planned_config import planned_config


def _parser() -> OptionParser:
    parser = OptionParser(prog="parity.py", description=__doc__)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimiser steps (default 3, in bf16 1)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp64", "bf16"],
        default="fp64",
        help="fp64: nothing hides behind rounding (default); bf16: by more than rounding does?",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative difference (default 1e-10); in bf16 how many times as far from fp64 as one process "
        "(default 2)",
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="sizes of model and batch as configured"
    )
    parser.add_argument(
        "--data", action="store_true", help="the first tokens of data.train instead of random ones"
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="on a difference: without which dimension is there none?",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds for one run (default 600)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="write what was found, and of what, as JSON",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="does this certificate belong to code and overrides?",
    )
    parser.add_overrides()
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Checks one configuration, or one certificate, and returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.check:
            return _check(options)
        if options.world is None:
            raise ValueError("--world N: the number of ranks is needed")
        return _compare(options)
    except ConfigError as error:
        refuse(error.faults)
    except (ValueError, OSError) as error:
        print(f"parity.py: error: {names_file(error, options.certificate)}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    """Refuses what is wrong before the imports that take seconds."""
    _check_options(options)
    asked = planned_config(options.overrides, options.world, files=bool(options.data))
    from megatron5d.parity.check import compare
    from megatron5d.parity.local_ranks import RankFailure

    try:
        return compare(asked, options)
    except RankFailure as failure:
        print(f"parity.py: one process fails by itself:\n{failure}", file=sys.stderr)
        return 1


def _check_options(options: argparse.Namespace) -> None:
    if options.certificate and options.certificate.is_dir():
        raise ValueError(f"--certificate {options.certificate} is a folder; name a file")
    if options.certificate and not os.access(options.certificate.absolute().parent, os.W_OK):
        raise ValueError(
            f"--certificate {options.certificate}: no folder in which it could be written"
        )
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps {options.steps}: at least 1")
    if options.tolerance is not None and not 0 <= options.tolerance < math.inf:
        raise ValueError(f"--tolerance {options.tolerance}: a number from 0 on")
    if not 0 < options.timeout < math.inf:
        raise ValueError(f"--timeout {options.timeout}: seconds above 0")


def _check(options: argparse.Namespace) -> int:
    """Returns whether a certificate was made of this code, of the overrides that it names or of
    those given."""
    with names_option(f"--check {options.check}"):
        content = options.check.read_bytes()
    try:
        certificate = parse_json(content)
    except ValueError:  # not JSON, or not even text
        certificate = None
    if not isinstance(certificate, dict) or "overrides" not in certificate:
        raise ValueError(f"--check {options.check}: that is no parity certificate")
    world = options.world or certificate.get("world", 1)
    config = planned_config(options.overrides or certificate["overrides"], world)
    from megatron5d.parity.certificate import strays_of

    try:
        faults = strays_of(certificate, config, world)
    except ValueError as error:
        raise ValueError(f"--check {options.check}: {error}") from error
    if options.json:
        print(json.dumps({"belongs": not faults, "faults": faults, "date": certificate["date"]}))
    else:
        told = f"made on {certificate['date']} at commit {certificate['code']['commit']}"
        print(
            "\n".join(["it does not belong:", *faults])
            if faults
            else f"it belongs to this code and configuration, {told}"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

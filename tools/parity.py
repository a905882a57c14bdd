"""Check that a configuration computes the same numbers on its layout as in one process.

    python tools/parity.py --world 16 experiment=quickstart
    python tools/parity.py --world 8 model=tiny_moe parallel.tp=2 parallel.sp=true parallel.ep=4
    python tools/parity.py --world 8 --bisect model=tiny parallel.tp=2 parallel.pp=2
    python tools/parity.py --world 16 --certificate parity.json experiment=quickstart
    python tools/parity.py --world 16 --precision bf16 experiment=quickstart
    python tools/parity.py --check parity.json

Words without dashes are overrides as pretrain.py takes them. The tool trains the configuration for
a few steps on random tokens, on forked CPU ranks and in one process without parallelism, in fp64,
and compares everything: samples, hidden states, losses, gradient norm, figures of the routers,
every gradient and weight of every step, moments. It takes seconds.

Sizes are reduced first, with every feature kept; layout, schedule, ZeRO and recompute are those of
the configuration. Its data need not exist, unless --data asks for the first tokens of it. With
--precision bf16 both runs are in bf16, and the ranks may be twice as far from one process in fp64
as one process in bf16 is.

Exit code 0: equal; 1: different, or the ranks failed; 2: configuration or options are rejected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import ConfigError, names_file, names_option, refuse
from megatron5d.config.json_file import parse_json
from megatron5d.planning.planned_config import planned_config


def _parser() -> OptionParser:
    parser = OptionParser(prog="parity.py", description=__doc__)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps (default 3, in bf16 1)"
    )
    parser.add_argument(
        "--precision",
        choices=["fp64", "bf16"],
        default="fp64",
        help="fp64 (default) finds differences that rounding would hide; bf16 allows for rounding",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative difference (default 1e-10); in bf16, the largest distance from fp64 "
        "as a multiple of one process's (default 2)",
    )
    parser.add_argument(
        "--no-shrink", action="store_true", help="keep the sizes of model and batch"
    )
    parser.add_argument(
        "--data",
        action="store_true",
        help="use the first tokens of data.train instead of random ones",
    )
    parser.add_argument(
        "--bisect",
        action="store_true",
        help="on a difference, repeat with one dimension or option off at a time",
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
        help="write the result as JSON, with hashes of configuration and code",
    )
    parser.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="check that this certificate is valid for the code and the overrides",
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
            raise ValueError("--world N is required: the number of ranks")
        return _compare(options)
    except ConfigError as error:
        refuse(error.faults)
    except (ValueError, OSError) as error:
        print(f"parity.py: error: {names_file(error, options.certificate)}", file=sys.stderr)
        return 2


def _compare(options: argparse.Namespace) -> int:
    """Rejects invalid options and configurations before the imports that take seconds."""
    _check_options(options)
    config = planned_config(options.overrides, options.world, files=bool(options.data))
    from megatron5d.parity.check import compare
    from megatron5d.parity.local_ranks import RankFailure

    try:
        return compare(config, options)
    except RankFailure as failure:
        text = str(failure)
        start = "\n" if "\n" in text else " "
        print(f"parity.py: the run in one process fails:{start}{text}", file=sys.stderr)
        return 1


def _check_options(options: argparse.Namespace) -> None:
    if options.certificate and options.certificate.is_dir():
        raise ValueError(f"--certificate requires a file (got the folder {options.certificate})")
    if options.certificate and not os.access(options.certificate.absolute().parent, os.W_OK):
        raise ValueError(f"--certificate {options.certificate}: its folder is not writable")
    if options.steps is not None and options.steps < 1:
        raise ValueError(f"--steps requires at least 1 (got {options.steps})")
    if options.tolerance is not None and options.tolerance < 0:
        raise ValueError(f"--tolerance requires a number >= 0 (got {options.tolerance})")
    if options.timeout <= 0:
        raise ValueError(f"--timeout requires seconds > 0 (got {options.timeout})")


def _check(options: argparse.Namespace) -> int:
    """Checks a certificate against this code and the given overrides, else against its own.

    Returns:
        The exit code: 0 valid, 1 not valid.
    """
    with names_option(f"--check {options.check}"):
        content = options.check.read_bytes()
    try:
        certificate = parse_json(content)
    except ValueError:  # not JSON, or not even text
        certificate = None
    if not isinstance(certificate, dict) or "overrides" not in certificate:
        raise ValueError(f"--check {options.check}: not a parity certificate")
    world = options.world or certificate.get("world", 1)
    config = planned_config(options.overrides or certificate["overrides"], world)
    from megatron5d.parity.certificate import mismatches

    try:
        reasons = mismatches(certificate, config, world)
    except ValueError as error:
        raise ValueError(f"--check {options.check}: {error}") from error
    date, commit = certificate["date"], certificate["code"]["commit"]
    if options.json:
        print(json.dumps({"belongs": not reasons, "faults": reasons, "date": date}))
    elif reasons:
        print("\n".join(["not valid here:", *reasons]))
    else:
        print(f"valid for this code and configuration; made on {date} at commit {commit}")
    return 1 if reasons else 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

"""Predicts memory and step time of a run, and searches for layouts, on a CPU without the model.

    python tools/plan.py memory --world 64 experiment=llama3_8b
    python tools/plan.py memory --world 4096 --device-gb 80 experiment=llama3_70b parallel.pp=8 \\
        train.gbs=2048
    python tools/plan.py memory --world 64 --json model=llama3_8b train.seq_len=1048576 \\
        parallel.cp=64 train.gbs=1
    python tools/plan.py step --world 64 --device h100 experiment=llama3_8b
    python tools/plan.py search --world 256 --device h100 experiment=llama3_70b
    python tools/plan.py context --world 64 --node 8 model=llama3_8b train.seq_len=131072 \\
        parallel.tp=2 parallel.cp=16
    python tools/plan.py memory --world 64 --as nanotron model=llama2_7b precision.dtype=bf16 \\
        parallel.tp=4 train.gbs=64

Words without dashes are overrides of pretrain.py. Files of the run (its data) need not exist. Exit
code 1: the run does not fit; 2: invalid configuration or input.
"""

from __future__ import annotations

import argparse
import gc
import sys
from importlib import import_module
from pathlib import Path

if not __package__:  # run as a script from a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.config.load import keys_given
from megatron5d.planning.clusters import CLUSTERS
from megatron5d.planning.planned_config import planned_config, unplanned_config
from megatron5d.tools.planning.options import check_options, note_defaults


def _parser() -> OptionParser:
    parser = OptionParser(prog="plan.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    memory = commands.add_parser(
        "memory", help="bytes of every pipeline rank, by kind, and whether a device has them"
    )
    memory.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    memory.add_argument(
        "--device",
        default="sm_90",
        metavar="NAME",
        help="a device such as h100; an architecture such as sm_90 (default); or cpu",
    )
    memory.add_argument(
        "--device-gb",
        type=float,
        metavar="X",
        help="memory of one device in 10⁹ bytes, to compare with",
    )
    memory.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="load of the busiest rank's experts relative to an even share "
        "(default: moe.planned_imbalance)",
    )
    memory.add_argument(
        "--as",
        dest="convention",
        default="megatron5d",
        metavar="CODE",
        help="memory of another code base: nanotron; or megatron, optionally followed by "
        ",te_fused_loss ,dropout ,unfused_attention",
    )
    memory.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    memory.add_overrides()
    context = commands.add_parser(
        "context", help="bytes sent by each parallel.cp_method, the best first"
    )
    context.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    context.add_argument(
        "--node", type=int, default=8, metavar="N", help="ranks that share fast links (default 8)"
    )
    context.add_argument("--json", action="store_true", help="print one JSON object, in bytes")
    context.add_overrides()
    _add_cluster(
        commands.add_parser(
            "step", help="time of a step by kind, tokens/s and MFU, on a device and its network"
        )
    )
    search = commands.add_parser(
        "search", help="the fastest layouts that fit; keys set as key=value stay fixed"
    )
    _add_cluster(search)
    search.add_argument(
        "--device-gb", type=float, metavar="X", help="memory of one device in 10⁹ bytes"
    )
    search.add_argument(
        "--count", type=int, default=5, metavar="N", help="layouts to show (default 5)"
    )
    return parser


def _add_cluster(command: OptionParser) -> None:
    """Adds the options that describe the machines."""
    command.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    command.add_argument(
        "--device", default="h100", metavar="NAME", help=f"default h100; {', '.join(CLUSTERS)}"
    )
    command.add_argument("--node", type=int, metavar="N", help="ranks that share fast links")
    command.add_argument(
        "--network-gbps", type=float, metavar="X", help="10⁹ bits/s from a rank to other nodes"
    )
    command.add_argument(
        "--link-gbps", type=float, metavar="X", help="10⁹ bits/s between ranks of a node"
    )
    command.add_argument(
        "--tflops",
        type=float,
        metavar="X",
        help="peak of a device in 16 bits; the 8-bit peak scales along",
    )
    command.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="load of the busiest rank's experts relative to an even share "
        "(default: 1 for the time, moe.planned_imbalance for the memory)",
    )
    command.add_argument(
        "--json", action="store_true", help="print one JSON object, in seconds and bytes"
    )
    command.add_overrides()


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; the result is the exit code."""
    options = _parser().parse_args(arguments)
    return exit_code("plan.py: error", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    """Checks options and configuration before the subcommand imports torch, which takes seconds."""
    check_options(options)
    config = (unplanned_config if options.command == "search" else planned_config)(
        options.overrides, options.world
    )
    if "precision.dtype" not in keys_given(options.overrides):
        note_defaults(config)
    return import_module(f"megatron5d.tools.planning.{options.command}").run(options, config)


if __name__ == "__main__":
    print_anywhere()
    # Programs are many small tuples without cycles; frequent collections would only cost time.
    gc.set_threshold(100_000, 20, 100)
    sys.exit(main())

"""Visualizes a layout, a run or a schedule as one page or as a picture.

    python tools/visualize.py report --world 64 --device h100 experiment=llama3_8b -o report.html
    python tools/visualize.py report runs/first                a finished run with its layout
    python tools/visualize.py report --world 64 experiment=llama3_8b \\
        --against 'parallel.tp=2 parallel.cp=2'                two layouts compared
    python tools/visualize.py sweep --world 8,16,32,64 --device h100 experiment=llama3_8b \\
        -o sweep.png
    python tools/visualize.py schedule --schedule dualpipe --pp 8 --microbatches 20 \\
        -o dualpipe.svg
    python tools/visualize.py loss RUN_DIR [RUN_DIR...] --out loss.png
    python tools/visualize.py loss runs --smooth 20 \\
        --panels grad_norm,lr,mfu,memory_gb,'moe/layer_*/load'

RUN_DIR is the folder of a run with its .jsonl file, that file, or a folder of runs; `loss` draws
training and validation loss over tokens. Exit code 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script from a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code, in_options
from megatron5d.tools.plots.losses import draw_losses
from megatron5d.tools.report.runs import (
    dataset_suffix,
    find_logs,
    match_fields,
    read_curve,
    summary,
)


def run_loss(args: argparse.Namespace) -> None:
    if args.smooth is not None and args.smooth < 1:
        raise ValueError(f"--smooth must be at least 1 record (got {args.smooth})")
    curves = [read_curve(log) for run in args.runs for log in find_logs(run)]
    draw_losses(curves, args.out, match_fields(curves, args.panels), args.smooth)
    if args.json:
        print(json.dumps([summary(curve) for curve in curves]))
        return
    for curve in curves:
        (_, first), (tokens, last) = curve.train[0], curve.train[-1]
        print(f"{curve.name}: {tokens:,} tokens, training loss {first:.3f} -> {last:.3f}")
        for field, points in sorted(curve.valid.items()):
            losses = f"{points[0][1]:.3f} -> {points[-1][1]:.3f}"
            print(f"{curve.name}: validation loss{dataset_suffix(field)} {losses}")
    for number, curve in enumerate(curves):
        equal = [other.name for other in curves[:number] if other.train == curve.train]
        if equal:
            print(f"{curve.name}: every training loss equals that of {equal[0]}")
    print(f"wrote {args.out}")


def run_report(args: argparse.Namespace) -> None:
    from megatron5d.tools.report.report import ReportOptions, write_report

    overrides, runs = _overrides_and_runs(args)
    options = ReportOptions(overrides, runs, args.world, args.device, args.against, args.best)
    print(write_report(options, args.out, args.json))
    print(f"wrote {args.out}" + (f" and {args.json}" if args.json else ""))


def run_sweep(args: argparse.Namespace) -> None:
    from megatron5d.planning.clusters import cluster_called
    from megatron5d.tools.plots.sweep import draw_sweep
    from megatron5d.tools.report.sweep import measured_records, planned_records

    if args.count < 1:
        raise ValueError(f"--count must be above 0 (got {args.count})")
    overrides, runs = _overrides_and_runs(args)
    if runs:
        records = measured_records([log for run in runs for log in find_logs(run)])
        title = f"{len(records)} runs"
    elif args.world:
        cluster = cluster_called(args.device)
        records = planned_records(overrides, args.world, cluster, args.count)
        title = f"{' '.join(overrides)} on {cluster.name}, planned"
    else:
        raise ValueError("sweep requires --world, such as 8,16,32, with overrides; or run folders")
    draw_sweep(records, title, args.out)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    print(f"wrote {args.out}: {len(records)} layouts")


def _overrides_and_runs(args: argparse.Namespace) -> tuple[list[str], list[Path]]:
    overrides = [word for word in args.words if "=" in word]
    return overrides, [Path(word) for word in args.words if "=" not in word]


def rank_counts(text: str) -> list[int]:
    """Numbers of ranks from a comma-separated list."""
    counts = [int(count) for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"a run requires at least 1 rank (got {text})")
    return counts


def run_schedule(args: argparse.Namespace) -> None:
    from megatron5d.tools import schedule

    formats = {".svg": "--svg", ".png": "--png", ".json": "--trace"}
    if args.out.suffix not in formats:
        raise ValueError(
            f"--out requires a file ending in .svg, .png, or .json for a trace (got {args.out})"
        )
    names = ("schedule", "pp", "microbatches", "costs")
    words = [f"--{name}={getattr(args, name)}" for name in names]
    option = formats[args.out.suffix]
    try:
        schedule.run(schedule.parse(["show", *words, f"{option}={args.out}"]))
    except ValueError as error:
        raise ValueError(in_options(str(error), {option: "--out"})) from error


def run_docs(args: argparse.Namespace) -> None:
    from megatron5d.tools.report.dimensions import write_docs

    for file in write_docs(args.out):
        print(f"wrote {file}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for add in (_add_report, _add_sweep, _add_schedule, _add_docs, _add_loss):
        add(commands)
    return parser.parse_args(argv)


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="one page: the layer, the ranks, memory, pipeline, step time, runs"
    )
    report.add_argument(
        "--world", type=int, metavar="N", help="number of ranks (default: that of the run)"
    )
    report.add_argument(
        "--device",
        metavar="NAME",
        help="a device of plan.py, or cpu (default h100; cpu for a run on CPUs)",
    )
    report.add_argument(
        "--against", metavar="OVERRIDES", help="a second layout: the first with these overrides"
    )
    report.add_argument(
        "--best", action="store_true", help="also the fastest layout that fits, from a search"
    )
    _add_out(report, "report.html", short=True)
    report.add_argument("--json", type=Path, metavar="FILE", help="also write the page's numbers")
    report.add_words(
        "words",
        nargs="*",
        metavar="OVERRIDE|RUN_DIR",
        help="overrides of pretrain.py; folders of runs",
    )
    report.set_defaults(run=run_report)


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep", help="throughput and memory of many layouts, planned or measured"
    )
    sweep.add_argument(
        "--world", type=rank_counts, metavar="N,N", help="numbers of ranks to plan for"
    )
    sweep.add_argument(
        "--device", default="h100", metavar="NAME", help="a device of plan.py (default h100)"
    )
    sweep.add_argument(
        "--count",
        type=int,
        default=20,
        metavar="N",
        help="layouts per number of ranks (default 20)",
    )
    _add_out(sweep, "sweep.png", short=True)
    sweep.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    sweep.add_words(
        "words",
        nargs="*",
        metavar="OVERRIDE|RUN_DIR",
        help="overrides of pretrain.py, or folders of runs",
    )
    sweep.set_defaults(run=run_sweep)


def _add_schedule(commands: Any) -> None:
    schedule = commands.add_parser(
        "schedule", help="the step of a pipeline as a picture, or as a trace for Perfetto"
    )
    schedule.add_argument(
        "--schedule", required=True, metavar="NAME", help="as pipeline.schedule, or file:PATH"
    )
    schedule.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline ranks")
    schedule.add_argument(
        "--microbatches", type=int, required=True, metavar="N", help="micro-batches per step"
    )
    schedule.add_argument(
        "--costs", default="", metavar="LIST", help="costs in the form of tools/schedule.py"
    )
    _add_out(schedule, "schedule.svg", short=True, note="; .svg, .png or .json")
    schedule.set_defaults(run=run_schedule)


def _add_docs(commands: Any) -> None:
    docs = commands.add_parser(
        "docs", help="write the generated tables and pictures of the documentation"
    )
    docs.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default docs")
    docs.set_defaults(run=run_docs)


def _add_loss(commands: Any) -> None:
    loss = commands.add_parser("loss", help="loss over tokens, one color per run")
    loss.add_words(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="the folder of a run, its .jsonl file, or a folder of runs",
    )
    _add_out(loss, "loss.png")
    loss.add_argument(
        "--panels",
        default="",
        metavar="FIELDS",
        help="fields to draw below the losses, comma-separated; * matches any text",
    )
    loss.add_argument(
        "--smooth",
        type=int,
        metavar="N",
        help="records per running mean (default: 1/40 of the run)",
    )
    loss.add_argument("--json", action="store_true", help="print the first and last losses as JSON")
    loss.set_defaults(run=run_loss)


def _add_out(parser: Any, default: str, short: bool = False, note: str = "") -> None:
    names = ("-o", "--out") if short else ("--out",)
    parser.add_argument(
        *names, type=Path, default=Path(default), metavar="FILE", help=f"default {default}{note}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return exit_code("visualize", lambda: args.run(args), args.out)


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

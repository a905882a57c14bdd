"""Show a layout, a run or a schedule: as one page, or as a picture.

    python tools/visualize.py report --world 64 --device h100 experiment=llama3_8b -o report.html
    python tools/visualize.py report runs/first                            a finished run, with its layout
    python tools/visualize.py report --world 64 experiment=llama3_8b --against 'parallel.tp=2 parallel.cp=2'
    python tools/visualize.py sweep --world 8,16,32,64 --device h100 experiment=llama3_8b -o sweep.png
    python tools/visualize.py schedule --schedule dualpipe --pp 8 --microbatches 20 -o dualpipe.svg
    python tools/visualize.py loss RUN_DIR [RUN_DIR...] --out loss.png     loss over tokens, training and validation
    python tools/visualize.py loss runs --smooth 20 --panels grad_norm,lr,mfu,memory_gb,'moe/layer_*/load'

RUN_DIR is a run's folder with its .jsonl file, that file, or a folder of runs, which are all drawn.
Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code, in_options
from megatron5d.tools.report.runs import (
    chosen_fields,
    draw,
    find_records,
    of_set,
    read_curve,
    summary,
)


def run_loss(args: argparse.Namespace) -> None:
    if args.smooth is not None and args.smooth < 1:
        raise ValueError(f"--smooth {args.smooth}: a mean is of at least 1 record")
    curves = [read_curve(path) for run in args.runs for path in find_records(run)]
    draw(curves, args.out, chosen_fields(curves, args.panels), args.smooth)
    if args.json:
        print(json.dumps([summary(curve) for curve in curves]))
        return
    for curve in curves:
        (_, first), (tokens, last) = curve.train[0], curve.train[-1]
        print(f"{curve.name}: {tokens:,} tokens, training loss {first:.3f} -> {last:.3f}")
        for field, points in sorted(curve.valid.items()):
            print(
                f"{curve.name}: validation loss{of_set(field)} {points[0][1]:.3f} -> {points[-1][1]:.3f}"
            )
    for number, curve in enumerate(curves):
        same = [other.name for other in curves[:number] if other.train == curve.train]
        if same:
            print(f"{curve.name}: every training loss is that of {same[0]}")
    print(f"wrote {args.out}")


def run_report(args: argparse.Namespace) -> None:
    from megatron5d.tools.report.report import Question, write_report

    question = Question(
        overrides=[word for word in args.words if "=" in word],
        runs=[Path(word) for word in args.words if "=" not in word],
        world=args.world,
        device=args.device,
        against=args.against,
    )
    sentence = write_report(question, args.out, args.json)
    print(sentence)
    print(f"wrote {args.out}" + (f" and {args.json}" if args.json else ""))


def run_sweep(args: argparse.Namespace) -> None:
    from megatron5d.planning.clusters import cluster_called
    from megatron5d.tools.report import sweep

    if args.count < 1:
        raise ValueError(f"--count {args.count} is not above 0")
    overrides = [word for word in args.words if "=" in word]
    if runs := [Path(word) for word in args.words if "=" not in word]:
        records = sweep.measured([log for run in runs for log in find_records(run)])
        title = f"{len(records)} runs"
    elif args.world:
        cluster = cluster_called(args.device)
        records = sweep.planned(overrides, args.world, cluster, args.count)
        title = f"{' '.join(overrides)} on {cluster.name}, planned"
    else:
        raise ValueError("a sweep needs --world 8,16,32 and overrides, or folders of runs")
    sweep.draw(records, title, args.out)
    if args.json:
        args.json.write_text(json.dumps(records, indent=1) + "\n")
    print(f"wrote {args.out}: {len(records)} layouts")


def worlds(text: str) -> list[int]:
    """Returns numbers of ranks with commas between them."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a run has at least 1 rank")
    return found


def run_schedule(args: argparse.Namespace) -> None:
    from megatron5d.tools import schedule

    suffixes = {".svg": "--svg", ".png": "--png", ".json": "--trace"}
    if args.out.suffix not in suffixes:
        raise ValueError(
            f"--out {args.out}: .svg and .png are pictures, .json is a trace for Perfetto"
        )
    words = [
        f"--{name}={getattr(args, name)}" for name in ("schedule", "pp", "microbatches", "costs")
    ]
    written = suffixes[args.out.suffix]
    try:
        schedule.run(schedule.parse(["show", *words, f"{written}={args.out}"]))
    except ValueError as error:
        raise ValueError(in_options(str(error), {written: "--out"})) from error


def run_docs(args: argparse.Namespace) -> None:
    from megatron5d.tools.report.dimensions import write_docs

    for file in write_docs(args.out):
        print(f"wrote {file}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__)
    pictures = parser.add_subparsers(required=True)
    report = pictures.add_parser(
        "report", help="one page: the layer, the ranks, memory, pipeline, step time, runs"
    )
    report.add_argument(
        "--world", type=int, metavar="N", help="number of ranks (default: that of the run)"
    )
    report.add_argument(
        "--device",
        metavar="NAME",
        help="as plan.py takes it, or cpu (default h100; cpu for a run on CPUs)",
    )
    report.add_argument(
        "--against", metavar="OVERRIDES", help="a second layout: the first with these overrides"
    )
    report.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="default report.html",
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the page's numbers, too")
    report.add_words(
        "words",
        nargs="*",
        metavar="OVERRIDE|RUN_DIR",
        help="overrides of pretrain.py, and folders of runs",
    )
    report.set_defaults(run=run_report)
    sweep = pictures.add_parser(
        "sweep", help="many layouts, planned or measured: throughput and memory over GPUs"
    )
    sweep.add_argument("--world", type=worlds, metavar="N,N", help="numbers of ranks to plan for")
    sweep.add_argument(
        "--device", default="h100", metavar="NAME", help="as plan.py takes it (default h100)"
    )
    sweep.add_argument(
        "--count",
        type=int,
        default=20,
        metavar="N",
        help="layouts on each number of ranks (default 20)",
    )
    sweep.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("sweep.png"),
        metavar="FILE",
        help="default sweep.png",
    )
    sweep.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    sweep.add_words(
        "words", nargs="*", metavar="OVERRIDE|RUN_DIR", help="of pretrain.py; or folders of runs"
    )
    sweep.set_defaults(run=run_sweep)
    timeline = pictures.add_parser(
        "schedule", help="a pipeline's step as a picture, or as a trace for Perfetto"
    )
    timeline.add_argument(
        "--schedule", required=True, metavar="NAME", help="as pipeline.schedule, or file:PATH"
    )
    timeline.add_argument("--pp", type=int, required=True, metavar="N", help="pipeline ranks")
    timeline.add_argument("--microbatches", type=int, required=True, metavar="N", help="of a step")
    timeline.add_argument(
        "--costs", default="", metavar="LIST", help="as tools/schedule.py takes them"
    )
    timeline.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("schedule.svg"),
        metavar="FILE",
        help=".svg, .png or .json",
    )
    timeline.set_defaults(run=run_schedule)
    docs = pictures.add_parser(
        "docs", help="write the generated tables and pictures of the documentation"
    )
    docs.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default docs")
    docs.set_defaults(run=run_docs)
    _add_loss(pictures)
    return parser.parse_args(argv)


def _add_loss(pictures: Any) -> None:
    loss = pictures.add_parser("loss", help="loss over tokens, one colour a run")
    loss.add_words(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="a run's folder, its .jsonl file, or a folder of runs",
    )
    loss.add_argument(
        "--out", type=Path, default=Path("loss.png"), metavar="FILE", help="default loss.png"
    )
    loss.add_argument(
        "--panels",
        default="",
        metavar="FIELDS",
        help="fields of a record to draw below, with commas; * is any text",
    )
    loss.add_argument(
        "--smooth", type=int, metavar="N", help="draw means of N records (default: 1/40 of the run)"
    )
    loss.add_argument("--json", action="store_true", help="print the first and last losses as JSON")
    loss.set_defaults(run=run_loss)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return exit_code("visualize", lambda: args.run(args), args.out)


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

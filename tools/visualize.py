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
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import cycle
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import names_file
from megatron5d.config.json_file import parse_json


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token.

    Args:
        name: of the run.
        train: (tokens seen, loss) of every record.
        valid: field (`valid_loss`, `valid_loss/<name>`) -> (tokens seen, loss) of every evaluation; the first stands
            at 0 where it came before training.
        fields: every other number of a record (`grad_norm`, `moe/layer_0/load`) -> (tokens seen, value).
    """

    name: str
    train: list[tuple[int, float]]
    valid: dict[str, list[tuple[int, float]]]
    fields: dict[str, list[tuple[int, float]]]


def find_records(run: Path) -> list[Path]:
    """Returns the run's .jsonl file, or those of all runs in a folder of runs.

    Raises:
        ValueError: there is none, or one folder holds several.
    """
    if run.is_file():
        return [run]
    if not run.is_dir():
        raise ValueError(f"{run} does not exist: name a run's folder or its .jsonl file")
    found = sorted(run.glob("*.jsonl"))
    if not found:
        found = sorted(path for path in run.rglob("*.jsonl") if "wandb" not in path.parts)
        if found and len({path.parent for path in found}) == len(found):
            return found
    if len(found) != 1:
        names = ", ".join(str(path.relative_to(run)) for path in found) or "none"
        raise ValueError(f"{run} should hold one .jsonl file (log.jsonl), found {names}: name the file itself")
    return found


def read_curve(path: Path) -> Curve:
    """Reads one JSON object a step, as `log.jsonl` writes them; a last line that is still being written is left out.

    Raises:
        ValueError: a line is not such an object; names file and line.
    """
    train: list[tuple[int, float]] = []
    valid: dict[str, list[tuple[int, float]]] = {}
    fields: dict[str, list[tuple[int, float]]] = {}
    whole, _, _ = path.read_text(errors="replace").rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record: dict[str, Any] = parse_json(line)
            tokens = int(record["tokens"])
            if record["loss"] is not None:  # as is a loss that was not finite
                train.append((tokens, float(record["loss"])))
            for key, loss in sorted(record.items()):  # those before training first
                field = key.removeprefix("initial_")
                if field.partition("/")[0] == "valid_loss" and loss is not None:
                    valid.setdefault(field, []).append((tokens if field == key else 0, float(loss)))
                elif key != "loss" and isinstance(loss, (int, float)):
                    fields.setdefault(key, []).append((tokens, float(loss)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a record of a step with tokens and loss ({error!r})") from error
    if not train:
        raise ValueError(f"{path} holds no record: has the run made a step?")
    return Curve(path.resolve().parent.name, train, valid, fields)


def smoothed(points: Sequence[tuple[int, float]], records: int) -> list[tuple[int, float]]:
    """Returns the mean of each value and those before it, of at most `records` records together."""
    means, total = [], 0.0
    for number, (tokens, value) in enumerate(points):
        total += value - (points[number - records][1] if number >= records else 0.0)
        means.append((tokens, total / min(number + 1, records)))
    return means


def chosen_fields(curves: Sequence[Curve], panels: str) -> list[str]:
    """Returns the fields that a list of names and patterns means, in its order.

    Raises:
        ValueError: one of them means none.
    """
    there = sorted({field for curve in curves for field in curve.fields})
    found: dict[str, None] = {}
    for pattern in filter(None, panels.split(",")):
        fields = [field for field in there if fnmatchcase(field, pattern)]
        if not fields:
            raise ValueError(f"--panels {pattern}: no record has such a number; there are {', '.join(there)}")
        found |= dict.fromkeys(fields)
    return list(found)


def drawable(name: str, number: int) -> str:
    """Returns a run's name if some font here has its letters, which is then used; else `run <number>`."""
    from matplotlib import font_manager, rcParams
    from matplotlib.ft2font import FT2Font

    letters = set(name) - {" "}
    fonts = [font_manager.findfont("DejaVu Sans"), *sorted(font_manager.findSystemFonts())]
    for path in fonts:
        with suppress(RuntimeError, OSError):  # a file that is no font
            font = FT2Font(path)
            if all(font.get_char_index(ord(letter)) for letter in letters):
                if path != fonts[0]:
                    font_manager.fontManager.addfont(path)
                    rcParams["font.family"] = [*dict.fromkeys([*rcParams["font.family"], font.family_name])]
                return name
    print(f"run {number} is {name!r}: no font here has its letters", file=sys.stderr)
    return f"run {number}"


def draw(curves: Sequence[Curve], out: Path, fields: Sequence[str] = (), smooth: int | None = None) -> None:
    """Writes the picture, losses above and a panel for each field below; its format follows from the name.

    Args:
        curves: runs.
        out: file.
        fields: of records, to draw below.
        smooth: records of a mean; None = a fortieth of the run.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from matplotlib import pyplot

    names = [drawable(curve.name, number) for number, curve in enumerate(curves, 1)]
    height = 5 + 2 * len(fields)
    figure, all_axes = pyplot.subplots(
        1 + len(fields), figsize=(8, height), layout="constrained", sharex=True, squeeze=False,
        height_ratios=[5, *[2] * len(fields)],
    )  # fmt: skip
    axes, *panels = all_axes[:, 0]
    for number, (name, curve) in enumerate(zip(names, curves)):
        color, width = (
            f"C{number % 10}",
            1 + 3 * (1 - (number + 1) / len(curves)),
        )  # what lies on top leaves an edge free
        mean_of = smooth or max(1, len(curve.train) // 40)
        if mean_of > 1:
            axes.plot(*zip(*curve.train), color=color, alpha=0.25, linewidth=width)
        shown = smoothed(curve.train, mean_of)
        axes.plot(*zip(*shown), color=color, alpha=0.6, linewidth=width, label=f"{name}, training")
        for (field, points), style in zip(sorted(curve.valid.items()), cycle(("-", "--", ":", "-."))):
            label = f"{name}, validation{of_set(field)}"
            few = len(points) < 10  # straight lines between few points would look like a curve
            axes.plot(*zip(*points), color=color, linestyle="none" if few else style, marker="o", markersize=4 + width,
                      markeredgecolor="black", label=label)  # fmt: skip
        for panel, field in zip(panels, fields):
            if points := curve.fields.get(field, []):
                panel.plot(*zip(*smoothed(points, mean_of)), color=color, alpha=0.6, linewidth=width)
    axes.set(ylabel="loss (nats per token)")
    for panel, field in zip(panels, fields):
        panel.set(ylabel=field)
    for each in all_axes[:, 0]:
        each.grid(alpha=0.3)
    all_axes[-1, 0].set(xlabel="tokens")
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def of_set(field: str) -> str:
    """Returns ` of <name>` for the field `valid_loss/<name>`; nothing for `valid_loss`."""
    _, slash, name = field.partition("/")
    return f" of {name}" if slash else ""


def summary(curve: Curve) -> dict[str, Any]:
    """Returns first and last losses, for people and programs."""
    figures = {"run": curve.name, "tokens": curve.train[-1][0]}
    for field, points in {"loss": curve.train, **curve.valid}.items():
        figures |= {f"first_{field}": points[0][1], f"last_{field}": points[-1][1]}
    return figures


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
            print(f"{curve.name}: validation loss{of_set(field)} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
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
        world=args.world, device=args.device, against=args.against,
    )  # fmt: skip
    sentence = write_report(question, args.out, args.json)
    print(sentence)
    print(f"wrote {args.out}" + (f" and {args.json}" if args.json else ""))


def run_sweep(args: argparse.Namespace) -> None:
    from megatron5d.planning.clusters import cluster_called
    from megatron5d.tools.report import sweep

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
        raise ValueError(f"--out {args.out}: .svg and .png are pictures, .json is a trace for Perfetto")
    given = ["--schedule", args.schedule, "--pp", args.pp, "--microbatches", args.microbatches, "--costs", args.costs]
    if code := schedule.main(["show", *given, suffixes[args.out.suffix], str(args.out)]):
        raise SystemExit(code)


def run_docs(args: argparse.Namespace) -> None:
    from megatron5d.tools.report.dimensions import write_docs

    for file in write_docs(args.out):
        print(f"wrote {file}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(required=True)
    report = pictures.add_parser("report", help="one page: the layer, the ranks, memory, pipeline, step time, runs")
    report.add_argument("--world", type=int, metavar="N", help="number of ranks (default: that of the run)")
    report.add_argument(
        "--device", metavar="NAME", help="as plan.py takes it, or cpu (default h100; cpu for a run on CPUs)"
    )
    report.add_argument("--against", metavar="OVERRIDES", help="a second layout: the first with these overrides")
    report.add_argument(
        "-o", "--out", type=Path, default=Path("report.html"), metavar="FILE", help="default report.html"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the page's numbers, too")
    report.add_words(
        "words", nargs="*", metavar="OVERRIDE|RUN_DIR", help="overrides of pretrain.py, and folders of runs"
    )
    report.set_defaults(run=run_report)
    sweep = pictures.add_parser("sweep", help="many layouts, planned or measured: throughput and memory over GPUs")
    sweep.add_argument("--world", type=worlds, metavar="N,N", help="numbers of ranks to plan for")
    sweep.add_argument("--device", default="h100", metavar="NAME", help="as plan.py takes it (default h100)")
    sweep.add_argument(
        "--count", type=int, default=20, metavar="N", help="layouts on each number of ranks (default 20)"
    )
    sweep.add_argument("-o", "--out", type=Path, default=Path("sweep.png"), metavar="FILE", help="default sweep.png")
    sweep.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, too")
    sweep.add_words("words", nargs="*", metavar="OVERRIDE|RUN_DIR", help="of pretrain.py; or folders of runs")
    sweep.set_defaults(run=run_sweep)
    timeline = pictures.add_parser("schedule", help="a pipeline's step as a picture, or as a trace for Perfetto")
    timeline.add_argument("--schedule", required=True, metavar="NAME", help="as pipeline.schedule, or file:PATH")
    timeline.add_argument("--pp", required=True, metavar="N", help="pipeline ranks")
    timeline.add_argument("--microbatches", required=True, metavar="N", help="of a step")
    timeline.add_argument("--costs", default="", metavar="LIST", help="as tools/schedule.py takes them")
    timeline.add_argument(
        "-o", "--out", type=Path, default=Path("schedule.svg"), metavar="FILE", help=".svg, .png or .json"
    )
    timeline.set_defaults(run=run_schedule)
    docs = pictures.add_parser("docs", help="write the generated tables and pictures of the documentation")
    docs.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="default docs")
    docs.set_defaults(run=run_docs)
    _add_loss(pictures)
    return parser.parse_args(argv)


def _add_loss(pictures: Any) -> None:
    loss = pictures.add_parser("loss", help="loss over tokens, one colour a run")
    loss.add_words(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run's folder, its .jsonl file, or a folder of runs"
    )
    loss.add_argument("--out", type=Path, default=Path("loss.png"), metavar="FILE", help="default loss.png")
    loss.add_argument(
        "--panels", default="", metavar="FIELDS", help="fields of a record to draw below, with commas; * is any text"
    )
    loss.add_argument("--smooth", type=int, metavar="N", help="draw means of N records (default: 1/40 of the run)")
    loss.add_argument("--json", action="store_true", help="print the first and last losses as JSON")
    loss.set_defaults(run=run_loss)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"visualize: {names_file(error, args.out)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

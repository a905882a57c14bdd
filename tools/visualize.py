"""Draw the losses of runs.

    python tools/visualize.py loss RUN_DIR [RUN_DIR...] --out loss.png     loss over tokens, training and validation

RUN_DIR is a run's folder with its .jsonl file, or that file. Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token.

    Args:
        name: of the run.
        train: (tokens seen, loss) of every record.
        valid: field (`valid_loss`, `valid_loss/<name>`) -> (tokens seen, loss) of every evaluation; the first stands
            at 0 where it came before training.
    """

    name: str
    train: list[tuple[int, float]]
    valid: dict[str, list[tuple[int, float]]]


def find_records(run: Path) -> Path:
    """The run's .jsonl file.

    Raises:
        ValueError: there is none, or there are several.
    """
    if run.is_file():
        return run
    if not run.is_dir():
        raise ValueError(f"{run} does not exist: name a run's folder or its .jsonl file")
    found = sorted(run.glob("*.jsonl"))
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise ValueError(f"{run} should hold one .jsonl file (log.jsonl), found {names}: name the file itself")
    return found[0]


def read_curve(path: Path) -> Curve:
    """Reads one JSON object a step, as `log.jsonl` writes them; a last line that is still being written is left out.

    Raises:
        ValueError: a line is not such an object; names file and line.
    """
    train: list[tuple[int, float]] = []
    valid: dict[str, list[tuple[int, float]]] = {}
    whole, _, _ = path.read_text(errors="replace").rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            tokens = int(record["tokens"])
            if record["loss"] is not None:  # as is a loss that was not finite
                train.append((tokens, float(record["loss"])))
            for key, loss in sorted(record.items()):  # those before training first
                field = key.removeprefix("initial_")
                if field.partition("/")[0] == "valid_loss" and loss is not None:
                    valid.setdefault(field, []).append((tokens if field == key else 0, float(loss)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a record of a step with tokens and loss ({error!r})") from error
    if not train:
        raise ValueError(f"{path} holds no record: has the run made a step?")
    return Curve(path.resolve().parent.name, train, valid)


def draw(curves: Sequence[Curve], out: Path) -> None:
    """Writes the picture; its format follows from the name."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, or asked for
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, curve in enumerate(curves):
        color = f"C{number % 10}"
        axes.plot(*zip(*curve.train), color=color, alpha=0.5, linewidth=1, label=f"{curve.name}, training")
        for (field, points), style in zip(sorted(curve.valid.items()), cycle(("-", "--", ":", "-."))):
            label = f"{curve.name}, validation{of_set(field)}"
            axes.plot(*zip(*points), color=color, linestyle=style, marker="o", markersize=4, label=label)
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def of_set(field: str) -> str:
    """` of <name>` for the field `valid_loss/<name>`; nothing for `valid_loss`."""
    _, slash, name = field.partition("/")
    return f" of {name}" if slash else ""


def summary(curve: Curve) -> dict[str, Any]:
    """First and last losses, for people and programs."""
    figures = {"run": curve.name, "tokens": curve.train[-1][0]}
    for field, points in {"loss": curve.train, **curve.valid}.items():
        figures |= {f"first_{field}": points[0][1], f"last_{field}": points[-1][1]}
    return figures


def run_loss(args: argparse.Namespace) -> None:
    curves = [read_curve(find_records(run)) for run in args.runs]
    draw(curves, args.out)
    if args.json:
        print(json.dumps([summary(curve) for curve in curves]))
        return
    for curve in curves:
        (_, first), (tokens, last) = curve.train[0], curve.train[-1]
        print(f"{curve.name}: {tokens:,} tokens, training loss {first:.3f} -> {last:.3f}")
        for field, points in sorted(curve.valid.items()):
            print(f"{curve.name}: validation loss{of_set(field)} {points[0][1]:.3f} -> {points[-1][1]:.3f}")
    print(f"wrote {args.out}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = OptionParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(required=True)
    loss = pictures.add_parser("loss", help="loss over tokens, one colour a run")
    loss.add_words("runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run's folder or its .jsonl file")
    loss.add_argument("--out", type=Path, default=Path("loss.png"), metavar="FILE", help="default loss.png")
    loss.add_argument("--json", action="store_true", help="print the first and last losses as JSON")
    loss.set_defaults(run=run_loss)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"visualize: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main(sys.argv[1:]))

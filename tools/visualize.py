"""Pictures of runs.

    python tools/visualize.py loss RUN_DIR [RUN_DIR...] --out loss.png     loss over tokens, training and validation

RUN_DIR is a run's folder with its .jsonl file, or that file. Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.options import OptionParser


@dataclass(frozen=True)
class Curve:
    """One run's losses, in nats per token.

    Args:
        name: of the run.
        train: (tokens seen, loss) of every record.
        valid: (tokens seen, loss) of every evaluation; the first one stands at 0 where it came before training.
    """

    name: str
    train: list[tuple[int, float]]
    valid: list[tuple[int, float]]


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
    valid: list[tuple[int, float]] = []
    whole, _, _ = path.read_text().rpartition("\n")
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            record: dict[str, Any] = json.loads(line)
            tokens = record["tokens"]
            if record["loss"] is not None:  # as is a loss that was not finite
                train.append((tokens, record["loss"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a record of a step with tokens and loss ({error!r})") from error
        if record.get("initial_valid_loss") is not None:
            valid.append((0, record["initial_valid_loss"]))
        if record.get("valid_loss") is not None:
            valid.append((tokens, record["valid_loss"]))
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
        if curve.valid:
            axes.plot(*zip(*curve.valid), color=color, marker="o", markersize=4, label=f"{curve.name}, validation")
    axes.set(xlabel="tokens", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def summary(curve: Curve) -> dict[str, Any]:
    """First and last losses, for people and programs."""
    figures = {"run": curve.name, "tokens": curve.train[-1][0]}
    for name, points in (("loss", curve.train), ("valid_loss", curve.valid)):
        if points:
            figures |= {f"first_{name}": points[0][1], f"last_{name}": points[-1][1]}
    return figures


def run_loss(args: argparse.Namespace) -> None:
    curves = [read_curve(find_records(run)) for run in args.runs]
    draw(curves, args.out)
    figures = [summary(curve) for curve in curves]
    if args.json:
        print(json.dumps(figures))
        return
    for f in figures:
        print(f"{f['run']}: {f['tokens']:,} tokens, training loss {f['first_loss']:.3f} -> {f['last_loss']:.3f}")
        if "first_valid_loss" in f:
            print(f"{f['run']}: validation loss {f['first_valid_loss']:.3f} -> {f['last_valid_loss']:.3f}")
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
    sys.exit(main(sys.argv[1:]))

"""Show, simulate, compare, search and verify pipeline schedules, on one CPU and without a model.

    python tools/schedule.py show --schedule zb_v --pp 4 --microbatches 8 --svg zb_v.svg --trace \\
        zb_v.json
    python tools/schedule.py simulate --schedule dualpipe --pp 16 --microbatches 64 --costs \\
        F=1,I=1.2,W=0.8,comm=0.1
    python tools/schedule.py compare --pp 8 --microbatches 32 --costs a2aF=0.5,a2aB=0.5
    python tools/schedule.py search --pp 16 --microbatches 64 --costs a2aF=0.5,a2aB=0.5 --memory \\
        1.25 --seconds 10
    python tools/schedule.py verify mine.csv --pp 4 --microbatches 8 --memory 1.25

Times are in any one unit, per micro-batch and rank (1/pp of the model); they divide over the chunks
of a rank. Activations are in micro-batches of one rank's layers. A refused schedule or bad input
ends with exit code 2.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import print_anywhere
from megatron5d.config.errors import exit_code, in_options, names_option
from megatron5d.model.partition import BALANCES
from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import Program, placement_name
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_file, write_program
from megatron5d.pipeline_parallel.simulate import Simulation, lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify
from megatron5d.planning.schedule_search.named_schedules import PAIRS, PLACEMENTS
from megatron5d.planning.schedule_search.stage_costs import LayerCosts
from megatron5d.tools.plots.schedule import chrome_trace, draw_png, draw_svg, draw_text

SEARCH_S = 10.0
"""Time limit of a search where the options set none."""


OPTIONS = {
    "parallel.pp": "--pp",
    "parallel.vpp": "--vpp",
    "pipeline.schedule": "--schedule",
    "model.num_layers": "--layers",
    "num_microbatches": "--microbatches",
    "stage_scale": "--stage-scale",
}
"""Of this tool, by the words that messages of schedules have for them."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand and returns the exit code."""
    options = parse(arguments)
    return exit_code("schedule.py: error", lambda: run(options))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="schedule.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_show, _add_simulate, _add_compare, _add_search, _add_verify):
        add(commands)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Runs a subcommand; refuses options that are no amount of anything, and schedules in the words
    of OPTIONS."""
    for name in ("pp", "microbatches", "memory", "seconds", "activation_bytes", "layers", "width"):
        amount = getattr(options, name, None)
        if amount is not None and not amount > 0:
            raise ValueError(f"--{name.replace('_', '-')} {amount:g} is not above 0")
    for name in ("activation_bytes", "embedding", "head", "dense", "evaluations", "seed"):
        amount = getattr(options, name, None)
        if amount is not None and not 0 <= amount < math.inf:
            raise ValueError(
                f"--{name.replace('_', '-')} {amount:g} is no finite number of at least 0"
            )
    try:
        return options.run(options)
    except ValueError as error:
        raise ValueError(in_options(str(error), OPTIONS)) from error


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show", help="draw a schedule over time, in the terminal or as a picture"
    )
    _add_program_options(parser)
    parser.add_argument(
        "--width", type=int, help="columns of the drawing (default: fits the actions)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG picture")
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="write a PNG picture (needs matplotlib)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the Program in PyTorch's CSV format"
    )
    parser.set_defaults(run=_show)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="makespan, bubble and peak memory of one schedule"
    )
    _add_program_options(parser)
    parser.add_argument(
        "--activation-bytes",
        type=float,
        metavar="N",
        help="of one micro-batch of one rank's layers",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_simulate)


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", help="a table of all named schedules under the same costs"
    )
    _add_sizes(parser)
    _add_costs(parser)
    parser.add_argument(
        "--memory", type=float, metavar="X", help="only those that fit X·pp activations per rank"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=_compare)


def _add_search(commands: Any) -> None:
    parser = commands.add_parser("search", help="the best schedule found under a memory cap")
    _add_sizes(parser)
    _add_costs(parser)
    parser.add_argument(
        "--memory",
        type=float,
        default=1.25,
        metavar="X",
        help="at most X·pp activations per rank (default 1.25)",
    )
    parser.add_argument(
        "--copies", type=int, default=1, choices=(1, 2), help="most copies of the parameters"
    )
    parser.add_argument(
        "--seconds", type=float, help=f"time limit (default {SEARCH_S:g}; with --evaluations none)"
    )
    parser.add_argument(
        "--evaluations", type=int, metavar="N", help="end after N list schedules; repeats exactly"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moves")
    parser.add_argument(
        "--placements",
        metavar="LIST",
        help=f"such as loop:4,zigzag:2; default: {','.join(PLACEMENTS)} as copies admit",
    )
    parser.add_argument(
        "--pairs",
        default=",".join(PAIRS),
        metavar="LIST",
        help="which actions may overlap; empty for none",
    )
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="keep the result there, and take it from there"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write the Program in PyTorch's CSV format"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_search)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="prove that a CSV file is complete, ordered and free of deadlock"
    )
    parser.add_argument(
        "file", type=Path, help="one row a rank, cells such as 2F0 or (0F1;7B0)OVERLAP_F_B"
    )
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches of one step")
    parser.add_argument(
        "--memory", type=float, metavar="X", help="refuse more than X·pp activations on a rank"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches of one step")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs", default="", help="F=1,I=1,W=1,comm=0,a2aF=0,a2aB=0 (these are the defaults)"
    )
    parser.add_argument(
        "--stage-scale",
        metavar="LIST",
        help="each stage's time relative to an even split, such as 0.3,1,1,1.5",
    )
    whole = parser.add_argument_group(
        "whole layers", "dealt to stages; sizes of ends in layers of one rank, N/pp"
    )
    whole.add_argument(
        "--layers", type=int, metavar="N", help="of the model (default: stages share it evenly)"
    )
    whole.add_argument(
        "--embedding",
        type=float,
        default=0.0,
        metavar="X",
        help="compute of the first stage besides",
    )
    whole.add_argument(
        "--head", type=float, default=0.0, metavar="X", help="compute of the last stage besides"
    )
    whole.add_argument(
        "--dense",
        type=float,
        default=0.0,
        metavar="X",
        help="layers at the bottom without all-to-all",
    )
    whole.add_argument(
        "--balance", choices=BALANCES, help="what is evened (default: stages; search tries all)"
    )


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(schedule_names())
    parser.add_argument("--schedule", required=True, help=f"{names}, or file:<path> of a CSV")
    _add_sizes(parser)
    parser.add_argument("--vpp", type=int, help="chunks per rank (default: as the schedule needs)")
    _add_costs(parser)


def _cost_models(options: argparse.Namespace) -> list[Costs | LayerCosts]:
    """Returns the costs for every way to deal the layers to stages that the options leave open."""
    ends = {name: getattr(options, name) for name in ("embedding", "head", "dense")}
    if options.layers is None:
        given = [f"--{name}" for name in (*ends, "balance") if getattr(options, name)]
        if given:
            raise ValueError(
                f"{', '.join(given)}: of layers that are dealt to stages; say how many with --layers"
            )
        return [_costs(options)]
    if options.stage_scale:
        raise ValueError("--stage-scale and --layers both say what stages hold; leave one out")
    ways = [options.balance] if options.balance else BALANCES
    return [
        LayerCosts(_costs(options), options.layers, **ends, balance=balance) for balance in ways
    ]


def _stage_costs(
    options: argparse.Namespace, program: Program
) -> tuple[StageCosts, list[int] | None]:
    """Returns the costs of the stages of a Program and, where whole layers are dealt to them, how
    many each has."""
    model, placement = _cost_models(options)[0], program.placement
    return model.of(placement), model.layout(placement) if isinstance(model, LayerCosts) else None


def _costs(options: argparse.Namespace) -> Costs:
    scale = None
    if options.stage_scale:
        try:
            scale = [float(part) for part in options.stage_scale.split(",")]
        except ValueError:
            raise ValueError(
                f"--stage-scale {options.stage_scale!r} is no list of numbers such as 0.3,1,1,1.5"
            ) from None
    return parse_costs(options.costs, scale)


def _program(options: argparse.Namespace) -> Program:
    if options.schedule.startswith("file:"):
        with names_option(f"--schedule {options.schedule}"):
            path = Path(options.schedule.removeprefix("file:"))
            return read_file(path, options.pp, options.microbatches, options.vpp)
    return build_program(options.schedule, options.pp, options.microbatches, options.vpp)


def _figures(
    program: Program, costs: StageCosts, result: Simulation, layout: list[int] | None = None
) -> dict[str, Any]:
    """Returns what a program that reads our output wants to know, in the units of the costs."""
    memory = float(result.peak_activations.max())
    return {
        "schedule": program.name,
        "pp": program.num_ranks,
        "num_microbatches": program.num_microbatches,
        "num_stages": program.num_stages,
        "makespan": round(result.makespan, 9),
        "overhead": round(result.overhead, 9),
        "bubble": round(result.bubble, 9),
        "lower_bound": round(
            lower_bound(program.placement, costs, program.num_microbatches, memory), 9
        ),
        "peak_activations": _rounded(result.peak_activations),
        "peak_stash": _rounded(result.peak_stash),
        "exposed_a2a": _rounded(result.exposed_a2a),
        "exposed_p2p": _rounded(result.exposed_p2p),
        "copies": program.copies,
    } | ({"layout": layout} if layout else {})


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 9) for value in values]


def _show(options: argparse.Namespace) -> int:
    program = _program(options)
    verify(program)
    result = simulate(program, _stage_costs(options, program)[0])
    if not result.makespan:
        raise ValueError(
            "no action takes any time, so there is nothing to draw; set F, I or W of --costs above 0"
        )
    write: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(draw_svg(program, result)),
        "png": lambda path: draw_png(program, result, path),
        "trace": lambda path: path.write_text(json.dumps(chrome_trace(program, result))),
        "csv": lambda path: path.write_text(write_program(program)),
    }
    written = {kind: path for kind in write if (path := getattr(options, kind))}
    for kind, path in written.items():
        with names_option(f"--{kind} {path}", "written"):
            write[kind](path)
    if written:
        print("wrote " + ", ".join(map(str, written.values())))
    else:
        lengths = result.end - result.start
        shortest = float(lengths[lengths > 0].min())  # of a stage without layers nothing is drawn
        width = options.width or min(400, max(60, round(3 * result.makespan / shortest)))
        print(draw_text(program, result, width, colored=sys.stdout.isatty()))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    program = _program(options)
    verify(program)
    costs, layout = _stage_costs(options, program)
    result = simulate(program, costs)
    figures = _figures(program, costs, result, layout)
    if options.activation_bytes:
        figures["peak_bytes"] = [
            round(peak * options.activation_bytes) for peak in figures["peak_activations"]
        ]
    _print_figures(figures, options.json)
    return 0


def _print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        shown = ", ".join(f"{item:g}" for item in value) if isinstance(value, list) else value
        print(f"{key:>19}  {shown}")


def _compare(options: argparse.Namespace) -> int:
    rows, refused = [], []
    for name in schedule_names():
        for chunks in (2, 4) if find_schedule(name).any_chunks else (None,):
            label = name if chunks is None else f"{name} v={chunks}"
            try:
                program = build_program(name, options.pp, options.microbatches, chunks)
                costs, layout = _stage_costs(options, program)
                result = simulate(program, costs)
            except ValueError as error:
                refused.append(in_options(f"{label}: {error}", OPTIONS))
                continue
            rows.append({**_figures(program, costs, result, layout), "schedule": label})
    if options.memory is not None:
        rows = _within(rows, options.memory * options.pp)
    rows.sort(key=lambda row: (row["makespan"], max(row["peak_activations"])))
    if options.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{'schedule':<24} {'makespan':>10} {'overhead':>10} {'bubble':>8} {'bound':>8} {'memory':>8} {'copies':>6}"
    )
    for row in rows:
        print(
            f"{row['schedule']:<24} {row['makespan']:>10.2f} {row['overhead']:>10.3f} {100 * row['bubble']:>6.1f} % "
            f"{row['lower_bound']:>8.2f} {max(row['peak_activations']):>8.2f} {row['copies']:>6}"
        )
    for line in refused:
        print(f"not possible: {line}")
    return 0


def _within(rows: list[dict[str, Any]], most: float) -> list[dict[str, Any]]:
    """Returns the schedules that hold at most `most` activations. Raises ValueError: there are
    some, but none fits."""
    fit = [row for row in rows if max(row["peak_activations"]) <= most + 1e-9]
    if rows and not fit:
        least = min(rows, key=lambda row: max(row["peak_activations"]))
        needed = max(least["peak_activations"]) / least["pp"]
        raise ValueError(
            f"no schedule holds at most {most:g} micro-batches of one rank's layers; {least['schedule']} needs the "
            f"least, --memory {math.ceil(needed * 1000) / 1000:g}"
        )
    return fit


def _search(options: argparse.Namespace) -> int:
    # numba takes a second to import, for which no other subcommand should wait
    from megatron5d.planning.schedule_search.search import IS_COMPILED, search_program

    pairs = [pair for pair in options.pairs.split(",") if pair]
    unknown = [pair for pair in pairs if pair not in PAIRS]
    if unknown:
        raise ValueError(f"--pairs: {unknown[0]!r} is none of {', '.join(PAIRS)}")
    if not IS_COMPILED:
        print(
            "schedule.py: without numba a schedule is tried a hundred times slower: pip install 'megatron5d[search]'",
            file=sys.stderr,
        )
    models = _cost_models(options)
    found = search_program(
        options.pp,
        options.microbatches,
        models,
        memory=options.memory * options.pp,
        copies=options.copies,
        seconds=SEARCH_S
        if options.seconds is None and options.evaluations is None
        else options.seconds,
        evaluations=options.evaluations,
        seed=options.seed,
        placements=options.placements.split(",") if options.placements else None,
        pairs=pairs,
        cache=options.cache,
    )
    chosen = models[found.split]
    costs = chosen.of(found.program.placement)
    layout = chosen.layout(found.program.placement) if isinstance(chosen, LayerCosts) else None
    figures = _figures(found.program, costs, found.simulation, layout) | {
        "placement": found.placement,
        "lower_bound": round(found.lower_bound, 9),
        "best_named": found.named[0] if found.named else None,
        "best_named_makespan": round(found.named[1], 9) if found.named else None,
        "evaluations": found.evaluations,
        "elapsed_s": round(found.elapsed_s, 3),
        "compiled": IS_COMPILED,
    }
    if isinstance(chosen, LayerCosts):
        figures["balance"] = chosen.balance
    if options.csv:
        with names_option(f"--csv {options.csv}", "written"):
            options.csv.write_text(write_program(found.program))
    _print_figures(figures, options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    with names_option(f"verify {options.file}"):
        program = read_file(options.file, options.pp, options.microbatches)
    peaks = verify(program, None if options.memory is None else options.memory * options.pp)
    if options.json:
        figures = {
            "ok": True,
            "num_stages": program.num_stages,
            "placement": placement_name(program.placement),
        }
        peak = {
            "peak_activations": _rounded(peaks.peak_activations),
            "peak_stash": _rounded(peaks.peak_stash),
        }
        print(json.dumps({**figures, **peak}))
        return 0
    print(
        f"{options.file}: correct; {program.num_stages} stages on {program.num_ranks} ranks, "
        f"{program.num_microbatches} micro-batches, placement {placement_name(program.placement)}, peak activations "
        f"{peaks.peak_activations.max():g}"
    )
    return 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

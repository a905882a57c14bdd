"""Shows, simulates, compares, searches and verifies pipeline schedules, on a CPU without a model.

    python tools/schedule.py show --schedule zb_v --pp 4 --microbatches 8 --svg zb_v.svg --trace \\
        zb_v.json
    python tools/schedule.py simulate --schedule dualpipe --pp 16 --microbatches 64 --costs \\
        F=1,I=1.2,W=0.8,comm=0.1
    python tools/schedule.py compare --pp 8 --microbatches 32 --costs a2aF=0.5,a2aB=0.5
    python tools/schedule.py search --pp 16 --microbatches 64 --costs a2aF=0.5,a2aB=0.5 --memory \\
        1.25 --seconds 10
    python tools/schedule.py verify mine.csv --pp 4 --microbatches 8 --memory 1.25

Times are per micro-batch and rank (1/pp of the model), in any one unit; the chunks of a rank share
them. Activations are in micro-batches of one rank's layers. Exit code 2: invalid schedule or input.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run as a script from a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code, in_options, names_option
from megatron5d.config.plugins import load_plugins
from megatron5d.pipeline_parallel.costs import Costs, StageCosts
from megatron5d.pipeline_parallel.program import Program, placement_name
from megatron5d.pipeline_parallel.registry import build_program, find_schedule, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_file, write_program
from megatron5d.pipeline_parallel.simulate import Simulation, lower_bound, simulate
from megatron5d.pipeline_parallel.verify import verify
from megatron5d.planning.schedule_search.named_schedules import PAIRS, PLACEMENTS
from megatron5d.planning.schedule_search.stage_costs import LayerCosts
from megatron5d.tools.planning.schedule_costs import (
    add_costs,
    cost_models,
    costs_and_layout,
    stage_costs,
)
from megatron5d.tools.plots.schedule import chrome_trace, draw_png, draw_svg, draw_text

if TYPE_CHECKING:
    from megatron5d.planning.schedule_search.search import SearchResult

SEARCH_S = 10.0
"""Default time limit of a search."""

OPTIONS = {
    "parallel.pp": "--pp",
    "parallel.vpp": "--vpp",
    "pipeline.schedule": "--schedule",
    "model.num_layers": "--layers",
    "num_microbatches": "--microbatches",
    "stage_scale": "--stage-scale",
}
"""Name in messages of schedules -> option of this tool."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; the result is the exit code."""
    options = parse(arguments)
    return exit_code("schedule.py: error", lambda: run(options))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OptionParser(prog="schedule.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_show, _add_simulate, _add_compare, _add_search, _add_verify):
        add(commands)
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    """Runs a subcommand.

    Raises:
        ValueError: a number is out of range or the schedule invalid; names options of this tool.
    """
    for name in ("pp", "microbatches", "memory", "seconds", "activation_bytes", "layers", "width"):
        amount = getattr(options, name, None)
        if amount is not None and not amount > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 (got {amount:g})")
    for name in ("activation_bytes", "embedding", "head", "dense", "evaluations", "seed"):
        amount = getattr(options, name, None)
        if amount is not None and amount < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 0 (got {amount:g})")
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
    add_costs(parser)
    parser.add_argument(
        "--memory",
        type=float,
        metavar="X",
        help="only schedules with at most X·pp activations per rank",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=_compare)


def _add_search(commands: Any) -> None:
    parser = commands.add_parser("search", help="the best schedule found under a memory cap")
    _add_sizes(parser)
    add_costs(parser)
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
        "--evaluations", type=int, metavar="N", help="stop after N list schedules; reproducible"
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
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="read the result from this folder, or store it there",
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
        "file", type=Path, help="one row per rank, cells such as 2F0 or (0F1;7B0)OVERLAP_F_B"
    )
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches per step")
    parser.add_argument(
        "--memory", type=float, metavar="X", help="reject more than X·pp activations on a rank"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_verify)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches per step")


def _add_program_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(schedule_names())
    parser.add_argument("--schedule", required=True, help=f"{names}, or file:<path> of a CSV")
    parser.add_argument(
        "--plugin", action="append", default=[], metavar="FILE", help="Python file with schedules"
    )
    _add_sizes(parser)
    parser.add_argument("--vpp", type=int, help="chunks per rank (default: as the schedule needs)")
    add_costs(parser)


def _program(options: argparse.Namespace) -> Program:
    if faults := load_plugins(options.plugin):
        raise ValueError(faults[0].reason.replace("plugins:", "--plugin:"))
    if options.schedule.startswith("file:"):
        with names_option(f"--schedule {options.schedule}"):
            path = Path(options.schedule.removeprefix("file:"))
            return read_file(path, options.pp, options.microbatches, options.vpp)
    return build_program(options.schedule, options.pp, options.microbatches, options.vpp)


def _figures(
    program: Program, costs: StageCosts, result: Simulation, layout: list[int] | None = None
) -> dict[str, Any]:
    """Results as a JSON object, in the units of the costs."""
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
    result = simulate(program, stage_costs(options, program)[0])
    if not result.makespan:
        raise ValueError(
            "a drawing requires F, I or W of --costs above 0 (got 0: no action takes time)"
        )
    writers: dict[str, Callable[[Path], object]] = {
        "svg": lambda path: path.write_text(draw_svg(program, result)),
        "png": lambda path: draw_png(program, result, path),
        "trace": lambda path: path.write_text(json.dumps(chrome_trace(program, result))),
        "csv": lambda path: path.write_text(write_program(program)),
    }
    files = {kind: path for kind in writers if (path := getattr(options, kind))}
    for kind, path in files.items():
        with names_option(f"--{kind} {path}", "written"):
            writers[kind](path)
    if files:
        print("wrote " + ", ".join(map(str, files.values())))
    else:
        lengths = result.end - result.start
        # Actions of a stage without layers take no time and are not drawn.
        shortest = float(lengths[lengths > 0].min())
        width = options.width or min(400, max(60, round(3 * result.makespan / shortest)))
        print(draw_text(program, result, width, colored=sys.stdout.isatty()))
    return 0


def _simulate(options: argparse.Namespace) -> int:
    program = _program(options)
    verify(program)
    costs, layout = stage_costs(options, program)
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
        text = ", ".join(f"{item:g}" for item in value) if isinstance(value, list) else value
        print(f"{key:>19}  {text}")


def _compare(options: argparse.Namespace) -> int:
    rows, impossible = [], []
    for name in schedule_names():
        for chunks in (2, 4) if find_schedule(name).any_chunks else (None,):
            label = name if chunks is None else f"{name} v={chunks}"
            try:
                program = build_program(name, options.pp, options.microbatches, chunks)
                costs, layout = stage_costs(options, program)
                result = simulate(program, costs)
            except ValueError as error:
                impossible.append(in_options(f"{label}: {error}", OPTIONS))
                continue
            rows.append({**_figures(program, costs, result, layout), "schedule": label})
    if options.memory is not None:
        rows = _within(rows, options.memory * options.pp)
    rows.sort(key=lambda row: (row["makespan"], max(row["peak_activations"])))
    if options.json:
        print(json.dumps(rows))
        return 0
    print(
        f"{'schedule':<24} {'makespan':>10} {'overhead':>10} {'bubble':>8} {'bound':>8} "
        f"{'memory':>8} {'copies':>6}"
    )
    for row in rows:
        print(
            f"{row['schedule']:<24} {row['makespan']:>10.2f} {row['overhead']:>10.3f} "
            f"{100 * row['bubble']:>6.1f} % {row['lower_bound']:>8.2f} "
            f"{max(row['peak_activations']):>8.2f} {row['copies']:>6}"
        )
    for line in impossible:
        print(f"not possible: {line}")
    return 0


def _within(rows: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Schedules with at most `limit` activations.

    Raises:
        ValueError: none of them fits.
    """
    fitting = [row for row in rows if max(row["peak_activations"]) <= limit + 1e-9]
    if rows and not fitting:
        least = min(rows, key=lambda row: max(row["peak_activations"]))
        needed = max(least["peak_activations"]) / least["pp"]
        raise ValueError(
            f"no schedule holds at most {limit:g} micro-batches of one rank's layers; "
            f"{least['schedule']} needs the least, --memory {math.ceil(needed * 1000) / 1000:g}"
        )
    return fitting


def _search(options: argparse.Namespace) -> int:
    # Imported here because numba takes a second, which the other subcommands need not wait for.
    from megatron5d.planning.schedule_search.search import IS_COMPILED, search_program

    pairs = _overlapped_pairs(options)
    if not IS_COMPILED:
        print(
            "schedule.py: without numba the search is a hundred times slower: "
            "pip install 'megatron5d[search]'",
            file=sys.stderr,
        )
    seconds = options.seconds
    if seconds is None and options.evaluations is None:
        seconds = SEARCH_S
    models = cost_models(options)
    result = search_program(
        options.pp,
        options.microbatches,
        models,
        memory=options.memory * options.pp,
        copies=options.copies,
        seconds=seconds,
        evaluations=options.evaluations,
        seed=options.seed,
        placements=options.placements.split(",") if options.placements else None,
        pairs=pairs,
        cache=options.cache,
    )
    model = models[result.split]
    figures = _search_figures(result, model) | {"compiled": IS_COMPILED}
    if isinstance(model, LayerCosts):
        figures["balance"] = model.balance
    if options.csv:
        with names_option(f"--csv {options.csv}", "written"):
            options.csv.write_text(write_program(result.program))
    _print_figures(figures, options.json)
    return 0


def _overlapped_pairs(options: argparse.Namespace) -> list[str]:
    pairs = [pair for pair in options.pairs.split(",") if pair]
    unknown = [pair for pair in pairs if pair not in PAIRS]
    if unknown:
        raise ValueError(f"--pairs must be among {', '.join(PAIRS)} (got {unknown[0]!r})")
    return pairs


def _search_figures(result: SearchResult, model: Costs | LayerCosts) -> dict[str, Any]:
    costs, layout = costs_and_layout(model, result.program)
    return _figures(result.program, costs, result.simulation, layout) | {
        "placement": result.placement,
        "lower_bound": round(result.lower_bound, 9),
        "best_named": result.named[0] if result.named else None,
        "best_named_makespan": round(result.named[1], 9) if result.named else None,
        "evaluations": result.evaluations,
        "elapsed_s": round(result.elapsed_s, 3),
    }


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
        f"{program.num_microbatches} micro-batches, placement {placement_name(program.placement)}, "
        f"peak activations {peaks.peak_activations.max():g}"
    )
    return 0


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

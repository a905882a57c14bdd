"""Draws a Program over time: in the terminal, as SVG, as PNG, and as a Chrome trace."""

from html import escape
from pathlib import Path
from typing import Any

from megatron5d.pipeline_parallel.program import Action, Program, Slot
from megatron5d.pipeline_parallel.schedule_csv import slot_text
from megatron5d.pipeline_parallel.simulate import Simulation

COLORS = {
    "F": ("#4c78a8", "#9ecae9"),
    "I": ("#54a24b", "#a3d998"),
    "W": ("#eeb92b", "#fbe29a"),
    "B": ("#2f7f6f", "#8fcfc0"),
}
"""Each op's colors; the second is for the later half of the stages, or for the second direction."""
ANSI = {"F": 44, "I": 42, "W": 43, "B": 46}
BRIGHTER = 60  # from a terminal color to its second shade
IDLE = "#f2f2f2"
PNG_COLUMNS = 200  # digits that fit next to each other
NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "full backward"}


Bar = tuple[Slot, float, float]
"""A slot, its start and its end."""


def _bars(program: Program, result: Simulation) -> list[list[Bar]]:
    """The bars of every rank."""
    times = iter(zip(result.start.tolist(), result.end.tolist()))
    return [[(slot, *next(times)) for slot in line] for line in program.ranks]


def draw_text(program: Program, result: Simulation, width: int = 160, colored: bool = False) -> str:
    """Draws one line per rank, time from left to right.

    `·` is waiting, and a pair shares its time half and half. The later half of the stages, or the
    second direction, is in lower case.

    Args:
        program: to draw.
        result: of its simulation.
        width: columns of the makespan.
        colored: color the ops with terminal codes.
    """
    scale = width / result.makespan if result.makespan else 0.0
    lines = [_caption(program, result)]
    for rank, bars in enumerate(_bars(program, result)):
        cells: list[str] = []
        for slot, start, end in bars:
            first, stop = round(start * scale), round(end * scale)
            cells += ["·"] * (first - len(cells))
            edges = [first + (stop - first) * k // len(slot) for k in range(len(slot) + 1)]
            for action, a, b in zip(slot, edges, edges[1:]):
                cells += _cell(action, b - a, _shade(program, action), colored)
        lines.append(f"{rank:>3} {''.join(cells)}{'·' * (width - len(cells))}")
    return "\n".join(lines)


def draw_svg(program: Program, result: Simulation, width: int = 1600, row: int = 26) -> str:
    """Draws the Program as SVG; a tooltip shows each action and its times.

    Args:
        program: to draw.
        result: of its simulation.
        width: pixels of the makespan.
        row: pixels of one rank's line.
    """
    scale = width / result.makespan if result.makespan else 0.0
    x0, y0 = 60, 50
    caption = escape(_caption(program, result))
    elements = [f'<text x="{x0}" y="18" font-size="13">{caption}</text>']
    for k, (color, name) in enumerate(_legend(program)):
        x = x0 + 190 * k
        elements.append(f'<rect x="{x}" y="27" width="14" height="14" fill="{color}"/>')
        elements.append(f'<text x="{x + 19}" y="39" font-size="12">{name}</text>')
    for rank, bars in enumerate(_bars(program, result)):
        y = y0 + rank * row
        elements.append(f'<text x="4" y="{y + row * 0.65:.1f}" font-size="12">rank {rank}</text>')
        elements.append(
            f'<rect x="{x0}" y="{y}" width="{width}" height="{row - 3}" fill="{IDLE}"/>'
        )
        for slot, start, end in bars:
            tooltip = escape(f"{slot_text(slot)}  {start:g} to {end:g}")
            height = (row - 3) / len(slot)
            for k, action in enumerate(slot):
                color = COLORS[action.op][_shade(program, action)]
                box = (x0 + start * scale, y + k * height, (end - start) * scale, height)
                elements.append(_svg_box(box, color, tooltip, str(action.microbatch)))
    size = f'width="{x0 + width + 10}" height="{y0 + program.num_ranks * row + 10}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([opening, *elements, "</svg>\n"])


def draw_png(program: Program, result: Simulation, path: Path) -> None:
    """Writes the Program as a PNG picture to `path`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 1.1 + 0.3 * program.num_ranks), layout="constrained")
    axes = figure.subplots()
    axes.set(
        title=_caption(program, result), xlabel="time", ylabel="rank", xlim=(0, result.makespan)
    )
    axes.set_yticks(range(program.num_ranks))
    axes.invert_yaxis()
    axes.set_facecolor(IDLE)
    for rank, bars in enumerate(_bars(program, result)):
        _draw_rank(axes, program, rank, bars, result.makespan)
    ops = [Patch(facecolor=color, edgecolor="#ccc", label=name) for color, name in _legend(program)]
    figure.legend(handles=ops, ncols=len(ops), loc="outside lower right", frameon=False)
    figure.savefig(path, dpi=120)


def _draw_rank(axes: Any, program: Program, rank: int, bars: list[Bar], makespan: float) -> None:
    spans: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for slot, start, end in bars:
        for k, action in enumerate(slot):
            low, height = rank - 0.45 + 0.9 * k / len(slot), 0.9 / len(slot)
            color, label = COLORS[action.op][_shade(program, action)], str(action.microbatch)
            spans.setdefault((color, low, height), []).append((start, end - start))
            if PNG_COLUMNS * (end - start) >= makespan * len(label):
                middle = ((start + end) / 2, low + height / 2)
                size = 7 if len(slot) == 1 else 6
                axes.text(*middle, label, size=size, ha="center", va="center")
    for (color, low, height), xranges in spans.items():
        axes.broken_barh(
            xranges, (low, height), facecolors=color, edgecolors="white", linewidth=0.3
        )


def chrome_trace(program: Program, result: Simulation) -> dict[str, list[dict]]:
    """The simulated step in Chrome's trace format, one process per rank, a unit as a millisecond.

    The actions of an overlapped pair are two events on two threads of their rank.
    """
    events: list[dict] = []
    for rank, bars in enumerate(_bars(program, result)):
        process = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": process})
        events += [
            {
                "ph": "X",
                "name": str(action),
                "cat": NAMES[action.op],
                "pid": rank,
                "tid": thread,
                "ts": 1000 * start,
                "dur": 1000 * (end - start),
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            for slot, start, end in bars
            for thread, action in enumerate(slot)
        ]
    return {"traceEvents": events}


def _svg_box(box: tuple[float, float, float, float], color: str, tooltip: str, label: str) -> str:
    """A rectangle (x, y, width, height), with its label where that fits."""
    x, y, width, height = box
    geometry = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    title = f"<title>{tooltip}</title>"
    shape = f'<rect {geometry} fill="{color}" stroke="#fff" stroke-width="0.6">{title}</rect>'
    points = min(11.0, height * 0.8)
    if width < 0.62 * points * len(label):
        return shape
    middle = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 0.36 * points:.2f}"'
    anchor = f'font-size="{points:.1f}" text-anchor="middle" pointer-events="none"'
    return f"{shape}<text {middle} {anchor}>{label}</text>"


def _caption(program: Program, result: Simulation) -> str:
    return (
        f"{program.name}: pp={program.num_ranks}, {program.num_stages} stages, "
        f"{program.num_microbatches} micro-batches; makespan {result.makespan:g}, "
        f"overhead {result.overhead:g}, bubble {100 * result.bubble:.1f} %, "
        f"peak activations {result.peak_activations.max():g}"
    )


def _legend(program: Program) -> list[tuple[str, str]]:
    """The color and the meaning of everything in a picture."""
    present = {
        (action.op, _shade(program, action))
        for line in program.ranks
        for slot in line
        for action in slot
    }
    second = "second direction" if program.copies > 1 else "later stages"
    return [
        (COLORS[op][shade], f"{op} {name}" + f", {second}" * shade)
        for op, name in NAMES.items()
        for shade in (0, 1)
        if (op, shade) in present
    ] + [(IDLE, "idle")]


def _shade(program: Program, action: Action) -> int:
    if program.copies > 1:
        return program.direction[action.microbatch]
    return int(program.chunks > 1 and action.stage >= program.num_stages // 2)


def _cell(action: Action, columns: int, shade: int, colored: bool) -> list[str]:
    """One string per column: the action's name, or its letter repeated if the name is too long."""
    op = action.op.lower() if shade else action.op
    name = f"{op}{action.microbatch}"
    shown = list(name.ljust(columns) if len(name) <= columns else op * columns)
    if colored and shown:
        shown[0] = f"\x1b[30;{ANSI[action.op] + BRIGHTER * shade}m{shown[0]}"
        shown[-1] += "\x1b[0m"
    return shown

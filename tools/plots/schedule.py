"""A Program drawn over time: in the terminal, as SVG, and as PNG."""

from html import escape
from pathlib import Path

from megatron5d.pipeline_parallel.program import Action, Program
from megatron5d.pipeline_parallel.schedule_csv import slot_text
from megatron5d.pipeline_parallel.simulate import Simulation

COLOURS = {
    "F": ("#4c78a8", "#9ecae9"),
    "I": ("#54a24b", "#a3d998"),
    "W": ("#eeb92b", "#fbe29a"),
    "B": ("#2f7f6f", "#8fcfc0"),
}
"""Each op's colour; the second one is for the later half of the stages, or for the second direction."""
ANSI = {"F": 44, "I": 42, "W": 43, "B": 46}
BRIGHTER = 60  # from a terminal's colour to the second one
IDLE = "#f2f2f2"
PNG_COLUMNS = 200  # digits that fit beside each other
NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "full backward"}


def draw_text(
    program: Program, result: Simulation, width: int = 160, coloured: bool = False
) -> str:
    """Returns one line a rank, time from left to right; `·` is waiting, and a pair shares its time
    half and half.

    The later half of the stages, or the second direction, is in small letters.

    Args:
        width: columns that the makespan is spread over.
        coloured: whether to colour the ops with terminal codes.
    """
    scale = width / result.makespan if result.makespan else 0.0
    lines = [_caption(program, result)]
    edges = program.table.rank_start.tolist()
    for rank, line in enumerate(program.ranks):
        cells: list[str] = []
        for slot, index in zip(line, range(edges[rank], edges[rank + 1])):
            first, stop = round(result.start[index] * scale), round(result.end[index] * scale)
            cells += ["·"] * (first - len(cells))
            cuts = [first + (stop - first) * part // len(slot) for part in range(len(slot) + 1)]
            for action, a, b in zip(slot, cuts, cuts[1:]):
                cells += _cell(action, b - a, _shade(program, action), coloured)
        lines.append(f"{rank:>3} " + "".join(cells) + "·" * (width - len(cells)))
    return "\n".join(lines)


def draw_svg(program: Program, result: Simulation, width: int = 1600, row: int = 26) -> str:
    """Returns the Program as an SVG picture; the pointer shows each action and its times.

    `width` is the pixels of the makespan, `row` those of one rank's line.
    """
    scale = width / result.makespan if result.makespan else 0.0
    left, top = 60, 50
    parts = [f'<text x="{left}" y="18" font-size="13">{escape(_caption(program, result))}</text>']
    for k, (colour, name) in enumerate(_legend(program)):
        x = left + 190 * k
        parts.append(f'<rect x="{x}" y="27" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 19}" y="39" font-size="12">{name}</text>')
    edges = program.table.rank_start.tolist()
    for rank, line in enumerate(program.ranks):
        y = top + rank * row
        parts.append(f'<text x="4" y="{y + row * 0.65:.1f}" font-size="12">rank {rank}</text>')
        parts.append(f'<rect x="{left}" y="{y}" width="{width}" height="{row - 3}" fill="{IDLE}"/>')
        for slot, index in zip(line, range(edges[rank], edges[rank + 1])):
            start, end = float(result.start[index]), float(result.end[index])
            tip = escape(f"{slot_text(slot)}  {start:g} to {end:g}")
            height = (row - 3) / len(slot)
            for k, action in enumerate(slot):
                colour = COLOURS[action.op][_shade(program, action)]
                box = (left + start * scale, y + k * height, (end - start) * scale, height)
                parts.append(_svg_box(box, colour, tip, str(action.microbatch)))
    size = f'width="{left + width + 10}" height="{top + program.num_ranks * row + 10}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


def draw_png(program: Program, result: Simulation, path: Path) -> None:
    """Writes the Program as a PNG picture to `path`."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 1.1 + 0.3 * program.num_ranks), layout="constrained")
    axes = figure.subplots()
    edges = program.table.rank_start.tolist()
    for rank, line in enumerate(program.ranks):
        bars: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
        for slot, index in zip(line, range(edges[rank], edges[rank + 1])):
            start, end = float(result.start[index]), float(result.end[index])
            for k, action in enumerate(slot):
                low, height = rank - 0.45 + 0.9 * k / len(slot), 0.9 / len(slot)
                colour = COLOURS[action.op][_shade(program, action)]
                bars.setdefault((colour, low, height), []).append((start, end - start))
                label = str(action.microbatch)
                if PNG_COLUMNS * (end - start) >= result.makespan * len(label):
                    middle = ((start + end) / 2, low + height / 2)
                    axes.text(
                        *middle, label, size=7 if len(slot) == 1 else 6, ha="center", va="center"
                    )
        for (colour, low, height), spans in bars.items():
            axes.broken_barh(
                spans, (low, height), facecolors=colour, edgecolors="white", linewidth=0.3
            )
    axes.set(
        title=_caption(program, result), xlabel="time", ylabel="rank", xlim=(0, result.makespan)
    )
    axes.set_yticks(range(program.num_ranks))
    axes.invert_yaxis()
    axes.set_facecolor(IDLE)
    ops = [
        Patch(facecolor=colour, edgecolor="#ccc", label=name) for colour, name in _legend(program)
    ]
    figure.legend(handles=ops, ncols=len(ops), loc="outside lower right", frameon=False)
    figure.savefig(path, dpi=120)


def chrome_trace(program: Program, result: Simulation) -> dict[str, list[dict]]:
    """Returns the simulated step in Chrome's trace format, one thread a rank; a unit of time is a
    millisecond.

    The actions of an overlapped pair are two events on two threads of their rank.
    """
    events: list[dict] = []
    edges = program.table.rank_start.tolist()
    for rank, line in enumerate(program.ranks):
        events.append(
            {
                "ph": "M",
                "name": "process_name",
                "pid": rank,
                "args": {"name": f"pipeline rank {rank}"},
            }
        )
        for slot, index in zip(line, range(edges[rank], edges[rank + 1])):
            start, end = float(result.start[index]), float(result.end[index])
            for thread, action in enumerate(slot):
                told = {"stage": action.stage, "microbatch": action.microbatch}
                span = {"ts": 1000 * start, "dur": 1000 * (end - start)}
                events.append(
                    {
                        "ph": "X",
                        "name": str(action),
                        "cat": NAMES[action.op],
                        "pid": rank,
                        "tid": thread,
                        **span,
                        "args": told,
                    }
                )
    return {"traceEvents": events}


def _svg_box(box: tuple[float, float, float, float], colour: str, tip: str, label: str) -> str:
    """Returns a rectangle (x, y, width, height), with its label where that fits."""
    x, y, width, height = box
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    shape = f'<rect {place} fill="{colour}" stroke="#fff" stroke-width="0.6"><title>{tip}</title></rect>'
    points = min(11.0, height * 0.8)
    if width < 0.62 * points * len(label):
        return shape
    middle = (
        f'x="{x + width / 2:.2f}" y="{y + height / 2 + 0.36 * points:.2f}" font-size="{points:.1f}"'
    )
    return shape + f'<text {middle} text-anchor="middle" pointer-events="none">{label}</text>'


def _caption(program: Program, result: Simulation) -> str:
    sizes = f"pp={program.num_ranks}, {program.num_stages} stages, {program.num_microbatches} micro-batches"
    times = f"makespan {result.makespan:g}, overhead {result.overhead:g}, bubble {100 * result.bubble:.1f} %"
    return f"{program.name}: {sizes}; {times}, peak activations {result.peak_activations.max():g}"


def _legend(program: Program) -> list[tuple[str, str]]:
    """Returns the colour and meaning of all that a picture shows."""
    present = {
        (action.op, _shade(program, action))
        for line in program.ranks
        for slot in line
        for action in slot
    }
    second = "second direction" if program.copies > 1 else "later stages"
    shown = [
        (op, name, shade)
        for op, name in NAMES.items()
        for shade in (0, 1)
        if (op, shade) in present
    ]
    return [
        (COLOURS[op][shade], f"{op} {name}" + f", {second}" * shade) for op, name, shade in shown
    ] + [(IDLE, "idle")]


def _shade(program: Program, action: Action) -> int:
    if program.copies > 1:
        return program.direction[action.microbatch]
    return int(program.chunks > 1 and action.stage >= program.num_stages // 2)


def _cell(action: Action, columns: int, shade: int, coloured: bool) -> list[str]:
    """Returns one string a column: the action's name as far as it fits."""
    op = action.op.lower() if shade else action.op
    name = f"{op}{action.microbatch}"
    shown = list(name.ljust(columns) if len(name) <= columns else op * columns)
    if coloured and shown:
        shown[0] = f"\x1b[30;{ANSI[action.op] + BRIGHTER * shade}m{shown[0]}"
        shown[-1] += "\x1b[0m"
    return shown

"""Moving SVG pictures of the documentation: a ring of keys and values, a micro-batch in a pipeline.

Without motion (`prefers-reduced-motion`) and on paper both show everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import cos, pi, sin

from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.simulate import Simulation
from megatron5d.tools.plots.dimensions import COLORS, INK, svg_of, text_at

RING_COLORS = ("#176b61", "#2a9d8f", "#6fbfb4", "#b5ddd7")
"""Keys and values of each of at most four ranks."""
HOP_S = 2.5  # duration of a hop, with the attention that hides it
Point = tuple[float, float]


def draw_ring(pieces: Sequence[Sequence[tuple[float, float]]]) -> str:
    """SVG of ring attention: the chunks of every rank, and keys and values on their way around.

    Args:
        pieces: parts of the sequence on each rank, as [start, end] of 1.
    """
    size, radius = len(pieces), 84.0
    center = (150.0, 150.0)
    points = [
        (
            center[0] + radius * sin(2 * pi * rank / size),
            center[1] - radius * cos(2 * pi * rank / size),
        )
        for rank in range(size)
    ]
    styles = [_path_keyframes(rank, points) for rank in range(size)]
    elements = [
        text_at(10, 20, "the ring: keys and values move on", 13, INK),
        f'<circle cx="{center[0]}" cy="{center[1]}" r="{radius}" fill="none" stroke="#d4dae0" '
        'stroke-width="2"/>',
        *(_ring_rank(rank, point) for rank, point in enumerate(points)),
        *_ring_table(size, 320.0),
        *_chunks(pieces, 320.0, 232.0),
    ]
    for rank, (x, y) in enumerate(points):
        elements.append(
            f'<circle class="kv kv{rank}" cx="{x:.1f}" cy="{y + 14:.1f}" r="9" '
            f'fill="{RING_COLORS[rank]}" stroke="#ffffff" stroke-width="2"/>'
        )
    duration = HOP_S * size
    columns = [
        f".hop{hop} {{ animation: hop {duration}s {hop * HOP_S - duration}s step-end infinite; }}"
        for hop in range(size)
    ]
    hop = f"@keyframes hop {{ 0% {{ stroke: {INK}; }} {100 / size:.2f}% {{ stroke: none; }} }}"
    moving = [f".kv{rank} {{ animation: kv{rank} {duration}s infinite; }}" for rank in range(size)]
    return svg_of(760, 290, [_style([*styles, hop], [*moving, *columns]), *elements])


def _ring_rank(rank: int, point: Point) -> str:
    x, y = point
    return (
        f'<rect x="{x - 30:.1f}" y="{y - 26:.1f}" width="60" height="56" rx="7" fill="#e8eef5" '
        f'stroke="{COLORS["cp"]}" stroke-width="1.5"/>'
        + text_at(x - 22, y - 9, f"cp {rank}", 12, INK)
    )


def _path_keyframes(rank: int, points: Sequence[Point]) -> str:
    """Keyframes of the keys and values of a rank: half of each hop is rest, half is travel."""
    size, frames = len(points), list[str]()
    start_x, start_y = points[rank]
    for hop in range(size):
        x, y = points[(rank + hop) % size]
        shift = f"transform: translate({x - start_x:.1f}px, {y - start_y:.1f}px)"
        begin, departure = 100 * hop / size, 100 * (hop + 0.55) / size
        frames.append(f"{begin:.2f}%, {departure:.2f}% {{ {shift}; opacity: 1; }}")
    frames.append(f"99% {{ {shift}; opacity: 0; }} 100% {{ transform: none; opacity: 0; }}")
    return f"@keyframes kv{rank} {{ {' '.join(frames)} }}"


def _ring_table(size: int, left: float) -> list[str]:
    """Which keys and values each rank attends to in every hop."""
    elements = [text_at(left, 20, "attends to keys and values of", 13, INK)]
    for hop in range(size):
        name = "its own" if hop == 0 else f"hop {hop}"
        elements.append(text_at(left + 56 + 84 * hop, 44, name, 12))
    for rank in range(size):
        y = 54.0 + 30 * rank
        elements.append(text_at(left, y + 17, f"cp {rank}", 12, INK))
        for hop in range(size):
            owner, x = (rank - hop) % size, left + 52 + 84 * hop
            elements.append(
                f'<rect class="hop{hop}" x="{x}" y="{y}" width="76" height="24" rx="5" '
                f'fill="{RING_COLORS[owner]}" stroke-width="2.5"/>'
                + text_at(x + 22, y + 17, f"cp {owner}", 12, _on(RING_COLORS[owner]))
            )
    return elements


def _chunks(pieces: Sequence[Sequence[tuple[float, float]]], left: float, top: float) -> list[str]:
    elements = [
        text_at(left, top - 8, "the sequence, in zigzag order: equal work for all", 13, INK)
    ]
    for rank, intervals in enumerate(pieces):
        for start, end in intervals:
            x, width = left + 400 * start, 400 * (end - start)
            elements.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width - 2:.1f}" height="26" rx="3" '
                f'fill="{RING_COLORS[rank]}"/>'
                + text_at(x + width / 2 - 14, top + 17, f"cp {rank}", 11, _on(RING_COLORS[rank]))
            )
    return elements


def _on(fill: str) -> str:
    """Color of text on a fill."""
    return "#ffffff" if int(fill[1:3], 16) < 0x60 else INK


def follow_microbatch(
    svg: str, program: Program, result: Simulation, width: int, row: int, duration_s: float = 14
) -> str:
    """The picture of a schedule (`draw_svg`) with a clock, and the first micro-batch on its way.

    Args:
        svg: the picture.
        program, result, width, row: as for `draw_svg`.
        duration_s: of the animation.
    """
    left, top, scale = 60, 50, width / result.makespan
    bottom = top + program.num_ranks * row
    times = iter(zip(result.start.tolist(), result.end.tolist()))
    slots: list[tuple[float, float, float]] = []
    for rank, line in enumerate(program.ranks):
        for slot in line:
            start, end = next(times)
            if any(action.microbatch == 0 for action in slot):
                slots.append((start, end, top + rank * row + row - 6))
    stops = [(time, y) for start, end, y in sorted(slots) for time in (start, end)]
    points = " ".join(f"{left + time * scale:.1f},{y:.1f}" for time, y in stops)
    frames = " ".join(
        f"{100 * time / result.makespan:.2f}% "
        f"{{ transform: translate({left + time * scale:.1f}px, {y:.1f}px); }}"
        for time, y in stops
    )
    hidden = ".dot, .clock { display: none; }"
    clock = f"@keyframes clock {{ to {{ transform: translateX({width}px); }} }}"
    moving = [
        f".dot {{ display: block; animation: dot {duration_s}s linear infinite; }}",
        f".clock {{ display: block; animation: clock {duration_s}s linear infinite; }}",
    ]
    elements = [
        _style([f"@keyframes dot {{ {frames} }}", clock, hidden], moving),
        f'<polyline points="{points}" fill="none" stroke="{COLORS["pp"]}" stroke-width="2.5" '
        'stroke-linejoin="round"/>',
        f'<line class="clock" x1="{left}" x2="{left}" y1="{top - 6}" y2="{bottom}" '
        f'stroke="{INK}" stroke-width="1.5"/>',
        f'<circle class="dot" r="6" fill="{COLORS["pp"]}" stroke="#ffffff" stroke-width="2"/>',
    ]
    return svg.replace("</svg>", "\n".join([*elements, "</svg>"]))


def _style(rules: Sequence[str], moving: Sequence[str]) -> str:
    motion = "@media screen and (prefers-reduced-motion: no-preference)"
    return "<style>\n" + "\n".join([*rules, f"{motion} {{", *moving, "}"]) + "\n</style>"

"""The floors of the house as a picture: `python tests/architecture/floors.py` writes
docs/pictures/floors.svg."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from architecture.rules import FLOORS  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "floors.svg"


def floors_picture() -> str:
    """Returns an SVG with the rooms of each floor, the highest on top."""
    levels = sorted({floor for floor in FLOORS.values() if floor}, reverse=True)
    parts = []
    for row, level in enumerate(levels):
        rooms = sorted(room for room, floor in FLOORS.items() if floor == level)
        y, width = 8 + 46 * row, (820 - 8 * (len(rooms) - 1)) / len(rooms)
        parts.append(f'<text x="8" y="{y + 25}" font-size="15" font-weight="600">{level}</text>')
        for place, room in enumerate(rooms):
            x, name = 34 + place * (width + 8), room.removeprefix("megatron5d/")
            parts.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="38" rx="5" fill="#e8eef5" stroke="#3b76c4"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 24}" font-size="13" text-anchor="middle">{escape(name)}</text>'
            )
    height = 8 + 46 * len(levels)
    body = "\n".join([f'<rect width="864" height="{height}" fill="#ffffff"/>', *parts])
    size = f'viewBox="0 0 864 {height}" width="864" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(floors_picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")

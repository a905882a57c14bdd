"""The layers as a picture: `python tests/architecture/layers.py` writes it for the README."""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from architecture.rules import LAYERS  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"


def layers_picture() -> str:
    """SVG with the packages of each layer, the highest layer on top."""
    levels = sorted({layer for layer in LAYERS.values() if layer}, reverse=True)
    shapes = []
    for row, level in enumerate(levels):
        packages = sorted(package for package, layer in LAYERS.items() if layer == level)
        y, width = 8 + 46 * row, (820 - 8 * (len(packages) - 1)) / len(packages)
        shapes.append(f'<text x="8" y="{y + 25}" font-size="15" font-weight="600">{level}</text>')
        for column, package in enumerate(packages):
            x, name = 34 + column * (width + 8), package.removeprefix("megatron5d/")
            shapes.append(
                f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="38" rx="5" '
                'fill="#e8eef5" stroke="#3b76c4"/>'
                f'<text x="{x + width / 2:.0f}" y="{y + 24}" font-size="13" '
                f'text-anchor="middle">{escape(name)}</text>'
            )
    height = 8 + 46 * len(levels)
    body = "\n".join([f'<rect width="864" height="{height}" fill="#ffffff"/>', *shapes])
    size = f'viewBox="0 0 864 {height}" width="864" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


if __name__ == "__main__":
    PICTURE.write_text(layers_picture())
    print(f"wrote {PICTURE.relative_to(ROOT)}")

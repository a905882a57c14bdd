"""The report as one HTML file without any request: its data and scripts are inside."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

WEB = Path(__file__).resolve().parent / "web"
SCRIPTS = ("base", "layer", "grid", "memory", "pipeline", "step", "runs", "compare")


def page_of(report: dict[str, Any]) -> str:
    """Returns the page that shows a report."""
    data = json.dumps(report, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(report["title"]),
        "@STYLE@": (WEB / "style.css").read_text(),
        "@SCRIPT@": "\n".join((WEB / f"{name}.js").read_text() for name in SCRIPTS),
        "@DATA@": data,
    }
    page = (WEB / "page.html").read_text()
    for name, text in parts.items():
        page = page.replace(name, text)
    return page

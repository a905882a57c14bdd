"""The worked examples of CONTRIBUTING.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def example(name: str) -> str:
    """Text of the code block with this name."""
    (text,) = re.findall(rf"^```\w+ {name}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    return text

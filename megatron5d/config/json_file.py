"""Reads JSON files that others may have written, and writes files atomically."""

import json
from pathlib import Path
from typing import Any

# Python's parser, and code that walks the values later, would overflow the stack beyond it
MAX_DEPTH = 100
MAX_BYTES = 256 << 20  # the largest files, tokenizer.json of big vocabularies, have 40 MB


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON file of an object.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, not JSON, nested too deep, or no object; names the file.
    """
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{file} has {size:,} bytes; files of its kind have at most {MAX_BYTES:,}")
    try:
        return parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def parse_json(text: str | bytes, kind: type = dict) -> Any:
    """Value of a JSON text.

    Args:
        kind: of the outermost value, dict or list.

    Raises:
        ValueError: it is not JSON, nested too deep, or of another kind.
    """
    too_deep = ValueError(f"its brackets are nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(text)
    except RecursionError:  # far deeper than the limit
        raise too_deep from None
    if not isinstance(value, kind):
        expected = "an object {...}" if kind is dict else "a list [...]"
        raise ValueError(f"it holds {type(value).__name__} where {expected} is expected")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        children = (
            child
            for outer in level
            for child in (outer.values() if isinstance(outer, dict) else outer)
        )
        level = [child for child in children if isinstance(child, (dict, list))]
        if not level:
            return value
    raise too_deep


def write_whole(file: Path, content: str | bytes) -> None:
    """Replaces a file atomically: an interruption leaves the old content or the new."""
    part = file.with_name(file.name + ".part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    part.rename(file)

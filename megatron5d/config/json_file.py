"""Reads JSON that somebody else may have written: a checkpoint's files, a Hugging Face folder's."""

import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 100  # of brackets; Python's parser and whatever walks the values later would overflow its stack
MAX_BYTES = 256 << 20  # of a file; the largest that are common, tokenizer.json of big vocabularies, have 40 MB


def read_json(file: Path, kind: type = dict, max_bytes: int = MAX_BYTES) -> Any:
    """Reads a JSON file of plain values.

    Args:
        kind: of the outermost value, dict or list.
        max_bytes: size above which the file is refused unread.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, not JSON, nested too deep, or not of this kind; names the file.
    """
    size = file.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{file} has {size:,} bytes, and no file of its kind has more than {max_bytes:,}")
    try:
        return parse_json(file.read_bytes(), kind)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def parse_json(text: str | bytes, kind: type = dict) -> Any:
    """Returns the value of a JSON text; raises as `read_json`, without the file."""
    try:
        value = json.loads(text)
    except RecursionError:  # far deeper than the limit
        raise ValueError(f"its brackets are nested deeper than {MAX_DEPTH}") from None
    if not isinstance(value, kind):
        wanted = "an object {...}" if kind is dict else "a list [...]"
        raise ValueError(f"it holds {type(value).__name__} where {wanted} is expected")
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        inner = (each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer))
        level = [each for each in inner if isinstance(each, (dict, list))]
        if not level:
            return value
    raise ValueError(f"its brackets are nested deeper than {MAX_DEPTH}")

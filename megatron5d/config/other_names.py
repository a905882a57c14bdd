"""Names of other code bases and what they are here, from other_names.txt.

The file is read when a name is looked up: by the refusal of an unknown key or flag, and by
`tools/convert.py flags`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")
ALWAYS, NOT_HERE = "always", "no"


@dataclass(frozen=True)
class OtherName:
    """A line of other_names.txt."""

    source: str  # code base
    section: str
    names: tuple[str, ...]  # as `normalized`; globs for families of flags
    default: str
    ours: str  # what it is here, as other_names.txt writes it
    note: str

    @property
    def kind(self) -> str:
        """`always`, `no`, or `key` if it is a key here."""
        word = self.ours.partition(" ")[0]
        return word if word in (ALWAYS, NOT_HERE) else "key"

    def allows(self, values: Sequence[str]) -> bool:
        """Whether our program does what this name asks for, though it has no key for it."""
        return self.kind == ALWAYS or not {*values}.isdisjoint(self.ours.split()[1:])

    def assignments(self, values: Sequence[str]) -> dict[str, str | None]:
        """Our keys with their values; None where a value is computed, missing or not here."""
        if self.kind != "key":
            return {}
        key, colon, pairs = self.ours.partition(": ")
        if colon:
            ours = dict(pair.rsplit("=", 1) for pair in pairs.split())
            ours |= {value: value for value in ours.values()}
            mapped = [ours.get(value) for value in values]
            return {key: _joined(list(filter(None, mapped))) if values and all(mapped) else None}
        result: dict[str, str | None] = {}
        for word in self.ours.split():
            key, _, constant = word.partition("=")
            if constant == "[*]":
                result[key] = f"[{','.join(values)}]"
            elif constant:
                result[key] = None if constant == "?" else constant
            else:
                result[key] = " ".join(values) or None
        return result


def _joined(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{','.join(values)}]"


def normalized(name: str) -> str:
    """A flag or key without the differences between `--no-load-optim` and `no_load_optim`."""
    return name.lstrip("-").replace("-", "_").lower()


@cache
def table() -> tuple[OtherName, ...]:
    """All lines of other_names.txt."""
    rows, source, section = [], "", ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            source, section = line[3:].split(": ")
        elif line and not line.startswith("#"):
            columns = line.replace("\\|", "\0").split("|")
            names, default, ours, note = (text.strip().replace("\0", "|") for text in columns)
            words = tuple(map(normalized, names.split()))
            rows.append(OtherName(source, section, words, default, ours, note))
    return tuple(rows)


def find_name(written: str, source: str = "") -> OtherName | None:
    """What a name of another code base is here, if it is known.

    Args:
        written: flag or dotted key; a name without its group is enough.
        source: code base whose names go before those of others.
    """
    parts = normalized(written).split(".")
    for start in range(len(parts)):
        name = ".".join(parts[start:])
        rows = [row for row in table() if any(map(partial(_matches, name), row.names))]
        if rows:
            return min(rows, key=lambda row: (row.source != source, name not in row.names))
    return None


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or ("*" in pattern and fnmatchcase(name, pattern))


def advice(written: str, values: Sequence[str] = ()) -> tuple[str, str] | None:
    """Our key and its assignment for a name of another code base; None if it is not known.

    The key is empty, and the text is the reason, where nothing is to be set.
    """
    row = find_name(written)
    if row is None:
        return None
    if row.kind != "key":
        allowed = row.allows(values) if row.kind == NOT_HERE else True
        return "", f"leave it out: {'' if allowed else 'not here; '}{row.note}"
    assignments = row.assignments(values)
    text = " ".join(f"{key}={value or '...'}" for key, value in assignments.items())
    if None in assignments.values() and row.note and (values or "?" in row.ours):
        text += f" ({row.note})"
    return next(iter(assignments)), text

"""Faults of a configuration, with the keys, the values and a fix, and the messages about them."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

REFUSED = 2  # exit code of a refused configuration

# Names of dp in other code bases; here it follows from the number of ranks.
DATA_PARALLEL = [
    "dp",
    "dp_size",
    "data",
    "data_parallel",
    "data_parallel_size",
    "data_parallel_degree",
]


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a configuration."""

    id: str  # of the check, or of the kind of fault on the command line; kebab-case
    knobs: tuple[str, ...]  # config keys that it concerns
    reason: str  # what is wrong, with the numbers
    fix: str  # the nearest legal value, as an override
    local: bool = False  # about files or devices, and may occur on this node only

    def __str__(self) -> str:
        return f"{self.reason}\n    fix: {self.fix}  [{self.id}]"


class ConfigError(ValueError):
    """A configuration that cannot run; `faults` has everything that is wrong with it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(message(self.faults))

    @property
    def concerns_all_ranks(self) -> bool:
        """Whether every rank finds it, as some fault is not about the files of this node alone."""
        return not all(fault.local for fault in self.faults)


class Refused(ValueError):
    """A file that the configuration names is invalid.

    A run that has not begun ends with exit code 2.
    """


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Replaces keys by a tool's options in a message: `--pp 4` for `parallel.pp=4`.

    Args:
        options: options of the tool, by the words that they replace.
    """
    for word, option in options.items():
        for assignment in (f"{word} = ", f"{word}="):
            text = text.replace(assignment, f"{option} ")
        text = text.replace(word, option)
    return text


def message(faults: Sequence[Fault]) -> str:
    """All faults as one text, in their order."""
    count = f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"
    return "\n".join(
        [f"the configuration is refused: {count}", *(f"  - {fault}" for fault in faults)]
    )


def refuse(faults: Sequence[Fault], rank: int = 0) -> NoReturn:
    """Prints the faults on rank 0, and ends the process with exit code 2."""
    if rank == 0:
        print(message(faults), file=sys.stderr, flush=True)
    raise SystemExit(REFUSED)


def names_file(error: Exception, written: object) -> str:
    """Text of an error, with the file if the system's message names none (a full disk).

    Args:
        written: file that was being written.
    """
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    file = written if error.filename is None else error.filename
    return error.strerror if file is None else f"{file}: {error.strerror}"


@contextmanager
def names_option(option: str, verb: str = "read") -> Iterator[None]:
    """Converts an OSError to a ValueError that names the option whose file fails.

    Args:
        verb: what the file cannot be, as a participle.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} cannot be {verb}: {error.strerror or error}") from error


def exit_code(
    tool: str, run: Callable[[], int | None], written: object = None, *, quiet: bool = False
) -> int:
    """Runs a tool; its exit code is 2 for bad input, which is printed.

    Args:
        written: file that the tool writes, as in `names_file`.
        quiet: print nothing.
    """
    try:
        return run() or 0
    except (ValueError, OSError) as error:
        if not quiet:
            print(f"{tool}: {names_file(error, written)}", file=sys.stderr)
        return REFUSED


def closest(written: str, legal: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Legal word that was probably meant; None if no similarity (0 to 1) reaches the cutoff."""
    by_lowercase = {word.lower(): word for word in legal}
    matches = get_close_matches(written.lower(), by_lowercase, n=1, cutoff=cutoff)
    return by_lowercase[matches[0]] if matches else None


def closest_key(written: str, legal: Iterable[str]) -> str | None:
    """Key that was probably meant: the same name in another group, or a misspelled one.

    The similarity must be high, because a wrong suggestion costs more than none.
    """
    keys = list(legal)
    name = written.rpartition(".")[2].replace("-", "_")
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    if same_name:
        return closest(written, same_name) or same_name[0]
    # a misspelled name, in its group first
    if "." in written:
        group = written[: written.rindex(".") + 1]
        siblings = [key.removeprefix(group) for key in keys if key.startswith(group)]
        similar = closest(name, siblings, 0.66)
        return group + similar if similar else closest(written, keys, 0.85)
    similar = closest(name, sorted({key.rpartition(".")[2] for key in keys}), 0.85)
    return next((key for key in keys if similar and key.rpartition(".")[2] == similar), None)


def alternatives(words: Iterable[object]) -> str:
    """Words as text: `a, b or c`."""
    *first, last = map(str, words)
    return f"{', '.join(first)} or {last}" if first else last

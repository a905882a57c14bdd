"""Our command line for one of Megatron-LM, or of another code base that other_names.txt knows."""

import re
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from megatron5d.config.convert import default_of, leaves, spelled
from megatron5d.config.other_names import ALWAYS, NOT_HERE, OtherName, find_name, normalized, table
from megatron5d.tools.conversion.job_script import JobScript
from megatron5d.tools.conversion.megatron_flags import add_computed

FlagValues = dict[str, list[str]]  # normalized names -> values
WIDTH = 96
_OF_OUR_SCRIPT = re.compile(
    "--(ntasks|cpus-per-task|signal|requeue|output|error|open-mode|job-name)"
)


def flags(args: Namespace) -> None:
    """Prints our command line, after comments about what differs.

    Raises:
        ValueError: no word is a flag of another code base.
    """
    script, words, text = JobScript(), list(args.words), ""
    if len(words) == 1 and not words[0].startswith("-"):
        text = Path(words[0]).read_text(encoding="utf-8")
        script.read(text)
        if not script.started:
            raise ValueError(f"{words[0]}: no statement starts pretrain_*.py")
    else:
        script.start(words)
    flag_values = _flag_values(script.arguments or words)
    known = Counter(row.source for row in map(find_name, flag_values) if row)
    if not known:
        raise ValueError("these words have no flag of another code base")
    translation = Translation(flag_values, known.most_common(1)[0][0])
    sbatch = [o for o in re.findall(r"(?m)^#SBATCH\s+(\S+)", text) if not _OF_OUR_SCRIPT.match(o)]
    comments = [*(f"under a condition, left out: {line}" for line in script.conditional)]
    comments += translation.comments()
    print("\n".join([*(f"# {line}" for line in comments), *translation.lines(script, sbatch)]))


def _flag_values(words: Sequence[str]) -> FlagValues:
    flag_values: FlagValues = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z_]", word):
            flag, equals, value = word.partition("=")
            name = normalized(flag)
            flag_values[name] = [value] if equals else []
        elif name:
            flag_values[name].append(word)
    return flag_values


class Translation:
    """Our keys for flags of another code base, and remarks about all others."""

    def __init__(self, flag_values: FlagValues, source: str) -> None:
        self.flag_values, self.source = flag_values, source
        self.ours: dict[str, str] = {}
        self.explicit: set[str] = set()  # keys that a flag sets
        self.remarks: dict[str, list[str]] = {}  # remark -> flags that it concerns
        self.unneeded: list[str] = []
        self._missing: dict[str, str] = {}  # keys that are computed, or have no value -> flag
        # the table has a flag before those that refine it
        order = {row: line for line, row in enumerate(table())}
        rows = [(find_name(name, source), name) for name in flag_values]
        for row, name in sorted(rows, key=lambda pair: order.get(pair[0], -1)):  # type: ignore
            self._apply(row, name, flag_values[name])
        for row in table():
            if row.source == source and row.default:
                self._apply_default(row)
        if source == "megatron":
            self.remarks |= {
                text: [] for text in add_computed(flag_values, self.ours, self.explicit)
            }
        for key, shown in self._missing.items():
            if key not in self.ours:
                self.remarks.setdefault(f"{key} is not set", []).append(shown)
        for key in self.ours.keys() - self.explicit:
            if self.ours[key] == spelled(default_of(key)):
                del self.ours[key]

    def _apply(
        self, row: OtherName | None, name: str, values: list[str], default: str = ""
    ) -> None:
        flag = f"--{name.replace('_', '-') if self.source == 'megatron' else name}"
        shown = " ".join([flag, *values]) + default
        if row is None:
            self.remarks.setdefault("unknown", []).append(shown)
            return
        if row.kind == ALWAYS or row.allows(values):
            self.unneeded.append(flag)
        elif row.kind == NOT_HERE:
            self.remarks.setdefault(f"not here; {row.note}", []).append(shown)
        for key, value in row.assignments(values).items():
            if value is None and ": " in row.ours:
                self.remarks.setdefault(f"no such {key}; {row.note}", []).append(shown)
            elif value is None:
                self._missing[key] = f"{shown} ({row.note})"
            elif not default or key not in self.ours:
                self.ours[key] = value
            if not default:
                self.explicit.add(key)

    def _apply_default(self, row: OtherName) -> None:
        """Applies what the absence of a flag means there."""
        default, _, condition = row.default.partition(" if ")
        name, _, value = condition.partition("=")
        values = self.flag_values.get(normalized(name), None if name else [])
        if values is None or any(normalized(name) in self.flag_values for name in row.names):
            return
        if value in ("", *values):
            if "=" in default:
                for word in default.split():
                    self.ours.setdefault(*word.split("=", 1))
            else:
                self._apply(row, row.names[0], [default], " (default)")

    def comments(self) -> Iterator[str]:
        """Lines about what differs from the other code base."""
        for remark, shown in self.remarks.items():
            yield f"{' '.join(shown)}: {remark}" if shown else remark
        by_default = [f"{key}={self.ours[key]}" for key in self.ours if key not in self.explicit]
        for title, words in ("from defaults", by_default), ("nothing to set", self.unneeded):
            if words:
                yield from _wrapped([f"{title}:", *words])

    def lines(self, script: JobScript, sbatch: list[str]) -> list[str]:
        """The command, a group of keys a line, begun as the job is."""
        order = {key: position for position, key in enumerate(leaves())}
        ours = sorted(self.ours.items(), key=lambda item: order[item[0]])
        torchrun = re.search(r"\btorch(run|\.distributed\.run) .*", " ".join(script.launcher))
        start = torchrun[0].replace(".distributed.", "") if torchrun else "python"
        lines = [f"{start} pretrain.py"]
        if sbatch:  # starts a task per rank, without torchrun
            lines = [" ".join(["sbatch", *sbatch, "launch/slurm.sbatch"])]
        for _, group in groupby(ours, key=lambda item: item[0].partition(".")[0]):
            # Hydra splits at a comma
            words = [
                f'{key}="{text}"' if "," in text and text[0] != "[" else f"{key}={text}"
                for key, text in group
            ]
            lines += _wrapped(list(map(_quoted, words)))
        return [" \\\n    ".join(lines)]


def _wrapped(words: Sequence[str]) -> Iterator[str]:
    line = words[0]
    for word in words[1:]:
        if len(line) + len(word) >= WIDTH:
            yield line
            line = word
        else:
            line += f" {word}"
    yield line


def _quoted(word: str) -> str:
    """A word for a shell, in which variables of the job script stay variables."""
    escaped = word.replace('"', '\\"')
    return f'"{escaped}"' if "$" in word else shlex.quote(word)

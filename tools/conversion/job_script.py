"""The training command in a job script, with the script's own variables expanded.

The script is read, never run: statements under a condition are left out and named.
"""

import re
import shlex
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?:(?<=\s)|^)\#[^\n]*|\d?(?:>>|>|<)&?[ \t]*[\w./$:{}-]+)
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\(\([^)]*\)\)|\$\([^)]*\)|\$\{[^}]*\}
        |[^\s;&|()'"\\])+)
    |(?P<open>\()|(?P<end>.|\n)""",
    re.VERBOSE | re.MULTILINE,
)
_VARIABLE = re.compile(
    r"""\$\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?(?:\[[@*]\])?\}
    |\$(?P<name>\w+|@)""",
    re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"(?:.*/)?pretrain_\w+\.py")
_OPENING, _CLOSING = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}


@dataclass
class JobScript:
    """What reading a script has collected."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)  # words before the program
    arguments: list[str] = field(default_factory=list)  # words after it
    conditional: list[str] = field(default_factory=list)  # assignments that were left out
    depth: int = 0  # of conditions and loops
    started: bool = False  # whether the program has been found

    def read(self, text: str) -> None:
        """Reads all statements, up to the first that starts pretrain_*.py."""
        text = re.sub(r"(?m)^\s*#.*\n", "", text).replace("\\\n", " ")
        words: list[str] = []
        array: list[str] | None = None
        for token in _TOKEN.finditer(text + "\n"):
            if token["word"]:
                (words if array is None else array).append(token["word"])
            elif token["open"] and words and words[-1].endswith("="):
                array = []
            elif token["end"] == ")" and array is not None:
                self._assign_array(words.pop(), array)
                array = None
            elif token["end"] and array is None:
                self._statement(words)
                words = []

    def _assign_array(self, target: str, words: list[str]) -> None:
        name, added = target[:-1].rstrip("+"), target.endswith("+=")
        if self.depth > 0:
            self.conditional.append(" ".join([f"{target}(", *words, ")"]))
        else:
            values = [value for word in words for value in self.expanded(word)]
            self.variables[name] = [*(self.variables.get(name, []) if added else []), *values]

    def _statement(self, words: list[str]) -> None:
        while words and words[0] in {"then", "else", "do", "export", *_OPENING, *_CLOSING}:
            word = words.pop(0)
            self.depth += (word in _OPENING) - (word in _CLOSING)
        self.depth -= sum(word in _CLOSING for word in words)
        if self.started or not words:
            return
        assignment = _ASSIGNMENT.fullmatch(words[0])
        if assignment and self.depth > 0:
            self.conditional.append(" ".join(words))
        elif assignment:
            name, added, text = assignment.groups()
            before = " ".join(self.variables.get(name, [])) if added else ""
            value = before + " ".join(self.expanded(text, split=False))
            self.variables[name] = [value]
        else:
            self.start([value for word in words for value in self.expanded(word)])

    def start(self, words: list[str]) -> None:
        """Notes the command if these words start the program."""
        # bash -c "python pretrain_gpt.py ..." has the command in one word
        nested = next((word for word in words if " " in word and "pretrain_" in word), None)
        words = _split(nested) if nested else words
        for position, word in enumerate(words):
            arguments = words[position + 1 :]
            # a message may name the program, too
            if _PROGRAM.fullmatch(word) and any(later.startswith("--") for later in arguments):
                self.launcher, self.arguments = words[:position], arguments
                self.started = True
                return

    def expanded(self, word: str, split: bool = True) -> list[str]:
        """Words that the shell makes of one."""
        variable = re.fullmatch(r'"?\$\{?(\w+|@)(?:\[[@*]\])?\}?"?', word)
        values = self.variables.get(variable[1]) if variable else None
        if values is not None and split:
            # an element may hold an option and its value
            quoted = word.startswith('"')
            parts = [
                [value] if quoted and not value.startswith("-") else _split(value)
                for value in values
            ]
            return [part for split_value in parts for part in split_value]
        pieces = re.findall(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.|[^'\"\\]+", word)
        texts = [
            piece[1:-1] if piece[0] == "'" else _VARIABLE.sub(self._value, piece.strip('"'))
            for piece in pieces
        ]
        text = "".join(texts)
        return _split(text) if split and len(pieces) == 1 and word[0] == "$" else [text]

    def _value(self, match: re.Match[str]) -> str:
        name = match["braced"] or match["name"]
        if name in self.variables:
            return " ".join(self.variables[name])
        default = match["default"]
        return match[0] if default is None else _VARIABLE.sub(self._value, default.strip("\"'"))


def _split(text: str) -> list[str]:
    """Words of a text; quotes inside it group words."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()

"""The source tree as the rules see it: files, their syntax trees and tokens, and who imports whom."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PRODUCT = ("megatron5d", "kernels", "tools", "launch", "pretrain.py")  # what users run
SKIPPED = {"__pycache__"}
LINKED = ("kernels", "tools")  # found in the package through links: megatron5d.kernels and so on
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True)
class File:
    """One Python file.

    Args:
        path: relative to the root of the tree, with forward slashes.
        text: its source.
    """

    path: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree, walked once for all rules."""
        return list(ast.walk(ast.parse(self.text, self.path)))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tokens_by_line(self) -> Counter[int]:
        """Number of Python tokens on each line, without comments, docstrings and layout.

        Reformatting does not change their sum, so that no limit is met by packing lines.
        """
        docstrings = {
            node.body[0].lineno
            for node in self.walk(ast.Module, ast.ClassDef, *FUNCTIONS)
            if ast.get_docstring(node, clean=False)
        }
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return Counter(
            token.start[0]
            for token in tokens
            if token.type not in LAYOUT
            and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        )

    def num_tokens(self, node: ast.stmt | None = None) -> int:
        """Number of tokens of a statement, or of the whole file."""
        if node is None:
            return self.tokens_by_line.total()
        return sum(self.tokens_by_line[n] for n in range(node.lineno, node.end_lineno + 1))

    @property
    def module(self) -> str:
        """Dotted name under which it is imported."""
        prefix = "megatron5d/" if self.path.startswith(LINKED) else ""
        return (prefix + self.path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def package(self) -> str:
        """The folder that has a layer: "megatron5d/model", "kernels"; "pretrain.py" for itself."""
        folders = self.path.split("/")
        if folders[0] == "megatron5d":
            return "/".join(folders[:2]) if len(folders) > 2 else "megatron5d"
        return folders[0]

    def walk(self, *kinds: type) -> list:
        return [node for node in self.nodes if isinstance(node, kinds)]

    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, deferred ones too; `from a import b` is a.b."""
        imported = []
        for node in self.walk(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                imported += [(node.lineno, alias.name) for alias in node.names]
            else:
                origin = self._origin(node)
                imported += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        return imported

    def _origin(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.module.split(".")
        if not self.path.endswith("__init__.py"):
            package = package[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


@dataclass(frozen=True)
class Source:
    """All Python files below a root."""

    root: Path

    @cached_property
    def files(self) -> list[File]:
        """Product and tests."""
        paths = [self.root / "setup.py"]
        for name in (*PRODUCT, "tests"):
            path = self.root / name
            paths += [path] if path.is_file() else sorted(path.rglob("*.py"))
        return [
            File(path.relative_to(self.root).as_posix(), path.read_text())
            for path in paths
            if path.is_file() and not SKIPPED & set(path.parts)
        ]

    @cached_property
    def product(self) -> list[File]:
        return [file for file in self.files if file.path.split("/")[0] in PRODUCT]

    @cached_property
    def modules(self) -> dict[str, File]:
        return {file.module: file for file in self.product}

    def target(self, name: str) -> File | None:
        """The file that an imported name comes from; None where it is not ours."""
        while name:
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        return None

    def edges(self, file: File) -> list[tuple[int, File]]:
        """(line, imported file) for imports of our own files."""
        pairs = [(line, self.target(name)) for line, name in file.imports()]
        return list(dict.fromkeys((line, to) for line, to in pairs if to and to is not file))


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names

"""The source tree as the rules see it: files, their syntax trees, and who imports whom."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# what users run; the tests come on top
CODE = ("megatron5d", "kernels", "tools", "launch", "pretrain.py")
SKIPPED = {"__pycache__"}
LINKED = ("kernels", "tools")  # found in the package through links: megatron5d.kernels and so on


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
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def module(self) -> str:
        """Dotted name under which it is imported."""
        within = "megatron5d/" if self.path.startswith(LINKED) else ""
        return (within + self.path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str:
        """The folder that has a floor: "megatron5d/model", "kernels", "tools"; "pretrain.py" for
        the door."""
        parts = self.path.split("/")
        if parts[0] == "megatron5d":
            return "/".join(parts[:2]) if len(parts) > 2 else "megatron5d"
        return parts[0]

    def walk(self, *kinds: type) -> list:
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def imports(self) -> list[tuple[int, str]]:
        """(line, dotted name) of every import, deferred ones included; `from a import b` counts as
        a.b."""
        found = []
        for node in self.walk(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            else:
                origin = self._origin(node)
                found += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        return found

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
        """Code and tests."""
        paths = [self.root / "setup.py"]
        for name in (*CODE, "tests"):
            place = self.root / name
            paths += [place] if place.is_file() else sorted(place.rglob("*.py"))
        return [
            File(path.relative_to(self.root).as_posix(), path.read_text())
            for path in paths
            if path.is_file() and not SKIPPED & set(path.parts)
        ]

    @cached_property
    def code(self) -> list[File]:
        return [file for file in self.files if file.path.split("/")[0] in CODE]

    @cached_property
    def modules(self) -> dict[str, File]:
        return {file.module: file for file in self.code}

    def target(self, name: str) -> File | None:
        """The file that an imported name comes from; None where it is not ours."""
        while name:
            if name in self.modules:
                return self.modules[name]
            name = name.rpartition(".")[0]
        return None

    def edges(self, file: File) -> list[tuple[int, File]]:
        """(line, imported file) for imports of our own files."""
        found = [
            (line, to)
            for line, name in file.imports()
            if (to := self.target(name)) and to is not file
        ]
        return list(dict.fromkeys(found))


def is_standard(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names

"""Calls in Python source."""

import ast
from collections.abc import Iterator


def calls_in(text: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of each function around it."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield function.name, node

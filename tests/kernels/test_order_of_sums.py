"""What adds in whatever order a GPU's programs come: counts may, sums of rounded numbers may
not."""

import ast
from pathlib import Path

import megatron5d
from megatron5d import kernels

IN_ANY_ORDER = {"put_", "atomic_add"}
IN_ANY_ORDER |= {
    f"{name}{end}" for name in ("index_add", "scatter_add", "index_reduce") for end in ("", "_")
}
PACKAGES = (
    Path(kernels.__file__).parent,
    *(
        path
        for path in Path(megatron5d.__file__).parent.iterdir()
        if path.name not in ("kernels", "tools", "conf")
    ),
)
HARMLESS = {
    "accumulate_rows": "the plain path, which a CPU goes in order",
    "vocab_cross_entropy_backward_reference": "no column of a row comes twice",
    "counts_of": "whole numbers",
    "observe": "whole numbers",
    "_gemm_reduce_scatter_kernel": "whole numbers",
    "wait_for": "adds 0",
}


def adds_in_any_order(text: str) -> set[str]:
    """Functions that do."""
    found = set()
    for function in (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    ):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and call.func.attr in IN_ANY_ORDER:
                found.add(function.name)
    return found


def test_no_sum_of_rounded_numbers_has_another_order_in_another_run():
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert set().union(*(adds_in_any_order(path.read_text()) for path in files)) == HARMLESS.keys()


def test_one_is_seen():
    text = "def f(x):\n    x.index_add_(0, i, y)\ndef g(x):\n    x.add_(y)\ndef h(p):\n    tl.atomic_add(p, 1.0)\n"
    assert adds_in_any_order(text) == {"f", "h"}

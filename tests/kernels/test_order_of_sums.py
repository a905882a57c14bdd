"""Sums in the order in which a GPU's programs run: of integers they are allowed, of rounded numbers
not."""

import ast
from pathlib import Path

from kernel_lab.source import calls_in

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
    "accumulate_rows": "the plain path, which a CPU runs in order",
    "vocab_cross_entropy_backward_reference": "no column of a row occurs twice",
    "counts_of": "integers",
    "observe": "integers",
    "_gemm_reduce_scatter_kernel": "integers",
    "wait_for": "adds 0",
}


def adds_in_any_order(text: str) -> set[str]:
    """Names of functions that do."""
    return {
        function
        for function, call in calls_in(text)
        if isinstance(call.func, ast.Attribute) and call.func.attr in IN_ANY_ORDER
    }


def test_sums_of_rounded_numbers_have_the_same_order_in_every_run():
    files = [path for package in PACKAGES for path in package.rglob("*.py")]
    assert set().union(*(adds_in_any_order(path.read_text()) for path in files)) == HARMLESS.keys()


def test_one_is_detected():
    bodies = {"f": "x.index_add_(0, i, y)", "g": "x.add_(y)", "h": "tl.atomic_add(x, 1.0)"}
    text = "".join(f"def {name}(x):\n    {body}\n" for name, body in bodies.items())
    assert adds_in_any_order(text) == {"f", "h"}

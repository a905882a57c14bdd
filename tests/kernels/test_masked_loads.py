"""Every masked load says what its other lanes are, which would be undefined, or its kernel does not
store them.

The interpreter poisons them, but the suite interprets a part of the cases only; compilers for
NVIDIA produce zeros.
"""

import ast
from pathlib import Path

from kernel_lab.source import calls_in

from megatron5d import kernels

FILES = sorted(Path(kernels.__file__).parent.rglob("*.py"))
STORED_UNDER_ITS_MASK = {
    "_gather_kernel": [
        "tl.load(x_ptr + tl.load(token_ptr + row) * x_stride + column, column < width)"
    ]
}


def loads_without_other(text: str) -> dict[str, list[str]]:
    """By function, calls of tl.load with a mask and without `other`."""
    loads: dict[str, list[str]] = {}
    for function, call in calls_in(text):
        names = {keyword.arg for keyword in call.keywords}
        is_masked = len(call.args) > 1 or "mask" in names
        has_other = len(call.args) > 2 or "other" in names
        if ast.unparse(call.func) == "tl.load" and is_masked and not has_other:
            loads.setdefault(function, []).append(ast.unparse(call))
    return loads


def test_every_masked_load_says_what_the_other_lanes_are():
    loads = {}
    for path in FILES:
        loads |= loads_without_other(path.read_text())
    assert loads == STORED_UNDER_ITS_MASK


def test_a_load_without_other_is_detected():
    text = "def f(p):\n    tl.load(p)\n    tl.load(p, m, other=0.0)\n    tl.load(p, m, 0)\n"
    assert loads_without_other(text) == {}
    assert loads_without_other(text + "    tl.load(p, m)\n    tl.load(p, mask=m).to(t)\n") == {
        "f": ["tl.load(p, m)", "tl.load(p, mask=m)"]
    }

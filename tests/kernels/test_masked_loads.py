"""What a masked load leaves of lanes without memory is undefined: each says it, or stores nothing
of those lanes.

The interpreter fills them with poison, but a whole run interprets a part of the cases; compilers
for NVIDIA make zeros.
"""

import ast
from pathlib import Path

from megatron5d import kernels

FILES = sorted(Path(kernels.__file__).parent.rglob("*.py"))
STORED_UNDER_ITS_MASK = {
    "_gather_kernel": [
        "tl.load(x_ptr + tl.load(token_ptr + row) * x_stride + column, column < width)"
    ]
}


def loads_without_other(text: str) -> dict[str, list[str]]:
    """By function, the calls of tl.load with a mask that do not say what the other lanes are."""
    found: dict[str, list[str]] = {}
    for function in (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
    ):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "tl.load":
                names = {keyword.arg for keyword in call.keywords}
                if (
                    (len(call.args) > 1 or "mask" in names)
                    and len(call.args) < 3
                    and "other" not in names
                ):
                    found.setdefault(function.name, []).append(ast.unparse(call))
    return found


def test_every_masked_load_says_what_the_other_lanes_are():
    found = {}
    for path in FILES:
        found |= loads_without_other(path.read_text())
    assert found == STORED_UNDER_ITS_MASK


def test_a_load_without_other_is_seen():
    text = "def f(p):\n    tl.load(p)\n    tl.load(p, m, other=0.0)\n    tl.load(p, m, 0)\n"
    assert loads_without_other(text) == {}
    assert loads_without_other(text + "    tl.load(p, m)\n    tl.load(p, mask=m).to(t)\n") == {
        "f": ["tl.load(p, m)", "tl.load(p, mask=m)"]
    }

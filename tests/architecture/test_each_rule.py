"""Each rule finds what it forbids: a small tree that keeps all of them, and one planted violation
at a time."""

import textwrap

import pytest
from architecture import rules
from architecture.source import Source

GOOD = {
    ".gitignore": "runs/\n__pycache__/\n*.log\n",
    "setup.py": "",
    "pretrain.py": "from megatron5d.train.loop import train\n",
    "kernels/__init__.py": "import torch\nimport os\nA = os.environ.get('TRITON_INTERPRET')\n",
    "megatron5d/__init__.py": "",
    "megatron5d/config/load.py": "import hydra\nfrom megatron5d.config.schema import C\n",
    "megatron5d/config/schema.py": "class C: pass\n",
    "megatron5d/topology/process.py": "import os\nos.environ['RANK']\n",
    "megatron5d/tensor_parallel/linear.py": "from megatron5d import kernels\nfrom megatron5d.topology import process\n",
    "megatron5d/data_parallel/weight_gather.py": "import numpy\n",
    "megatron5d/train/loop.py": "from megatron5d.data_parallel.weight_gather import x\ndef train(): pass\n",
    "tools/plan.py": "",
    "tests/test_a.py": "import os\nos.environ['X']\n",
}


def tree(root, planted=()):
    files = GOOD | dict(planted)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source(root)


def function(num_tokens, name="f", decorator=""):
    """A function of that many tokens, where the decorator has none."""
    return f"{decorator}\ndef {name}():\n" + "    x = 1\n" * ((num_tokens - 5) // 3)


def test_the_good_tree_is_good(tmp_path):
    source = tree(tmp_path)
    assert [line for rule in rules.RULES for line in rule(source)] == []


PLANTED = [
    (
        "product_is_light",
        {"tools/plan.py": "x = 1\n" * (rules.MAX_PRODUCT_TOKENS // 3 + 1)},
        "the product has",
    ),
    ("files_are_short", {"tests/test_a.py": "x = 1\n" * 501}, "tests/test_a.py: 501 lines"),
    ("functions_are_short", {"tools/plan.py": function(353)}, "tools/plan.py:2: f has 353 tokens"),
    (
        "functions_are_short",
        {"tools/plan.py": "class A:\n" + textwrap.indent(function(353), "    ")},
        "f has 353",
    ),
    (
        "functions_are_short",
        {"kernels/a.py": function(953, "k", "@triton.jit")},
        "k has 953 tokens, at most 950",
    ),
    (
        "parameters_are_few",
        {"tools/plan.py": "def f(a, b, c, d, e, f, g, h, i): pass"},
        "f has 9 positional",
    ),
    (
        "no_global_statements",
        {"tools/plan.py": "def f():\n    global A, B\n"},
        "tools/plan.py:2: global A, B",
    ),
    ("no_global_arguments", {"tools/plan.py": "def get_args(): pass"}, "get_args"),
    ("file_names_say_something", {"megatron5d/model/utils.py": ""}, "'utils' names no subject"),
    ("file_names_say_something", {"tests/helpers/a.py": ""}, "'helpers' names no subject"),
    ("names_say_something", {"tools/plan.py": "found = 1\nfor each in (): pass"}, "each 1"),
    ("types_are_known", {"tools/plan.py": "x = 1  # type: ignore\n" * 16}, "16 type: ignore"),
    ("formatting_has_no_exceptions", {"tests/test_a.py": "x = 1  # fmt" + ": skip"}, "test_a.py:1"),
    (
        "imports_point_down",
        {
            "megatron5d/topology/grid.py": "def f():\n    from megatron5d.model.gpt import GPT\n",
            "megatron5d/model/gpt.py": "",
        },
        (
            "megatron5d/topology/grid.py:2: megatron5d/topology (layer 2) imports megatron5d.model.gpt "
            "(layer 6)"
        ),
    ),
    (
        "imports_point_down",
        {"megatron5d/data_parallel/weight_gather.py": "from ..tensor_parallel import linear\n"},
        "they never import each other",
    ),
    (
        "imports_point_down",
        {"megatron5d/model/a.py": "import megatron5d.data.b", "megatron5d/data/b.py": ""},
        "only lower ones",
    ),
    ("imports_point_down", {"megatron5d/attic/a.py": ""}, "no layer for megatron5d/attic"),
    (
        "imports_point_down",
        {"megatron5d/model/a.py": "from pretrain import main"},
        "imports pretrain (layer 9)",
    ),
    (
        "no_circles",
        {
            "tools/a.py": "import megatron5d.tools.b",
            "tools/b.py": "def f():\n    from megatron5d.tools import c",
            "tools/c.py": "from megatron5d.tools.a import x",
        },
        "tools/a.py -> tools/b.py -> tools/c.py -> tools/a.py",
    ),
    (
        "second_derivatives_are_refused",
        {
            "kernels/a.py": "class _A(FirstOrderFunction):\n    @staticmethod\n    def backward(ctx, dy): return dy\n"
            "class _B(torch.autograd.Function):\n    @staticmethod\n    def backward(ctx, dy): "
            "return dy\n",
        },
        "kernels/a.py:4: _B is not a FirstOrderFunction",
    ),
    (
        "environment_is_read_in_topology",
        {"tools/plan.py": "import os\nos.getenv('A')"},
        "tools/plan.py:2",
    ),
    (
        "environment_is_read_in_topology",
        {"tools/plan.py": "from os import environ"},
        "tools/plan.py:1",
    ),
    (
        "environment_is_read_in_topology",
        {"kernels/a.py": "import os\nos.environ['RANK']"},
        "kernels/a.py:2",
    ),
    (
        "environment_is_read_in_topology",
        {"tools/plan.py": "import os\nos.environ['TRITON_INTERPRET']"},
        "plan.py:2",
    ),
    (
        "hydra_ends_at_the_entry_point",
        {"tools/plan.py": "def f():\n    import hydra.utils"},
        "tools/plan.py:2: imports hydra.utils",
    ),
    (
        "hydra_ends_at_the_entry_point",
        {"megatron5d/config/checks/__init__.py": "from omegaconf import DictConfig"},
        "checks/__init__.py:1",
    ),
    (
        "lowest_layer_is_light",
        {"kernels/a.py": "def f():\n    import numpy"},
        "kernels/a.py:2: imports numpy",
    ),
    (
        "lowest_layer_is_light",
        {"megatron5d/config/checks/__init__.py": "import torch"},
        "checks/__init__.py:1: imports torch",
    ),
    (
        "measured_times_are_compared_alone",
        {"tests/test_b.py": "def test():\n    t = time.time()\n    assert time.time() - t < 9"},
        "tests/test_b.py:3: compares a measured time",
    ),
    (
        "measured_times_are_compared_alone",
        {"tests/test_b.py": "def test():\n    s = perf_counter() - t\n    assert 1 < s and 9 >= s"},
        "tests/test_b.py:3",
    ),
    ("top_level_is_fixed", {"notes.txt": ""}, "notes.txt: not part"),
]


@pytest.mark.parametrize(
    ("rule", "planted", "message"), PLANTED, ids=[f"{r}-{i}" for i, (r, _, _) in enumerate(PLANTED)]
)
def test_a_planted_violation_is_found(tmp_path, rule, planted, message):
    broken = getattr(rules, rule)(tree(tmp_path, planted))
    assert len(broken) == 1
    assert message in broken[0]


def test_every_rule_has_a_violation():
    assert {rule.__name__ for rule in rules.RULES} == {rule for rule, _, _ in PLANTED}


ALLOWED = [
    (
        "functions_are_short",
        {"tools/plan.py": function(350), "kernels/a.py": function(950, "k", "@triton.jit")},
    ),
    ("functions_are_short", {"kernels/a.py": function(938, "k", "@jit(do_not_specialize=[0])")}),
    (
        "functions_are_short",
        {"tools/plan.py": "def f():\n" + '    """Word."""\n' + "    # x\n" * 400},
    ),
    ("names_say_something", {"tools/plan.py": "bucket = 1\n" * 199 + "found = 1\n"}),
    ("types_are_known", {"tools/plan.py": "x = 1  # type: ignore\n" * 15}),
    (
        "parameters_are_few",
        {"tools/plan.py": "class A:\n    def f(self, a, b, c, d, e, f, g, h, *, i, j): pass"},
    ),
    ("files_are_short", {"tools/plan.py": "x = 1\n" * 500}),
    (
        "measured_times_are_compared_alone",
        {
            "tests/test_b.py": "@pytest.mark.timing\ndef test():\n    assert time.time() - t < 9\n"
            "def test_c():\n    assert time.time() - t >= 9\n"
            "    while True:\n        assert time.time() < deadline",
        },
    ),
    ("top_level_is_fixed", {"runs/a": "", "train.log": ""}),
    ("lowest_layer_is_light", {"kernels/b.py": "from megatron5d.kernels import c"}),
]


@pytest.mark.parametrize(
    ("rule", "planted"), ALLOWED, ids=[f"{r}-{i}" for i, (r, _) in enumerate(ALLOWED)]
)
def test_the_edge_is_allowed(tmp_path, rule, planted):
    assert getattr(rules, rule)(tree(tmp_path, planted)) == []

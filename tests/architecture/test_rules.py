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


def function(lines, name="f", decorator=""):
    return f"{decorator}\ndef {name}():\n" + "    x = 1\n" * (lines - 1)


def test_the_good_tree_is_good(tmp_path):
    source = tree(tmp_path)
    assert [line for rule in rules.RULES for line in rule(source)] == []


PLANTED = [
    ("files_are_short", {"tests/test_a.py": "x = 1\n" * 401}, "tests/test_a.py: 401 lines"),
    ("functions_are_short", {"tools/plan.py": function(51)}, "tools/plan.py:2: f has 51 lines"),
    (
        "functions_are_short",
        {"tools/plan.py": "class A:\n" + textwrap.indent(function(51), "    ")},
        "f has 51",
    ),
    (
        "functions_are_short",
        {"kernels/a.py": function(121, "k", "@triton.jit")},
        "k has 121 lines, at most 120",
    ),
    (
        "parameters_are_few",
        {"tools/plan.py": "def f(a, b, c, d, e, f, g, h, i): pass"},
        "f has 9 positional",
    ),
    (
        "docstrings_begin_with_a_verb",
        {"tools/plan.py": 'def f():\n    """The sum."""'},
        "f begins with 'The'",
    ),
    (
        "docstrings_begin_with_a_verb",
        {"tools/plan.py": 'def f():\n    """Bytes sent."""'},
        "f begins with 'Bytes'",
    ),
    ("words_are_the_fields", {"tools/plan.py": "# in 8 bits\n"}, "plan.py:1: 'in 8 bits'"),
    (
        "words_are_the_fields",
        {"conf/model/a.yaml": "# the mailbox\n"},
        "conf/model/a.yaml:1: 'mailbox'; the field says",
    ),
    (
        "words_are_the_fields",
        {"README.md": "One matrix product.\n"},
        "README.md:1: 'matrix product'; the field says GEMM",
    ),
    (
        "no_global_statements",
        {"tools/plan.py": "def f():\n    global A, B\n"},
        "tools/plan.py:2: global A, B",
    ),
    ("no_global_arguments", {"tools/plan.py": "def get_args(): pass"}, "get_args"),
    ("names_say_something", {"megatron5d/model/utils.py": ""}, "'utils' names no subject"),
    ("names_say_something", {"tests/helpers/a.py": ""}, "'helpers' names no subject"),
    (
        "floors_hold",
        {
            "megatron5d/topology/grid.py": "def f():\n    from megatron5d.model.gpt import GPT\n",
            "megatron5d/model/gpt.py": "",
        },
        "megatron5d/topology/grid.py:2: megatron5d/topology (floor 2) imports megatron5d.model.gpt (floor 5)",
    ),
    (
        "floors_hold",
        {"megatron5d/data_parallel/weight_gather.py": "from ..tensor_parallel import linear\n"},
        "sisters never import each other",
    ),
    (
        "floors_hold",
        {"megatron5d/model/a.py": "import megatron5d.data.b", "megatron5d/data/b.py": ""},
        "only lower ones",
    ),
    ("floors_hold", {"megatron5d/attic/a.py": ""}, "the room megatron5d/attic has no floor"),
    (
        "floors_hold",
        {"megatron5d/model/a.py": "from pretrain import main"},
        "imports pretrain (floor 9)",
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
            "class _B(torch.autograd.Function):\n    @staticmethod\n    def backward(ctx, dy): return dy\n",
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
        "hydra_ends_at_the_door",
        {"tools/plan.py": "def f():\n    import hydra.utils"},
        "tools/plan.py:2: imports hydra.utils",
    ),
    (
        "hydra_ends_at_the_door",
        {"megatron5d/config/checks/__init__.py": "from omegaconf import DictConfig"},
        "checks/__init__.py:1",
    ),
    (
        "ground_floor_is_light",
        {"kernels/a.py": "def f():\n    import numpy"},
        "kernels/a.py:2: imports numpy",
    ),
    (
        "ground_floor_is_light",
        {"megatron5d/config/checks/__init__.py": "import torch"},
        "checks/__init__.py:1: imports torch",
    ),
    ("top_level_is_fixed", {"notes.txt": ""}, "notes.txt: not a part"),
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
        "words_are_the_fields",
        {"megatron5d/planning/memory/rank_memory.py": "boxes", "tools/a.py": "boxed = lawn = 8"},
    ),
    (
        "functions_are_short",
        {"tools/plan.py": function(50), "kernels/a.py": function(120, "k", "@triton.jit")},
    ),
    ("functions_are_short", {"kernels/a.py": function(120, "k", "@jit(do_not_specialize=[0])")}),
    (
        "parameters_are_few",
        {"tools/plan.py": "class A:\n    def f(self, a, b, c, d, e, f, g, h, *, i, j): pass"},
    ),
    ("files_are_short", {"tools/plan.py": "x = 1\n" * 400}),
    ("top_level_is_fixed", {"runs/a": "", "train.log": ""}),
    ("ground_floor_is_light", {"kernels/b.py": "from megatron5d.kernels import c"}),
]


@pytest.mark.parametrize(
    ("rule", "planted"), ALLOWED, ids=[f"{r}-{i}" for i, (r, _) in enumerate(ALLOWED)]
)
def test_the_edge_is_allowed(tmp_path, rule, planted):
    assert getattr(rules, rule)(tree(tmp_path, planted)) == []

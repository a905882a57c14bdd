"""The worked examples of CONTRIBUTING.md do what they say."""

import os
import re
import subprocess
import sys

import pytest
import torch
from architecture.rules import RULES
from architecture.test_each_rule import tree
from guide_examples import ROOT, example
from ranks import run_ranks

from megatron5d.config.load import load_config
from megatron5d.config.schema import (
    Config,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.flops import parameter_count
from megatron5d.phases.wgrad import run_now
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.pipeline_parallel.verify import verify
from megatron5d.topology.grid import resolve
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.mesh import build_mesh


def names_of(name):
    """What the example defines."""
    scope = {"__name__": f"contributing_{name}"}
    exec(compile(example(name), name, "exec"), scope)
    return scope


def outcome_of_layer(rank, world):
    """Output of the layer, and its gradient, with the sequence cut over all ranks."""
    config = Config(
        model=ModelConfig(hidden_size=16, ffn_hidden_size=24),
        parallel=ParallelConfig(tp=world, sp=world > 1),
        precision=PrecisionConfig("fp64"),
    )
    shared = BlockInputs(config, build_mesh(resolve(world, tp=world), rank), "cpu")
    layer = names_of("layer")["SquaredReluMLP"](shared, 0)
    for parameter in layer.parameters():
        initialize(parameter, seed=1)
    x = torch.randn(8, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x.chunk(world)[rank].clone().requires_grad_()
    y = layer(x, None, run_now)
    y.square().sum().backward()
    return y.detach(), x.grad


def test_layer():
    ((y, dx),) = run_ranks(outcome_of_layer, 1)
    cut = run_ranks(outcome_of_layer, 2)
    torch.testing.assert_close(torch.cat([part for part, _ in cut]), y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in cut]), dx, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["layer", "attention", "activation", "schedule", "kernel", "check"]
)
def test_examples_keep_the_rules_of_the_architecture(name, tmp_path):
    folder = {"kernel": "kernels", "check": "megatron5d/config/checks"}.get(
        name, "megatron5d/model"
    )
    if name == "schedule":
        folder = "megatron5d/pipeline_parallel/schedules"
    path = f"{folder}/example.py"
    source = tree(tmp_path, {path: example(name)})
    assert [line for rule in RULES for line in rule(source)] == []
    command = [sys.executable, "-m", "ruff"]
    for words in (["check"], ["format", "--check"]):
        run = subprocess.run(
            [*command, *words, "--stdin-filename", str(ROOT / path), "-"],
            input=example(name),
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout + run.stderr


def test_model_family(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "qwen2_0_5b.yaml").write_text(example("family"))
    config = load_config(["--config-dir", str(tmp_path), "model=qwen2_0_5b"])
    assert config.model.qkv_bias
    said = re.search(r"# ([\d,]+) parameters", example("family")).group(1)
    assert parameter_count(config.model) == int(said.replace(",", ""))


def test_schedule():
    def try_it(rank, world):  # on a rank, so that the name stays unknown here
        names_of("schedule")
        program = build_program("one_at_a_time", 4, 8)
        return verify(program).peak_activations.tolist(), simulate(program, Costs()).bubble

    ((peaks, bubble),) = run_ranks(try_it, 1)
    assert peaks == [1.0] * 4
    assert bubble == pytest.approx(3 / 4)


IN_INTERPRETER = """
import torch
from kernel_lab.interpreter_checks import install_checks
from kernel_lab.interpreter_numbers import repair_numbers
repair_numbers()
install_checks()
from relu_squared import relu_squared, relu_squared_reference
for count in (1, 1000, 3001):
    x = torch.randn(count, requires_grad=True)
    dy = torch.randn(count)
    y = relu_squared(x)
    assert type(y.grad_fn).__name__ == "_ReluSquaredBackward"
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(y, torch.where(x > 0, x * x, 0.0))
    torch.testing.assert_close(dx, torch.where(x > 0, 2 * x * dy, 0.0))
plain = relu_squared(torch.tensor([-1.0, 3.0], dtype=torch.float64))
assert plain.tolist() == [0.0, 9.0]
"""


def test_kernel(tmp_path):
    (tmp_path / "relu_squared.py").write_text(example("kernel"))
    paths = {
        "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'tests'}",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", IN_INTERPRETER]
    run = subprocess.run(
        command, env=os.environ | paths, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


def test_check():
    check = names_of("check")["window_hides_something"]
    assert check.id == "window-hides-something"
    assert (
        check.run(Config(model=ModelConfig(attention_window=64), train=TrainConfig(seq_len=128)), 1)
        is None
    )
    fault = check.run(
        Config(model=ModelConfig(attention_window=200), train=TrainConfig(seq_len=128)), 1
    )
    assert fault.knobs == ("model.attention_window", "train.seq_len")
    assert "200" in fault.reason
    assert "128" in fault.reason
    assert fault.fix.endswith("model.attention_window=64")


@pytest.mark.parametrize(("name", "files"), [("key", "*schema.py"), ("requirement", "checks/*.py")])
def test_documented_lines_are_in_the_code(name, files):
    code = "".join(path.read_text() for path in (ROOT / "megatron5d/config").glob(files))
    for line in example(name).splitlines():
        assert line in code

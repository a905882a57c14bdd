"""What a start imports and costs: nothing of torch for a refused configuration, nothing of its
compiler for a step."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from runs import write_corpus

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import runpy, sys
{before}
sys.argv = [{program!r}, *{arguments}]
try:
    runpy.run_path({program!r}, run_name="__main__")
except SystemExit as left:
    print("left with", left.code, [name for name in {names} if sys.modules.get(name)])
"""

FORKS = """
import os, sys
import pretrain
pretrain.before_fork({arguments}, 1)
for run, said in {runs}:
    if (child := os.fork()) == 0:
        os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY), 1)
        exec(run)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, said
"""
NO_TORCH = "left with 2 []"
MODELS = ["tiny", "tiny_gpt2", "tiny_deepseek", "tiny_qwen3_moe"]


def outcome(program, arguments, names, before=""):
    source = RUN.format(
        arguments=list(arguments), program=str(ROOT / program), names=names, before=before
    )
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def one_step(folder, *more):
    data = write_corpus(folder / "corpus", vocab_size=64)
    return [
        f"data.train=[{data}]",
        "train.steps=1",
        "train.gbs=2",
        "train.seq_len=32",
        "optim.warmup_steps=0",
        "checkpoint.every=0",
        f"log.dir={folder}/run",
        "log.wandb=off",
        *more,
    ]


@pytest.fixture(scope="module")
def first_steps(tmp_path_factory):
    """What each model's process said; all are forked from one that has imported what the launcher
    does for ranks."""
    folder, names = (
        tmp_path_factory.mktemp("first"),
        ["torch._dynamo", "torch._inductor", "torch.optim.adamw", "numpy"],
    )
    more = {
        model: [] if model in ("tiny_deepseek", "tiny_qwen3_moe") else ["sympy"] for model in MODELS
    }  # of grouped GEMMs
    arguments = {model: one_step(folder / model, f"model={model}") for model in MODELS}
    said = {model: str(folder / model / "said") for model in MODELS}
    runs = [
        (
            RUN.format(
                arguments=each,
                program=str(ROOT / "pretrain.py"),
                names=names + more[model],
                before="",
            ),
            said[model],
        )
        for model, each in arguments.items()
    ]
    source = FORKS.format(arguments=arguments["tiny"], runs=runs)
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True)
    return {model: Path(said[model]).read_text().splitlines()[-1] for model in MODELS}


@pytest.mark.parametrize(
    "wrong", ["parallel.tp=3", "model.num_heads=5", "optim.lr=-1", "pipeline.schedule=none_such"]
)
def test_a_refused_configuration_imports_no_torch(wrong):
    assert (
        outcome("pretrain.py", [wrong], ["torch", "triton", "numpy"], "sys.modules['torch'] = None")
        == NO_TORCH
    )


@pytest.mark.parametrize(
    "command",
    [
        "plan.py memory --world 8 parallel.tp=3",
        "plan.py step --world 8 --device h1000",
        "plan.py step --world 8 parallel.tp=3",
        "plan.py search --world 8 parallel.tpp=2",
        "plan.py context --world 8 parallel.cp=3",
        "parity.py --world 4 parallel.tp=3",
        "parity.py --world 4 --tolerance -1",
        "visualize.py report --world 8 parallel.tp=3",
        "visualize.py sweep --world 8,16 parallel.tpp=2",
    ],
)
def test_a_tool_that_is_asked_of_a_wrong_one_imports_no_torch(command):
    program, *arguments = command.split()
    assert (
        outcome(f"tools/{program}", arguments, ["torch", "triton"], "sys.modules['torch'] = None")
        == NO_TORCH
    )


@pytest.mark.parametrize("model", MODELS)
def test_a_first_step_does_not_import_torchs_compiler(model, first_steps):
    # `import torch` brings these
    assert first_steps[model] == "left with 0 ['torch.optim.adamw', 'numpy']"


def cpu_seconds(*arguments):
    """User and system time of a child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, cwd=ROOT, env=ENVIRONMENT
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.mark.timing
def test_a_first_step_costs_little_more_than_the_import_of_torch(tmp_path):
    start = ["pretrain.py", *one_step(tmp_path, "model=tiny")]
    rounds = []
    for _ in range(4):  # by turns: others run, too
        rounds.append((cpu_seconds(*start), cpu_seconds("-c", "import torch")))
        step, torch = map(min, zip(*rounds))
        # 1.7 to 1.9 as measured; 2.2 with sympy, 2.8 with the compiler
        if len(rounds) > 1 and step < 2.1 * torch:
            return
    pytest.fail(f"{step:.2f} CPU s, {torch:.2f} for torch")

"""Train a tiny mixture of experts in every FP8 recipe and in bf16, and compare the losses.

    python tests/fp8_quality.py                      500 steps of each on the CPU; a table
    python tests/fp8_quality.py --steps 60 --json    quicker; for programs

Weights, data and order are the same in all runs; only precision.fp8 differs. A run's figure is its
mean loss over the last tenth of the steps. The data is generated here: a chain of tokens in which
each has a few successors of uneven probability, so that the loss keeps falling.
"""

import argparse
import json
import sys

import torch

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.data.batch import make_micro_batch
from megatron5d.model.gpt import GPT
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

RECIPES = ("none", "blockwise", "tensorwise")
BOUNDS = {"blockwise": 0.005, "tensorwise": 0.01}  # largest relative difference from bf16
VOCABULARY, SUCCESSORS = 256, 6


def config_of(recipe: str, steps: int) -> Config:
    """Two layers of four experts, two per token; rows, weights and tokens span several groups of
    128."""
    return Config(
        model=ModelConfig(
            name="fp8_quality",
            num_layers=2,
            hidden_size=160,
            ffn_hidden_size=160,
            num_heads=4,
            num_kv_heads=2,
            head_dim=48,
            vocab_size=VOCABULARY,
            num_experts=4,
            top_k=2,
            moe_ffn_hidden_size=144,
        ),
        train=TrainConfig(steps=steps, gbs=4, mbs=4, seq_len=48),
        optim=OptimConfig(lr=2e-3, min_lr=2e-4, warmup_steps=steps // 10),
        moe=MoeConfig(balance=["aux"], aux_coef=0.01),
        precision=PrecisionConfig(dtype="bf16", fp8=recipe),
    )


def rows_of(config: Config) -> torch.Tensor:
    """Chains int64 `[steps·gbs, s+1]` in which a token's successors have probabilities 1/2, 1/4,
    …"""
    generator = torch.Generator().manual_seed(5)
    count, length = config.train.steps * config.train.gbs, config.train.seq_len + 1
    successors = torch.randint(0, VOCABULARY, (VOCABULARY, SUCCESSORS), generator=generator)
    probabilities = 0.5 ** torch.arange(1.0, SUCCESSORS + 1)
    choices = torch.multinomial(
        probabilities, count * length, replacement=True, generator=generator
    ).view(count, length)
    rows = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    for i in range(1, length):
        rows[:, i] = successors[rows[:, i - 1], choices[:, i]]
    return rows


def train(config: Config) -> list[float]:
    """Trains in this process; the loss of every step."""
    plan = pipeline_layout(config, 1)
    mesh = build_mesh(sizes_of(config, 1), 0, num_kv_heads=config.model.num_kv_heads)
    model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
    model.initialize(config.train.seed)
    _, _, trainer = build_trainer(config, mesh, model, plan)
    losses, steps = list[float](), config.train.steps
    for step, rows in enumerate(rows_of(config).split(config.train.gbs), 1):
        rate = learning_rate(config.optim, step, steps)
        losses.append(trainer.step([make_micro_batch(rows)], rate).losses["loss"])
        if sys.stderr.isatty():
            progress = f"\r{config.precision.fp8:10} {step}/{steps} {losses[-1]:.4f}"
            print(progress, end="", file=sys.stderr)
    return losses


def compare(steps: int, recipes: tuple[str, ...] = RECIPES) -> dict[str, dict[str, float]]:
    """For each recipe the first loss, the mean loss over the last tenth, and its relative
    difference from that in bf16."""
    table: dict[str, dict[str, float]] = {}
    for recipe in dict.fromkeys(("none", *recipes)):
        losses, count = train(config_of(recipe, steps)), max(1, steps // 10)
        table[recipe] = {"first": losses[0], "last": sum(losses[-count:]) / count}
        table[recipe]["from_bf16"] = table[recipe]["last"] / table["none"]["last"] - 1
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="optimizer steps of each run, at least 10"
    )
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    args = parser.parse_args()
    if args.steps < 10:
        parser.error(f"--steps {args.steps} is below 10")
    table = compare(args.steps)
    if args.json:
        print(json.dumps({"steps": args.steps, "recipes": table, "bounds": BOUNDS}))
    else:
        for recipe, row in table.items():
            name = "bf16" if recipe == "none" else recipe
            losses = f"first {row['first']:.4f}  last {row['last']:.4f}"
            print(f"{name:10} {losses}  from bf16 {row['from_bf16']:+.2%}")
    return int(any(abs(table[recipe]["from_bf16"]) > bound for recipe, bound in BOUNDS.items()))


if __name__ == "__main__":
    sys.exit(main())

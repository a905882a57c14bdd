"""ZeRO-3 that gathers in FP8: the values and the training of bf16, at half the bytes."""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from training_rank import TrainingRank

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.kernels.fp8.quantize import E4M3, quantize_blocks, scales_of
from megatron5d.precision import fp8_weights
from megatron5d.precision.fp8_weights import block_grid, block_maxima, quantize_slice
from megatron5d.precision.gemm import forget_copies
from megatron5d.topology.shard_spec import spec_of, state_of


@pytest.mark.parametrize(
    "stack", [(1, 300, 208), (1, 256, 128), (3, 80, 144), (2, 128, 272)], ids=str
)
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_quantized_slices_are_slices_of_the_quantized_weight(stack, powers_of_two, monkeypatch):
    """Wherever a slice is cut: in a row, in a block, between experts; with zeros, infinities and
    NaN among the values."""
    monkeypatch.setattr(fp8_weights, "_CHUNK", 128 * stack[2])  # a block row at a time
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(stack, generator=generator) * torch.logspace(-3, 3, stack[2])
    weight[:, ::128, 0] = 50.0  # the largest of a block, where the block begins
    weight[0, :70, -90:], weight[-1, -1, 3], weight[-1, -1, 20] = 0.0, float("inf"), float("nan")
    weight = weight.bfloat16()
    numel, flat = weight.numel(), weight.view(-1)
    random_cuts = torch.randint(1, numel, (6,), generator=generator).tolist()
    cuts = sorted({0, numel, stack[2] * 64, *random_cuts})
    spans = list(zip(cuts, cuts[1:]))
    maxima = torch.stack([block_maxima(flat[a:b], stack, a) for a, b in spans]).amax(0)
    scales = scales_of(maxima, E4M3, powers_of_two)
    expected, _ = quantize_blocks(weight, powers_of_two=powers_of_two)
    assert torch.equal(scales, expected.scales) and scales.shape == block_grid(stack)
    out = torch.zeros(numel, dtype=torch.uint8)
    for a, b in spans:
        quantize_slice(flat[a:b], stack, a, maxima, scales, out[a:b])
    assert torch.equal(out.view(stack), expected.values.view(torch.uint8))
    assert expected.values.float().isnan().any() and (expected.values.float() == 0).any()


PER_STEP = {"zero3_gather": "per_step", "grad_reduce": "per_step"}
CASES = {"blockwise": {}, "tensorwise": PER_STEP}  # recipe -> when weights are gathered


def config_of(recipe: str, gather: bool) -> Config:
    return Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=144,
            ffn_hidden_size=256,
            num_heads=2,
            num_kv_heads=2,
            head_dim=128,
            vocab_size=61,
            num_experts=2,
            top_k=1,
            moe_ffn_hidden_size=256,
            first_k_dense=1,
        ),
        parallel=ParallelConfig(zero=3, tp=2, sp=True, **CASES[recipe]),
        train=TrainConfig(steps=10, gbs=4, mbs=1, seq_len=16),
        optim=OptimConfig(lr=1e-2, warmup_steps=0, clip=0.0),
        precision=PrecisionConfig(
            dtype="bf16", fp8=recipe, fp8_gather=gather, fp8_exclude=["layers.0.attention.*"]
        ),
    )


@dataclasses.dataclass
class Outcome:
    losses: list[float]
    weights: list
    gathered_bytes: int
    fp8_names: set[str]  # parameters that are gathered in FP8
    fp8_numel: int  # elements of this rank's slices of them


def train(rank, world, recipe, gather):
    run, losses = TrainingRank(config_of(recipe, gather), rank, world), []
    for _ in range(2):
        losses.append(run.step().losses["loss"])
    axes = ("dp_shard_cp", "edp_shard")
    num_bytes = sum(run.ledger.totals[axis, "all_gather"].num_bytes for axis in axes)
    assert not any(bucket.is_gathered(in_model_dtype=False) for bucket in run.sync.buckets)
    weights = run.weights()
    run.evaluate()
    # FP8 copies are dropped together with the weights that they were made from
    assert all(state_of(parameter).fp8_copies is None for parameter in run.model.parameters())
    buckets = [bucket for bucket in run.sync.buckets if bucket.format]
    names = {spec_of(parameter).name for bucket in buckets for parameter in bucket.parameters}
    return Outcome(losses, weights, num_bytes, names, sum(b.slice_numel for b in buckets))


def test_the_same_training_at_half_the_bytes():
    matrices = {f"layers.1.attention.{name}.weight" for name in ("qkv", "out")}
    for layer in ("layers.0.mlp", "layers.1.experts"):
        matrices |= {f"{layer}.up.weight", f"{layer}.down.weight"}

    def on_rank(rank, world):
        return [
            [train(rank, world, recipe, gather) for gather in (False, True)] for recipe in CASES
        ]

    for outcomes in run_ranks(on_rank, 4):
        for recipe, (plain, fp8) in zip(CASES, outcomes):
            assert fp8.losses == plain.losses, recipe
            assert all((a == b).all() for a, b in zip(fp8.weights, plain.weights)), recipe
            assert fp8.fp8_names == matrices and not plain.fp8_names, recipe
            gathers = 1 if CASES[recipe] else 2 * 2  # two micro-batches, forward and backward
            saved = plain.gathered_bytes - fp8.gathered_bytes
            # one byte of two, on two ranks
            assert saved == pytest.approx(gathers * fp8.fp8_numel, rel=0.01), recipe


def test_weights_are_quantized_again_after_an_update():
    """Without ZeRO-3 the optimizer writes the weights' memory directly, which only the gather can
    notice."""
    config = dataclasses.replace(config_of("blockwise", False), parallel=ParallelConfig())
    run = TrainingRank(config)
    run.step()
    loss = run.evaluate()
    forget_copies(run.model.parameters())
    assert torch.equal(loss, run.evaluate())

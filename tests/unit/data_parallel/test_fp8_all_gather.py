"""ZeRO-3 that gathers in FP8: slice by slice the numbers of the whole, at half the bytes, and the
same training."""

import dataclasses

import pytest
import torch
from layouts import make_rows, micro_batch
from ranks import run_ranks

from megatron5d.comm.ledger import Ledger
from megatron5d.config.schema import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.kernels.fp8.quantize import E4M3, quantize_blocks, scales_of
from megatron5d.model.gpt import GPT
from megatron5d.precision import fp8_tensor
from megatron5d.precision.fp8_tensor import block_maxima, blocks_in, quantize_slice
from megatron5d.precision.gemm import forget_copies
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of, state_of
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout


@pytest.mark.parametrize(
    "stack", [(1, 300, 208), (1, 256, 128), (3, 80, 144), (2, 128, 272)], ids=str
)
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_slices_are_slices_of_the_whole_quantised(stack, powers_of_two, monkeypatch):
    """Wherever a slice is cut: in a row, in a block, between experts; zeros, infinities and NaN
    among the values."""
    monkeypatch.setattr(fp8_tensor, "_CHUNK", 128 * stack[2])  # a block row at a time
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(stack, generator=generator) * torch.logspace(-3, 3, stack[2])
    whole[:, ::128, 0] = 50.0  # the largest of a block where the block begins
    whole[0, :70, -90:], whole[-1, -1, 3], whole[-1, -1, 20] = 0.0, float("inf"), float("nan")
    whole = whole.bfloat16()
    numel = whole.numel()
    inner = torch.randint(1, numel, (6,), generator=generator).tolist()
    cuts = sorted({0, numel, stack[2] * 64, *inner})
    spans = list(zip(cuts, cuts[1:]))
    maxima = [block_maxima(whole.view(-1)[a:b], stack, a) for a, b in spans]
    most = torch.stack(maxima).amax(0)
    scales = scales_of(most, E4M3, powers_of_two)
    straight, _ = quantize_blocks(whole, powers_of_two=powers_of_two)
    assert torch.equal(scales, straight.scales) and scales.shape == blocks_in(stack)
    out = torch.zeros(numel, dtype=torch.uint8)
    for a, b in spans:
        quantize_slice(whole.view(-1)[a:b], stack, a, most, scales, out[a:b])
    assert torch.equal(out.view(stack), straight.values.view(torch.uint8))
    assert straight.values.float().isnan().any() and (straight.values.float() == 0).any()


PER_STEP = {"zero3_gather": "per_step", "grad_reduce": "per_step"}
CASES = {"blockwise": {}, "tensorwise": PER_STEP}  # how weights come and go


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


def on_rank(rank, world):
    found = []
    for recipe in CASES:
        for gather in (False, True):
            config, ledger = config_of(recipe, gather), Ledger()
            mesh = build_mesh(sizes_of(config, world), rank, recorder=ledger)
            plan = pipeline_layout(config, world)
            model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
            model.initialize(1)
            sync, _, trainer = build_trainer(config, mesh, model, plan)
            rows, t = make_rows(config, 1), config.train
            numbers = micro_batch_samples(0, t.gbs, t.mbs, mesh["dp"].rank, mesh["dp"].size)
            batches = [micro_batch(config, rows[list(each)]) for each in numbers]
            losses = []
            for _ in range(2):
                ledger.clear()
                losses.append(trainer.step(batches, 1e-2).losses["loss"])
            sent = [
                ledger.totals[axis, "all_gather"].num_bytes for axis in ("dp_shard_cp", "edp_shard")
            ]
            held = [bucket.holds(wide=False) for bucket in sync.buckets]
            narrow = {id(p) for bucket in sync.buckets if bucket.format for p in bucket.parameters}
            owned = sum(bucket.slice_numel for bucket in sync.buckets if bucket.format)
            with sync.weights.whole():
                weights = {
                    spec_of(p).name: p.detach().float().numpy().copy() for p in model.parameters()
                }
            names = {spec_of(p).name for p in model.parameters() if id(p) in narrow}
            trainer.evaluate(batches)
            copies = [
                spec_of(p).name for p in model.parameters() if state_of(p).fp8_copies is not None
            ]
            found.append((losses, weights, sum(sent), names, owned, any(held), copies))
    return found


def test_the_same_training_at_half_the_bytes():
    matrices = {f"layers.1.attention.{name}.weight" for name in ("qkv", "out")}
    matrices |= {
        f"layers.{i}.{name}.weight"
        for i, block in enumerate(("mlp", "experts"))
        for name in (f"{block}.up", f"{block}.down")
    }
    for rank in run_ranks(on_rank, 4):
        runs = iter(rank)
        for recipe in CASES:
            (
                (losses, weights, sent, none, _, _, kept),
                (theirs, eight, less, names, owned, held, copies),
            ) = (
                next(runs),
                next(runs),
            )
            assert theirs == losses, recipe
            assert all((eight[name] == weights[name]).all() for name in weights), recipe
            assert names == matrices and not none and not held, recipe
            assert not kept and not copies, "FP8 copies go with the weights that they were made of"
            gathers = 1 if CASES[recipe] else 2 * 2  # two micro-batches, forward and backward
            # a byte of two, on two ranks
            assert sent - less == pytest.approx(gathers * owned, rel=0.01), recipe


def test_after_an_update_weights_are_quantised_anew():
    """Where they stay whole, the optimiser writes past the parameters, and nobody but the gather
    can tell."""
    config = dataclasses.replace(config_of("blockwise", False), parallel=ParallelConfig())
    plan = pipeline_layout(config, 1)
    model = GPT(config, build_mesh(sizes_of(config, 1)), "cpu", plan.stage_specs(0), plan.shared)
    model.initialize(1)
    _, _, trainer = build_trainer(config, build_mesh(sizes_of(config, 1)), model, plan)
    batches = [micro_batch(config, row[None]) for row in make_rows(config, 1)]
    trainer.step(batches, 1e-2)
    loss = trainer.evaluate(batches)
    forget_copies(model.parameters())
    assert torch.equal(loss, trainer.evaluate(batches))

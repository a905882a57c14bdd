"""Rounding at random: unbiased, the same on any slice, and enough to train bf16 weights without
masters."""

import dataclasses

import pytest
import torch
from layouts import layout_run, make_rows
from parity_configs import config_of

from megatron5d.config.schema import OptimConfig, PrecisionConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.optim import sharded_state as rounding
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.sharded_state import global_index, round_stochastically, store_rounded
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, state_of, unsharded


def test_up_or_down_with_the_chances_that_keep_the_mean():
    step = 2.0**-7  # between neighbours of bfloat16 above 1
    for share in (0.0, 0.25, 0.875):
        x = torch.full((1 << 16,), 1 + share * step)
        rounded = round_stochastically(x, torch.arange(1 << 16))  # every pattern of 16 bits once
        assert set(rounded.tolist()) <= {1.0, 1 + step}
        assert (rounded == 1 + step).float().mean().item() == share
        assert torch.equal(round_stochastically(-x, torch.arange(1 << 16)), -rounded)


def test_what_is_exact_or_not_finite_stays():
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), float("inf"), -float("inf"), float("nan")])
    for bits in (0, 0xFFFF):
        rounded = round_stochastically(x, torch.full((7,), bits))
        assert torch.equal(rounded[:6].float(), x[:6]) and rounded[6].isnan()


def test_a_piece_knows_its_place():
    numbers = torch.arange(4 * 5 * 6).view(4, 5, 6)
    piece = Piece((1, 2, 3), (2, 3, 2))
    want = numbers[1:3, 2:5, 3:5].flatten()
    assert torch.equal(global_index(piece, (4, 5, 6), 0, 12, torch.device("cpu")), want)
    assert torch.equal(global_index(piece, (4, 5, 6), 5, 9, torch.device("cpu")), want[5:9])


def test_slices_and_copies_round_alike(monkeypatch):
    wide = 1 + torch.rand(6, 8)
    name, shape = "layers.0.mlp.up.weight", (6, 8)

    def rounded(rows: slice, first: int, last: int, seed: int = 3, step: int = 7) -> torch.Tensor:
        """Elements first to last of a rank that holds these rows, as an owned slice that begins
        elsewhere."""
        piece = Piece((rows.start, 0), (rows.stop - rows.start, 8))
        segment = Segment(
            ShardSpec(name, shape, (piece,)), (first, last), (100, 100 + last - first)
        )
        out = torch.empty(last - first, dtype=torch.bfloat16)
        store_rounded(wide[rows].flatten()[first:last], out, segment, seed, step)
        return out

    once = rounded(slice(0, 6), 0, 48)
    assert torch.equal(torch.cat([rounded(slice(0, 6), 0, 13), rounded(slice(0, 6), 13, 48)]), once)
    assert torch.equal(rounded(slice(2, 4), 3, 16), once.view(6, 8)[2:4].flatten()[3:16])
    assert (once.float() != wide.flatten().bfloat16().float()).any()
    monkeypatch.setattr(rounding, "_CHUNK", 5)
    assert torch.equal(rounded(slice(0, 6), 3, 48), once[3:]), "piece by piece"
    for other in ({"seed": 4}, {"step": 8}):
        assert not torch.equal(rounded(slice(0, 6), 0, 48, **other), once), (
            f"the same bits whatever {other} is"
        )


def test_small_updates_are_not_lost():
    """Twenty updates of 1e-4 on weights of 1, whose neighbour below is 4e-3 away."""
    spec = ShardSpec("layers.0.mlp.up.weight", (64, 128), unsharded((64, 128)))
    weight = new_parameter((64, 128), spec, torch.bfloat16, "cpu")
    weight.data.fill_(1.0)
    bucket = Bucket([weight], Axis("dp"), Axis("dp"), torch.bfloat16)
    optimizer = AdamW([bucket], OptimConfig(weight_decay=0.0), rounding_seed=1)
    assert not any(kind == "master" for kind, _, _ in optimizer.tensors())
    assert (
        optimizer.slices[0].master.data_ptr() == bucket.weights.data_ptr()
        and weight.dtype == torch.bfloat16
    )
    for _ in range(20):
        state_of(weight).main_grad.fill_(1.0)
        optimizer.step(1e-4)
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)
    momentum = optimizer.slices[0].moments["exp_avg"]
    assert momentum.dtype == torch.float32 and momentum.mean().item() == pytest.approx(1 - 0.9**20)


def test_a_model_trains_without_masters():
    """Near the run with masters, as near on two ranks that share the optimiser state; copies stay
    equal."""
    config = config_of("llama_gqa", gbs=2, zero=1)
    losses = {}
    for masters, world in ((True, 1), (False, 1), (False, 2)):
        run = dataclasses.replace(
            config, precision=PrecisionConfig(dtype="bf16", master_weights=masters)
        )
        outcome, _, held = layout_run(run, world, make_rows(run, 6), 6)
        losses[masters, world] = outcome.losses[-1]
        assert all(torch.equal(one[2], other[2]) for one, other in zip(held[0], held[-1])), (
            "copies differ"
        )
    assert losses[False, 1] == pytest.approx(losses[True, 1], rel=2e-2)
    assert losses[False, 2] == pytest.approx(losses[False, 1], rel=2e-2)

"""Stochastic rounding: unbiased, the same on any slice, and sufficient for bf16 weights without
masters."""

import dataclasses

import pytest
import torch
from layouts import layout_run, make_rows
from parity_configs import config_of

from megatron5d.config.schema import OptimConfig, PrecisionConfig
from megatron5d.data_parallel.bucket import Bucket, Segment
from megatron5d.optim import sharded_state
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.sharded_state import global_index, round_stochastically, store_rounded
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, state_of, unsharded

NAME = "layers.0.mlp.up.weight"


@pytest.mark.parametrize("fraction", [0.0, 0.25, 0.875])
def test_rounding_keeps_the_mean(fraction):
    spacing = 2.0**-7  # of bfloat16 above 1
    x, bits = torch.full((1 << 16,), 1 + fraction * spacing), torch.arange(1 << 16)
    rounded = round_stochastically(x, bits)
    assert set(rounded.tolist()) <= {1.0, 1 + spacing}
    assert (rounded == 1 + spacing).float().mean().item() == fraction
    assert torch.equal(round_stochastically(-x, bits), -rounded)


@pytest.mark.parametrize("bits", [0, 0xFFFF])
def test_exact_and_non_finite_values_are_kept(bits):
    x = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), float("inf"), -float("inf"), float("nan")])
    rounded = round_stochastically(x, torch.full((7,), bits))
    assert torch.equal(rounded[:6].float(), x[:6]) and rounded[6].isnan()


def test_global_index():
    numbers, piece = torch.arange(4 * 5 * 6).view(4, 5, 6), Piece((1, 2, 3), (2, 3, 2))
    expected = numbers[1:3, 2:5, 3:5].flatten()
    for start, stop in ((0, 12), (5, 9)):
        index = global_index(piece, (4, 5, 6), start, stop, torch.device("cpu"))
        assert torch.equal(index, expected[start:stop])


def test_slices_and_replicas_round_alike(monkeypatch):
    wide = 1 + torch.rand(6, 8)

    def rounded(first_row, last_row, first, last, seed=3, step=7):
        """Elements first to last of a rank with these rows, in a slice that begins elsewhere."""
        piece = Piece((first_row, 0), (last_row - first_row, 8))
        owned = (100, 100 + last - first)
        segment = Segment(ShardSpec(NAME, (6, 8), (piece,)), (first, last), owned)
        out = torch.empty(last - first, dtype=torch.bfloat16)
        values = wide[first_row:last_row].flatten()[first:last]
        store_rounded(values, out, segment, seed, step)
        return out

    expected = rounded(0, 6, 0, 48)
    assert torch.equal(torch.cat([rounded(0, 6, 0, 13), rounded(0, 6, 13, 48)]), expected)
    assert torch.equal(rounded(2, 4, 3, 16), expected.view(6, 8)[2:4].flatten()[3:16])
    assert not torch.equal(expected, wide.flatten().bfloat16())
    for change in ({"seed": 4}, {"step": 8}):
        assert not torch.equal(rounded(0, 6, 0, 48, **change), expected), change
    monkeypatch.setattr(sharded_state, "_CHUNK", 5)
    assert torch.equal(rounded(0, 6, 3, 48), expected[3:])


def test_small_updates_are_not_lost():
    """Twenty updates of 1e-4 on weights of 1, whose lower neighbor is 4e-3 away."""
    spec = ShardSpec(NAME, (64, 128), unsharded((64, 128)))
    weight = new_parameter((64, 128), spec, torch.bfloat16, "cpu")
    weight.data.fill_(1.0)
    bucket = Bucket([weight], Axis("dp"), Axis("dp"), torch.bfloat16)
    optimizer = AdamW([bucket], OptimConfig(weight_decay=0.0), rounding_seed=1)
    assert {kind for kind, _, _ in optimizer.tensors()} == {"exp_avg", "exp_avg_sq"}
    (state,) = optimizer.slices
    assert state.master.data_ptr() == bucket.weights.data_ptr() and weight.dtype == torch.bfloat16
    for _ in range(20):
        state_of(weight).main_grad.fill_(1.0)
        optimizer.step(1e-4)
    assert weight.float().mean().item() == pytest.approx(1 - 20e-4, abs=2e-4)
    exp_avg = state.moments["exp_avg"]
    assert exp_avg.dtype == torch.float32 and exp_avg.mean().item() == pytest.approx(1 - 0.9**20)


def test_a_model_trains_without_masters():
    """Close to the run with masters, on two ranks that shard the optimizer state as well."""
    config, losses = config_of("llama_gqa", gbs=2, zero=1), []
    for master_weights, world in ((True, 1), (False, 1), (False, 2)):
        precision = PrecisionConfig(dtype="bf16", master_weights=master_weights)
        run = dataclasses.replace(config, precision=precision)
        outcome, _, weights = layout_run(run, world, make_rows(run, 6), 6)
        losses.append(outcome.losses[-1])
        assert all(torch.equal(a[2], b[2]) for a, b in zip(weights[0], weights[-1])), "replicas"
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[2] == pytest.approx(losses[1], rel=2e-2)

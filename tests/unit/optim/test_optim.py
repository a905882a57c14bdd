"""The rate of each step, and AdamW on slices against torch's on whole parameters."""

import dataclasses

import pytest
import torch
from optimizer_buckets import new_bucket, parameters, resumed, seeded
from torch.utils._python_dispatch import TorchDispatchMode

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.optim.optimizer import clip_coefficient, global_square_sum
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, state_of, unsharded

BASE = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)


def rates(steps=12, **changes):
    config = dataclasses.replace(BASE, **changes)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_from_the_first_step():
    assert rates()[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_min_lr_is_reached_exactly_at_the_last_step(schedule):
    lr = rates(schedule=schedule)
    assert lr[-1] == pytest.approx(0.1, abs=1e-15)
    assert all(a > b for a, b in zip(lr[3:], lr[4:]))
    assert lr[7] == pytest.approx(0.55)  # half way, after 4 of 8 steps


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_by_samples_the_rate_depends_on_the_number_of_samples(schedule):
    batches = [(0, 2), (6, 3), (24, 8)]
    samples = [0, 2, 4, 6, 9, 12, 15, 18, 21, 24, 32, 40, 48]  # after each step
    config = dataclasses.replace(BASE, schedule=schedule, decay_steps=5, schedule_by="samples")
    one_by_one = dataclasses.replace(
        config, warmup_steps=samples[4], decay_steps=samples[12] - samples[7], schedule_by="steps"
    )
    for step in range(1, 13):
        expected = learning_rate(one_by_one, samples[step], samples[12])
        assert learning_rate(config, step, 12, batches) == pytest.approx(expected, rel=1e-14)


def test_wsd_is_stable_then_decays_linearly():
    lr = rates(schedule="wsd", decay_steps=4)
    assert lr[3:8] == [1.0] * 5
    assert lr[8:] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_constant_and_no_warm_up():
    assert rates(schedule="constant", warmup_steps=0) == [1.0] * 12
    assert rates(schedule="linear", warmup_steps=0, steps=2) == pytest.approx([0.55, 0.1])


@pytest.mark.parametrize(
    ("num_slices", "offload", "implementation"),
    [(1, False, "auto"), (3, False, "kernel"), (1, True, "auto"), (3, True, "auto")],
)
def test_slices_are_updated_as_torch_updates_parameters(num_slices, offload, implementation):
    config = OptimConfig(
        lr=0.1,
        weight_decay=0.3,
        decay_exclude=["d"],
        offload=offload,
        implementation=implementation,
    )
    a, b, c, d = expected = [p.detach().clone().requires_grad_() for p in parameters()]
    groups = [{"params": [a, c]}, {"params": [b, d], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    ranks = tuple(range(num_slices))
    buckets = [new_bucket(shard=Axis("dp_shard_cp", ranks, rank)) for rank in ranks]
    for bucket in buckets:
        assert all(start % 16 == 0 for start in (bucket.slice_numel, *bucket.offsets)), "alignment"
    optimizers = [AdamW([bucket], config) for bucket in buckets]
    for (state,) in (optimizer.slices for optimizer in optimizers):
        assert state.on_host == offload
        in_bucket, in_update = (
            {t.untyped_storage().data_ptr() for t in tensors}
            for tensors in (
                (state.bucket.weights, state.bucket.grads),
                (state.master, state.grads),
            )
        )
        assert in_bucket.isdisjoint(in_update) == offload, "offload uses copies"
    for step in range(3):
        for i, p in enumerate(expected):
            p.grad = seeded(p.shape, step)
            for bucket in buckets:
                state_of(bucket.parameters[i]).main_grad.copy_(p.grad)
        reference.step()
        for optimizer in optimizers:
            optimizer.step(lr=0.1)
    weights = torch.cat([bucket.weight_slice for bucket in buckets])
    for p, offset in zip(expected, buckets[0].offsets):
        torch.testing.assert_close(weights[offset : offset + p.numel()].view(p.shape), p.detach())


def train(implementation, dtype, steps=3, scale=None, **options):
    """The state of a bucket after some steps."""
    bucket = new_bucket(dtype)
    config = OptimConfig(weight_decay=0.3, implementation=implementation, **options)
    optimizer = AdamW([bucket], config)
    for step in range(steps):
        bucket.grads.copy_(seeded(bucket.numel, step, bucket.grads.dtype))
        optimizer.step(lr=0.1, scale=scale)
    return optimizer.slices[0]


def test_the_kernel_clips_updates_and_rounds_as_torch_does():
    states = [train(name, torch.bfloat16, scale=0.25) for name in ("torch", "kernel")]
    masters = []
    for state in states:
        assert state.master.dtype == torch.float32
        assert torch.equal(state.master.bfloat16(), state.bucket.weight_slice)
        masters.append(torch.cat([state.master[slice(*s.owned)] for s in state.segments]))
    torch.testing.assert_close(masters[1], masters[0], rtol=1e-5, atol=1e-6)


def test_the_kernels_plain_path_is_as_exact_as_its_masters():
    weights, expected = (
        train(name, torch.float64, steps=1).bucket.weights for name in ("kernel", "torch")
    )
    torch.testing.assert_close(weights, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_in_the_update_equals_clipping_before_it(dtype, monkeypatch):
    """torch's update scales gradients itself, but in float32 only."""
    weights = train("torch", dtype, scale=0.3, eps=0.5).bucket.weights
    prepare = AdamW._prepare_grads
    monkeypatch.setattr(AdamW, "_prepare_grads", lambda self, scale: prepare(self, 0.3))
    expected = train("torch", dtype, eps=0.5).bucket.weights
    torch.testing.assert_close(weights, expected, rtol=10 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize(("name", "seed"), [("torch", None), ("kernel", None), ("torch", 1)])
def test_an_optimizer_resumes_with_the_same_bits(name, seed):
    """From moments and the number of updates, on which bias correction and (seed) stochastic
    rounding depend."""
    weights = []
    for resume_at in (None, 2):
        bucket, config = new_bucket(torch.bfloat16), OptimConfig(implementation=name)
        optimizer = AdamW([bucket], config, seed)
        for step in range(3):
            if step == resume_at:
                optimizer = resumed(optimizer, AdamW([bucket], config, seed))
            bucket.grads.copy_(seeded(bucket.numel, step))
            optimizer.step(lr=0.1)
        weights.append(bucket.weights.clone())
    assert torch.equal(*weights)


def test_the_norm_counts_owned_elements_once():
    total = 0.0
    for rank in (0, 1):
        for replica in (0, 1):
            shard, replicate = (
                Axis("dp_shard_cp", (0, 1), rank),
                Axis("dp_replicate", (0, 1), replica),
            )
            bucket = new_bucket(shard=shard, replicate=replicate)
            bucket.grads.fill_(2.0)  # padding as well, which must not count
            total += global_square_sum([bucket]).item()
    assert total == pytest.approx(4.0 * (35 + 3 + 4 + 36))


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    bucket = new_bucket(grad_dtype=torch.bfloat16)
    bucket.grads.copy_(seeded(bucket.numel, 0))
    segments = [bucket.grad_slice[slice(*segment.owned)] for segment in bucket.segments()]
    exact = sum(grads.double().square().sum().item() for grads in segments)
    assert global_square_sum([bucket]).item() == pytest.approx(exact, rel=1e-6)


def test_the_norm_of_many_elements_is_as_exact_as_float32():
    """A CPU that sums ten million squares at once in float32 is off by a thousandth."""
    spec = ShardSpec("weight", (2500, 4000), unsharded((2500, 4000)))
    weight = new_parameter(spec.shape, spec, torch.float32, "cpu")
    bucket = Bucket([weight], Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float32)
    bucket.grads.normal_(generator=torch.Generator().manual_seed(0))
    exact = bucket.grads.double().square().sum().item()
    assert global_square_sum([bucket]).item() == pytest.approx(exact, rel=1e-6)


def test_clipping_is_torchs_rule():
    assert clip_coefficient(2.0, 1.0) == pytest.approx(1 / (2 + 1e-6))
    assert clip_coefficient(0.5, 1.0) is None
    assert clip_coefficient(5.0, 0.0) is None


class Calls(TorchDispatchMode):
    """Records the operations that are called."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.operations.append(operation)
        return operation(*args, **(kwargs or {}))


def test_offloaded_masters_are_widened_on_the_host():
    """The device may have no memory for an fp32 copy of its weights."""
    bucket = new_bucket(torch.bfloat16)
    with Calls() as calls:
        AdamW([bucket], OptimConfig(offload=True))
    assert torch.ops.aten.copy_.default in calls.operations
    assert torch.ops.aten._to_copy.default not in calls.operations


def test_offloaded_masters_take_loaded_weights():
    bucket = new_bucket()
    optimizer = AdamW([bucket], OptimConfig(weight_decay=0.0, offload=True))
    bucket.weights.copy_(torch.arange(bucket.weights.numel()))
    loaded = bucket.weights.clone()
    optimizer.restore_unsaved_masters()
    optimizer.step(lr=0.0)
    assert torch.equal(bucket.weights, loaded)
    assert {kind for kind, _, _ in optimizer.tensors()} == {"exp_avg", "exp_avg_sq"}

"""The rate of each step, and AdamW on slices against torch's on whole parameters."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron5d.config.schema import OptimConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.optim.adamw import AdamW
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.optim.optimizer import clip_coefficient, global_square_sum
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, spec_of, state_of, unsharded

BASE = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4)


def rates(steps=12, **changes):
    config = dataclasses.replace(BASE, **changes)
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def test_warm_up_is_linear_from_the_first_step():
    assert rates()[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_min_lr_is_reached_exactly_at_the_last_step(schedule):
    found = rates(schedule=schedule)
    assert found[-1] == pytest.approx(0.1, abs=1e-15)
    assert all(a > b for a, b in zip(found[3:], found[4:]))
    assert found[7] == pytest.approx(0.55)  # half way down, 4 of 8 steps


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_by_samples_the_rate_is_that_of_a_constant_batch_after_as_many_samples(schedule):
    batches, by_samples = (
        [(0, 2), (6, 3), (24, 8)],
        dataclasses.replace(BASE, schedule=schedule, decay_steps=5, schedule_by="samples"),
    )
    taken = [0, 2, 4, 6, 9, 12, 15, 18, 21, 24, 32, 40, 48]  # after each step
    equal = dataclasses.replace(
        by_samples, warmup_steps=taken[4], decay_steps=taken[12] - taken[7], schedule_by="steps"
    )
    for step in range(1, 13):
        expected = learning_rate(equal, taken[step], taken[12])
        assert learning_rate(by_samples, step, 12, batches) == pytest.approx(expected, rel=1e-14)


def test_wsd_holds_then_decays_linearly():
    found = rates(schedule="wsd", decay_steps=4)
    assert found[3:8] == [1.0] * 5
    assert found[8:] == pytest.approx([0.775, 0.55, 0.325, 0.1])


def test_constant_and_no_warm_up():
    assert rates(schedule="constant", warmup_steps=0) == [1.0] * 12
    assert rates(schedule="linear", warmup_steps=0, steps=2) == pytest.approx([0.55, 0.1])


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = []
    for name, shape in (("a", (7, 5)), ("b", (3,)), ("c", (2, 2)), ("d", (9, 4))):
        p = new_parameter(
            shape,
            ShardSpec(name, shape, unsharded(shape), decay=len(shape) > 1),
            torch.float32,
            "cpu",
        )
        p.data.copy_(torch.randn(shape, generator=generator))
        made.append(p)
    return made


@pytest.mark.parametrize(
    ("slices", "offload", "how"),
    [(1, False, "auto"), (3, False, "kernel"), (1, True, "auto"), (3, True, "auto")],
)
def test_slices_of_a_bucket_are_updated_as_torch_updates_whole_parameters(slices, offload, how):
    config = OptimConfig(
        lr=0.1, weight_decay=0.3, decay_exclude=["d"], offload=offload, implementation=how
    )
    truth = [p.detach().clone().requires_grad_() for p in parameters()]
    groups = [
        {"params": [truth[0], truth[2]]},
        {"params": [truth[1], truth[3]], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    buckets = []
    for rank in range(slices):
        shard = Axis("dp_shard_cp", tuple(range(slices)), rank)
        buckets.append(Bucket(parameters(), shard, Axis("dp_replicate"), torch.float32))
    assert all(
        start % 16 == 0 for bucket in buckets for start in (bucket.slice_numel, *bucket.offsets)
    ), "not aligned"
    optimizers = [AdamW([bucket], config) for bucket in buckets]
    for state in (state for optimizer in optimizers for state in optimizer.slices):
        assert state.on_host == offload
        device_memory = {
            t.untyped_storage().data_ptr() for t in (state.bucket.weights, state.bucket.grads)
        }
        host = {t.untyped_storage().data_ptr() for t in (state.master, state.grads)}
        assert (device_memory & host == set()) == offload, (
            "the update reads and writes copies of its own"
        )
    for step in range(3):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step)) for p in truth]
        for p, grad in zip(truth, grads):
            p.grad = grad
        oracle.step()
        for bucket, optimizer in zip(buckets, optimizers):
            for p, grad in zip(bucket.parameters, grads):
                state_of(p).main_grad.copy_(grad)
            optimizer.step(lr=0.1)
    joined = torch.cat([bucket.weight_slice for bucket in buckets])
    for p, offset in zip(truth, buckets[0].offsets):
        torch.testing.assert_close(joined[offset : offset + p.numel()].view(p.shape), p.detach())


def test_one_pass_clips_updates_and_rounds():
    """As scaling in place, torch's update and a cast, one after the other."""
    weights = []
    for how in ("torch", "kernel"):
        narrow = []
        for wide in parameters():
            narrow.append(torch.nn.Parameter(wide.detach().bfloat16()))
            state_of(narrow[-1]).spec = spec_of(wide)
        bucket = Bucket(narrow, Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float32)
        optimizer = AdamW([bucket], OptimConfig(weight_decay=0.3, implementation=how))
        for step in range(3):
            bucket.grads.copy_(
                torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step))
            )
            optimizer.step(lr=0.1, scale=0.25)
        (state,) = optimizer.slices
        assert state.master.dtype == torch.float32 and torch.equal(
            state.master.bfloat16(), bucket.weight_slice
        )
        weights.append(
            torch.cat([state.master[slice(*segment.owned)] for segment in state.segments])
        )
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-6)


def test_one_pass_is_as_exact_as_its_masters():
    weights = []
    for how in ("torch", "kernel"):
        wide = [torch.nn.Parameter(each.detach().double()) for each in parameters()]
        for each, like in zip(wide, parameters()):
            state_of(each).spec = spec_of(like)
        bucket = Bucket(wide, Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float64)
        optimizer = AdamW([bucket], OptimConfig(weight_decay=0.3, implementation=how))
        bucket.grads.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0)))
        optimizer.step(lr=0.1)
        weights.append(bucket.weights)
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize(("how", "seed"), [("torch", None), ("kernel", None), ("torch", 1)])
def test_a_new_optimiser_goes_on_where_another_stopped(how, seed):
    """With its moments, and the number of updates: for the bias correction, and (seed) the bits of
    random rounding."""
    weights = []
    for stop in (0, 2):
        narrow = [torch.nn.Parameter(wide.detach().bfloat16()) for wide in parameters()]
        for each, like in zip(narrow, parameters()):
            state_of(each).spec = spec_of(like)
        bucket = Bucket(narrow, Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float32)
        optimizer = AdamW([bucket], OptimConfig(implementation=how), seed)
        for step in range(3):
            if step and step == stop:
                old, optimizer = optimizer, AdamW([bucket], OptimConfig(implementation=how), seed)
                for (_, tensor, _), (_, saved, _) in zip(
                    optimizer.tensors(), old.tensors(), strict=True
                ):
                    tensor.copy_(saved)
                optimizer.set_step_count(step)
            bucket.grads.copy_(
                torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step))
            )
            optimizer.step(lr=0.1)
        weights.append(bucket.weights.clone())
    assert torch.equal(*weights)


def test_the_norm_counts_owned_elements_once():
    def bucket(rank, replica):
        shard, replicate = Axis("dp_shard_cp", (0, 1), rank), Axis("dp_replicate", (0, 1), replica)
        made = Bucket(parameters(), shard, replicate, torch.float32)
        made.grads.fill_(2.0)  # padding between parameters too: it must not count
        return made

    total = sum(
        global_square_sum([bucket(rank, replica)]).item() for rank in (0, 1) for replica in (0, 1)
    )
    assert total == pytest.approx(4.0 * (35 + 3 + 4 + 36))


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    bucket = Bucket(parameters(), Axis("dp_shard_cp"), Axis("dp_replicate"), torch.bfloat16)
    bucket.grads.copy_(torch.randn(bucket.numel, generator=torch.Generator().manual_seed(0)))
    owned = [bucket.grad_slice[slice(*segment.owned)].double() for segment in bucket.segments()]
    expected = sum(grad.square().sum().item() for grad in owned)
    assert global_square_sum([bucket]).item() == pytest.approx(expected, rel=1e-6)


def test_the_norm_of_many_elements_is_as_exact_as_float32():
    """Summed in one go, float32 loses a thousandth of ten million squares on a CPU."""
    spec = ShardSpec("weight", (2500, 4000), unsharded((2500, 4000)))
    bucket = Bucket(
        [new_parameter(spec.shape, spec, torch.float32, "cpu")],
        Axis("dp_shard_cp"),
        Axis("dp_replicate"),
        torch.float32,
    )
    bucket.grads.normal_(generator=torch.Generator().manual_seed(0))
    expected = bucket.grads.double().square().sum().item()
    assert global_square_sum([bucket]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_in_the_update_is_clipping_before_it(dtype):
    """torch's update takes the factor, but in float32 alone."""
    weights = []
    for before in (False, True):
        wide = [torch.nn.Parameter(each.detach().to(dtype)) for each in parameters()]
        for each, like in zip(wide, parameters()):
            state_of(each).spec = spec_of(like)
        bucket = Bucket(wide, Axis("dp_shard_cp"), Axis("dp_replicate"), dtype)
        optimizer = AdamW([bucket], OptimConfig(weight_decay=0.3, eps=0.5, implementation="torch"))
        for step in range(3):
            bucket.grads.copy_(
                torch.randn(
                    bucket.numel, generator=torch.Generator().manual_seed(step), dtype=dtype
                )
            )
            bucket.grads.mul_(0.3 if before else 1)
            optimizer.step(lr=0.1, scale=None if before else 0.3)
        weights.append(bucket.weights)
    torch.testing.assert_close(*weights, rtol=10 * torch.finfo(dtype).eps, atol=0)


def test_clipping_is_torchs_rule():
    assert clip_coefficient(2.0, 1.0) == pytest.approx(1 / (2 + 1e-6))
    assert clip_coefficient(0.5, 1.0) is None
    assert clip_coefficient(5.0, 0.0) is None


class Calls(TorchDispatchMode):
    """Remembers which operations were called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.seen.append(operation)
        return operation(*args, **(kwargs or {}))


def test_masters_on_the_host_are_widened_there():
    """The device may have no room for an fp32 copy of its weights, which is why they are on the
    host."""
    leaves = [
        new_parameter(spec.shape, spec, torch.bfloat16, "cpu")
        for spec in map(spec_of, parameters())
    ]
    bucket = Bucket(leaves, Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float32)
    with Calls() as calls:
        AdamW([bucket], OptimConfig(offload=True))
    assert (
        torch.ops.aten.copy_.default in calls.seen
        and torch.ops.aten._to_copy.default not in calls.seen
    )


def test_masters_on_the_host_take_weights_that_were_loaded():
    bucket = Bucket(parameters(), Axis("dp_shard_cp"), Axis("dp_replicate"), torch.float32)
    optimizer = AdamW([bucket], OptimConfig(weight_decay=0.0, offload=True))
    bucket.weights.copy_(torch.arange(bucket.weights.numel()))
    loaded = bucket.weights.clone()
    optimizer.take_unsaved_masters()
    optimizer.step(lr=0.0)
    assert torch.equal(bucket.weights, loaded)
    assert {kind for kind, _, _ in optimizer.tensors()} == {"exp_avg", "exp_avg_sq"}, (
        "saved once, as the weights"
    )

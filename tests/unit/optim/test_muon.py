"""Muon: what its iteration does to singular values, whose matrices it takes, who works on them and
what is sent."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from layouts import make_rows
from parity_configs import config_of
from ranks import run_ranks

from megatron5d.comm.ledger import Ledger
from megatron5d.config.schema import Config, OptimConfig, PrecisionConfig
from megatron5d.data_parallel.bucket import Bucket
from megatron5d.model.gpt import GPT
from megatron5d.optim import muon
from megatron5d.optim.muon import orthogonalize
from megatron5d.optim.optimizer import build_optimizer
from megatron5d.optim.sharded_state import takes_muon
from megatron5d.parity.run import short_run
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, spec_of, state_of, unsharded
from megatron5d.train.build import build_sync, sizes_of

MUON = OptimConfig(name="muon", weight_decay=0.0)


@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 16, 40), (2, 40, 16)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(-2, 3, min(shape[1:]), dtype=torch.float64)  # 1e-5 to 1 of the largest
    found = u.mT @ orthogonalize(u * values @ v, 5) @ v.mT
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    seen = values > 10  # from a hundredth of the largest on
    assert ((diagonal[:, seen] > 0.65) & (diagonal[:, seen] < 1.2)).all()
    assert (diagonal > 0).all() and (diagonal.diff()[:, values[:-1] < 1] > 0).all(), (
        "smaller ones are on their way"
    )
    torch.testing.assert_close(found, torch.diag_embed(diagonal), rtol=0, atol=1e-12)


def test_a_matrix_of_zeros_stays_zero_and_bf16_comes_near():
    stack = torch.stack((torch.zeros(12, 20), torch.randn(12, 20)))
    zero, one = orthogonalize(stack.bfloat16(), 5)
    assert zero.dtype == torch.bfloat16 and not zero.any()
    values = torch.linalg.svdvals(one.float())
    assert values.min() > 0.6 and values.max() < 1.25


def layers_of(config: Config) -> GPT:
    return GPT(config, build_mesh(sizes_of(config, 1), num_kv_heads=config.model.num_kv_heads))


def test_layers_matrices_are_muons_and_the_rest_is_not():
    experts = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16, "shared_ffn_hidden_size": 8}
    for model in ("gpt2_style", "mla", "gqa_sinks"):
        for more in (
            {},
            {**experts, "first_k_dense": 1, "num_mtp_layers": 1, "tie_embeddings": False},
        ):
            config = config_of(model, optim={"name": "muon"})
            config = replace(config, model=replace(config.model, **more))
            specs = [spec_of(parameter) for parameter in layers_of(config).parameters()]
            for spec in specs:
                matrix = len(spec.shape) > 1 and not spec.name.endswith(".bias")
                inside = spec.name.startswith("layers.") and matrix and ".router." not in spec.name
                assert takes_muon(spec, config.optim) == inside, spec.name
                assert not spec.stack or sum(spec.stack) == spec.shape[-2]
                assert not takes_muon(spec, OptimConfig())


def one_bucket(dtype=torch.float32, shape=(64, 128)) -> Bucket:
    spec = ShardSpec("layers.0.mlp.up.weight", shape, unsharded(shape), stack=(16, 48))
    return Bucket([new_parameter(shape, spec, dtype, "cpu")], Axis("dp"), Axis("dp"), torch.float32)


def optimizer_of(bucket: Bucket, config: OptimConfig, **options):
    return build_optimizer([bucket], config, build_mesh(sizes_of(Config(), 1)), **options)


def test_an_update_has_the_size_of_adamws_and_one_moment():
    bucket = one_bucket(shape=(64, 24))
    bucket.weights.zero_()
    optimizer = optimizer_of(bucket, MUON)
    assert [kind for kind, _, _ in optimizer.tensors()] == ["momentum"]
    bucket.grads.copy_(torch.randn(bucket.numel) * 1e-3)
    optimizer.step(1.0, scale=0.5)
    (parameter,) = bucket.parameters
    for part in parameter.detach().split([16, 48]):
        assert 0.2 * 0.7 < part.square().mean().sqrt().item() < 0.2 * 1.2, (
            "0.2 times singular values near 1"
        )


def test_ranks_come_to_their_groups_in_one_order_whatever_that_of_their_layers():
    """Mirrored pipeline ranks hold the same layers in another one: who begins with experts would
    wait for ever, and who begins with another matrix would mix them up."""
    model = replace(
        config_of().model, num_experts=2, top_k=1, moe_ffn_hidden_size=8, first_k_dense=1
    )
    config = replace(config_of(optim={"name": "muon"}), model=model)
    mesh = build_mesh(sizes_of(config, 1), num_kv_heads=model.num_kv_heads)
    buckets = [
        b
        for b in build_sync(config, mesh, GPT(config, mesh)).buckets
        if takes_muon(spec_of(b.parameters[0]), config.optim)
    ]
    orders = [
        [
            (each.shard.name, each.cut.name, [matrix.spec.name for matrix in each.matrices])
            for each in muon.Muon(some, config.optim, mesh)._gathers
        ]
        for some in (buckets, buckets[::-1])
    ]
    assert orders[0] == orders[1] and len(orders[0]) == 2


@pytest.mark.parametrize(
    ("dtype", "offload", "take"),
    [
        (torch.bfloat16, False, "weights_to_masters"),
        (torch.float32, True, "weights_to_masters"),
        (torch.float32, True, "take_unsaved_masters"),
    ],
)
def test_both_optimisers_take_weights_that_were_loaded_and_the_number_of_updates(
    dtype, offload, take
):
    norm = new_parameter((24,), ShardSpec("norm.weight", (24,), unsharded((24,))), dtype, "cpu")
    buckets = [Bucket([norm], Axis("dp"), Axis("dp"), torch.float32), one_bucket(dtype)]
    config = replace(MUON, offload=offload)
    optimizer = build_optimizer(buckets, config, build_mesh(sizes_of(Config(), 1)))
    for bucket in buckets:
        bucket.weights.fill_(3.0)
    getattr(optimizer, take)()
    optimizer.step(0.0)
    for bucket, part in zip(buckets, optimizer.parts, strict=True):
        assert (bucket.weights == 3.0).all(), (
            f"{type(part).__name__} has other masters than the weights"
        )
    optimizer.set_step_count(7)
    assert [part.step_count for part in optimizer.parts] == [7, 7]


def test_without_masters_small_updates_are_not_lost():
    """Thirty updates of a weight of 1 by about 2e-4 each, whose neighbours are 4e-3 and 8e-3
    away."""
    bucket = one_bucket(torch.bfloat16)
    (weight,) = bucket.parameters
    weight.data.fill_(1.0)
    optimizer = optimizer_of(bucket, MUON, rounding_seed=1)
    assert [kind for kind, _, _ in optimizer.tensors()] == ["momentum"], (
        "masters are kept after all"
    )
    gradient, exact = torch.randn(64, 128), one_bucket()
    exact.weights.fill_(1.0)
    other = optimizer_of(exact, MUON)
    for _ in range(30):
        for each, part in ((bucket, optimizer), (exact, other)):
            state_of(each.parameters[0]).main_grad.copy_(gradient)
            part.step(1e-3)
    moved, wanted = weight.detach().float() - 1, exact.parameters[0].detach() - 1
    assert wanted.abs().mean() > 1e-3
    slope = (moved * wanted).sum() / wanted.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.05)


def count_work(rank: int, world: int, config: Config):
    """Sizes of the matrices that this rank makes orthogonal, and bytes that the optimiser sends by
    axis."""
    ledger = Ledger()
    mesh = build_mesh(
        sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads, recorder=ledger
    )
    model = GPT(config, mesh)
    sync = build_sync(config, mesh, model)
    worked, original = Counter(), muon.orthogonalize

    def counted(matrix, steps):
        worked[tuple(matrix.shape)] += 1
        return original(matrix, steps)

    muon.orthogonalize = counted
    optimizer = build_optimizer(sync.buckets, config.optim, mesh)
    ledger.clear()
    optimizer.step(1e-3)
    return worked, ledger.bytes_by_axis()


def test_every_matrix_is_one_ranks_work_and_every_rank_has_some():
    """On tp 2 × dp 2, ZeRO-1: what is sent is what leaves a rank of a share of each matrix, there
    and back."""
    config = config_of("llama_gqa", tp=2, zero=1, optim={"name": "muon"})
    found = run_ranks(count_work, 4, config)
    h, f, kv = 32, 48, 16
    once = Counter(
        {(1, h, h): 2 * 2, (1, kv, h): 2 * 2, (1, f, h): 2 * 2, (1, h, f): 2}
    )  # q, out; k, v; gate, up; down
    assert sum((worked for worked, _ in found), Counter()) == once
    assert all(worked for worked, _ in found)
    numel = sum(count * math.prod(shape) for shape, count in once.items())
    sent = {
        axis: sum(by_axis.get(axis, 0) for _, by_axis in found) for axis in ("dp_shard_cp", "tp")
    }
    assert sent == {"dp_shard_cp": 2 * numel // 2 * 8, "tp": 2 * numel // 2 * 8}, (
        "half of each, in fp64, both ways"
    )


def test_slices_of_any_stage_give_the_same_bits():
    """In bf16 without masters, a micro-batch on each of two ranks: what is orthogonalised is whole,
    however cut."""
    weights = []
    for zero in (1, 2, 3):
        config = config_of("llama_gqa", gbs=2, zero=zero, optim={"name": "muon"})
        config = replace(config, precision=PrecisionConfig("bf16", master_weights=False))
        weights.append(short_run(config, 2, make_rows(config, 2), 2)[0].weights[-1])
    for other in weights[1:]:
        for (name, _, mine), (_, _, theirs) in zip(weights[0], other, strict=True):
            assert torch.equal(mine, theirs), name

"""Muon: its effect on singular values, its matrices, and who computes and sends what."""

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
from megatron5d.optim.sharded_state import uses_muon
from megatron5d.parity.inputs import Rows
from megatron5d.parity.run import short_run
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import ShardSpec, new_parameter, spec_of, state_of, unsharded
from megatron5d.train.build import build_sync, sizes_of

MUON = OptimConfig(name="muon", weight_decay=0.0)


def mesh_of(config, world=1, rank=0, **options):
    return build_mesh(
        sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads, **options
    )


@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 16, 40), (2, 40, 16)])
def test_singular_values_approach_one_and_vectors_are_kept(shape):
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(-2, 3, min(shape[1:]), dtype=torch.float64)  # 1e-5 to 1 of the largest
    result = u.mT @ orthogonalize(u * values @ v, 5) @ v.mT
    diagonal = result.diagonal(dim1=-2, dim2=-1)
    large = diagonal[:, values > 10]  # at least a hundredth of the largest
    assert ((large > 0.65) & (large < 1.2)).all()
    # Smaller values have grown and are still in order.
    assert (diagonal > 0).all() and (diagonal.diff()[:, values[:-1] < 1] > 0).all()
    torch.testing.assert_close(result, torch.diag_embed(diagonal), rtol=0, atol=1e-12)


def test_zeros_stay_zero_and_bf16_is_close():
    stack = torch.stack((torch.zeros(12, 20), torch.randn(12, 20)))
    zeros, matrix = orthogonalize(stack.bfloat16(), 5)
    assert zeros.dtype == torch.bfloat16 and not zeros.any()
    values = torch.linalg.svdvals(matrix.float())
    assert values.min() > 0.6 and values.max() < 1.25


EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16, "shared_ffn_hidden_size": 8}


@pytest.mark.parametrize("model", ["gpt2_style", "mla", "gqa_sinks"])
@pytest.mark.parametrize(
    "fields", [{}, {**EXPERTS, "first_k_dense": 1, "num_mtp_layers": 1, "tie_embeddings": False}]
)
def test_muon_updates_the_matrices_of_layers_only(model, fields):
    config = config_of(model, optim={"name": "muon"})
    config = replace(config, model=replace(config.model, **fields))
    for spec in map(spec_of, GPT(config, mesh_of(config)).parameters()):
        is_matrix = len(spec.shape) > 1 and not spec.name.endswith(".bias")
        in_layers = spec.name.startswith("layers.") and ".router." not in spec.name
        assert uses_muon(spec, config.optim) == (is_matrix and in_layers), spec.name
        assert not spec.stack or sum(spec.stack) == spec.shape[-2]
        assert not uses_muon(spec, OptimConfig())


def new_bucket(dtype=torch.float32, shape=(64, 128)) -> Bucket:
    spec = ShardSpec("layers.0.mlp.up.weight", shape, unsharded(shape), stack=(16, 48))
    return Bucket([new_parameter(shape, spec, dtype, "cpu")], Axis("dp"), Axis("dp"), torch.float32)


def new_optimizer(*buckets: Bucket, config: OptimConfig = MUON, **options):
    return build_optimizer(buckets, config, mesh_of(Config()), **options)


def test_an_update_has_the_size_of_adamws_and_one_moment():
    bucket = new_bucket(shape=(64, 24))
    bucket.weights.zero_()
    optimizer = new_optimizer(bucket)
    assert [kind for kind, _, _ in optimizer.tensors()] == ["momentum"]
    bucket.grads.copy_(torch.randn(bucket.numel) * 1e-3)
    optimizer.step(1.0, scale=0.5)
    (parameter,) = bucket.parameters
    for matrix in parameter.detach().split([16, 48]):
        # 0.2 times singular values near 1
        assert 0.2 * 0.7 < matrix.square().mean().sqrt().item() < 0.2 * 1.2


def test_all_ranks_gather_in_one_order():
    """Mirrored pipeline ranks hold the same layers in another order. With another order of groups
    they would wait forever, with another order of matrices mix them up."""
    experts = {"num_experts": 2, "top_k": 1, "moe_ffn_hidden_size": 8, "first_k_dense": 1}
    config = config_of(optim={"name": "muon"})
    config = replace(config, model=replace(config.model, **experts))
    mesh = mesh_of(config)
    buckets = [
        bucket
        for bucket in build_sync(config, mesh, GPT(config, mesh)).buckets
        if uses_muon(spec_of(bucket.parameters[0]), config.optim)
    ]
    orders = [
        [
            (gather.shard.name, gather.tp.name, [matrix.spec.name for matrix in gather.matrices])
            for gather in muon.Muon(some, config.optim, mesh)._gathers
        ]
        for some in (buckets, buckets[::-1])
    ]
    assert orders[0] == orders[1] and len(orders[0]) == 2


@pytest.mark.parametrize(
    ("dtype", "offload", "copy_weights"),
    [
        (torch.bfloat16, False, "weights_to_masters"),
        (torch.float32, True, "weights_to_masters"),
        (torch.float32, True, "restore_unsaved_masters"),
    ],
)
def test_both_optimizers_take_loaded_weights_and_the_step_count(dtype, offload, copy_weights):
    norm = new_parameter((24,), ShardSpec("norm.weight", (24,), unsharded((24,))), dtype, "cpu")
    buckets = [Bucket([norm], Axis("dp"), Axis("dp"), torch.float32), new_bucket(dtype)]
    optimizer = new_optimizer(*buckets, config=replace(MUON, offload=offload))
    for bucket in buckets:
        bucket.weights.fill_(3.0)
    getattr(optimizer, copy_weights)()
    optimizer.step(0.0)
    for bucket, part in zip(buckets, optimizer.optimizers, strict=True):
        assert (bucket.weights == 3.0).all(), f"{type(part).__name__} has stale masters"
    optimizer.set_step_count(7)
    assert [part.step_count for part in optimizer.optimizers] == [7, 7]


def test_without_masters_small_updates_are_not_lost():
    """Thirty updates of about 2e-4 on weights of 1, whose neighbors are 4e-3 and 8e-3 away."""
    gradient, changes = torch.randn(64, 128), []
    for dtype, seed in ((torch.bfloat16, 1), (torch.float32, None)):
        bucket = new_bucket(dtype)
        bucket.weights.fill_(1.0)
        optimizer = new_optimizer(bucket, rounding_seed=seed)
        assert [kind for kind, _, _ in optimizer.tensors()] == ["momentum"], "no masters"
        (weight,) = bucket.parameters
        for _ in range(30):
            state_of(weight).main_grad.copy_(gradient)
            optimizer.step(1e-3)
        changes.append(weight.detach().float() - 1)
    rounded, exact = changes
    assert exact.abs().mean() > 1e-3
    slope = (rounded * exact).sum() / exact.square().sum()
    assert slope.item() == pytest.approx(1.0, abs=0.05)


def count_work(rank: int, world: int, config: Config):
    """Shapes that this rank orthogonalizes, and bytes that the optimizer sends by axis."""
    ledger = Ledger()
    mesh = mesh_of(config, world, rank, recorder=ledger)
    sync = build_sync(config, mesh, GPT(config, mesh))
    shapes, original = Counter(), muon.orthogonalize

    def counted(matrix, steps):
        shapes[tuple(matrix.shape)] += 1
        return original(matrix, steps)

    muon.orthogonalize = counted
    optimizer = build_optimizer(sync.buckets, config.optim, mesh)
    ledger.clear()
    optimizer.step(1e-3)
    return shapes, ledger.bytes_by_axis()


def test_every_matrix_is_orthogonalized_once_and_every_rank_takes_part():
    """On tp 2 × dp 2 with ZeRO-1, half of each matrix is sent over each axis, in both
    directions."""
    config = config_of("llama_gqa", tp=2, zero=1, optim={"name": "muon"})
    shapes, sent = zip(*run_ranks(count_work, 4, config))
    h, f, kv = 32, 48, 16
    # q, out; k, v; gate, up; down
    expected = Counter({(1, h, h): 4, (1, kv, h): 4, (1, f, h): 4, (1, h, f): 2})
    assert sum(shapes, Counter()) == expected and all(shapes)
    numel = sum(count * math.prod(shape) for shape, count in expected.items())
    for axis in ("dp_shard_cp", "tp"):
        assert sum(by_axis.get(axis, 0) for by_axis in sent) == 2 * numel // 2 * 8  # fp64


def test_slices_of_any_zero_stage_give_the_same_bits():
    """In bf16 without masters, one micro-batch on each of two ranks: the matrices are gathered."""
    weights = []
    for zero in (1, 2, 3):
        config = config_of("llama_gqa", gbs=2, zero=zero, optim={"name": "muon"})
        config = replace(config, precision=PrecisionConfig("bf16", master_weights=False))
        weights.append(short_run(config, 2, Rows(make_rows(config, 2)), 2)[0].weights[-1])
    for stage in weights[1:]:
        for (name, _, expected), (_, _, weight) in zip(weights[0], stage, strict=True):
            assert torch.equal(expected, weight), name

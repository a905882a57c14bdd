"""Recomputation and offloading change no number: each part, alone and together, under every kind of
layout, with W deferred.

All parts together are compared with one process's reference; each part by itself with the same
ranks that keep everything, bit for bit. Only norms and the head may differ in the last bits: a
recomputed norm sums the gradient of its input in another order; slices of logits sum the gradient
of the matrix one by one.
"""

from dataclasses import replace

import pytest
from layouts import assert_parity, make_rows, micro_batch, perturb
from parity_configs import MLA, config_of
from rank_pool import run_on_pool

from megatron5d.config.schema import MoeConfig, PipelineConfig, RecomputeConfig
from megatron5d.data.batch import SequenceSharding
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

PARTS = ["norm", "qkv", "attention", "activation", "mlp"]
SELECTIVE = [RecomputeConfig("selective", [name]) for name in PARTS]
ALL = RecomputeConfig("selective", PARTS)
ROUTED = ["experts", "permute"]
EXPERTS = [RecomputeConfig("selective", [name]) for name in PARTS + ROUTED]
EXPERTS.append(RecomputeConfig("selective", PARTS + ROUTED))
FULL = [RecomputeConfig("full"), RecomputeConfig("full", group_layers=2)]
SLICED = RecomputeConfig(logit_tokens=5)


def scheduled(config, schedule, layers):
    model = replace(config.model, num_layers=layers)
    return replace(config, model=model, pipeline=PipelineConfig(schedule))


def first_gradients(rank, config, mesh, layout, batches):
    model = GPT(config, mesh, "cpu", layout.stage_specs(mesh["pp"].rank), layout.shared)
    model.initialize(config.train.seed)
    perturb(model.weights())
    sync, _, trainer = build_trainer(config, mesh, model, layout)
    trainer.accumulate(batches)
    sync.finish_reduce()
    balancer = model.balancer
    routing = [] if balancer is None else [balancer.counts, balancer.loss_values]
    return [tensor.clone() for tensor in [bucket.grad_slice for bucket in sync.buckets] + routing]


def relative_difference(a, b):
    """The largest difference relative to the largest entry."""
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() if a.numel() else 0.0


def changing_modes(rank, world, config, rows, modes):
    """The modes with other gradients, routing or auxiliary losses on this rank than `none` has."""
    layout = pipeline_layout(config, world)
    sizes, num_kv_heads = sizes_of(config, world), config.model.num_kv_heads
    mesh = build_mesh(sizes, rank, num_kv_heads=num_kv_heads, shared=layout.shared)
    t, dp, sharding = config.train, mesh["dp"], SequenceSharding(config, mesh)
    batches = [
        sharding(micro_batch(config, rows[list(samples)]))
        for samples in micro_batch_samples(0, t.gbs, t.mbs, dp.rank, dp.size)
    ]
    expected = first_gradients(rank, config, mesh, layout, batches)
    changing = []
    for mode in modes:
        grads = first_gradients(rank, replace(config, recompute=mode), mesh, layout, batches)
        reordered = mode.logit_tokens or (mode.mode == "selective" and "norm" in mode.parts)
        bound = 1e-13 if reordered else 0.0
        if any(relative_difference(a, b) > bound for a, b in zip(expected, grads, strict=True)):
            changing.append(mode)
    return changing


EXPERTS_OF = {
    "shared": {
        "num_experts": 8,
        "top_k": 3,
        "moe_ffn_hidden_size": 12,
        "shared_ffn_hidden_size": 20,
        "first_k_dense": 1,
        "router_score": "sigmoid",
        "num_groups": 4,
        "top_groups": 2,
        "group_score": "top2_sum",
        "router_bias": True,
    },
    "plain": {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 16, "activation": "gelu"},
    "latent": {**MLA, "num_experts": 4, "attention": "mla", "q_lora_rank": 8, "kv_lora_rank": 6},
}


def moe(experts, capacity=None, **parallel):
    config = config_of(**parallel)
    balance = ["aux", "seq_aux", "global_aux", "bias"]
    return replace(
        config,
        model=replace(config.model, **{"num_kv_heads": 4, **EXPERTS_OF[experts]}),
        moe=MoeConfig(
            balance, aux_coef=0.1, z_coef=0.02, bias_rate=0.005, capacity_factor=capacity
        ),
    )


CASES = {
    "tp2 sp, cp2 ring": (
        4,
        config_of("mqa_qk_norm", mbs=4, tp=2, sp=True, cp=2),
        [*SELECTIVE, ALL, *FULL, SLICED],
    ),
    "gpt2, tp2, zb_h1": (
        4,
        scheduled(config_of("gpt2_style", gbs=4, tp=2, pp=2), "zb_h1", 4),
        [*SELECTIVE, ALL, *FULL, SLICED],
    ),
    "1f1b, zero": (4, scheduled(config_of(gbs=8, pp=2, zero=1), "1f1b", 4), [ALL, FULL[1]]),
    "allgather": (
        2,
        config_of("softcaps_window", gbs=2, cp=2, cp_method="allgather"),
        [ALL, SELECTIVE[2], SLICED],
    ),
    "ulysses": (2, config_of("gqa_sinks", gbs=2, cp=2, cp_method="ulysses"), [ALL, SELECTIVE[2]]),
    "two_level": (
        4,
        config_of("mla", gbs=2, cp=4, cp_method="two_level", cp_inner=2),
        [ALL, *SELECTIVE[1:3]],
    ),
    "compressed kv": (2, config_of("mla", gbs=2, cp=2, cp_compress_kv=True), [ALL, *SELECTIVE[:3]]),
    "experts, zb_h1": (
        4,
        scheduled(moe("shared", gbs=8, pp=2, ep=2), "zb_h1", 4),
        [*EXPERTS, *FULL],
    ),
    "experts, tp2 sp, etp2": (
        4,
        moe("plain", 1.0, gbs=4, tp=2, sp=True, ep=2),
        [EXPERTS[-1], FULL[1]],
    ),
    "experts over nodes": (4, moe("plain", ep=4, gbs=4, ep_inner=2), [EXPERTS[-2], EXPERTS[-1]]),
    "experts, dualpipe": (
        4,
        scheduled(moe("latent", gbs=8, pp=2, ep=2), "dualpipe", 2),
        [EXPERTS[-1], FULL[0]],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_recomputation_changes_no_gradient(case):
    world, config, modes = CASES[case]
    rows = make_rows(config, 1, ignored=0.3)
    for rank, changing in enumerate(run_on_pool(changing_modes, world, config, rows, modes)):
        assert not changing, f"rank {rank}"


REFERENCED = [
    "gpt2, tp2, zb_h1",
    "two_level",
    "experts, zb_h1",
    "experts, tp2 sp, etp2",
    "experts over nodes",
]


@pytest.mark.parametrize("case", REFERENCED)
def test_all_parts_recomputed_equal_one_process(case):
    world, config, modes = CASES[case]
    all_parts = [mode for mode in modes if mode.mode == "selective"][-1]
    assert_parity(replace(config, recompute=replace(all_parts, logit_tokens=7)), world)


@pytest.mark.parametrize(("zero", "ep"), [(2, 2), (3, 1)])
def test_all_activations_on_the_host_equal_one_process(zero, ep):
    """With the optimizer's state in host memory too, where the update of slices runs."""
    experts = moe("shared", gbs=8, pp=2, ep=ep, zero=zero, optim={"offload": True})
    phases = ["attention", "mlp", "dispatch", "experts", "combine"]
    recompute = RecomputeConfig(
        "selective", ["norm", "activation"], offload=phases, offload_min_bytes=256
    )
    assert_parity(replace(scheduled(experts, "zb_h1", 4), recompute=recompute), 4)

"""What is computed again gives the same numbers: each part, alone and together, under every kind of
layout, W apart.

Everything recomputed is compared with one process's reference; each part by itself with the same
ranks that keep everything, bit for bit. Only norms and the head may differ in the last bits: where
norms stand apart, their plain path adds up the gradient of its input in another order; slices of
logits add up the gradient of the matrix one by one.
"""

import dataclasses

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

PARTS = ("norm", "qkv", "attention", "activation", "mlp")
SELECTIVE = [RecomputeConfig("selective", [part]) for part in PARTS]
ALL = RecomputeConfig("selective", list(PARTS))
ROUTED = ("experts", "permute")
EXPERTS = [
    RecomputeConfig("selective", parts)
    for parts in (*([part] for part in (*PARTS, *ROUTED)), [*PARTS, *ROUTED])
]
FULL = [RecomputeConfig("full"), RecomputeConfig("full", group_layers=2)]
SLICED = RecomputeConfig(logit_tokens=5)


def scheduled(config, schedule, layers):
    model = dataclasses.replace(config.model, num_layers=layers)
    return dataclasses.replace(config, model=model, pipeline=PipelineConfig(schedule))


def first_gradients(rank, config, mesh, plan, batches):
    model = GPT(config, mesh, "cpu", plan.stage_specs(mesh["pp"].rank), plan.shared)
    model.initialize(config.train.seed)
    perturb(model.weights())
    sync, _, trainer = build_trainer(config, mesh, model, plan)
    trainer.accumulate(batches)
    sync.finish_reduce()
    figures = [] if model.balancer is None else [model.balancer.chosen, model.balancer.values]
    return [bucket.grad_slice.clone() for bucket in sync.buckets] + [
        each.clone() for each in figures
    ]


def differs(a, b):
    """Largest difference relative to the largest entry."""
    return ((a - b).abs().max() / a.abs().max().clamp(min=1e-30)).item() if a.numel() else 0.0


def changed_bits(rank, world, config, rows, modes):
    """The modes with other gradients, choices of experts or auxiliary losses than `none` has,
    here."""
    plan = pipeline_layout(config, world)
    sizes, kv = sizes_of(config, world), config.model.num_kv_heads
    mesh = build_mesh(sizes, rank, num_kv_heads=kv, shared=plan.shared)
    t, dp, sharding = config.train, mesh["dp"], SequenceSharding(config, mesh)
    batches = [
        sharding(micro_batch(config, rows[list(each)]))
        for each in micro_batch_samples(0, t.gbs, t.mbs, dp.rank, dp.size)
    ]
    plain = first_gradients(rank, config, mesh, plan, batches)
    changed = []
    for mode in modes:
        again = first_gradients(
            rank, dataclasses.replace(config, recompute=mode), mesh, plan, batches
        )
        reordered = mode.logit_tokens or (mode.mode == "selective" and "norm" in mode.parts)
        bound = 1e-13 if reordered else 0.0
        if not all(differs(a, b) <= bound for a, b in zip(plain, again, strict=True)):
            changed.append(mode)
    return changed


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
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **{"num_kv_heads": 4, **EXPERTS_OF[experts]}),
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
    "latents travel": (
        2,
        config_of("mla", gbs=2, cp=2, cp_compress_kv=True),
        [ALL, *SELECTIVE[:3]],
    ),
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
def test_nothing_changes(case):
    world, config, modes = CASES[case]
    rows = make_rows(config, 1, ignored=0.3)
    for rank, changed in enumerate(run_on_pool(changed_bits, world, config, rows, modes)):
        assert not changed, f"rank {rank}"


@pytest.mark.parametrize(
    "case",
    [
        "gpt2, tp2, zb_h1",
        "two_level",
        "experts, zb_h1",
        "experts, tp2 sp, etp2",
        "experts over nodes",
    ],
)
def test_everything_recomputed_equals_one_process(case):
    world, config, modes = CASES[case]
    whole = [mode for mode in modes if mode.mode == "selective"][-1]
    assert_parity(
        dataclasses.replace(config, recompute=dataclasses.replace(whole, logit_tokens=7)), world
    )


@pytest.mark.parametrize(("zero", "ep"), [(2, 2), (3, 1)])
def test_everything_on_the_host_equals_one_process(zero, ep):
    """Activations of all phases and the optimiser's state wait in host memory; the update of slices
    runs there."""
    config = scheduled(
        moe("shared", gbs=8, pp=2, ep=ep, zero=zero, optim={"offload": True}), "zb_h1", 4
    )
    phases = ["attention", "mlp", "dispatch", "experts", "combine"]
    recompute = RecomputeConfig(
        "selective", ["norm", "activation"], offload=phases, offload_min_bytes=256
    )
    assert_parity(dataclasses.replace(config, recompute=recompute), 4)

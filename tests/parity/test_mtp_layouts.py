"""Multi-token prediction on N ranks equals one process: loss, every gradient, weights after steps;
fp64 to 1e-10."""

import pytest
import torch
from layouts import assert_parity, make_rows

from megatron5d.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)

EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "moe_ffn_hidden_size": 12,
    "shared_ffn_hidden_size": 12,
    "first_k_dense": 1,
    "router_score": "sigmoid",
    "router_bias": True,
}
MOE = MoeConfig(balance=["aux", "global_aux", "bias"], aux_coef=0.1, z_coef=0.02, bias_rate=0.005)


def config_of(
    depths=1,
    *,
    layers=2,
    gbs=4,
    mbs=1,
    schedule="1f1b",
    sparse=True,
    recompute="none",
    data=None,
    **more,
):
    sliced, stages = more.pop("logit_tokens", None), more.pop("stages", None)
    model = {
        name: more.pop(name)
        for name in ("tie_embeddings", "vocab_size", "position")
        if name in more
    }
    return Config(
        model=ModelConfig(
            **{
                "num_layers": layers,
                "hidden_size": 16,
                "ffn_hidden_size": 24,
                "head_dim": 8,
                "num_heads": 2,
                "num_kv_heads": 2,
                "vocab_size": 61,
                "num_mtp_layers": depths,
                **(EXPERTS if sparse else {}),
                **model,
            }
        ),
        parallel=ParallelConfig(**more),
        pipeline=PipelineConfig(schedule=schedule, layout=stages),
        train=TrainConfig(steps=10, gbs=gbs, mbs=mbs, seq_len=8, mtp_loss=0.6, z_loss=0.01),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip=0.5),
        moe=MOE if sparse else MoeConfig(),
        precision=PrecisionConfig(dtype="fp64"),
        recompute=RecomputeConfig(recompute, logit_tokens=sliced),
        data=data or DataConfig(),
    )


DOCUMENTS = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)
CASES = {
    "one rank, two depths": (1, {"depths": 2, "mbs": 2}),
    "dense, tied, learned positions": (
        1,
        {"sparse": False, "tie_embeddings": True, "position": "learned"},
    ),
    "tp2 sp, two depths, recomputed": (2, {"depths": 2, "tp": 2, "sp": True, "recompute": "full"}),
    "cp2, two depths, documents": (2, {"depths": 2, "cp": 2, "ep": 2, "data": DOCUMENTS, "mbs": 2}),
    "pp2, two depths, embedding copied, zero": (4, {"depths": 2, "pp": 2, "zero": 1, "ep": 2}),
    "pp2 zb_h1, tp2, tied, logits in slices": (
        4,
        {
            "pp": 2,
            "schedule": "zb_h1",
            "tp": 2,
            "ep": 2,
            "etp": 1,
            "tie_embeddings": True,
            "logit_tokens": 3,
        },
    ),
    # a unit whose head runs before the rest is run again
    "zero 3, recomputed": (2, {"recompute": "full", "zero": 3}),
    "pp3, with the head on a stage that holds no layer": (
        3,
        {"depths": 2, "pp": 3, "stages": [1, 1, 0], "gbs": 6},
    ),
    "a stage of its own, tp2 sp, two depths, recomputed": (
        8,
        {
            "depths": 2,
            "pp": 4,
            "tp": 2,
            "sp": True,
            "stages": [1, 1, 2, 0],
            "recompute": "full",
            "ep": 2,
            "etp": 1,
        },
    ),
    "behind a layer, documents, cp2, zero 1": (
        6,
        {"depths": 1, "pp": 3, "cp": 2, "ep": 2, "zero": 1, "stages": [1, 2, 0], "data": DOCUMENTS},
    ),
    "tied on three ranks, zero 3, split between two stages": (
        8,
        {
            "depths": 2,
            "pp": 4,
            "stages": [1, 1, 1, 0],
            "tie_embeddings": True,
            "zero": 3,
            "schedule": "zb_h1",
        },
    ),
    "interleaved, zero 2, sent past an empty stage": (
        4,
        {
            "depths": 2,
            "pp": 2,
            "vpp": 3,
            "stages": [1, 0, 1, 2, 0, 0],
            "schedule": "interleaved",
            "zero": 2,
        },
    ),
    "zb_v, before the head, tied": (
        4,
        {
            "pp": 2,
            "layers": 3,
            "stages": [1, 1, 2, 0],
            "schedule": "zb_v",
            "tie_embeddings": True,
            "zero": 1,
        },
    ),
    "dualpipe, before the head, zero 1": (
        8,
        {
            "pp": 4,
            "depths": 2,
            "gbs": 16,
            "schedule": "dualpipe",
            "stages": [1, 0, 3, 0],
            "zero": 1,
            "ep": 2,
        },
    ),
    "dualpipe_v, all five": (
        16,
        {
            "tp": 2,
            "sp": True,
            "cp": 2,
            "pp": 2,
            "ep": 4,
            "etp": 1,
            "zero": 1,
            "stages": [1, 1, 1, 0],
            "gbs": 8,
            "schedule": "dualpipe_v",
            "data": DOCUMENTS,
        },
    ),
    "zb_v, embedding here": (2, {"pp": 2, "layers": 4, "schedule": "zb_v"}),
    "dualpipe, zero": (2, {"pp": 2, "schedule": "dualpipe", "zero": 1}),
    "all five, documents": (
        8,
        {"tp": 2, "sp": True, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "zero": 1, "data": DOCUMENTS},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layout(case):
    world, options = CASES[case]
    assert_parity(
        config_of(**options), world=world, steps=2, ignored=0.7 if "documents" in case else 0.0
    )


SPREAD = {
    "one rank": (1, {"depths": 2, "mbs": 2}),
    "tp2 sp, cp2, pp2, zero": (
        8,
        {"depths": 2, "tp": 2, "sp": True, "cp": 2, "pp": 2, "zero": 1, "ep": 2, "etp": 1},
    ),
}


@pytest.mark.parametrize("case", SPREAD)
@pytest.mark.parametrize("data", [DataConfig(), DOCUMENTS], ids=["whole rows", "documents"])
def test_padding_anywhere(case, data):
    """Before and between tokens: no prediction is made at it, and attention does not see it."""
    world, options = SPREAD[case]
    config = config_of(**options, data=data)
    rows = make_rows(config, 2)
    rows[torch.rand(rows.shape, generator=torch.Generator().manual_seed(3)) < 0.15] = -100
    assert_parity(config, world=world, rows=rows)


@pytest.mark.parametrize("world, layout", [(1, {}), (4, {"pp": 2, "zero": 3, "cp": 2})])
def test_depths_without_targets(world, layout):
    """Documents of two tokens: the second depth has no target, and the first alone is trained, and
    told."""
    config = config_of(2, sparse=False, data=DataConfig(document_mask=True, eod=3), **layout)
    rows = make_rows(config, 2)
    rows[rows == 3], rows[:, 1::2] = 4, 3
    assert_parity(config, world=world, rows=rows)

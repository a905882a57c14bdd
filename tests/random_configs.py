"""Random lawful configurations: any architecture on any layout, so that pairs nobody thought of are met too."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

from megatron5d.config.convert import leaves, value_of
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
from megatron5d.pipeline_parallel.registry import schedule_names
from megatron5d.train.shrink import faults_of


def random_config(seed: int) -> tuple[Config, int, float]:
    """The configuration of this number, its world, and the share of padding in its data; lawful."""
    dice = random.Random(seed)
    name = random.Random(f"optimiser {seed}").choice(["adamw", "muon"])
    while True:
        world, model = dice.choice([2, 4, 4, 8, 8]), _model(dice)
        config = Config(
            model=model,
            parallel=_parallel(dice, world, model),
            pipeline=_pipeline(dice),
            train=TrainConfig(
                steps=10, gbs=dice.choice([4, 6, 8, 12]), mbs=dice.choice([1, 1, 2]), seq_len=dice.choice([8, 12, 16]),
                z_loss=dice.choice([0.0, 1e-2]),
            ),
            optim=OptimConfig(
                name=name, lr=1e-2, warmup_steps=2, clip=dice.choice([0.0, 0.5]),
                decay_exclude=dice.choice([[], ["*norm*"]]), offload=dice.random() < 0.1,
            ),
            precision=PrecisionConfig(dtype="fp64"),
            recompute=_recompute(dice, model),
            moe=_moe(dice, model),
            data=_data(dice),
        )  # fmt: skip
        if not faults_of(config, world):
            return config, world, dice.choice([0.0, 0.0, 0.3])


def another_layout(config: Config, seed: int) -> tuple[Config, int]:
    """The same training on other ranks: model, batch and loss stay. And how many ranks that are."""
    dice = random.Random(seed)
    while True:
        world = dice.choice([1, 2, 4, 8])
        other = replace(
            config,
            parallel=_parallel(dice, world, config.model),
            pipeline=_pipeline(dice),
            recompute=_recompute(dice, config.model),
            optim=replace(config.optim, offload=dice.random() < 0.2),
        )
        if not faults_of(other, world):
            return other, world


def overrides(config: Config) -> str:
    """What differs from the defaults, as on a command line."""
    values = {key: (value_of(config, key), value_of(Config(), key)) for key in leaves()}
    return " ".join(f"{key}={mine}" for key, (mine, default) in values.items() if mine != default)


def numbers(default: str) -> range:
    """Which configurations a test meets: first:last of MEGATRON5D_RANDOM, or the default."""
    first, last = os.environ.get("MEGATRON5D_RANDOM", default).split(":")
    return range(int(first), int(last))


def _some(dice: random.Random, share: float, **values: Any) -> dict[str, Any]:
    return values if dice.random() < share else {}


def _model(dice: random.Random) -> ModelConfig:
    chosen: dict[str, Any] = {
        "num_layers": dice.choice([2, 3, 4, 5]), "hidden_size": 16, "ffn_hidden_size": 24, "num_heads": 4,
        "head_dim": 8, "vocab_size": dice.choice([61, 64]), "norm": dice.choice(["rmsnorm", "rmsnorm", "layernorm"]),
        "activation": dice.choice(["swiglu", "swiglu", "gelu", "gelu_tanh"]),
        "attention_out_bias": dice.random() < 0.3, "tie_embeddings": dice.random() < 0.4,
        "attention_causal": dice.random() < 0.8,
    }  # fmt: skip
    chosen |= _some(dice, 0.2, attention_window=5) | _some(dice, 0.2, attention_softcap=3.0)
    chosen |= _some(dice, 0.2, logit_softcap=5.0) | _some(dice, 0.2, attention_sinks=True)
    chosen |= _some(dice, 0.15, num_mtp_layers=1)
    chosen |= _latent(dice) if dice.random() < 0.3 else _grouped_heads(dice)
    chosen |= _experts(dice) if dice.random() < 0.6 else _some(dice, 0.3, mlp_bias=True)
    return ModelConfig(**chosen)


def _grouped_heads(dice: random.Random) -> dict[str, Any]:
    chosen = {"num_kv_heads": dice.choice([1, 2, 4]), "qk_norm": dice.random() < 0.3, "qkv_bias": dice.random() < 0.3}
    chosen |= {"position": "learned", "max_positions": 16} if dice.random() < 0.2 else {}
    return chosen | _some(dice, 0.3, rope_interleaved=True)


def _latent(dice: random.Random) -> dict[str, Any]:
    return {"attention": "mla", "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
            "q_lora_rank": dice.choice([None, 8, 24]), "kv_lora_rank": dice.choice([6, 20])}  # fmt: skip


def _experts(dice: random.Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "num_experts": 8, "top_k": dice.choice([1, 2, 3]), "moe_ffn_hidden_size": 8,
        "shared_ffn_hidden_size": dice.choice([0, 8]), "first_k_dense": dice.choice([0, 0, 1]),
        "router_score": dice.choice(["softmax", "sigmoid"]), "router_bias": dice.random() < 0.4,
    }  # fmt: skip
    # a single choice that is divided by itself gives the router no gradient but rounding
    chosen["norm_topk_prob"] = chosen["top_k"] > 1 and dice.random() < 0.7
    return chosen | _some(dice, 0.3, num_groups=4, top_groups=2, group_score=dice.choice(["max", "top2_sum"]))


def _parallel(dice: random.Random, world: int, model: ModelConfig) -> ParallelConfig:
    size = dict.fromkeys(("tp", "cp", "pp", "dp"), 1)
    for _ in range(world.bit_length() - 1):
        size[dice.choice(["tp", "cp", "pp", "pp", "dp"])] *= 2
    chosen: dict[str, Any] = {"zero": dice.choice([0, 1, 2, 3]), **{name: size[name] for name in ("tp", "cp", "pp")}}
    if size["tp"] > 1:
        chosen |= _some(dice, 0.7, sp=True, tp_overlap=dice.choice(["none", "chunked", "fused"]))
    if size["cp"] > 1:
        chosen["cp_method"] = dice.choice(["ring", "allgather", "ulysses", "two_level"])
        chosen |= {"cp_inner": 2} if chosen["cp_method"] == "two_level" else {}
        chosen |= _some(dice, 0.4 * (model.attention == "mla"), cp_compress_kv=True)
    chosen |= _some(dice, 0.3 * (size["pp"] > 1), vpp=2) | _some(dice, 0.4 * (size["dp"] > 1), dp_replicate=2)
    chosen |= _some(dice, 0.4 * (chosen["zero"] == 3), regather="per_step")
    chosen |= _some(dice, 0.4 * (chosen["zero"] >= 2), reduce="per_step")
    if model.num_experts:
        chosen |= {"ep": dice.choice([1, 2, 4]), "etp": dice.choice([None, 1, 2])}
        chosen |= _some(dice, 0.4 * (chosen["ep"] > 1), ep_inner=2)
    return ParallelConfig(**chosen, **_some(dice, 0.2, order=dice.sample(["pp", "dp", "cp", "tp"], 4)))


def _pipeline(dice: random.Random) -> PipelineConfig:
    return PipelineConfig(
        schedule=dice.choice(["1f1b", *schedule_names()]),
        split=dice.choice(["even", "even", "cost"]),
        balance=dice.choice(["stages", "stages", "ranks"]),
        head_layers=dice.choice([0.0, 0.0, 1.0]),
    )


def _recompute(dice: random.Random, model: ModelConfig) -> RecomputeConfig:
    chosen: dict[str, Any] = {"mode": dice.choice(["none", "none", "selective", "full"])}
    phases = ["attention", "mlp"] + (["dispatch", "experts", "combine"] if model.num_experts else [])
    if chosen["mode"] == "full":
        chosen |= {"num_layers": dice.choice([None, 1]), "group_layers": dice.choice([1, 1, 2])}
        phases = ["inputs"]
    if chosen["mode"] == "selective":
        parts = ["norm", "activation", "attention", "mlp"] + (["experts"] if model.num_experts else [])
        chosen["parts"] = dice.sample(parts, 2)
    chosen |= _some(dice, 0.3, logit_tokens=dice.choice([3, 8]))
    chosen |= _some(dice, 0.2, offload=[dice.choice(phases)], offload_min_bytes=1)
    return RecomputeConfig(**chosen)


def _moe(dice: random.Random, model: ModelConfig) -> MoeConfig:
    if not model.num_experts:
        return MoeConfig()
    balances = ["aux"], ["seq_aux"], ["aux", "seq_aux", "global_aux"], ["none"]
    balance = dice.choice(balances)
    if model.router_bias and dice.random() < 0.7:
        balance = [*(each for each in balance if each != "none"), "bias"]
    chosen: dict[str, Any] = {"balance": balance, "z_coef": dice.choice([0.0, 0.02])}
    chosen |= {"aux_coef": 0.1} if any(each.endswith("aux") for each in balance) else {}
    chosen |= {"bias_rate": 0.05} if "bias" in balance else {}
    chosen |= _some(dice, 0.2, capacity_factor=1.1, drop_by=dice.choice(["probability", "position"]))
    return MoeConfig(**chosen, **_some(dice, 0.2, jitter=0.1))


def _data(dice: random.Random) -> DataConfig:
    return DataConfig(**_some(dice, 0.3, document_mask=True, eod=7, eod_mask_loss=dice.random() < 0.5))

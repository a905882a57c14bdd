"""Random valid configurations: any architecture on any layout, so that pairs nobody thought of are
met too."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace
from typing import Any

import ranks  # noqa: F401 (has every collective compared between ranks)

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
from megatron5d.parity.variants import faults_of
from megatron5d.pipeline_parallel.registry import schedule_names

AUTO = 0.03  # share of the pipelines whose schedule is searched, which takes seconds


def random_config(seed: int) -> tuple[Config, int, float]:
    """The configuration of this number, its world, and the share of padding in its data; valid."""
    dice = random.Random(seed)
    while True:
        shape, world = random_shape(dice)
        if any(fault.id != "pipeline" for fault in faults_of(shape, world)):
            continue
        # so that layouts which few schedules and batches fit are met as often as others
        for _ in range(50):
            config = random_run(dice, shape)
            if not faults_of(config, world):
                return config, world, dice.choice([0.0, 0.0, 0.3])


def random_shape(dice: random.Random) -> tuple[Config, int]:
    """A model on a layout, valid or not, and its world."""
    world, model = dice.choice([2, 3, 4, 4, 6, 8, 8]), _model(dice)
    shape = Config(
        model=model, parallel=_parallel(dice, world, model), train=TrainConfig(gbs=24, seq_len=48)
    )
    return shape, world


def random_run(dice: random.Random, shape: Config) -> Config:
    """A model on a layout with all else that there is to choose, valid or not."""
    return replace(
        shape,
        pipeline=_pipeline(dice, shape),
        train=TrainConfig(
            steps=10,
            gbs=dice.choice([4, 6, 8, 12, 18]),
            mbs=dice.choice([1, 1, 2, 3]),
            seq_len=dice.choice([7, 8, 12, 16, 18, 24, 36]),
            z_loss=dice.choice([0.0, 1e-2]),
            mtp_loss=dice.choice([0.0, 0.1, 0.5]),
            seed=dice.choice([0, 1234]),
        ),
        optim=_optim(dice),
        precision=PrecisionConfig(dtype="fp64"),
        recompute=_recompute(dice, shape.model),
        moe=_moe(dice, shape.model),
        data=_data(dice),
    )


def another_layout(config: Config, seed: int) -> tuple[Config, int]:
    """The same training on other ranks: model, batch and loss stay. And how many ranks that are."""
    dice = random.Random(seed)
    while True:
        world = dice.choice([1, 2, 3, 4, 6, 8])
        other = replace(config, parallel=_parallel(dice, world, config.model))
        other = replace(
            other,
            pipeline=_pipeline(dice, other),
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


def _optim(dice: random.Random) -> OptimConfig:
    chosen: dict[str, Any] = {
        "lr": 1e-2,
        "warmup_steps": dice.choice([0, 2]),
        "clip": dice.choice([0.0, 0.5]),
    }
    chosen |= {"weight_decay": dice.choice([0.0, 0.1]), "offload": dice.random() < 0.1}
    chosen |= _some(
        dice, 0.3, decay_exclude=dice.choice([["*norm*"], ["*"], ["layers.0.*", "*embedding*"]])
    )
    chosen |= _some(dice, 0.3, betas=dice.choice([[0.0, 0.9], [0.9, 0.999]]), eps=1e-6)
    chosen |= _some(
        dice, 0.5, schedule=dice.choice(["linear", "constant", "wsd"]), min_lr=1e-3, decay_steps=8
    )
    chosen |= _some(dice, 0.3, implementation=dice.choice(["torch", "kernel"]))
    name = dice.choice(["adamw", "muon"])
    if name == "muon":
        chosen |= _some(dice, 0.4, ns_steps=dice.choice([1, 3]), momentum=dice.choice([0.0, 0.8]))
        chosen |= _some(random.Random(repr(chosen)), 0.3, muon_per_head=True)
        globs = (
            [],
            ["*"],
            ["*.mlp.*", "*.experts.up.weight"],
            ["*embedding.*", "*.attention.*", "head.*"],
        )
        chosen |= _some(dice, 0.5, muon_exclude=dice.choice(globs))
    globs = ["embedding.*"], ["layers.0.*"], ["*norm*", "*.up.weight"], ["*.attention.*"]
    chosen |= _some(
        random.Random(repr(chosen)), 0.2, freeze=random.Random(repr(chosen)).choice(globs)
    )
    scales = ["0.1 *norm*", "2 *.attention.*"], ["0.5 layers.*"], ["0 embedding.*", "1.5 *"]
    chosen |= _some(
        random.Random(repr(chosen) + "lr"), 0.2, lr_scale=random.Random(repr(chosen)).choice(scales)
    )
    chosen |= _some(
        random.Random(repr(chosen) + "wd"),
        0.2,
        decay_scale=random.Random(repr(chosen)).choice(scales),
    )
    if chosen.get("schedule") != "wsd":
        chosen.pop("decay_steps", None)
    return OptimConfig(name=name, **chosen)


def _model(dice: random.Random) -> ModelConfig:
    chosen: dict[str, Any] = {
        "num_layers": dice.choice([1, 2, 3, 4, 5]),
        "hidden_size": dice.choice([16, 16, 24]),
        "ffn_hidden_size": dice.choice([24, 24, 40]),
        "num_heads": dice.choice([4, 4, 8, 6, 12, 3, 2]),
        "head_dim": dice.choice([8, 8, 6]),
        "vocab_size": dice.choice([61, 64, 5, 3]),
        "norm": dice.choice(["rmsnorm", "rmsnorm", "layernorm"]),
        "norm_eps": dice.choice([1e-5, 1e-3]),
        "activation": dice.choice(["swiglu", "swiglu", "gelu", "gelu_tanh"]),
        "attention_out_bias": dice.random() < 0.3,
        "tie_embeddings": dice.random() < 0.4,
        "attention_causal": dice.random() < 0.8,
        "init_scale_output": dice.random() < 0.7,
        "init_std": dice.choice([0.02, 0.1]),
    }
    chosen |= _some(dice, 0.2, attention_window=dice.choice([2, 5, 100]))
    chosen |= _some(dice, 0.2, attention_softcap=3.0)
    chosen |= _some(dice, 0.2, logit_softcap=5.0) | _some(dice, 0.2, attention_sinks=True)
    chosen |= _some(dice, 0.15, num_mtp_layers=dice.choice([1, 2]))
    chosen |= (
        _latent(dice, chosen["num_heads"])
        if dice.random() < 0.3
        else _grouped_heads(dice, chosen["num_heads"])
    )
    chosen |= (
        _experts(dice, chosen["num_layers"])
        if dice.random() < 0.6
        else _some(dice, 0.3, mlp_bias=True)
    )
    return ModelConfig(**chosen | _block_options(random.Random(repr(chosen)), chosen))


def _block_options(dice: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    more = _some(dice, 0.3, block_norm=dice.choice(["post", "both"]))
    more |= {} if more else _some(dice, 0.3, parallel_block=dice.choice(["two_norms", "one_norm"]))
    if "attention_window" in chosen:
        layers = range(chosen["num_layers"])
        more |= _some(
            dice, 0.5, window_layers=sorted(dice.sample(layers, dice.randint(1, len(layers))))
        )
        more |= _some(random.Random(repr(more) + "theta"), 0.3, window_rope_theta=50.0)
    if chosen.get("attention") == "mla":
        more |= _some(random.Random(repr(more) + "latent"), 0.3, latent_norm_eps=0.03)
    else:
        more |= _some(dice, 0.2, attention_gate=True)
        more |= _some(dice, 0.2, rotary_percent=0.5) if chosen["head_dim"] == 8 else {}
        more |= _some(dice, 0.5, qk_norm_all_heads=True) if chosen["qk_norm"] else {}
    if "num_experts" in chosen:
        more |= _some(dice, 0.2, mlp_bias=True)
        more |= (
            _some(dice, 0.5, shared_expert_gate=True) if chosen["shared_ffn_hidden_size"] else {}
        )
    dice = random.Random(repr(more))
    more |= _some(dice, 0.2, norm_zero_centered=True) | _some(dice, 0.2, embedding_scale=3.0)
    more |= _some(dice, 0.2, activation=dice.choice(["geglu_tanh", "swiglu_clamped"]))
    more |= _some(dice, 0.2, query_pre_attn_scalar=5) if chosen.get("attention") != "mla" else {}
    return more | (_some(dice, 0.3, router_linear_bias=True) if "num_experts" in chosen else {})


def _grouped_heads(dice: random.Random, num_heads: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "num_kv_heads": dice.choice([n for n in (1, 2, 3, 4, 6, 8, 12) if num_heads % n == 0])
    }
    chosen |= {"qk_norm": dice.random() < 0.3, "qkv_bias": dice.random() < 0.3}
    chosen |= (
        {"position": "learned", "max_positions": dice.choice([16, 24])}
        if dice.random() < 0.2
        else {}
    )
    return chosen | _some(dice, 0.3, rope_interleaved=True, rope_theta=100.0)


def _latent(dice: random.Random, num_heads: int) -> dict[str, Any]:
    return {
        "attention": "mla",
        "num_kv_heads": num_heads,
        "qk_nope_head_dim": dice.choice([6, 3]),
        "qk_rope_head_dim": dice.choice([4, 2]),
        "v_head_dim": dice.choice([5, 12]),
        "q_lora_rank": dice.choice([None, 8, 24]),
        "kv_lora_rank": dice.choice([6, 20]),
        "rope_interleaved": dice.random() < 0.3,
    }


def _experts(dice: random.Random, num_layers: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "num_experts": dice.choice([8, 8, 4, 6, 12]),
        "top_k": dice.choice([1, 2, 3, 4]),
        "moe_ffn_hidden_size": dice.choice([8, 12, None]),
        "shared_ffn_hidden_size": dice.choice([0, 8, 12]),
        "router_score": dice.choice(["softmax", "sigmoid"]),
        "router_bias": dice.random() < 0.4,
        "routed_scaling_factor": dice.choice([1.0, 2.5]),
    }
    pattern = dice.choice(["all", "first", "interval", "named"])
    chosen |= {"first_k_dense": 1} if pattern == "first" else {}
    chosen |= {"moe_interval": 2} if pattern == "interval" else {}
    if pattern == "named":
        chosen["moe_layers"] = sorted(dice.sample(range(num_layers), dice.randint(1, num_layers)))
    # a single choice that is divided by itself gives the router no gradient but rounding
    chosen["norm_topk_prob"] = chosen["top_k"] > 1 and dice.random() < 0.7
    groups = dice.choice([n for n in (2, 3, 4) if chosen["num_experts"] % n == 0])
    top_groups = dice.randint(1, groups)
    return chosen | _some(
        dice,
        0.3,
        num_groups=groups,
        top_groups=top_groups,
        group_score=dice.choice(["max", "top2_sum"]),
    )


def _parallel(dice: random.Random, world: int, model: ModelConfig) -> ParallelConfig:
    size = dict.fromkeys(("tp", "cp", "pp", "dp"), 1)
    for factor in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3], 8: [2, 2, 2]}[world]:
        size[dice.choice(["tp", "cp", "pp", "pp", "dp"])] *= factor
    chosen: dict[str, Any] = {
        "zero": dice.choice([0, 1, 2, 3]),
        **{name: size[name] for name in ("tp", "cp", "pp")},
    }
    if size["tp"] > 1:
        chosen |= _some(dice, 0.7, sp=True, tp_overlap=dice.choice(["none", "chunked", "fused"]))
    if size["cp"] > 1:
        chosen["cp_method"] = dice.choice(["ring", "allgather", "ulysses", "two_level"])
        chosen |= (
            {"cp_inner": dice.choice([1, 2, 3, size["cp"]])}
            if chosen["cp_method"] == "two_level"
            else {}
        )
        chosen |= _some(dice, 0.4 * (model.attention == "mla"), cp_compress_kv=True)
    chosen |= _some(dice, 0.3 * (size["pp"] > 1), vpp=dice.choice([2, 2, 3]))
    chosen |= _some(dice, 0.4 * (size["dp"] > 1), dp_replicate=dice.choice([2, 2, size["dp"]]))
    chosen |= _some(dice, 0.4 * (chosen["zero"] == 3), zero3_gather="per_step")
    chosen |= _some(dice, 0.4 * (chosen["zero"] >= 2), grad_reduce="per_step")
    if model.num_experts:
        fold = world // size["pp"]
        chosen["etp"] = dice.choice([each for each in (1, 2, 3, 4) if fold % each == 0])
        both = math.gcd(model.num_experts, fold // chosen["etp"])
        sizes = [n for n in (1, 2, 3, 4, 6, 8) if both % n == 0]
        chosen["ep"] = max(dice.choice(sizes), dice.choice(sizes))
        chosen |= {"etp": None} if chosen["etp"] == chosen["tp"] and dice.random() < 0.5 else {}
        chosen |= _some(dice, 0.4 * (chosen["ep"] > 1), ep_inner=dice.choice([2, 3, chosen["ep"]]))
    return ParallelConfig(
        **chosen, **_some(dice, 0.2, order=dice.sample(["pp", "dp", "cp", "tp"], 4))
    )


def _pipeline(dice: random.Random, shape: Config) -> PipelineConfig:
    num_layers, stages = (
        shape.model.num_layers,
        shape.parallel.pp * max(shape.parallel.vpp, dice.choice([1, 2])),
    )
    chosen: dict[str, Any] = {
        "schedule": dice.choice(["1f1b", *schedule_names()]),
        "split": dice.choice(["even", "even", "cost"]),
        "balance": dice.choice(["auto", "stages", "ranks", "late", "ends"]),
        "head_layers": dice.choice([0.0, 0.0, 1.0]),
        "embedding_layers": dice.choice([0.0, 0.0, 1.5]),
    }
    if dice.random() < 0.3 * (shape.parallel.pp > 1):
        blocks = num_layers + random.Random(repr(chosen)).choice([0, shape.model.num_mtp_layers])
        cuts = sorted(dice.choices(range(blocks + 1), k=stages - 1))
        chosen["layout"] = [b - a for a, b in zip([0, *cuts], [*cuts, blocks])]
    chosen |= _some(
        dice,
        AUTO,
        schedule="auto",
        evaluations=30,
        search_s=1000.0,
        memory=dice.choice([0.5, 1.0, 2.0]),
        copies=dice.choice([1, 2]),
        costs=dice.choice([None, "F=1,I=1,W=1,a2aF=0.5,a2aB=0.5,comm=0.1"]),
    )
    return PipelineConfig(**chosen)


def _recompute(dice: random.Random, model: ModelConfig) -> RecomputeConfig:
    chosen: dict[str, Any] = {"mode": dice.choice(["none", "none", "selective", "full"])}
    phases = ["attention", "mlp"] + (
        ["dispatch", "experts", "combine"] if model.num_experts else []
    )
    if chosen["mode"] == "full":
        chosen |= {"group_layers": dice.choice([1, 1, 2, 3])}
        phases.append("inputs")
    if chosen["mode"] == "selective":
        parts = ["norm", "qkv", "activation", "attention", "mlp"] + (
            ["experts", "permute"] if model.num_experts else []
        )
        chosen["parts"] = dice.sample(parts, dice.randint(1, len(parts)))
    if chosen["mode"] != "none":
        count = {"num_layers": dice.choice([None, None, 1, 2])}
        stages = {
            "stage_layers": [dice.choice([0, 1, 2, 9]) for _ in range(dice.choice([1, 2, 4, 4, 8]))]
        }
        chosen |= stages if dice.random() < 0.2 else count
    chosen |= _some(dice, 0.3, logit_tokens=dice.choice([1, 3, 8, 1000]))
    chosen |= _some(
        dice,
        0.2,
        offload=dice.sample(phases, dice.randint(1, len(phases))),
        offload_min_bytes=dice.choice([0, 1, 1500]),
    )
    return RecomputeConfig(**chosen)


def _moe(dice: random.Random, model: ModelConfig) -> MoeConfig:
    if not model.num_experts:
        return MoeConfig()
    balances = ["aux"], ["seq_aux"], ["global_aux"], ["aux", "seq_aux", "global_aux"], ["none"]
    balance = dice.choice(balances)
    if model.router_bias and dice.random() < 0.7:
        balance = [*(each for each in balance if each != "none"), "bias"]
    chosen: dict[str, Any] = {"balance": balance, "z_coef": dice.choice([0.0, 0.02])}
    chosen |= {"aux_coef": 0.1} if any(each.endswith("aux") for each in balance) else {}
    chosen |= {"bias_rate": 0.005} if "bias" in balance else {}
    refusing = {
        "capacity_factor": dice.choice([0.3, 1.0, 1.1, 8.0]),
        "drop_by": dice.choice(["probability", "position"]),
    }
    chosen |= _some(dice, 0.2, **refusing)
    chosen |= _some(dice, 0.2, jitter=0.1)
    return MoeConfig(**chosen, **_some(random.Random(repr(chosen)), 0.1, force_balanced=True))


def _data(dice: random.Random) -> DataConfig:
    chosen = _some(dice, 0.3, document_mask=True, eod=dice.choice([0, 1, 7]))
    return DataConfig(**chosen | _some(dice, 0.3, eod=chosen.get("eod", 1), eod_mask_loss=True))

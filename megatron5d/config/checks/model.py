"""Laws of multi-head latent attention: it has dims of its own, and lacks some options of the others.

Laws of mixtures of experts: how the router, its training and the expert axes must fit together.
"""

from __future__ import annotations

from typing import Any

from megatron5d.config.checks.check import Law, data_parallel, divisors, multiples, nearest, spelled
from megatron5d.config.convert import value_of
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import Config

_DIMS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _is_mla(c: Config) -> bool:
    return c.model.attention == "mla"


def _unused_dims(c: Config) -> list[str]:
    """The dims of latent attention that are set although the model has another attention."""
    return [] if _is_mla(c) else [dim for dim in _DIMS if getattr(c.model, dim) != getattr(Config().model, dim)]


def _unsupported(c: Config) -> list[str]:
    """The options that are set and that latent attention does not have."""
    return [name for name in ("qk_norm", "qkv_bias") if getattr(c.model, name)]


ATTENTION_LAWS = (
    Law(
        "mla-dims-need-mla",
        ("model.attention", *(f"model.{dim}" for dim in _DIMS)),
        lambda c, w: _unused_dims(c) != [],
        lambda c, w: f"model.attention = {c.model.attention} does not read model.{', model.'.join(_unused_dims(c))}",
        lambda c, w: "model.attention=mla",
    ),
    Law(
        "mla-needs-rope",
        ("model.attention", "model.position"),
        lambda c, w: _is_mla(c) and c.model.position != "rope",
        lambda c, w: (
            f"model.attention = mla rotates qk_rope_head_dim features, and model.position = {c.model.position}"
        ),
        lambda c, w: "model.position=rope",
    ),
    Law(
        "mla-rope-pairs-dims",
        ("model.attention", "model.qk_rope_head_dim"),
        lambda c, w: _is_mla(c) and c.model.qk_rope_head_dim % 2 == 1,
        lambda c, w: f"model.qk_rope_head_dim = {c.model.qk_rope_head_dim} is odd, and rope rotates pairs",
        lambda c, w: f"model.qk_rope_head_dim={c.model.qk_rope_head_dim + 1}",
    ),
    Law(
        "mla-kv-heads",
        ("model.attention", "model.num_kv_heads", "model.num_heads"),
        lambda c, w: _is_mla(c) and c.model.num_kv_heads != c.model.num_heads,
        lambda c, w: (
            f"model.num_kv_heads = {c.model.num_kv_heads} and model.num_heads = {c.model.num_heads}: with "
            "model.attention = mla every head has its own key and value, projected from the shared latent"
        ),
        lambda c, w: f"model.num_kv_heads={c.model.num_heads}",
    ),
    Law(
        "mla-has-no-such-option",
        ("model.attention", "model.qk_norm", "model.qkv_bias"),
        lambda c, w: _is_mla(c) and _unsupported(c) != [],
        lambda c, w: (
            f"model.attention = mla norms its latents and has no bias on them: model.{', model.'.join(_unsupported(c))}"
        ),
        lambda c, w: " ".join(f"model.{name}=false" for name in _unsupported(c)),
    ),
)


AUXILIARY = ("aux", "seq_aux", "global_aux")
# Keys that have an effect only with experts -> the value they must have without.
NEED_EXPERTS: dict[str, Any] = {
    "parallel.ep": 1,
    "parallel.etp": None,
    "parallel.ep_inner": 1,
    "moe.balance": ["none"],
    "moe.aux_coef": 0.0,
    "moe.z_coef": 0.0,
    "moe.bias_rate": 0.0,
    "moe.jitter": 0.0,
    "moe.capacity_factor": None,
    "moe.fp8_dispatch": False,
    "model.shared_ffn_hidden_size": 0,
    "model.router_bias": False,
}
_PATTERN = ("model.num_experts", "model.num_layers", "model.first_k_dense", "model.moe_interval", "model.moe_layers")


def _is_moe(c: Config) -> bool:
    return c.model.num_experts > 0


def _unused_keys(c: Config) -> list[str]:
    """The keys of NEED_EXPERTS that are set although the model has no experts."""
    return [] if _is_moe(c) else [key for key, idle in NEED_EXPERTS.items() if value_of(c, key) != idle]


def _etp(c: Config) -> int:
    return c.parallel.etp or c.parallel.tp


def _group_size(c: Config) -> int:
    """Experts in each group."""
    return c.model.num_experts // c.model.num_groups


def _ep_fix(c: Config, world: int) -> str:
    fold = data_parallel(c, world) * c.parallel.cp * c.parallel.tp
    legal = [ep for ep in divisors(c.model.num_experts) if fold % (ep * _etp(c)) == 0]
    return f"parallel.ep={nearest(c.parallel.ep, legal)}"


def _balance_with(c: Config, kind: str) -> str:
    kinds = [word for word in c.moe.balance if word != "none"] + [kind]
    return f"moe.balance={spelled(kinds)}"


MOE_LAWS = (
    Law(
        "routing-needs-experts",
        ("model.num_experts", *NEED_EXPERTS),
        lambda c, w: _unused_keys(c) != [],
        lambda c, w: (
            f"model.num_experts = 0 makes a dense model, on which {', '.join(_unused_keys(c))} would do nothing"
        ),
        lambda c, w: " ".join(f"{key}={spelled(NEED_EXPERTS[key])}" for key in _unused_keys(c)),
    ),
    Law(
        "moe-layers-exist",
        ("model.moe_layers", "model.num_layers"),
        lambda c, w: any(not 0 <= i < c.model.num_layers for i in c.model.moe_layers or []),
        lambda c, w: (
            f"model.moe_layers = {spelled(c.model.moe_layers)} names layers outside 0 to {c.model.num_layers - 1} "
            f"(model.num_layers = {c.model.num_layers})"
        ),
        lambda c, w: (
            f"model.moe_layers={spelled([i for i in c.model.moe_layers or [] if 0 <= i < c.model.num_layers] or None)}"
        ),
    ),
    Law(
        "experts-have-layers",
        _PATTERN,
        lambda c, w: _is_moe(c) and not moe_layers(c.model),
        lambda c, w: (
            f"model.num_experts = {c.model.num_experts}, but no layer is MoE: model.first_k_dense = "
            f"{c.model.first_k_dense} and moe_interval = {c.model.moe_interval} of model.num_layers = "
            f"{c.model.num_layers}, moe_layers = {spelled(c.model.moe_layers)}"
        ),
        lambda c, w: "model.first_k_dense=0 model.moe_interval=1 model.moe_layers=null",
        needs=("moe-layers-exist",),
    ),
    Law(
        "top-k-experts-exist",
        ("model.top_k", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.top_k > c.model.num_experts,
        lambda c, w: f"model.top_k = {c.model.top_k} is more than model.num_experts = {c.model.num_experts}",
        lambda c, w: f"model.top_k={c.model.num_experts}",
    ),
    Law(
        "groups-divide-experts",
        ("model.num_groups", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.num_experts % c.model.num_groups != 0,
        lambda c, w: (
            f"model.num_experts = {c.model.num_experts} is not divisible by model.num_groups = {c.model.num_groups}"
        ),
        lambda c, w: f"model.num_groups={nearest(c.model.num_groups, divisors(c.model.num_experts))}",
    ),
    Law(
        "top-groups-exist",
        ("model.top_groups", "model.num_groups"),
        lambda c, w: c.model.top_groups > c.model.num_groups,
        lambda c, w: f"model.top_groups = {c.model.top_groups} is more than model.num_groups = {c.model.num_groups}",
        lambda c, w: f"model.top_groups={c.model.num_groups}",
    ),
    Law(
        "top-groups-hold-top-k",
        ("model.top_groups", "model.num_groups", "model.top_k", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.top_groups * _group_size(c) < c.model.top_k,
        lambda c, w: (
            f"model.top_groups = {c.model.top_groups} groups of {_group_size(c)} experts hold fewer than "
            f"model.top_k = {c.model.top_k}"
        ),
        lambda c, w: f"model.top_groups={-(-c.model.top_k // _group_size(c))}",
        needs=("groups-divide-experts", "top-groups-exist", "top-k-experts-exist"),
    ),
    Law(
        "top2-needs-two",
        ("model.group_score", "model.num_groups", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.group_score == "top2_sum" and c.model.num_groups > 1 and _group_size(c) < 2,
        lambda c, w: (
            f"model.group_score = top2_sum adds two experts of a group, and model.num_experts / num_groups = "
            f"{c.model.num_experts} / {c.model.num_groups} leaves one"
        ),
        lambda c, w: "model.group_score=max",
        needs=("groups-divide-experts",),
    ),
    Law(
        "experts-have-no-biases",
        ("model.mlp_bias", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.mlp_bias,
        lambda c, w: f"model.mlp_bias = true, and the {c.model.num_experts} experts have no biases",
        lambda c, w: "model.mlp_bias=false",
    ),
    Law(
        "experts-split-over-ep",
        ("parallel.ep", "model.num_experts", "parallel.etp", "parallel.tp", "parallel.cp", "parallel.pp"),
        lambda c, w: _is_moe(c) and c.model.num_experts % c.parallel.ep != 0,
        lambda c, w: f"model.num_experts = {c.model.num_experts} is not divisible by parallel.ep = {c.parallel.ep}",
        _ep_fix,
        needs=("world-fits",),
    ),
    Law(
        "nodes-divide-ep",
        ("parallel.ep_inner", "parallel.ep"),
        lambda c, w: c.parallel.ep % c.parallel.ep_inner != 0,
        lambda c, w: f"parallel.ep_inner = {c.parallel.ep_inner} does not divide parallel.ep = {c.parallel.ep}",
        lambda c, w: f"parallel.ep_inner={nearest(c.parallel.ep_inner, divisors(c.parallel.ep))}",
    ),
    Law(
        "experts-split-over-etp",
        ("parallel.etp", "parallel.tp", "model.moe_ffn_hidden_size", "model.ffn_hidden_size", "model.num_experts"),
        lambda c, w: _is_moe(c) and c.model.expert_hidden_size % _etp(c) != 0,
        lambda c, w: (
            f"an expert's {c.model.expert_hidden_size} features (model.moe_ffn_hidden_size, or ffn_hidden_size) are "
            f"not divisible by parallel.etp = {_etp(c)}{' (= parallel.tp)' if c.parallel.etp is None else ''}"
        ),
        lambda c, w: (
            f"parallel.etp={nearest(_etp(c), [d for d in divisors(_etp(c)) if c.model.expert_hidden_size % d == 0])}"
        ),
    ),
    Law(
        "shared-expert-splits-over-tp",
        ("model.shared_ffn_hidden_size", "parallel.tp"),
        lambda c, w: c.model.shared_ffn_hidden_size % c.parallel.tp != 0,
        lambda c, w: (
            f"model.shared_ffn_hidden_size = {c.model.shared_ffn_hidden_size} is not divisible by parallel.tp = "
            f"{c.parallel.tp}"
        ),
        lambda c, w: f"model.shared_ffn_hidden_size={multiples(c.model.shared_ffn_hidden_size, c.parallel.tp)}",
    ),
    Law(
        "aux-coef-needs-aux",
        ("moe.aux_coef", "moe.balance"),
        lambda c, w: c.moe.aux_coef > 0 and not set(AUXILIARY) & set(c.moe.balance),
        lambda c, w: (
            f"moe.aux_coef = {c.moe.aux_coef:g} scales auxiliary losses, and moe.balance = {spelled(c.moe.balance)} "
            "has none"
        ),
        lambda c, w: f"{_balance_with(c, 'aux')}, or moe.aux_coef=0",
        needs=("routing-needs-experts",),
    ),
    Law(
        "bias-rate-needs-bias",
        ("moe.bias_rate", "moe.balance"),
        lambda c, w: c.moe.bias_rate > 0 and "bias" not in c.moe.balance,
        lambda c, w: (
            f"moe.bias_rate = {c.moe.bias_rate:g} moves the routers' biases, and moe.balance = "
            f"{spelled(c.moe.balance)} does not use them"
        ),
        lambda c, w: f"{_balance_with(c, 'bias')}, or moe.bias_rate=0",
        needs=("routing-needs-experts",),
    ),
)

"""Checks of the architecture: heads and positions, latent attention, experts and their axes."""

from megatron5d.config.checks.check import (
    Check,
    Faults,
    check,
    data_parallel,
    divides,
    divisors,
    fault,
    multiples,
    nearest,
)
from megatron5d.config.checks.layout import MODEL_AXES
from megatron5d.config.convert import spelled, value_of
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import Config


def _layers_exist(knob: str, id: str) -> Check:
    @check(knob, "model.num_layers", id=id)
    def find(c: Config, world: int) -> Faults:
        listed, layers = value_of(c, knob) or [], range(c.model.num_layers)
        if any(layer not in layers for layer in listed):
            yield fault(
                f"{knob} must name layers from 0 to {len(layers) - 1}, below "
                f"model.num_layers={len(layers)} (got {spelled(listed)})",
                f"{knob}={spelled([layer for layer in listed if layer in layers] or None)}",
            )

    return find


MOE_LAYERS = _layers_exist("model.moe_layers", "moe-layers-exist")
WINDOW_LAYERS = _layers_exist("model.window_layers", "window-layers-exist")


@check(
    "model.num_experts",
    "model.num_layers",
    "model.first_k_dense",
    "model.moe_interval",
    "model.moe_layers",
    needs=["moe-layers-exist"],
)
def experts_have_layers(c: Config, world: int) -> Faults:
    m = c.model
    if m.num_experts and not moe_layers(m):
        yield fault(
            f"model.num_experts={m.num_experts} requires a MoE layer (got none of "
            f"model.num_layers={m.num_layers} with first_k_dense={m.first_k_dense}, "
            f"moe_interval={m.moe_interval}, moe_layers={spelled(m.moe_layers)})",
            "model.first_k_dense=0 model.moe_interval=1 model.moe_layers=null",
        )


GROUPS_OF_EXPERTS = divides("model.num_groups", "model.num_experts", "groups-divide-experts")


@check(
    "model.top_groups",
    "model.num_groups",
    "model.top_k",
    "model.num_experts",
    needs=["groups-divide-experts", "top-groups-exist", "top-k-experts-exist"],
)
def top_groups_hold_top_k(c: Config, world: int) -> Faults:
    m, group_size = c.model, c.model.num_experts // c.model.num_groups
    if m.num_experts and m.top_groups * group_size < m.top_k:
        yield fault(
            f"model.top_k={m.top_k} requires {m.top_k} experts in model.top_groups={m.top_groups} "
            f"groups (got {m.top_groups}·{group_size})",
            f"model.top_groups={-(-m.top_k // group_size)}",
        )


@check(
    "model.group_score", "model.num_groups", "model.num_experts", needs=["groups-divide-experts"]
)
def top2_needs_two(c: Config, world: int) -> Faults:
    experts, groups = c.model.num_experts, c.model.num_groups
    if c.model.group_score == "top2_sum" and experts == groups > 1:
        yield fault(
            "model.group_score=top2_sum requires two experts per group (got model.num_experts / "
            f"num_groups = {experts} / {groups})",
            "model.group_score=max",
        )


@check("parallel.ep", "model.num_experts", "parallel.etp", *MODEL_AXES, needs=["world-fits"])
def experts_split_over_ep(c: Config, world: int) -> Faults:
    experts, p = c.model.num_experts, c.parallel
    if experts % p.ep:
        fold = data_parallel(c, world) * p.cp * p.tp
        legal = [ep for ep in divisors(experts) if fold % (ep * (p.etp or p.tp)) == 0]
        yield fault(
            f"model.num_experts={experts} must be divisible by parallel.ep (got {p.ep})",
            f"parallel.ep={nearest(p.ep, legal)}",
        )


NODES_OF_EP = divides("parallel.ep_inner", "parallel.ep", "nodes-divide-ep")


@check("moe.exchange", "parallel.ep_inner", "parallel.ep", needs=["nodes-divide-ep"])
def planned_exchange_is_direct(c: Config, world: int) -> Faults:
    inner, ep = c.parallel.ep_inner, c.parallel.ep
    if c.moe.exchange == "planned" and 1 < inner < ep:
        yield fault(
            f"moe.exchange=planned requires parallel.ep_inner=1 or parallel.ep={ep} (got {inner})",
            "moe.exchange=counted, or parallel.ep_inner=1",
        )


@check(
    "parallel.etp",
    "parallel.tp",
    "model.moe_ffn_hidden_size",
    "model.ffn_hidden_size",
    "model.num_experts",
)
def experts_split_over_etp(c: Config, world: int) -> Faults:
    features, etp = c.model.expert_hidden_size, c.parallel.etp or c.parallel.tp
    if c.model.num_experts and features % etp:
        legal = [size for size in divisors(etp) if features % size == 0]
        yield fault(
            f"model.moe_ffn_hidden_size (or ffn_hidden_size) = {features} must be divisible by "
            f"parallel.etp (got {etp}{', that of parallel.tp' if c.parallel.etp is None else ''})",
            f"parallel.etp={nearest(etp, legal)}",
        )


SHARED_EXPERT = "model.shared_ffn_hidden_size"


def _shared_expert_fix(c: Config, world: int) -> str:
    return f"{SHARED_EXPERT}={multiples(c.model.shared_ffn_hidden_size, c.parallel.tp)}"


SHARED_EXPERT_OVER_TP = divides(
    "parallel.tp", SHARED_EXPERT, "shared-expert-splits-over-tp", _shared_expert_fix
)


@check("model.attention", "model.qk_rope_head_dim")
def mla_rope_pairs_dims(c: Config, world: int) -> Faults:
    dim = c.model.qk_rope_head_dim
    if c.model.attention == "mla" and dim % 2:
        yield fault(
            f"model.qk_rope_head_dim must be even, as rope rotates pairs (got {dim})",
            f"model.qk_rope_head_dim={dim + 1}",
        )


@check("model.attention", "model.num_kv_heads", "model.num_heads")
def mla_kv_heads(c: Config, world: int) -> Faults:
    heads, kv_heads = c.model.num_heads, c.model.num_kv_heads
    # every head projects its own key and value from the shared latent
    if c.model.attention == "mla" and kv_heads != heads:
        yield fault(
            f"model.attention=mla requires model.num_kv_heads=model.num_heads={heads} "
            f"(got {kv_heads})",
            f"model.num_kv_heads={heads}",
        )


KV_HEADS = divides("model.num_kv_heads", "model.num_heads", "kv-heads-divide-heads")


@check("model.head_dim", "model.rotary_percent", "model.position", "model.attention")
def rope_pairs_dims(c: Config, world: int) -> Faults:
    dim, share, rotated = c.model.head_dim, c.model.rotary_percent, c.model.rotary_dim
    if c.model.position == "rope" and c.model.attention != "mla" and (rotated % 2 or rotated == 0):
        yield fault(
            "model.position=rope rotates pairs: model.head_dim·rotary_percent must be even and "
            f"above 0 (got {dim}·{share:g} = {rotated})",
            f"model.head_dim={dim + 1}" if share == 1 else "model.rotary_percent=1.0",
        )

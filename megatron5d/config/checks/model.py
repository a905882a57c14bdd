"""Checks of the architecture: heads and positions, latent attention, mixtures of experts and their
axes."""

from typing import Any

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
from megatron5d.config.convert import spelled, value_of
from megatron5d.config.derived import moe_layers
from megatron5d.config.schema import Config

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
    "moe.exchange": "counted",
    "moe.replay": None,
    "moe.record": None,
    "model.shared_ffn_hidden_size": 0,
    "model.router_bias": False,
    "model.router_linear_bias": False,
}


@check("model.num_experts", *NEED_EXPERTS)
def routing_needs_experts(c: Config, world: int) -> Faults:
    unused = {key: idle for key, idle in NEED_EXPERTS.items() if value_of(c, key) != idle}
    if unused and not c.model.num_experts:
        yield fault(
            f"model.num_experts = 0 makes a dense model, on which {', '.join(unused)} would do nothing",
            " ".join(f"{key}={spelled(idle)}" for key, idle in unused.items()),
        )


@check("moe.replay", "moe.record", "moe.force_balanced")
def experts_chosen_once(c: Config, world: int) -> Faults:
    given = [key for key in ("replay", "record", "force_balanced") if getattr(c.moe, key)]
    if "replay" in given and len(given) > 1:
        yield fault(
            f"moe.replay = {c.moe.replay} says which experts tokens take, and so does moe.{given[1]}"
            if given[1] != "record"
            else f"moe.replay = {c.moe.replay} is what moe.record = {c.moe.record} would write",
            " ".join(
                f"moe.{key}={spelled(None if key == 'record' else False)}" for key in given[1:]
            ),
        )


def _layers_exist(knob: str, id: str) -> Check:
    @check(knob, "model.num_layers", id=id)
    def find(c: Config, world: int) -> Faults:
        listed, layers = value_of(c, knob) or [], range(c.model.num_layers)
        if any(i not in layers for i in listed):
            yield fault(
                f"{knob} = {spelled(listed)} names layers outside 0 to {len(layers) - 1} "
                f"(model.num_layers = {len(layers)})",
                f"{knob}={spelled([i for i in listed if i in layers] or None)}",
            )

    return find


MOE_LAYERS = _layers_exist("model.moe_layers", "moe-layers-exist")


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
            f"model.num_experts = {m.num_experts}, but no layer is MoE: model.first_k_dense = {m.first_k_dense} and "
            f"moe_interval = {m.moe_interval} of model.num_layers = {m.num_layers}, moe_layers = "
            f"{spelled(m.moe_layers)}",
            "model.first_k_dense=0 model.moe_interval=1 model.moe_layers=null",
        )


@check("model.top_k", "model.num_experts")
def top_k_experts_exist(c: Config, world: int) -> Faults:
    top_k, experts = c.model.top_k, c.model.num_experts
    if 0 < experts < top_k:
        yield fault(
            f"model.top_k = {top_k} is more than model.num_experts = {experts}",
            f"model.top_k={experts}",
        )


GROUPS_OF_EXPERTS = divides("model.num_groups", "model.num_experts", "groups-divide-experts")


@check("model.top_groups", "model.num_groups")
def top_groups_exist(c: Config, world: int) -> Faults:
    chosen, groups = c.model.top_groups, c.model.num_groups
    if chosen > groups:
        yield fault(
            f"model.top_groups = {chosen} is more than model.num_groups = {groups}",
            f"model.top_groups={groups}",
        )


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
            f"model.top_groups = {m.top_groups} groups of {group_size} experts hold fewer than model.top_k = {m.top_k}",
            f"model.top_groups={-(-m.top_k // group_size)}",
        )


@check(
    "model.group_score", "model.num_groups", "model.num_experts", needs=["groups-divide-experts"]
)
def top2_needs_two(c: Config, world: int) -> Faults:
    experts, groups = c.model.num_experts, c.model.num_groups
    if c.model.group_score == "top2_sum" and experts == groups > 1:
        yield fault(
            f"model.group_score = top2_sum adds two experts of a group, and model.num_experts / num_groups = "
            f"{experts} / {groups} leaves one",
            "model.group_score=max",
        )


@check(
    "parallel.ep",
    "model.num_experts",
    "parallel.etp",
    "parallel.tp",
    "parallel.cp",
    "parallel.pp",
    needs=["world-fits"],
)
def experts_split_over_ep(c: Config, world: int) -> Faults:
    experts, p = c.model.num_experts, c.parallel
    if experts % p.ep:
        fold = data_parallel(c, world) * p.cp * p.tp
        legal = [ep for ep in divisors(experts) if fold % (ep * (p.etp or p.tp)) == 0]
        yield fault(
            f"model.num_experts = {experts} is not divisible by parallel.ep = {p.ep}",
            f"parallel.ep={nearest(p.ep, legal)}",
        )


@check("parallel.ep_inner", "parallel.ep")
def nodes_divide_ep(c: Config, world: int) -> Faults:
    inner, ep = c.parallel.ep_inner, c.parallel.ep
    if ep % inner:
        yield fault(
            f"parallel.ep_inner = {inner} does not divide parallel.ep = {ep}",
            f"parallel.ep_inner={nearest(inner, divisors(ep))}",
        )


@check("moe.exchange", "parallel.ep_inner", "parallel.ep", needs=["nodes-divide-ep"])
def planned_exchange_is_direct(c: Config, world: int) -> Faults:
    if c.moe.exchange == "planned" and 1 < c.parallel.ep_inner < c.parallel.ep:
        yield fault(
            f"moe.exchange = planned sends tokens straight to their experts, and parallel.ep_inner = "
            f"{c.parallel.ep_inner} of parallel.ep = {c.parallel.ep} sends them to nodes first",
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
        yield fault(
            f"an expert's {features} features (model.moe_ffn_hidden_size, or ffn_hidden_size) are not divisible by "
            f"parallel.etp = {etp}{' (= parallel.tp)' if c.parallel.etp is None else ''}",
            f"parallel.etp={nearest(etp, [size for size in divisors(etp) if features % size == 0])}",
        )


def _other_shared_expert(c: Config, world: int) -> str:
    return (
        f"model.shared_ffn_hidden_size={multiples(c.model.shared_ffn_hidden_size, c.parallel.tp)}"
    )


SHARED_EXPERT = "model.shared_ffn_hidden_size"
SHARED_EXPERT_OVER_TP = divides(
    "parallel.tp", SHARED_EXPERT, "shared-expert-splits-over-tp", _other_shared_expert
)


def _balance_with(c: Config, kind: str) -> str:
    return f"moe.balance={spelled([word for word in c.moe.balance if word != 'none'] + [kind])}"


@check("moe.aux_coef", "moe.balance", needs=["routing-needs-experts"])
def aux_coef_needs_aux(c: Config, world: int) -> Faults:
    if c.moe.aux_coef > 0 and not set(AUXILIARY) & set(c.moe.balance):
        yield fault(
            f"moe.aux_coef = {c.moe.aux_coef:g} scales auxiliary losses, and moe.balance = {spelled(c.moe.balance)} "
            "has none",
            f"{_balance_with(c, 'aux')}, or moe.aux_coef=0",
        )


@check("moe.bias_rate", "moe.balance", needs=["routing-needs-experts"])
def bias_rate_needs_bias(c: Config, world: int) -> Faults:
    if c.moe.bias_rate > 0 and "bias" not in c.moe.balance:
        yield fault(
            f"moe.bias_rate = {c.moe.bias_rate:g} moves the routers' biases, and moe.balance = "
            f"{spelled(c.moe.balance)} does not use them",
            f"{_balance_with(c, 'bias')}, or moe.bias_rate=0",
        )


_MLA_DIMS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "latent_norm_eps",
)


@check("model.attention", *(f"model.{dim}" for dim in _MLA_DIMS))
def mla_dims_need_mla(c: Config, world: int) -> Faults:
    unused = [
        f"model.{dim}" for dim in _MLA_DIMS if getattr(c.model, dim) != getattr(Config().model, dim)
    ]
    if unused and c.model.attention != "mla":
        yield fault(
            f"model.attention = {c.model.attention} does not read {', '.join(unused)}",
            "model.attention=mla",
        )


@check("model.attention", "model.position")
def mla_needs_rope(c: Config, world: int) -> Faults:
    if c.model.attention == "mla" and c.model.position != "rope":
        yield fault(
            f"model.attention = mla rotates qk_rope_head_dim features, and model.position = {c.model.position}",
            "model.position=rope",
        )


@check("model.attention", "model.qk_rope_head_dim")
def mla_rope_pairs_dims(c: Config, world: int) -> Faults:
    dim = c.model.qk_rope_head_dim
    if c.model.attention == "mla" and dim % 2:
        yield fault(
            f"model.qk_rope_head_dim = {dim} is odd, and rope rotates pairs",
            f"model.qk_rope_head_dim={dim + 1}",
        )


@check("model.attention", "model.num_kv_heads", "model.num_heads")
def mla_kv_heads(c: Config, world: int) -> Faults:
    heads, kv_heads = c.model.num_heads, c.model.num_kv_heads
    if c.model.attention == "mla" and kv_heads != heads:
        yield fault(
            f"model.num_kv_heads = {kv_heads} and model.num_heads = {heads}: with model.attention = mla every head "
            "has its own key and value, projected from the shared latent",
            f"model.num_kv_heads={heads}",
        )


_NOT_IN_MLA = {
    "qk_norm": False,
    "qkv_bias": False,
    "attention_gate": False,
    "query_pre_attn_scalar": None,
}


@check("model.attention", *(f"model.{name}" for name in _NOT_IN_MLA))
def mla_has_no_such_option(c: Config, world: int) -> Faults:
    options = {
        f"model.{name}": idle
        for name, idle in _NOT_IN_MLA.items()
        if getattr(c.model, name) != idle
    }
    if c.model.attention == "mla" and options:
        yield fault(
            f"model.attention = mla norms and scales on its own and has no bias on latents: {', '.join(options)}",
            " ".join(f"{option}={spelled(idle)}" for option, idle in options.items()),
        )


KV_HEADS = divides("model.num_kv_heads", "model.num_heads", "kv-heads-divide-heads")


_NEEDED = {
    "qk_norm_all_heads": "qk_norm",
    "window_layers": "attention_window",
    "window_rope_theta": "attention_window",
    "shared_expert_gate": "shared_ffn_hidden_size",
}


@check(*(f"model.{name}" for pair in _NEEDED.items() for name in pair))
def options_of_what_is_absent(c: Config, world: int) -> Faults:
    for name, needed in _NEEDED.items():
        value, default = (getattr(model, name) for model in (c.model, Config().model))
        if value != default and not getattr(c.model, needed):
            yield fault(
                f"model.{name} = {spelled(value)} changes what model.{needed} = "
                f"{spelled(getattr(c.model, needed))} leaves out",
                f"model.{name}={spelled(default)}",
            )


WINDOW_LAYERS = _layers_exist("model.window_layers", "window-layers-exist")


@check("model.parallel_block", "model.block_norm")
def parallel_block_norms_first(c: Config, world: int) -> Faults:
    if c.model.parallel_block != "none" and c.model.block_norm != "pre":
        yield fault(
            f"model.parallel_block = {c.model.parallel_block} has norms before attention and MLP, and "
            f"model.block_norm = {c.model.block_norm}",
            "model.block_norm=pre",
        )


@check("model.head_dim", "model.rotary_percent", "model.position", "model.attention")
def rope_pairs_dims(c: Config, world: int) -> Faults:
    dim, share, rotated = c.model.head_dim, c.model.rotary_percent, c.model.rotary_dim
    if c.model.position == "rope" and c.model.attention == "gqa" and (rotated % 2 or rotated == 0):
        yield fault(
            (
                f"model.head_dim = {dim}"
                if share == 1
                else f"model.rotary_percent = {share} of model.head_dim = {dim}"
            )
            + f" is {rotated if share < 1 else 'odd'}, and model.position = rope rotates pairs",
            f"model.head_dim={dim + 1}" if share == 1 else "model.rotary_percent=1.0",
        )


@check("train.seq_len", "model.max_positions", "model.position")
def learned_positions_reach(c: Config, world: int) -> Faults:
    length, positions = c.train.seq_len, c.model.max_positions
    if c.model.position == "learned" and length > positions:
        yield fault(
            f"train.seq_len = {length} is longer than the table of learned positions, model.max_positions = "
            f"{positions}",
            f"train.seq_len={positions}, or model.max_positions={length}",
        )


@check("model.rope_scaling.type", "model.position")
def scaling_needs_rope(c: Config, world: int) -> Faults:
    scaling = c.model.rope_scaling
    if c.model.position != "rope" and scaling.type != "none":
        yield fault(
            f"model.rope_scaling.type = {scaling.type} stretches rotary frequencies, and model.position = "
            f"{c.model.position}",
            "model.rope_scaling.type=none",
        )


@check("model.rope_scaling.factor", "model.rope_scaling.type")
def scaling_factor_needs_a_type(c: Config, world: int) -> Faults:
    scaling = c.model.rope_scaling
    if scaling.type == "none" and scaling.factor != 1:
        yield fault(
            f"model.rope_scaling.factor = {scaling.factor:g}, and model.rope_scaling.type = none stretches nothing",
            "model.rope_scaling.factor=1, or model.rope_scaling.type=llama3, yarn or linear",
        )


@check(
    "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_freq_factor",
    "model.rope_scaling.type",
)
def llama3_scaling_bands(c: Config, world: int) -> Faults:
    scaling = c.model.rope_scaling
    if scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield fault(
            f"model.rope_scaling.low_freq_factor = {scaling.low_freq_factor} is not below high_freq_factor = "
            f"{scaling.high_freq_factor}",
            f"model.rope_scaling.high_freq_factor={4 * scaling.low_freq_factor:g}",
        )


@check("model.rope_scaling.beta_slow", "model.rope_scaling.beta_fast", "model.rope_scaling.type")
def yarn_scaling_bands(c: Config, world: int) -> Faults:
    scaling = c.model.rope_scaling
    if scaling.type == "yarn" and scaling.beta_slow > scaling.beta_fast:
        yield fault(
            f"model.rope_scaling.beta_slow = {scaling.beta_slow} is above beta_fast = {scaling.beta_fast}",
            f"model.rope_scaling.beta_fast={32 * scaling.beta_slow:g}",
        )

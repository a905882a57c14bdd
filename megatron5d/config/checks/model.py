"""Laws of multi-head latent attention: it has dims of its own, and lacks some options of the others."""

from __future__ import annotations

from megatron5d.config.checks.check import Law
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

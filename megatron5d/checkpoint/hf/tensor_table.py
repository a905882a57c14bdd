"""Which stored tensor is which of ours, for every Hugging Face family.

Names and orientations are those that transformers writes to disk. All families rotate as we do,
half-split or interleaved, so no row is permuted; GPT-2's Conv1D stores [in, out] and already fuses
q, k and v in our order.

Experts are stored as one tensor per matrix and expert, which transformers keeps writing although
version 5 fuses them in memory. Folders of fused experts (`save_pretrained(...,
save_original_format=False)`, or a bare state dict) are read as well. We keep one stack of all
experts per layer.
"""

from dataclasses import dataclass
from typing import Any

import torch

from megatron5d.checkpoint.hf.families import DENSE, SPARSE
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig

# Stored names that carry no weights: rotary tables and causal masks that older versions saved as
# buffers.
IGNORED = {
    **dict.fromkeys((*DENSE, *SPARSE), (r"(^|\.)rotary_emb\.inv_freq$",)),
    "gpt2": (r"(^|\.)attn\.(masked_)?bias$",),
    "gpt_neox": (r"(^|\.)attention\.(masked_)?bias$", r"(^|\.)rotary_emb\.inv_freq$"),
}
BASE_PREFIX = {
    **dict.fromkeys((*DENSE, *SPARSE), "model."),
    "gpt2": "transformer.",
    "gpt_neox": "gpt_neox.",
}
HEAD = "lm_head.weight"
FUSED = "experts.gate_up_proj"  # the name by which a folder of fused experts is recognized
_MLP = ("gate_proj", "up_proj", "down_proj")
# router, its bias and the shared expert, below the module `mlp` of a layer
_ROUTER = dict.fromkeys(SPARSE, ("gate", "gate.e_score_correction_bias", "shared_experts")) | {
    "qwen2_moe": ("gate", "", "shared_expert"),
    "hy_v3": ("router.gate", "expert_bias", "shared_mlp"),
    "hy_v3, fused": ("gate", "e_score_correction_bias", "shared_experts"),
}


@dataclass(frozen=True)
class Entry:
    """One stored tensor and its place in a tensor of ours."""

    name: str  # global name of our tensor
    # (start, stop) in dim 0 of our tensor, or of one expert of it; other dims are complete
    rows: tuple[int, int]
    stored_name: str
    stored_shape: tuple[int, ...]
    # stored as [..., in, out] (GPT-2's Conv1D, gpt-oss) where ours is [..., out, in]
    transposed: bool = False
    # which expert of our stack `[experts, rows, ...]`; None = not a tensor of one expert
    expert: int | None = None
    # at least fp32, stored and in memory, whatever the model's dtype is (a router's bias)
    wide: bool = False
    # number of heads, each stored as its q, k and v (GPT-NeoX); None = all q, all k, all v
    heads: int | None = None
    # a stack of experts in which gate and up rows alternate (gpt-oss)
    interleaved: bool = False

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape of the tensor within ours."""
        shape = self.stored_shape
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return shape if self.expert is None else (1, *shape)

    @property
    def model_offset(self) -> tuple[int, ...]:
        """First index of the tensor within ours."""
        offset = (self.rows[0], *(0 for _ in self.stored_shape[1:]))
        return offset if self.expert is None else (self.expert, *offset)

    def from_stored(self, values: torch.Tensor) -> torch.Tensor:
        """A stored tensor, or some experts of a stored stack, with dims and rows in our order."""
        values = values.transpose(-1, -2) if self.transposed else values
        if self.interleaved:
            return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        if self.heads is not None:
            return values.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return values

    def to_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Our tensor as it is stored; the inverse of `from_stored`."""
        if self.interleaved:
            values = values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if self.heads is not None:
            values = values.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)
        return values.transpose(-1, -2) if self.transposed else values

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of this tensor in a model whose weights have `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.wide else dtype


def hf_entries(config: ModelConfig, family: str, fused: bool = False) -> list[Entry]:
    """Table of a model's tensors, in the order in which transformers writes them.

    Args:
        fused: all experts of a layer are stored in two tensors, as transformers has them in memory.

    Returns:
        One entry per stored tensor; together they tile every parameter of the model exactly.
    """
    h, layers = config.hidden_size, blocks(config)
    embedding, head, norm = "model.embed_tokens.weight", HEAD, "model.norm"
    table: list[Entry] = []
    if family == "gpt2":
        embedding, norm = "transformer.wte.weight", "transformer.ln_f"
        positions = (config.max_positions, h)
        table = [_whole("position_embedding.weight", "transformer.wpe.weight", *positions)]
        table += [entry for i in layers for entry in _gpt2_layer(config, i)]
    elif family == "gpt_neox":
        embedding, head = "gpt_neox.embed_in.weight", "embed_out.weight"
        norm = "gpt_neox.final_layer_norm"
        table = [entry for i in layers for entry in _neox_layer(config, i)]
    else:
        table = [entry for i in layers for entry in _decoder_layer(config, family, i, fused)]
        table += [entry for i in layers[config.num_layers :] for entry in _mtp_layer(config, i)]
    table = [
        _whole("embedding.weight", embedding, config.vocab_size, h),
        *table,
        *_norm("final_norm", norm, h, bias=family in ("gpt2", "gpt_neox")),
    ]
    if not config.tie_embeddings:
        table.append(_whole("head.weight", head, config.vocab_size, h))
    return table


def mtp_copies(config: ModelConfig) -> list[Entry]:
    """Copies of embedding and head that folders with multi-token prediction layers also store."""
    shape = (config.vocab_size, config.hidden_size)
    head = "embedding.weight" if config.tie_embeddings else "head.weight"
    return [
        _whole(name, f"model.layers.{i}.{copy}.weight", *shape)
        for i in blocks(config)[config.num_layers :]
        for name, copy in (("embedding.weight", "embed_tokens"), (head, "shared_head.head"))
    ]


def _whole(name: str, stored_name: str, *shape: int, **options: Any) -> Entry:
    """A stored tensor that is all of ours."""
    return Entry(name, (0, shape[0]), stored_name, shape, **options)


def _norm(name: str, stored_name: str, size: int, bias: bool = False) -> list[Entry]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [_whole(f"{name}.{kind}", f"{stored_name}.{kind}", size) for kind in kinds]


def _linear(
    name: str, columns: int, bias: bool, stored: list[tuple[str, int]], **options: Any
) -> list[Entry]:
    """Linear layers [out, in] that we keep as one, in the given order.

    Args:
        stored: (stored name, rows) of each.
        options: fields of each entry.
    """
    entries, start = [], 0
    for stored_name, rows in stored:
        row_range = (start, start + rows)
        weight = (f"{name}.weight", row_range, f"{stored_name}.weight", (rows, columns))
        entries.append(Entry(*weight, **options))
        if bias:
            entries.append(
                Entry(f"{name}.bias", row_range, f"{stored_name}.bias", (rows,), **options)
            )
        start += rows
    return entries


def _decoder_layer(config: ModelConfig, family: str, i: int, fused: bool) -> list[Entry]:
    ours, theirs = f"layers.{i}", f"model.layers.{i}"
    packed = family == "phi3"  # q, k and v lie in one tensor, and so do gate and up, in our order
    norms = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
    post_norms = {
        "attention.post_norm": "post_attention_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    }
    if config.block_norm == "post":
        norms = post_norms
    elif config.block_norm == "both":
        norms = {
            "attention.norm": "input_layernorm",
            "attention.post_norm": "post_attention_layernorm",
            "mlp.norm": "pre_feedforward_layernorm",
            "mlp.post_norm": "post_feedforward_layernorm",
        }
    table = [
        entry
        for name, stored_name in norms.items()
        for entry in _norm(f"{ours}.{name}", f"{theirs}.{stored_name}", config.hidden_size)
    ]
    table += (
        _latent_attention(config, i)
        if config.attention == "mla"
        else _attention(config, f"{ours}.attention", f"{theirs}.self_attn", packed)
    )
    if config.attention_sinks:
        sinks = (f"{ours}.attention.sinks", f"{theirs}.self_attn.sinks")
        table.append(_whole(*sinks, config.num_heads))
    if not is_moe(config, i):
        sizes = (config.hidden_size, config.ffn_hidden_size)
        names = ("gate_up_proj", "down_proj") if packed else _MLP
        return table + _mlp(f"{ours}.mlp", f"{theirs}.mlp", *sizes, names, config.mlp_bias)
    if family == "gpt_oss":
        return table + _gpt_oss_experts(config, i)
    return table + _experts(config, family, i, fused)


def _attention(config: ModelConfig, ours: str, theirs: str, packed: bool) -> list[Entry]:
    h, d = config.hidden_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    qkv = [(f"{theirs}.q_proj", q), (f"{theirs}.k_proj", kv), (f"{theirs}.v_proj", kv)]
    if packed:
        qkv = [(f"{theirs}.qkv_proj", q + 2 * kv)]
    entries = [
        *_linear(f"{ours}.qkv", h, config.qkv_bias, qkv),
        *_linear(f"{ours}.out", q, config.attention_out_bias, [(f"{theirs}.o_proj", h)]),
    ]
    if config.qk_norm:
        q, kv = (q, kv) if config.qk_norm_all_heads else (d, d)
        entries += _norm(f"{ours}.q_norm", f"{theirs}.q_norm", q)
        entries += _norm(f"{ours}.k_norm", f"{theirs}.k_norm", kv)
    return entries


def _latent_attention(config: ModelConfig, i: int) -> list[Entry]:
    h, a, q_rank, r = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("q", "q_proj", (a * (dn + dr), h))]
    if q_rank:
        tensors = [
            ("q_down", "q_a_proj", (q_rank, h)),
            ("q_norm", "q_a_layernorm", (q_rank,)),
            ("q_up", "q_b_proj", (a * (dn + dr), q_rank)),
        ]
    tensors += [
        ("kv_down", "kv_a_proj_with_mqa", (r + dr, h)),
        ("kv_norm", "kv_a_layernorm", (r,)),
        ("kv_up", "kv_b_proj", (a * (dn + dv), r)),
        ("out", "o_proj", (h, a * dv)),
    ]
    ours, theirs = f"layers.{i}.attention", f"model.layers.{i}.self_attn"
    return [
        _whole(f"{ours}.{name}.weight", f"{theirs}.{stored_name}.weight", *shape)
        for name, stored_name, shape in tensors
    ]


def _mlp(
    ours: str,
    theirs: str,
    hidden: int,
    features: int,
    names: tuple[str, ...],
    bias: bool = False,
    **options: Any,
) -> list[Entry]:
    """An MLP whose gate and up projections we keep as one; `names`: (gate, up, down), or (gate and
    up, down)."""
    *up, down = names
    up_rows = [(f"{theirs}.{name}", 2 * features // len(up)) for name in up]
    return [
        *_linear(f"{ours}.up", hidden, bias, up_rows, **options),
        *_linear(f"{ours}.down", features, bias, [(f"{theirs}.{down}", hidden)], **options),
    ]


def _gpt_oss_experts(config: ModelConfig, i: int) -> list[Entry]:
    """Router and experts, stored in stacks `[E, in, out]` in which gate and up alternate."""
    h, f, e = config.hidden_size, config.expert_hidden_size, config.num_experts
    ours, theirs = f"layers.{i}", f"model.layers.{i}.mlp"
    experts, up, down = f"{ours}.experts", f"{theirs}.{FUSED}", f"{theirs}.experts.down_proj"
    return [
        _whole(f"{ours}.router.weight", f"{theirs}.router.weight", e, h),
        _whole(f"{ours}.router.linear_bias", f"{theirs}.router.bias", e),
        _whole(f"{experts}.up.weight", up, e, h, 2 * f, transposed=True, interleaved=True),
        _whole(f"{experts}.up.bias", f"{up}_bias", e, 2 * f, interleaved=True),
        _whole(f"{experts}.down.weight", down, e, f, h, transposed=True),
        _whole(f"{experts}.down.bias", f"{down}_bias", e, h),
    ]


def _experts(config: ModelConfig, family: str, i: int, fused: bool) -> list[Entry]:
    """Router, experts and shared expert of a layer."""
    h, f, experts = config.hidden_size, config.expert_hidden_size, config.num_experts
    mixtral = family == "mixtral"
    module = "block_sparse_moe" if mixtral and not fused else "mlp"
    names = ("w1", "w3", "w2") if mixtral else _MLP
    renamed = fused and family == "hy_v3"
    router, bias, shared = _ROUTER["hy_v3, fused" if renamed else family]
    ours, theirs = f"layers.{i}", f"model.layers.{i}.{module}"
    table = [_whole(f"{ours}.router.weight", f"{theirs}.{router}.weight", experts, h)]
    if config.router_bias:
        table.append(_whole(f"{ours}.router.bias", f"{theirs}.{bias}", experts, wide=True))
    if fused:
        up, down = f"{theirs}.{FUSED}", f"{theirs}.experts.down_proj"
        table += [
            _whole(f"{ours}.experts.up.weight", up, experts, 2 * f, h),
            _whole(f"{ours}.experts.down.weight", down, experts, h, f),
        ]
    for e in range(0 if fused else experts):
        table += _mlp(f"{ours}.experts", f"{theirs}.experts.{e}", h, f, names, expert=e)
    if features := config.shared_ffn_hidden_size:
        if config.shared_expert_gate:
            gate = f"{theirs}.shared_expert_gate.weight"
            table.append(_whole(f"{ours}.shared_expert.gate.weight", gate, 1, h))
        table += _mlp(f"{ours}.shared_expert", f"{theirs}.{shared}", h, features, names)
    return table


def _mtp_layer(config: ModelConfig, i: int) -> list[Entry]:
    """What a multi-token prediction layer has in addition to a block."""
    h, ours, theirs = config.hidden_size, f"layers.{i}.mtp", f"model.layers.{i}"
    return [
        *_norm(f"{ours}.embedding_norm", f"{theirs}.enorm", h),
        *_norm(f"{ours}.hidden_norm", f"{theirs}.hnorm", h),
        _whole(f"{ours}.join.weight", f"{theirs}.eh_proj.weight", h, 2 * h),
        *_norm(f"{ours}.final_norm", f"{theirs}.shared_head.norm", h),
    ]


def _gpt2_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f = config.hidden_size, config.ffn_hidden_size
    ours, theirs = f"layers.{i}", f"transformer.h.{i}"

    def conv1d(name: str, stored_name: str, rows: int, columns: int) -> list[Entry]:
        name, stored_name = f"{ours}.{name}", f"{theirs}.{stored_name}"
        weight, stored_weight = f"{name}.weight", f"{stored_name}.weight"
        return [
            Entry(weight, (0, rows), stored_weight, (columns, rows), transposed=True),
            _whole(f"{name}.bias", f"{stored_name}.bias", rows),
        ]

    return [
        *_norm(f"{ours}.attention.norm", f"{theirs}.ln_1", h, bias=True),
        *conv1d("attention.qkv", "attn.c_attn", 3 * h, h),
        *conv1d("attention.out", "attn.c_proj", h, h),
        *_norm(f"{ours}.mlp.norm", f"{theirs}.ln_2", h, bias=True),
        *conv1d("mlp.up", "mlp.c_fc", f, h),
        *conv1d("mlp.down", "mlp.c_proj", h, f),
    ]


def _neox_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f, biased = config.hidden_size, config.ffn_hidden_size, config.qkv_bias
    ours, theirs = f"layers.{i}", f"gpt_neox.layers.{i}"
    qkv = [(f"{theirs}.attention.query_key_value", 3 * h)]
    return [
        *_norm(f"{ours}.attention.norm", f"{theirs}.input_layernorm", h, bias=True),
        *_norm(f"{ours}.mlp.norm", f"{theirs}.post_attention_layernorm", h, bias=True),
        *_linear(f"{ours}.attention.qkv", h, biased, qkv, heads=config.num_heads),
        *_linear(f"{ours}.attention.out", h, biased, [(f"{theirs}.attention.dense", h)]),
        *_linear(f"{ours}.mlp.up", h, True, [(f"{theirs}.mlp.dense_h_to_4h", f)]),
        *_linear(f"{ours}.mlp.down", f, True, [(f"{theirs}.mlp.dense_4h_to_h", h)]),
    ]

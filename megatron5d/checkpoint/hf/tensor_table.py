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
from megatron5d.checkpoint.layout import Dims
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
_NEOX_HEAD = "embed_out.weight"
# names of a stored head; transformers 5 calls GPT-NeoX's otherwise in memory than in files
HEADS = dict.fromkeys(BASE_PREFIX, (HEAD,)) | {"gpt_neox": (_NEOX_HEAD, HEAD)}
_FINAL_NORMS = {
    **dict.fromkeys((*DENSE, *SPARSE), "norm"),
    "gpt2": "ln_f",
    "gpt_neox": "final_layer_norm",
}
TEXT_PREFIX = "language_model."  # of the language model's names beside a vision tower
# one name of every folder: of whole models, and of those saved without their base prefix
_WHOLE = {f"{BASE_PREFIX[family]}{norm}.weight" for family, norm in _FINAL_NORMS.items()}
ANCHORS = (
    _WHOLE | {TEXT_PREFIX + name for name in _WHOLE},
    {f"{norm}.weight" for norm in _FINAL_NORMS.values()},
)
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
    stored_shape: Dims
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
    # stored / ours, where a family has no setting for a factor of ours (export only)
    scale: float = 1.0

    @property
    def model_shape(self) -> Dims:
        """Shape of the tensor within ours."""
        shape = self.stored_shape
        if self.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        return shape if self.expert is None else (1, *shape)

    @property
    def model_offset(self) -> Dims:
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
    embedding, head = "model.embed_tokens.weight", HEADS[family][0]
    norm = BASE_PREFIX[family] + _FINAL_NORMS[family]
    table: list[Entry] = []
    if family == "gpt2":
        embedding = "transformer.wte.weight"
        positions = (config.max_positions, h)
        table = [whole_entry("position_embedding.weight", "transformer.wpe.weight", *positions)]
        table += [entry for i in layers for entry in _gpt2_layer(config, i)]
    elif family == "gpt_neox":
        embedding = "gpt_neox.embed_in.weight"
        table = [entry for i in layers for entry in _neox_layer(config, i)]
    else:
        table = [entry for i in layers for entry in _decoder_layer(config, family, i, fused)]
        table += [entry for i in layers[config.num_layers :] for entry in _mtp_layer(config, i)]
    table = [
        whole_entry("embedding.weight", embedding, config.vocab_size, h),
        *table,
        *norm_entries("final_norm", norm, h, bias=family in ("gpt2", "gpt_neox")),
    ]
    if not config.tie_embeddings:
        table.append(whole_entry("head.weight", head, config.vocab_size, h))
    return table


def mtp_copies(config: ModelConfig) -> list[Entry]:
    """Copies of embedding and head that folders with multi-token prediction layers also store."""
    shape = (config.vocab_size, config.hidden_size)
    head = "embedding.weight" if config.tie_embeddings else "head.weight"
    return [
        whole_entry(name, f"model.layers.{i}.{copy}.weight", *shape)
        for i in blocks(config)[config.num_layers :]
        for name, copy in (("embedding.weight", "embed_tokens"), (head, "shared_head.head"))
    ]


def whole_entry(name: str, stored_name: str, *shape: int, **options: Any) -> Entry:
    """A stored tensor that is all of ours."""
    return Entry(name, (0, shape[0]), stored_name, shape, **options)


def norm_entries(name: str, stored_name: str, size: int, bias: bool = False) -> list[Entry]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [whole_entry(f"{name}.{kind}", f"{stored_name}.{kind}", size) for kind in kinds]


def linear_entries(
    name: str,
    columns: int,
    bias: bool,
    stored: list[tuple[str, int]],
    transposed: bool = False,
    **options: Any,
) -> list[Entry]:
    """Linear layers [out, in] that we keep as one, in the given order.

    Args:
        stored: (stored name, rows) of each.
        transposed: their weights are stored as [in, out].
        options: further fields of each entry.
    """
    entries, start = [], 0
    for stored_name, rows in stored:
        row_range = (start, start + rows)
        shape = (columns, rows) if transposed else (rows, columns)
        weight = (f"{name}.weight", row_range, f"{stored_name}.weight", shape, transposed)
        entries.append(Entry(*weight, **options))
        if bias:
            vector = (f"{name}.bias", row_range, f"{stored_name}.bias", (rows,))
            entries.append(Entry(*vector, **options))
        start += rows
    return entries


def mlp_entries(
    ours: str,
    theirs: str,
    sizes: tuple[int, int],
    names: tuple[str, ...],
    bias: bool = False,
    gated: bool = True,
    **options: Any,
) -> list[Entry]:
    """An MLP, whose gate and up projections we keep as one.

    Args:
        sizes: hidden size, and features inside.
        names: stored as (gate, up, down), or as (gate and up, down).
        options: as in `linear_entries`.
    """
    hidden, features = sizes
    *up, down = names
    rows = (2 if gated else 1) * features // len(up)
    up_rows = [(f"{theirs}.{name}", rows) for name in up]
    down_rows = [(f"{theirs}.{down}", hidden)]
    return [
        *linear_entries(f"{ours}.up", hidden, bias, up_rows, **options),
        *linear_entries(f"{ours}.down", features, bias, down_rows, **options),
    ]


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
        for entry in norm_entries(f"{ours}.{name}", f"{theirs}.{stored_name}", config.hidden_size)
    ]
    table += (
        _latent_attention(config, i)
        if config.attention == "mla"
        else _attention(config, f"{ours}.attention", f"{theirs}.self_attn", packed)
    )
    if config.attention_sinks:
        sinks = (f"{ours}.attention.sinks", f"{theirs}.self_attn.sinks")
        table.append(whole_entry(*sinks, config.num_heads))
    if not is_moe(config, i):
        sizes = (config.hidden_size, config.ffn_hidden_size)
        names = ("gate_up_proj", "down_proj") if packed else _MLP
        return table + mlp_entries(f"{ours}.mlp", f"{theirs}.mlp", sizes, names, config.mlp_bias)
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
        *linear_entries(f"{ours}.qkv", h, config.qkv_bias, qkv),
        *linear_entries(f"{ours}.out", q, config.attention_out_bias, [(f"{theirs}.o_proj", h)]),
    ]
    if config.qk_norm:
        q, kv = (q, kv) if config.qk_norm_all_heads else (d, d)
        entries += norm_entries(f"{ours}.q_norm", f"{theirs}.q_norm", q)
        entries += norm_entries(f"{ours}.k_norm", f"{theirs}.k_norm", kv)
    return entries


def _latent_attention(config: ModelConfig, i: int) -> list[Entry]:
    h, a, q_rank, r = config.hidden_size, config.num_heads, config.q_lora_rank, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    tensors: list[tuple[str, str, Dims]] = [("q", "q_proj", (a * (dn + dr), h))]
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
        whole_entry(f"{ours}.{name}.weight", f"{theirs}.{stored_name}.weight", *shape)
        for name, stored_name, shape in tensors
    ]


def _gpt_oss_experts(config: ModelConfig, i: int) -> list[Entry]:
    """Router and experts, stored in stacks `[E, in, out]` in which gate and up alternate."""
    h, f, e = config.hidden_size, config.expert_hidden_size, config.num_experts
    ours, theirs = f"layers.{i}", f"model.layers.{i}.mlp"
    experts, up, down = f"{ours}.experts", f"{theirs}.{FUSED}", f"{theirs}.experts.down_proj"
    return [
        whole_entry(f"{ours}.router.weight", f"{theirs}.router.weight", e, h),
        whole_entry(f"{ours}.router.linear_bias", f"{theirs}.router.bias", e),
        whole_entry(f"{experts}.up.weight", up, e, h, 2 * f, transposed=True, interleaved=True),
        whole_entry(f"{experts}.up.bias", f"{up}_bias", e, 2 * f, interleaved=True),
        whole_entry(f"{experts}.down.weight", down, e, f, h, transposed=True),
        whole_entry(f"{experts}.down.bias", f"{down}_bias", e, h),
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
    table = [whole_entry(f"{ours}.router.weight", f"{theirs}.{router}.weight", experts, h)]
    if config.router_bias:
        table.append(whole_entry(f"{ours}.router.bias", f"{theirs}.{bias}", experts, wide=True))
    if fused:
        up, down = f"{theirs}.{FUSED}", f"{theirs}.experts.down_proj"
        table += [
            whole_entry(f"{ours}.experts.up.weight", up, experts, 2 * f, h),
            whole_entry(f"{ours}.experts.down.weight", down, experts, h, f),
        ]
    for e in range(0 if fused else experts):
        stored_name = f"{theirs}.experts.{e}"
        table += mlp_entries(f"{ours}.experts", stored_name, (h, f), names, expert=e)
    if features := config.shared_ffn_hidden_size:
        if config.shared_expert_gate:
            gate = f"{theirs}.shared_expert_gate.weight"
            table.append(whole_entry(f"{ours}.shared_expert.gate.weight", gate, 1, h))
        sizes = (h, features)
        table += mlp_entries(f"{ours}.shared_expert", f"{theirs}.{shared}", sizes, names)
    return table


def _mtp_layer(config: ModelConfig, i: int) -> list[Entry]:
    """What a multi-token prediction layer has in addition to a block."""
    h, ours, theirs = config.hidden_size, f"layers.{i}.mtp", f"model.layers.{i}"
    return [
        *norm_entries(f"{ours}.embedding_norm", f"{theirs}.enorm", h),
        *norm_entries(f"{ours}.hidden_norm", f"{theirs}.hnorm", h),
        whole_entry(f"{ours}.join.weight", f"{theirs}.eh_proj.weight", h, 2 * h),
        *norm_entries(f"{ours}.final_norm", f"{theirs}.shared_head.norm", h),
    ]


def _gpt2_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, ours, theirs = config.hidden_size, f"layers.{i}", f"transformer.h.{i}"
    qkv, out = [(f"{theirs}.attn.c_attn", 3 * h)], [(f"{theirs}.attn.c_proj", h)]
    sizes, names = (h, config.ffn_hidden_size), ("c_fc", "c_proj")
    return [
        *norm_entries(f"{ours}.attention.norm", f"{theirs}.ln_1", h, bias=True),
        *linear_entries(f"{ours}.attention.qkv", h, True, qkv, transposed=True),
        *linear_entries(f"{ours}.attention.out", h, True, out, transposed=True),
        *norm_entries(f"{ours}.mlp.norm", f"{theirs}.ln_2", h, bias=True),
        *mlp_entries(
            f"{ours}.mlp", f"{theirs}.mlp", sizes, names, bias=True, gated=False, transposed=True
        ),
    ]


def _neox_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f, biased = config.hidden_size, config.ffn_hidden_size, config.qkv_bias
    ours, theirs = f"layers.{i}", f"gpt_neox.layers.{i}"
    qkv = [(f"{theirs}.attention.query_key_value", 3 * h)]
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return [
        *norm_entries(f"{ours}.attention.norm", f"{theirs}.input_layernorm", h, bias=True),
        *norm_entries(f"{ours}.mlp.norm", f"{theirs}.post_attention_layernorm", h, bias=True),
        *linear_entries(f"{ours}.attention.qkv", h, biased, qkv, heads=config.num_heads),
        *linear_entries(f"{ours}.attention.out", h, biased, [(f"{theirs}.attention.dense", h)]),
        *mlp_entries(f"{ours}.mlp", f"{theirs}.mlp", (h, f), names, bias=True, gated=False),
    ]

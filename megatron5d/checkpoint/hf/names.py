"""Which Hugging Face tensor is which part of ours; routers and experts are in moe_mla.py, latents in moe_mla.py.

Names and orientations as transformers writes them to disk. All families rotate as we do, half-split or interleaved, so
no row is permuted; GPT-2's Conv1D keeps [in, out] and already fuses q, k and v in our order.
"""

from megatron5d.checkpoint.hf.families import DENSE
from megatron5d.checkpoint.hf.files import Entry
from megatron5d.checkpoint.hf.moe_mla import SPARSE, gpt_oss_entries, mla_entries, moe_entries
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig

# Stored names that carry no weights: rotary tables and causal masks that older versions saved as buffers.
IGNORED = {
    **dict.fromkeys((*DENSE, *SPARSE), (r"(^|\.)rotary_emb\.inv_freq$",)),
    "gpt2": (r"(^|\.)attn\.(masked_)?bias$",),
    "gpt_neox": (r"(^|\.)attention\.(masked_)?bias$", r"(^|\.)rotary_emb\.inv_freq$"),
}
BASE_PREFIX = {**dict.fromkeys((*DENSE, *SPARSE), "model."), "gpt2": "transformer.", "gpt_neox": "gpt_neox."}
HEAD = "lm_head.weight"


def hf_entries(config: ModelConfig, family: str, fused: bool = False) -> list[Entry]:
    """Returns the whole model's table, in the order in which transformers writes the tensors.

    Args:
        fused: all experts of a layer lie in two tensors, as transformers has them in memory.

    Returns:
        One entry per stored tensor; together they tile every parameter of the model exactly.
    """
    v, h, positions = config.vocab_size, config.hidden_size, config.max_positions
    layers = blocks(config)
    if family == "gpt2":
        entries = [
            Entry("embedding.weight", (0, v), "transformer.wte.weight", (v, h)),
            Entry("position_embedding.weight", (0, positions), "transformer.wpe.weight", (positions, h)),
            *(entry for i in layers for entry in _gpt2_layer(config, i)),
            *_vectors("final_norm", "transformer.ln_f", h, bias=True),
        ]
    elif family == "gpt_neox":
        entries = [
            Entry("embedding.weight", (0, v), "gpt_neox.embed_in.weight", (v, h)),
            *(entry for i in layers for entry in _neox_layer(config, i)),
            *_vectors("final_norm", "gpt_neox.final_layer_norm", h, bias=True),
        ]
    else:
        entries = [
            Entry("embedding.weight", (0, v), "model.embed_tokens.weight", (v, h)),
            *(entry for i in layers for entry in _decoder_layer(config, family, i, fused)),
            *(entry for i in layers[config.num_layers :] for entry in _prediction(config, i)),
            *_vectors("final_norm", "model.norm", h, bias=False),
        ]
    if not config.tie_embeddings:
        entries.append(Entry("head.weight", (0, v), "embed_out.weight" if family == "gpt_neox" else HEAD, (v, h)))
    return entries


def hf_copies(config: ModelConfig) -> list[Entry]:
    """Returns further names of embedding and head in folders with DeepSeek-V3's multi-token prediction layers."""
    shape = (config.vocab_size, config.hidden_size)
    head = "embedding.weight" if config.tie_embeddings else "head.weight"
    return [
        Entry(name, (0, shape[0]), f"model.layers.{i}.{copy}.weight", shape)
        for i in blocks(config)[config.num_layers :]
        for name, copy in (("embedding.weight", "embed_tokens"), (head, "shared_head.head"))
    ]


def _prediction(config: ModelConfig, i: int) -> list[Entry]:
    """Returns what a multi-token prediction layer has beside a block."""
    h, ours, theirs = config.hidden_size, f"layers.{i}.mtp", f"model.layers.{i}"
    return [
        *_vectors(f"{ours}.embedding_norm", f"{theirs}.enorm", h, bias=False),
        *_vectors(f"{ours}.hidden_norm", f"{theirs}.hnorm", h, bias=False),
        Entry(f"{ours}.join.weight", (0, h), f"{theirs}.eh_proj.weight", (h, 2 * h)),
        *_vectors(f"{ours}.final_norm", f"{theirs}.shared_head.norm", h, bias=False),
    ]


def _vectors(name: str, hf_name: str, size: int, bias: bool) -> list[Entry]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Entry(f"{name}.{kind}", (0, size), f"{hf_name}.{kind}", (size,)) for kind in kinds]


def _stack(name: str, columns: int, bias: bool, parts: list[tuple[str, int]]) -> list[Entry]:
    """Returns linear layers [out, in] that we keep as one, under each other in the order given as (HF name, rows)."""
    entries, start = [], 0
    for hf_name, rows in parts:
        place = (start, start + rows)
        entries.append(Entry(f"{name}.weight", place, f"{hf_name}.weight", (rows, columns)))
        if bias:
            entries.append(Entry(f"{name}.bias", place, f"{hf_name}.bias", (rows,)))
        start += rows
    return entries


def _decoder_layer(config: ModelConfig, family: str, i: int, fused: bool) -> list[Entry]:
    h = config.hidden_size
    ours, theirs = f"layers.{i}", f"model.layers.{i}"
    latent, sparse = config.attention == "mla", is_moe(config, i)
    packed = family == "phi3"  # q, k and v lie in one tensor, and so do gate and up, in our order
    attention, mlp = (f"{ours}.attention", f"{theirs}.self_attn"), (f"{ours}.mlp", f"{theirs}.mlp")
    norms: tuple[tuple[str, str], ...]
    norms = ("attention.norm", "input_layernorm"), ("mlp.norm", "post_attention_layernorm")
    if config.block_norm == "post":
        norms = ("attention.post_norm", "post_attention_layernorm"), ("mlp.post_norm", "post_feedforward_layernorm")
    elif config.block_norm == "both":
        norms = (
            ("attention.norm", "input_layernorm"), ("attention.post_norm", "post_attention_layernorm"),
            ("mlp.norm", "pre_feedforward_layernorm"), ("mlp.post_norm", "post_feedforward_layernorm"),
        )  # fmt: skip
    second = _mlp(config, *mlp, packed) if not sparse else []
    if sparse:
        second = gpt_oss_entries(config, i) if family == "gpt_oss" else moe_entries(config, family, i, fused)
    sinks = [Entry(f"{attention[0]}.sinks", (0, config.num_heads), f"{attention[1]}.sinks", (config.num_heads,))]
    return [
        *(entry for own, hf in norms for entry in _vectors(f"{ours}.{own}", f"{theirs}.{hf}", h, bias=False)),
        *(mla_entries(config, i) if latent else _attention(config, *attention, packed)),
        *(sinks if config.attention_sinks else []),
        *second,
    ]


def _attention(config: ModelConfig, ours: str, theirs: str, packed: bool) -> list[Entry]:
    h, d = config.hidden_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    qkv = [(f"{theirs}.q_proj", q), (f"{theirs}.k_proj", kv), (f"{theirs}.v_proj", kv)]
    if packed:
        qkv = [(f"{theirs}.qkv_proj", q + 2 * kv)]
    entries = [
        *_stack(f"{ours}.qkv", h, config.qkv_bias, qkv),
        *_stack(f"{ours}.out", q, config.attention_out_bias, [(f"{theirs}.o_proj", h)]),
    ]
    if config.qk_norm:
        whole = config.qk_norm_all_heads
        entries += _vectors(f"{ours}.q_norm", f"{theirs}.q_norm", q if whole else d, bias=False)
        entries += _vectors(f"{ours}.k_norm", f"{theirs}.k_norm", kv if whole else d, bias=False)
    return entries


def _mlp(config: ModelConfig, ours: str, theirs: str, packed: bool) -> list[Entry]:
    h, f = config.hidden_size, config.ffn_hidden_size
    up = [(f"{theirs}.gate_up_proj", 2 * f)] if packed else [(f"{theirs}.gate_proj", f), (f"{theirs}.up_proj", f)]
    return [
        *_stack(f"{ours}.up", h, config.mlp_bias, up),
        *_stack(f"{ours}.down", f, config.mlp_bias, [(f"{theirs}.down_proj", h)]),
    ]


def _gpt2_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f = config.hidden_size, config.ffn_hidden_size
    ours, theirs = f"layers.{i}", f"transformer.h.{i}"

    def conv1d(name: str, hf_name: str, rows: int, columns: int) -> list[Entry]:
        weight = Entry(f"{name}.weight", (0, rows), f"{hf_name}.weight", (columns, rows), transposed=True)
        return [weight, Entry(f"{name}.bias", (0, rows), f"{hf_name}.bias", (rows,))]

    return [
        *_vectors(f"{ours}.attention.norm", f"{theirs}.ln_1", h, bias=True),
        *conv1d(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", 3 * h, h),
        *conv1d(f"{ours}.attention.out", f"{theirs}.attn.c_proj", h, h),
        *_vectors(f"{ours}.mlp.norm", f"{theirs}.ln_2", h, bias=True),
        *conv1d(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", f, h),
        *conv1d(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", h, f),
    ]


def _neox_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f, biased = config.hidden_size, config.ffn_hidden_size, config.qkv_bias
    ours, theirs, names = f"layers.{i}", f"gpt_neox.layers.{i}", ("weight", "bias")[: 1 + biased]
    qkv, attention = f"{theirs}.attention.query_key_value", f"{ours}.attention"
    shapes = {"weight": (3 * h, h), "bias": (3 * h,)}
    return [
        *_vectors(f"{attention}.norm", f"{theirs}.input_layernorm", h, bias=True),
        *_vectors(f"{ours}.mlp.norm", f"{theirs}.post_attention_layernorm", h, bias=True),
        *(
            Entry(f"{attention}.qkv.{name}", (0, 3 * h), f"{qkv}.{name}", shapes[name], heads=config.num_heads)
            for name in names
        ),
        *_stack(f"{attention}.out", h, biased, [(f"{theirs}.attention.dense", h)]),
        *_stack(f"{ours}.mlp.up", h, True, [(f"{theirs}.mlp.dense_h_to_4h", f)]),
        *_stack(f"{ours}.mlp.down", f, True, [(f"{theirs}.mlp.dense_4h_to_h", h)]),
    ]

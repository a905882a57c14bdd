"""Weights of a Hugging Face folder, into the local parameters of a model of ours or into a
checkpoint.

Which stored tensor is which of ours, under the names and in the orientations that transformers
writes to disk. All families rotate as we do, half-split or interleaved, so no row is permuted;
GPT-2's Conv1D keeps [in, out] and already fuses q, k and v in our order.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron5d.checkpoint.hf.families import DENSE
from megatron5d.checkpoint.hf.files import Entry
from megatron5d.checkpoint.hf.import_config import (
    model_config_from_hf,
    read_hf_config,
    read_model_config,
)
from megatron5d.checkpoint.hf.moe_mla import (
    FUSED,
    SPARSE,
    gpt_oss_entries,
    mla_entries,
    moe_entries,
)
from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    Stored,
    check_names,
    load_shards,
)
from megatron5d.checkpoint.layout import ShardedTensor, sharded_parameter
from megatron5d.checkpoint.load import WEIGHT_PREFIX, LazyTensor, lazy_tensor
from megatron5d.checkpoint.new_weights import EMBEDDING, fill_new_weights, new_weight_notes
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.shard_spec import ShardSpec, spec_of

_TEXT = "language_model."  # before the names of a text model that stands beside a vision tower
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in a global tensor


def load_hf_weights(
    parameters: Iterable[torch.Tensor], config: ModelConfig, folder: str | Path
) -> list[str]:
    """Returns `load_hf_shards` into local parameters that lie here as they are.

    Args:
        parameters: local tensors with a ShardSpec, the routers' biases among them.
        config, folder: as in `load_hf_shards`.
    """
    return load_hf_shards(
        [(spec_of(each), sharded_parameter(each)) for each in parameters], config, folder
    )


def load_hf_shards(
    held: Sequence[tuple[ShardSpec, ShardedTensor]],
    config: ModelConfig,
    folder: str | Path,
    seed: int = 0,
) -> list[str]:
    """Fills what this rank holds of a model from a folder of any supported family.

    The model may have a larger vocabulary, a head of its own where the folder's is tied, and blocks
    of multi-token prediction that the folder lacks (checkpoint/new_weights.py).

    Folders saved from the bare model (GPT-2 on the hub: `wte.weight`) and tied models that also
    store their head, equal to the embedding, are read as well.

    Args:
        held: parameters, or slices of them, and the routers' biases; a bias that the architecture
            does not have (model.router_bias = false), one that balancing alone uses, becomes zero.
        config: the architecture that they were built from.
        folder: config.json and safetensors files.
        seed: of what the folder lacks.

    Returns:
        Lines for the log: what of the folder is not read, and fields in which `config` computes
        another function than its config.json, intended when a context is stretched, a mistake
        otherwise. Empty when the two agree.

    Raises:
        ValueError: what is missing, unexpected or misshapen, or a stored head that differs from the
            embedding.
    """
    if not config.router_bias:
        for view in (
            view for spec, tensor in held if _is_bias(spec) for view in tensor.shards.values()
        ):
            view.zero_()
        held = [(spec, tensor) for spec, tensor in held if not _is_bias(spec)]
    with SafetensorsFolder(folder) as stored:
        theirs = _starting_point(config, stored)
        entries, ignored = _table(theirs, stored, _rows_here(held, theirs.vocab_size))
        at = {entry.name: entry for entry in entries}
        told = unread_notes(config, stored) + new_weight_notes(config, at, theirs.vocab_size)
        check_names(stored, entries, ignored)

        def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            return stored.read(at[name].stored_name, offset, shape)

        held = fill_new_weights(
            held, config, {name: entry.model_shape for name, entry in at.items()}, read, seed
        )
    load_shards(held, entries, folder, ignored)
    return told + config_differences(config, folder)


def _rows_here(
    held: Iterable[tuple[ShardSpec, ShardedTensor]], rows: int
) -> dict[str, list[Rectangle]]:
    """Returns the rectangles of embedding and head that a rank holds, without rows from `rows`
    on."""
    here: defaultdict[str, list[Rectangle]] = defaultdict(list)
    for spec, tensor in held:
        if spec.name in (EMBEDDING, "head.weight"):
            parts = [
                (offset, (min(len(view), rows - offset[0]), *view.shape[1:]))
                for offset, view in tensor.shards.items()
            ]
            here[spec.name] += [(offset, shape) for offset, shape in parts if shape[0] > 0]
    return here


def _starting_point(config: ModelConfig, stored: SafetensorsFolder) -> ModelConfig:
    """Returns the architecture without what the folder lacks, and another could add to it."""
    theirs = read_model_config(stored.folder)
    ahead = len(prediction_layers(replace(config, num_mtp_layers=0), stored))
    tied = theirs.tie_embeddings and HEAD not in stored.tensors
    return replace(
        config,
        vocab_size=min(config.vocab_size, theirs.vocab_size),
        tie_embeddings=config.tie_embeddings or tied,
        num_mtp_layers=min(config.num_mtp_layers, ahead),
    )


def _is_bias(spec: ShardSpec) -> bool:
    return spec.name.endswith(".router.bias")


def hf_weights(
    config: ModelConfig, stored: SafetensorsFolder, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Returns the whole model as a checkpoint takes it, each part read when it is written.

    Args:
        stored: an open folder; must stay open until the checkpoint is saved.
        dtype: what the weights are cast to.

    Raises:
        ValueError: as load_hf_weights.
    """
    whole: list[Rectangle] = [((0, 0), (config.vocab_size, config.hidden_size))]
    entries, ignored = _table(config, stored, {"embedding.weight": whole, "head.weight": whole})
    check_names(stored, entries, ignored)
    return lazy_weights(entries, stored, dtype)


def lazy_weights(
    entries: Sequence[Entry], stored: Stored, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Returns the tensors of a table as a checkpoint takes them; arguments as in `hf_weights`."""
    table: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        table[entry.name].append(entry)
    return {WEIGHT_PREFIX + name: _lazy(parts, stored, dtype) for name, parts in table.items()}


def _lazy(entries: list[Entry], stored: Stored, dtype: torch.dtype) -> LazyTensor:
    at = {entry.model_offset: entry for entry in entries}
    dtype = entries[0].dtype(dtype)

    def make(offset: tuple[int, ...]) -> torch.Tensor:
        entry = at[offset]
        values = stored.read(
            entry.stored_name, (0,) * len(entry.stored_shape), entry.stored_shape
        ).to(dtype)
        return entry.from_stored(values).reshape(entry.model_shape)

    parts = {offset: entry.model_shape for offset, entry in at.items()}
    ends = [[start + extent for start, extent in zip(*part)] for part in parts.items()]
    return lazy_tensor([max(end) for end in zip(*ends)], parts, dtype, make)


def _table(
    config: ModelConfig, stored: SafetensorsFolder, held: Mapping[str, list[Rectangle]]
) -> tuple[list[Entry], list[str]]:
    """Entries and ignored names as this folder spells them; `held` is what this rank has of each
    parameter."""
    family = read_hf_config(stored.folder)["model_type"]
    fused = any(name.endswith(f".{FUSED}") for name in stored.tensors)
    entries, ignored, prefix = (
        hf_entries(config, family, fused),
        list(IGNORED[family]),
        BASE_PREFIX[family],
    )
    ignored += [_layer_names(i) for i in prediction_layers(config, stored)]
    for copy in (copy for copy in mtp_copies(config) if copy.stored_name in stored.tensors):
        ignored.append(f"^{re.escape(copy.stored_name)}$")
        original = next(entry for entry in entries if entry.name == copy.name)
        if not _same(copy.stored_name, original, stored, held.get(copy.name, [])):
            raise ValueError(
                f"{stored.folder} stores {copy.stored_name} and it is not {original.stored_name}, which the multi-token "
                "prediction layers of this model share; set model.num_mtp_layers=0 to leave them out"
            )
    if any(name.startswith(_TEXT) for name in stored.tensors):
        entries = [replace(entry, stored_name=_TEXT + entry.stored_name) for entry in entries]
        ignored.append(rf"^(?!{re.escape(_TEXT)})")
    elif not any(name.startswith(prefix) for name in stored.tensors):
        entries = [
            replace(entry, stored_name=entry.stored_name.removeprefix(prefix)) for entry in entries
        ]
    if config.tie_embeddings and HEAD in stored.tensors:
        ignored.append(f"^{HEAD}$")
        embedding = next(entry for entry in entries if entry.name == "embedding.weight")
        if not _same(HEAD, embedding, stored, held.get("embedding.weight", [])):
            raise ValueError(
                f"{stored.folder} stores {HEAD} and it is not {embedding.stored_name}, but model.tie_embeddings = true; "
                "set it to false to load both"
            )
    return entries, ignored


def unread_notes(config: ModelConfig, stored: SafetensorsFolder) -> list[str]:
    """Returns a line for each part of a folder that the model has no use for."""
    counts = {
        i: sum(bool(re.search(_layer_names(i), n)) for n in stored.tensors)
        for i in prediction_layers(config, stored)
    }
    seen = sum(not name.startswith(_TEXT) for name in stored.tensors)
    vision = [f"{stored.folder}: the {seen} tensors of what is not its language model are not read"]
    return (vision if 0 < seen < len(stored.tensors) else []) + [
        f"{stored.folder}: the {count} tensors of multi-token prediction layer {i} are not read; "
        f"model.num_mtp_layers={i + 1 - config.num_layers} reads and trains them"
        for i, count in counts.items()
    ]


def prediction_layers(config: ModelConfig, stored: SafetensorsFolder) -> list[int]:
    """Layers beyond the model's blocks that predict further tokens; only they have an `eh_proj`."""
    found = (re.search(r"(?:^|\.)layers\.(\d+)\.eh_proj\.weight$", name) for name in stored.tensors)
    return sorted(
        int(match[1]) for match in found if match and int(match[1]) >= len(blocks(config))
    )


def _layer_names(i: int) -> str:
    return rf"(^|\.)layers\.{i}\."


def _same(copy: str, original: Entry, stored: SafetensorsFolder, held: list[Rectangle]) -> bool:
    """Returns whether a tensor that the folder stores twice is the same both times; each rank looks
    at its own rows."""
    same = (
        original.stored_name in stored.tensors
        and stored.tensors[copy].shape == original.stored_shape
    )
    for rectangle in held if same else []:
        same = same and torch.equal(
            stored.read(copy, *rectangle), stored.read(original.stored_name, *rectangle)
        )
    return same


def config_differences(config: ModelConfig, folder: str | Path) -> list[str]:
    """Returns `field: ours, theirs` for every field in which the folder's config.json computes
    another function."""
    theirs = read_model_config(folder)
    passive = {"name", "init_std"} | ({"max_positions"} if config.position == "rope" else set())
    return [
        f"model.{field}: {getattr(config, field)} here, {getattr(theirs, field)} in {Path(folder) / 'config.json'}"
        for field in model_config_from_hf(folder)
        if field not in passive and getattr(config, field) != getattr(theirs, field)
    ]


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
            Entry(
                "position_embedding.weight",
                (0, positions),
                "transformer.wpe.weight",
                (positions, h),
            ),
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
        entries.append(
            Entry(
                "head.weight", (0, v), "embed_out.weight" if family == "gpt_neox" else HEAD, (v, h)
            )
        )
    return entries


def mtp_copies(config: ModelConfig) -> list[Entry]:
    """Returns further names of embedding and head in folders with DeepSeek-V3's multi-token
    prediction layers."""
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


def _vectors(name: str, stored_name: str, size: int, bias: bool) -> list[Entry]:
    kinds = ("weight", "bias") if bias else ("weight",)
    return [Entry(f"{name}.{kind}", (0, size), f"{stored_name}.{kind}", (size,)) for kind in kinds]


def _stack(name: str, columns: int, bias: bool, parts: list[tuple[str, int]]) -> list[Entry]:
    """Returns linear layers [out, in] that we keep as one, under each other in the order given as
    (HF name, rows)."""
    entries, start = [], 0
    for stored_name, rows in parts:
        place = (start, start + rows)
        entries.append(Entry(f"{name}.weight", place, f"{stored_name}.weight", (rows, columns)))
        if bias:
            entries.append(Entry(f"{name}.bias", place, f"{stored_name}.bias", (rows,)))
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
        norms = (
            ("attention.post_norm", "post_attention_layernorm"),
            ("mlp.post_norm", "post_feedforward_layernorm"),
        )
    elif config.block_norm == "both":
        norms = (
            ("attention.norm", "input_layernorm"),
            ("attention.post_norm", "post_attention_layernorm"),
            ("mlp.norm", "pre_feedforward_layernorm"),
            ("mlp.post_norm", "post_feedforward_layernorm"),
        )
    second = _mlp(config, *mlp, packed) if not sparse else []
    if sparse:
        second = (
            gpt_oss_entries(config, i)
            if family == "gpt_oss"
            else moe_entries(config, family, i, fused)
        )
    sinks = [
        Entry(
            f"{attention[0]}.sinks",
            (0, config.num_heads),
            f"{attention[1]}.sinks",
            (config.num_heads,),
        )
    ]
    return [
        *(
            entry
            for own, hf in norms
            for entry in _vectors(f"{ours}.{own}", f"{theirs}.{hf}", h, bias=False)
        ),
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
    up = (
        [(f"{theirs}.gate_up_proj", 2 * f)]
        if packed
        else [(f"{theirs}.gate_proj", f), (f"{theirs}.up_proj", f)]
    )
    return [
        *_stack(f"{ours}.up", h, config.mlp_bias, up),
        *_stack(f"{ours}.down", f, config.mlp_bias, [(f"{theirs}.down_proj", h)]),
    ]


def _gpt2_layer(config: ModelConfig, i: int) -> list[Entry]:
    h, f = config.hidden_size, config.ffn_hidden_size
    ours, theirs = f"layers.{i}", f"transformer.h.{i}"

    def conv1d(name: str, stored_name: str, rows: int, columns: int) -> list[Entry]:
        weight = Entry(
            f"{name}.weight", (0, rows), f"{stored_name}.weight", (columns, rows), transposed=True
        )
        return [weight, Entry(f"{name}.bias", (0, rows), f"{stored_name}.bias", (rows,))]

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
            Entry(
                f"{attention}.qkv.{name}",
                (0, 3 * h),
                f"{qkv}.{name}",
                shapes[name],
                heads=config.num_heads,
            )
            for name in names
        ),
        *_stack(f"{attention}.out", h, biased, [(f"{theirs}.attention.dense", h)]),
        *_stack(f"{ours}.mlp.up", h, True, [(f"{theirs}.mlp.dense_h_to_4h", f)]),
        *_stack(f"{ours}.mlp.down", f, True, [(f"{theirs}.mlp.dense_4h_to_h", h)]),
    ]

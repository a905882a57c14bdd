"""Loads the weights of a Hugging Face folder, into local parameters or into a checkpoint."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron5d.checkpoint.canonical_model import differing_fields
from megatron5d.checkpoint.hf.import_config import read_hf_config, read_model_config
from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    Stored,
    check_names,
    load_shards,
)
from megatron5d.checkpoint.hf.tensor_table import (
    BASE_PREFIX,
    FUSED,
    HEADS,
    IGNORED,
    TEXT_PREFIX,
    Entry,
    hf_entries,
    mtp_copies,
)
from megatron5d.checkpoint.layout import Dims, LazyTensor, ParameterShards, sharded_parameter
from megatron5d.checkpoint.load import WEIGHT_PREFIX
from megatron5d.checkpoint.new_weights import EMBEDDING, fill_new_weights, new_weight_notes
from megatron5d.config.derived import blocks
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.shard_spec import ShardSpec, spec_of

Rectangle = tuple[Dims, Dims]  # offset and shape in a global tensor


def load_hf_weights(
    parameters: Iterable[torch.Tensor], config: ModelConfig, folder: str | Path
) -> list[str]:
    """`load_hf_shards` into complete local parameters.

    Args:
        parameters: local tensors with a ShardSpec, including the routers' biases.
        config, folder: as in `load_hf_shards`.
    """
    shards = [(spec_of(parameter), sharded_parameter(parameter)) for parameter in parameters]
    return load_hf_shards(shards, config, folder)


def load_hf_shards(
    shards: ParameterShards, config: ModelConfig, folder: str | Path, seed: int = 0
) -> list[str]:
    """Fills what this rank holds of a model from a folder of any supported family.

    The model may have a larger vocabulary, a head where the folder's is tied, and blocks for
    multi-token prediction that the folder lacks (checkpoint/new_weights.py).

    Folders saved from the bare model (GPT-2 on the hub: `wte.weight`) are read as well, and so are
    tied models that also store their head, equal to the embedding, or only their head.

    Args:
        shards: parameters, or slices of them, and the routers' biases; a bias that the architecture
            does not have (model.router_bias=false), but only balancing uses, becomes zero.
        config: the architecture of the model.
        folder: config.json and safetensors files.
        seed: of weights that the folder lacks.

    Returns:
        Lines for the log: tensors of the folder that are not read, and fields in which `config`
        computes another function than config.json. That is intended when a context is stretched,
        and a mistake otherwise. Empty when the two agree.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape, or a stored head differs
            from the embedding.
    """
    if not config.router_bias:
        for spec, tensor in shards:
            for view in tensor.shards.values() if _is_router_bias(spec) else ():
                view.zero_()
        shards = [(spec, tensor) for spec, tensor in shards if not _is_router_bias(spec)]
    with SafetensorsFolder(folder) as stored:
        source = _source_model(config, stored)
        entries, ignored = _table(source, stored, _rectangles(shards, source.vocab_size))
        by_name = {entry.name: entry for entry in entries}
        notes = folder_notes(config, stored) + new_weight_notes(config, by_name, source.vocab_size)
        check_names(stored, entries, ignored)

        def read(name: str, offset: Dims, shape: Dims) -> torch.Tensor:
            return stored.read(by_name[name].stored_name, offset, shape)

        shapes = {name: entry.model_shape for name, entry in by_name.items()}
        shards = fill_new_weights(shards, config, shapes, read, seed)
        notes += config_differences(config, stored)
    load_shards(shards, entries, folder, ignored)
    return notes


def _rectangles(shards: ParameterShards, rows: int) -> dict[str, list[Rectangle]]:
    """The rectangles of embedding and head that a rank holds, of their first `rows` rows."""
    rectangles: defaultdict[str, list[Rectangle]] = defaultdict(list)
    for spec, tensor in shards:
        if spec.name in (EMBEDDING, "head.weight"):
            for offset, view in tensor.shards.items():
                num_rows = min(len(view), rows - offset[0])
                if num_rows > 0:
                    rectangles[spec.name].append((offset, (num_rows, *view.shape[1:])))
    return rectangles


def _source_model(config: ModelConfig, stored: SafetensorsFolder) -> ModelConfig:
    """The architecture without weights that the folder lacks."""
    saved = read_model_config(stored.folder)
    num_mtp_layers = len(prediction_layers(replace(config, num_mtp_layers=0), stored))
    tied = saved.tie_embeddings and stored_head(stored) is None
    return replace(
        config,
        vocab_size=min(config.vocab_size, saved.vocab_size),
        tie_embeddings=config.tie_embeddings or tied,
        num_mtp_layers=min(config.num_mtp_layers, num_mtp_layers),
    )


def _is_router_bias(spec: ShardSpec) -> bool:
    return spec.name.endswith(".router.bias")


def hf_weights(
    config: ModelConfig, stored: SafetensorsFolder, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """All tensors of a model for a checkpoint, each read when it is written.

    Args:
        stored: an open folder; must stay open until the checkpoint is saved.
        dtype: to which the weights are cast.

    Raises:
        ValueError: as `load_hf_weights`.
    """
    rectangle: list[Rectangle] = [((0, 0), (config.vocab_size, config.hidden_size))]
    entries, ignored = _table(config, stored, {EMBEDDING: rectangle, "head.weight": rectangle})
    check_names(stored, entries, ignored)
    return lazy_weights(entries, stored, dtype)


def lazy_weights(
    entries: Sequence[Entry], stored: Stored, dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """The tensors of a table for a checkpoint; arguments as in `hf_weights`."""
    table: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        table[entry.name].append(entry)
    return {WEIGHT_PREFIX + name: _lazy(table[name], stored, dtype) for name in table}


def _lazy(entries: list[Entry], stored: Stored, dtype: torch.dtype) -> LazyTensor:
    by_offset = {entry.model_offset: entry for entry in entries}
    dtype = entries[0].dtype(dtype)

    def make(offset: Dims) -> torch.Tensor:
        entry = by_offset[offset]
        shape = entry.stored_shape
        values = stored.read(entry.stored_name, (0,) * len(shape), shape).to(dtype)
        return entry.from_stored(values).reshape(entry.model_shape)

    extents = {offset: entry.model_shape for offset, entry in by_offset.items()}
    ends = [map(sum, zip(*rectangle)) for rectangle in extents.items()]
    return LazyTensor([max(end) for end in zip(*ends)], extents, dtype, make)


def _table(
    config: ModelConfig, stored: SafetensorsFolder, rectangles: Mapping[str, list[Rectangle]]
) -> tuple[list[Entry], list[str]]:
    """Entries and ignored names as this folder spells them; `rectangles`: what this rank holds of
    embedding and head."""
    family = read_hf_config(stored.folder)["model_type"]
    entries = _stored_entries(config, stored)
    by_name = {entry.name: entry for entry in entries}
    ignored = [*IGNORED[family], *(_layer_names(i) for i in prediction_layers(config, stored))]
    if any(name.startswith(TEXT_PREFIX) for name in stored.tensors):
        ignored.append(rf"^(?!{re.escape(TEXT_PREFIX)})")

    # embedding and head are stored again beside the layers for multi-token prediction
    copies = {
        copy.stored_name: (
            copy.name,
            f"model.num_mtp_layers={config.num_mtp_layers}",
            "model.num_mtp_layers=0 (convert.py from-hf: no --mtp) leaves those layers out",
        )
        for copy in mtp_copies(config)
        if copy.stored_name in stored.tensors
    }
    head = stored_head(stored)
    if config.tie_embeddings and head is not None:
        copies[head] = (
            EMBEDDING,
            "model.tie_embeddings=true",
            "model.tie_embeddings=false loads both, as transformers 5 does",
        )
    for copy, (name, setting, fix) in copies.items():
        ignored.append(f"^{re.escape(copy)}$")
        if not _same(copy, by_name[name], stored, rectangles.get(name, [])):
            raise ValueError(
                f"{setting} requires that {copy} and {by_name[name].stored_name} of "
                f"{stored.folder} be equal (they differ); {fix}"
            )
    return entries, ignored


def _stored_entries(config: ModelConfig, stored: SafetensorsFolder) -> list[Entry]:
    """Table of a model's tensors by the names that this folder has for them."""
    settings = read_hf_config(stored.folder)
    family, tied = settings["model_type"], settings["tie_word_embeddings"]
    fused = any(name.endswith(f".{FUSED}") for name in stored.tensors)
    base, head = BASE_PREFIX[family], stored_head(stored)
    in_tower = any(name.startswith(TEXT_PREFIX) for name in stored.tensors)
    bare = not any(name.startswith(base) for name in stored.tensors)

    def stored_name(entry: Entry) -> str:
        name = entry.stored_name
        if in_tower:
            name = TEXT_PREFIX + name
        elif bare:
            name = name.removeprefix(base)
        if name in stored.tensors:
            return name
        if entry.name == "head.weight" or (entry.name == EMBEDDING and tied):
            name = head or name
        return stored.aliases.get(name, name)

    entries = hf_entries(config, family, fused)
    return [replace(entry, stored_name=stored_name(entry)) for entry in entries]


def stored_head(stored: SafetensorsFolder) -> str | None:
    """Name of the folder's head; None where it stores none."""
    heads = HEADS[read_hf_config(stored.folder)["model_type"]]
    names = (*(TEXT_PREFIX + head for head in heads), *heads)
    return next((name for name in names if name in stored.tensors), None)


def folder_model(folder: str | Path) -> ModelConfig:
    """Architecture of a folder: that of config.json, but not tied where the folder stores a head
    that differs from the embedding, as transformers 5 and vLLM load it.

    Raises:
        ValueError: as `read_model_config`, or the weights cannot be read.
    """
    model = read_model_config(folder)
    if not model.tie_embeddings:
        return model
    with SafetensorsFolder(folder) as stored:
        head, entries = stored_head(stored), _stored_entries(model, stored)
        embedding = next(entry for entry in entries if entry.name == EMBEDDING)
        whole: Rectangle = ((0, 0), embedding.stored_shape)
        tied = head is None or _same(head, embedding, stored, [whole])
    return replace(model, tie_embeddings=tied)


def _same(
    copy: str, original: Entry, stored: SafetensorsFolder, rectangles: list[Rectangle]
) -> bool:
    """Whether a tensor that the folder stores twice is the same both times, in these rectangles."""
    name = original.stored_name
    same_shape = name in stored.tensors and stored.tensors[copy].shape == original.stored_shape
    return same_shape and all(
        bool((stored.read(copy, *rectangle) == stored.read(name, *rectangle)).all())
        for rectangle in rectangles
    )


def folder_notes(config: ModelConfig, stored: SafetensorsFolder) -> list[str]:
    """A log line for each part of a folder that the model does not use, or uses in another way than
    config.json says."""
    notes = []
    if stored.prefix:
        notes.append(f"{stored.folder}: all names begin with {stored.prefix}, which is stripped")
    if _is_untied(config, stored):
        notes.append(
            f"{stored.folder}: {stored_head(stored)} is loaded as a head of its own, as "
            f"transformers 5 does, although {stored.folder / 'config.json'} has "
            "tie_word_embeddings = true"
        )
    num_other = sum(not name.startswith(TEXT_PREFIX) for name in stored.tensors)
    if 0 < num_other < len(stored.tensors):
        notes.append(
            f"{stored.folder}: {num_other} tensors outside its language model are not read"
        )
    for i in prediction_layers(config, stored):
        count = sum(bool(re.search(_layer_names(i), name)) for name in stored.tensors)
        notes.append(
            f"{stored.folder}: the {count} tensors of multi-token prediction layer {i} are not "
            f"read; model.num_mtp_layers={i + 1 - config.num_layers} reads and trains them"
        )
    return notes


def prediction_layers(config: ModelConfig, stored: SafetensorsFolder) -> list[int]:
    """Layers for multi-token prediction beyond the model's blocks; only they have an `eh_proj`."""
    matches = (
        re.search(r"(?:^|\.)layers\.(\d+)\.eh_proj\.weight$", name) for name in stored.tensors
    )
    layers = (int(match[1]) for match in matches if match)
    return sorted(i for i in layers if i >= len(blocks(config)))


def _layer_names(i: int) -> str:
    return rf"(^|\.)layers\.{i}\."


def _is_untied(config: ModelConfig, stored: SafetensorsFolder) -> bool:
    """Whether a model loads the head that a folder stores, though its config.json ties it."""
    tied = read_model_config(stored.folder).tie_embeddings
    return tied and not config.tie_embeddings and stored_head(stored) is not None


def config_differences(config: ModelConfig, stored: SafetensorsFolder) -> list[str]:
    """A log line for every field in which the folder's config.json computes another function."""
    fields = differing_fields(config, read_model_config(stored.folder))
    fields.pop("num_mtp_layers", None)  # no config.json says how many are used
    if _is_untied(config, stored):
        fields.pop("tie_embeddings")
    return [
        f"model.{field}: {value} here, {saved} in {stored.folder / 'config.json'}"
        for field, (value, saved) in fields.items()
    ]

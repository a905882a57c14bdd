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
    HEAD,
    IGNORED,
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

_TEXT = "language_model."  # prefix of the language model's names beside a vision tower
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
    tied models that also store their head, equal to the embedding.

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
        notes = unread_notes(config, stored) + new_weight_notes(config, by_name, source.vocab_size)
        check_names(stored, entries, ignored)

        def read(name: str, offset: Dims, shape: Dims) -> torch.Tensor:
            return stored.read(by_name[name].stored_name, offset, shape)

        shapes = {name: entry.model_shape for name, entry in by_name.items()}
        shards = fill_new_weights(shards, config, shapes, read, seed)
    load_shards(shards, entries, folder, ignored)
    return notes + config_differences(config, folder)


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
    tied = saved.tie_embeddings and HEAD not in stored.tensors
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
    fused = any(name.endswith(f".{FUSED}") for name in stored.tensors)
    entries = hf_entries(config, family, fused)
    original = {entry.name: entry for entry in entries}
    ignored = [*IGNORED[family], *(_layer_names(i) for i in prediction_layers(config, stored))]

    # embedding and head are stored again beside the layers for multi-token prediction
    for copy in mtp_copies(config):
        if copy.stored_name in stored.tensors:
            ignored.append(f"^{re.escape(copy.stored_name)}$")
            _check_copy(
                *(copy.stored_name, original[copy.name], stored, rectangles.get(copy.name, [])),
                "the multi-token prediction layers of this model share them; set "
                "model.num_mtp_layers=0 to leave them out",
            )

    # names may have another prefix, or none
    if any(name.startswith(_TEXT) for name in stored.tensors):
        entries = [replace(entry, stored_name=_TEXT + entry.stored_name) for entry in entries]
        ignored.append(rf"^(?!{re.escape(_TEXT)})")
    elif not any(name.startswith(BASE_PREFIX[family]) for name in stored.tensors):
        entries = [
            replace(entry, stored_name=entry.stored_name.removeprefix(BASE_PREFIX[family]))
            for entry in entries
        ]
    if config.tie_embeddings and HEAD in stored.tensors:
        ignored.append(f"^{HEAD}$")
        embedding = next(entry for entry in entries if entry.name == EMBEDDING)
        _check_copy(
            *(HEAD, embedding, stored, rectangles.get(EMBEDDING, [])),
            "model.tie_embeddings=true makes them one; set it to false to load both",
        )
    return entries, ignored


def _check_copy(
    copy: str, original: Entry, stored: SafetensorsFolder, rectangles: list[Rectangle], reason: str
) -> None:
    """Makes sure that a tensor which the folder stores twice is the same both times. Each rank
    compares its own rows.

    Raises:
        ValueError: they differ.
    """
    name = original.stored_name
    same_shape = name in stored.tensors and stored.tensors[copy].shape == original.stored_shape
    if not same_shape or not all(
        torch.equal(stored.read(copy, *rectangle), stored.read(name, *rectangle))
        for rectangle in rectangles
    ):
        raise ValueError(f"{stored.folder} stores {copy} and {name}, which differ, but {reason}")


def unread_notes(config: ModelConfig, stored: SafetensorsFolder) -> list[str]:
    """A log line for each part of a folder that the model does not use."""
    notes = []
    num_other = sum(not name.startswith(_TEXT) for name in stored.tensors)
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


def config_differences(config: ModelConfig, folder: str | Path) -> list[str]:
    """A log line for every field in which the folder's config.json computes another function."""
    fields = differing_fields(config, read_model_config(folder))
    fields.pop("num_mtp_layers", None)  # no config.json says how many are used
    return [
        f"model.{field}: {value} here, {saved} in {Path(folder) / 'config.json'}"
        for field, (value, saved) in fields.items()
    ]

"""Weights of a Hugging Face folder, into the local parameters of a model of ours or into a checkpoint."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megatron5d.checkpoint.hf.files import Entry
from megatron5d.checkpoint.hf.import_config import model_config_from_hf, read_hf_config, read_model_config
from megatron5d.checkpoint.hf.moe_mla import FUSED
from megatron5d.checkpoint.hf.names import BASE_PREFIX, HEAD, IGNORED, hf_copies, hf_entries
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder, Stored, check_names, load_shards
from megatron5d.checkpoint.layout import ShardedTensor, sharded_parameter
from megatron5d.checkpoint.load import PREFIX, LazyTensor, lazy_tensor
from megatron5d.checkpoint.new_parts import EMBEDDING, fill_new_parts, new_parts
from megatron5d.config.derived import blocks
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.shard_spec import ShardSpec, spec_of

_TEXT = "language_model."  # before the names of a text model that stands beside a vision tower
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape in a global tensor


def load_hf_weights(parameters: Iterable[torch.Tensor], config: ModelConfig, folder: str | Path) -> list[str]:
    """Returns `load_hf_shards` into local parameters that lie here as they are.

    Args:
        parameters: local tensors with a ShardSpec, the routers' biases among them.
        config, folder: as in `load_hf_shards`.
    """
    return load_hf_shards([(spec_of(each), sharded_parameter(each)) for each in parameters], config, folder)


def load_hf_shards(
    held: Sequence[tuple[ShardSpec, ShardedTensor]], config: ModelConfig, folder: str | Path, seed: int = 0
) -> list[str]:
    """Fills what this rank holds of a model from a folder of any supported family.

    The model may have a larger vocabulary, a head of its own where the folder's is tied, and blocks of multi-token
    prediction that the folder lacks (checkpoint/new_parts.py).

    Folders saved from the bare model (GPT-2 on the hub: `wte.weight`) and tied models that also store their head,
    equal to the embedding, are read as well.

    Args:
        held: parameters, or slices of them, and the routers' biases; a bias that the architecture does not have
            (model.router_bias = false), one that balancing alone uses, becomes zero.
        config: the architecture that they were built from.
        folder: config.json and safetensors files.
        seed: of what the folder lacks.

    Returns:
        Lines for the log: what of the folder is not read, and fields in which `config` computes another function than
        its config.json, intended when a context is stretched, a mistake otherwise. Empty when the two agree.

    Raises:
        ValueError: what is missing, unexpected or misshapen, or a stored head that differs from the embedding.
    """
    if not config.router_bias:
        for view in (view for spec, tensor in held if _is_bias(spec) for view in tensor.parts.values()):
            view.zero_()
        held = [(spec, tensor) for spec, tensor in held if not _is_bias(spec)]
    with SafetensorsFolder(folder) as stored:
        theirs = _starting_point(config, stored)
        entries, ignored = _table(theirs, stored, _rows_here(held, theirs.vocab_size))
        at = {entry.name: entry for entry in entries}
        told = unread(config, stored) + new_parts(config, at, theirs.vocab_size)
        check_names(stored, entries, ignored)

        def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            return stored.read(at[name].hf_name, offset, shape)

        held = fill_new_parts(held, config, {name: entry.our_shape for name, entry in at.items()}, read, seed)
    load_shards(held, entries, folder, ignored)
    return told + config_differences(config, folder)


def _rows_here(held: Iterable[tuple[ShardSpec, ShardedTensor]], rows: int) -> dict[str, list[Rectangle]]:
    """Returns the rectangles of embedding and head that a rank holds, without rows from `rows` on."""
    here: defaultdict[str, list[Rectangle]] = defaultdict(list)
    for spec, tensor in held:
        if spec.name in (EMBEDDING, "head.weight"):
            parts = [
                (offset, (min(len(view), rows - offset[0]), *view.shape[1:])) for offset, view in tensor.parts.items()
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


def hf_weights(config: ModelConfig, stored: SafetensorsFolder, dtype: torch.dtype) -> dict[str, LazyTensor]:
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


def lazy_weights(entries: Sequence[Entry], stored: Stored, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Returns the tensors of a table as a checkpoint takes them; arguments as in `hf_weights`."""
    table: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        table[entry.name].append(entry)
    return {PREFIX + name: _lazy(parts, stored, dtype) for name, parts in table.items()}


def _lazy(entries: list[Entry], stored: Stored, dtype: torch.dtype) -> LazyTensor:
    at = {entry.our_offset: entry for entry in entries}
    dtype = entries[0].dtype(dtype)

    def make(offset: tuple[int, ...]) -> torch.Tensor:
        entry = at[offset]
        values = stored.read(entry.hf_name, (0,) * len(entry.shape), entry.shape).to(dtype)
        return entry.ours(values).reshape(entry.our_shape)

    parts = {offset: entry.our_shape for offset, entry in at.items()}
    ends = [[start + extent for start, extent in zip(*part)] for part in parts.items()]
    return lazy_tensor([max(end) for end in zip(*ends)], parts, dtype, make)


def _table(
    config: ModelConfig, stored: SafetensorsFolder, held: Mapping[str, list[Rectangle]]
) -> tuple[list[Entry], list[str]]:
    """Entries and ignored names as this folder spells them; `held` is what this rank has of each parameter."""
    family = read_hf_config(stored.folder)["model_type"]
    fused = any(name.endswith(f".{FUSED}") for name in stored.tensors)
    entries, ignored, prefix = hf_entries(config, family, fused), list(IGNORED[family]), BASE_PREFIX[family]
    ignored += [_layer_names(i) for i in prediction_layers(config, stored)]
    for copy in (copy for copy in hf_copies(config) if copy.hf_name in stored.tensors):
        ignored.append(f"^{re.escape(copy.hf_name)}$")
        original = next(entry for entry in entries if entry.name == copy.name)
        if not _same(copy.hf_name, original, stored, held.get(copy.name, [])):
            raise ValueError(
                f"{stored.folder} stores {copy.hf_name} and it is not {original.hf_name}, which the multi-token "
                "prediction layers of this model share; set model.num_mtp_layers=0 to leave them out"
            )
    if any(name.startswith(_TEXT) for name in stored.tensors):
        entries = [replace(entry, hf_name=_TEXT + entry.hf_name) for entry in entries]
        ignored.append(rf"^(?!{re.escape(_TEXT)})")
    elif not any(name.startswith(prefix) for name in stored.tensors):
        entries = [replace(entry, hf_name=entry.hf_name.removeprefix(prefix)) for entry in entries]
    if config.tie_embeddings and HEAD in stored.tensors:
        ignored.append(f"^{HEAD}$")
        embedding = next(entry for entry in entries if entry.name == "embedding.weight")
        if not _same(HEAD, embedding, stored, held.get("embedding.weight", [])):
            raise ValueError(
                f"{stored.folder} stores {HEAD} and it is not {embedding.hf_name}, but model.tie_embeddings = true; "
                "set it to false to load both"
            )
    return entries, ignored


def unread(config: ModelConfig, stored: SafetensorsFolder) -> list[str]:
    """Returns a line for each part of a folder that the model has no use for."""
    counts = {
        i: sum(bool(re.search(_layer_names(i), n)) for n in stored.tensors) for i in prediction_layers(config, stored)
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
    return sorted(int(match[1]) for match in found if match and int(match[1]) >= len(blocks(config)))


def _layer_names(i: int) -> str:
    return rf"(^|\.)layers\.{i}\."


def _same(copy: str, original: Entry, stored: SafetensorsFolder, held: list[Rectangle]) -> bool:
    """Returns whether a tensor that the folder stores twice is the same both times; each rank looks at its own rows."""
    same = original.hf_name in stored.tensors and stored.tensors[copy].shape == original.shape
    for rectangle in held if same else []:
        same = same and torch.equal(stored.read(copy, *rectangle), stored.read(original.hf_name, *rectangle))
    return same


def config_differences(config: ModelConfig, folder: str | Path) -> list[str]:
    """Returns `field: ours, theirs` for every field in which the folder's config.json computes another function."""
    theirs = read_model_config(folder)
    passive = {"name", "init_std"} | ({"max_positions"} if config.position == "rope" else set())
    return [
        f"model.{field}: {getattr(config, field)} here, {getattr(theirs, field)} in {Path(folder) / 'config.json'}"
        for field in model_config_from_hf(folder)
        if field not in passive and getattr(config, field) != getattr(theirs, field)
    ]

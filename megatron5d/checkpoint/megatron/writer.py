"""Writes a `torch_dist` checkpoint that Megatron-LM loads on any layout."""

import io
import json
import re
import uuid
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import LazyTensor, ShardedTensor
from megatron5d.checkpoint.megatron.names import FUSED, megatron_entries, to_megatron_rows
from megatron5d.checkpoint.megatron.reader import BACKEND, COMMON, TRACKER
from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.config.derived import is_moe, moe_layers
from megatron5d.config.schema import ModelConfig

# A release has no optimiser and starts at iteration 0, which Megatron-LM knows without further
# flags.
RELEASE = "release"
# our kinds, and Megatron-Core's
STATES = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_NOTHING = "__0_1.distcp"  # holds the one object that all extra states are
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)$")
_ALONE = "pre_mlp_layernorm."
_Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
_Index = tuple[int, ...]  # of a layer or an expert in a stack, of both, or of neither


class TrainingState(NamedTuple):
    """What a run is continued with."""

    iteration: int  # steps done
    read: dict[str, _Read]  # as of the weights, for each of STATES
    common: dict[str, Any]  # what the optimiser and its schedule keep besides tensors


def write_checkpoint(
    out: Path,
    model: ModelConfig,
    args: Namespace,
    read: _Read,
    dtype: torch.dtype,
    training: TrainingState | None = None,
) -> Path:
    """Writes `out/release` or an iteration's folder, and the tracker file, with one layer's tensor
    in memory at a time.

    Args:
        out: an empty directory; created if it does not exist.
        read: returns the rectangle of our tensor with a (global name, offset, shape).
        training: None = a release.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: a file cannot be written.
    """
    iteration = training.iteration if training else 0
    folder = out / (f"iter_{iteration:07d}" if training else RELEASE)
    folder.mkdir(parents=True)
    save = Save(uuid.uuid4().hex, 0)
    places = _places(model)
    tensors: dict[str, ShardedTensor] = {
        key: _lazy(at, model, read, dtype) for key, at in places.items()
    }
    for kind, read_state in (training.read if training else {}).items():
        for key, at in places.items():
            if not next(iter(at.values())).wide:  # of which nothing is kept: no gradient moves them
                tensors[f"optimizer.state.{STATES[kind]}.{key}"] = _lazy(
                    at, model, read_state, torch.float32
                )
    written = write_rank_file(folder, tensors, 0, save)
    _, metadata, stored = IndexWriter().build([written])
    content = io.BytesIO()
    torch.save([None], content)  # an object in a list, as Megatron-Core writes the shards of one
    (folder / _NOTHING).write_bytes(content.getvalue())
    for key in _extra_states(places):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        info = _StorageInfo(_NOTHING, 0, len(content.getvalue()))
        stored.append(WriteResult(MetadataIndex(key), info.length, info))
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [stored])
    common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    torch.save(common | (training.common if training else {}), folder / COMMON)
    versions = {
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / BACKEND).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    (out / TRACKER).write_text(str(iteration) if training else RELEASE)
    return folder


def _places(model: ModelConfig) -> dict[str, dict[_Index, Entry]]:
    """Returns, by Megatron's key, the tensors that it stacks, by layer or expert or both.

    The norm before a mixture has two names in Megatron-Core: one of its local modules, one of
    TransformerEngine's.
    """
    # Megatron stacks the tensors of all layers where all have the same; else each layer has keys of
    # its own
    stacked = len(moe_layers(model)) in (0, model.num_layers)
    places: defaultdict[str, dict[_Index, Entry]] = defaultdict(dict)
    for entry in megatron_entries(model):
        if not (match := _LAYER.match(entry.stored_name)):
            places[entry.stored_name][()] = entry
            continue
        prefix, index = (
            ("decoder.layers.", (int(match[1]),))
            if stacked
            else (f"decoder.layers.{match[1]}.", ())
        )
        if match[2]:
            places[f"{prefix}mlp.experts.experts.{match[3]}"][index + (int(match[2]),)] = entry
            continue
        places[prefix + match[3]][index] = entry
        if is_moe(model, int(match[1])) and match[3].startswith(FUSED[_ALONE]):
            places[prefix + _ALONE + match[3].removeprefix(FUSED[_ALONE])][index] = entry
    return places


def _lazy(
    at: dict[_Index, Entry], model: ModelConfig, read: _Read, dtype: torch.dtype
) -> LazyTensor:
    first = next(iter(at.values()))
    depth, kind = len(next(iter(at))), first.dtype(dtype)

    def make(offset: _Index) -> Tensor:
        entry = at[offset[:depth]]
        values = read(entry.name, entry.model_offset, entry.model_shape).to(kind)
        values = to_megatron_rows(entry.stored_name, values.view(entry.stored_shape), model)
        return values.reshape(*(1 for _ in range(depth)), *entry.stored_shape).contiguous()

    zeros, ones = (0,) * len(first.stored_shape), (1,) * depth
    shape = (*(1 + max(index[dim] for index in at) for dim in range(depth)), *first.stored_shape)
    return LazyTensor(
        shape, {(*index, *zeros): (*ones, *first.stored_shape) for index in at}, kind, make
    )


def _extra_states(places: dict[str, dict[_Index, Entry]]) -> Iterator[str]:
    """Keys of the state of FP8 recipes, for which every layer of TransformerEngine asks; here it is
    empty."""
    for key, at in places.items():
        module = key.removesuffix(".weight")
        names = [module] if module != key else []
        names += (
            [module.replace("linear_qkv", "core_attention")]
            if module.endswith("linear_qkv")
            else []
        )
        sizes = [str(1 + last) for last in max(at)] or ["1"]
        for index in at:
            shard = f"{'.'.join(map(str, index)) or 0}_{'.'.join(sizes)}"
            yield from (f"{name}._extra_state/shard_{shard}" for name in names)

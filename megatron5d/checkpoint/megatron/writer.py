"""Writes a `torch_dist` checkpoint that Megatron-LM loads on any layout."""

from __future__ import annotations

import io
import json
import re
import uuid
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron5d.checkpoint.hf.safetensors_folder import Entry
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.load import LazyTensor, lazy_tensor
from megatron5d.checkpoint.megatron.checkpoint import TRACKER
from megatron5d.checkpoint.megatron.distributed import BACKEND, COMMON
from megatron5d.checkpoint.megatron.names import FUSED, entries, to_their_rows
from megatron5d.checkpoint.storage import write
from megatron5d.checkpoint.tensor_file import Save
from megatron5d.config.derived import is_moe, moe_layers
from megatron5d.config.schema import ModelConfig

# A release has no optimiser and starts at iteration 0, which Megatron-LM knows without further flags.
RELEASE = "release"
_NOTHING = "__0_1.distcp"  # holds the one object that all extra states are
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:(mlp\.experts\.)(\d+)\.)?(.+)$")
_Read = Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]
_Index = tuple[int, ...]  # of a layer or an expert in a stack, of both, or of neither


def write_release(out: Path, model: ModelConfig, args: Namespace, read: _Read, dtype: torch.dtype) -> Path:
    """Writes `out/release` and the tracker file, with one layer's tensor in memory at a time.

    Args:
        out: a directory without Megatron checkpoints; created if it does not exist.
        model: the architecture.
        args: what Megatron-LM calls it.
        read: returns the rectangle of our tensor with a (global name, offset, shape).
        dtype: of the written weights.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: there is a Megatron checkpoint already.
        OSError: a file cannot be written.
    """
    folder = out / RELEASE
    if folder.exists() or (out / TRACKER).exists():
        raise ValueError(f"{out} already holds a checkpoint of Megatron-LM; give a directory without any")
    folder.mkdir(parents=True)
    save = Save(uuid.uuid4().hex, 0)
    written = write(folder, dict(_weights(model, read, dtype)), 0, save)
    _, metadata, places = IndexWriter().build([written])
    content = io.BytesIO()
    torch.save([None], content)  # an object in a list, as Megatron-Core writes the shards of one
    (folder / _NOTHING).write_bytes(content.getvalue())
    for key in _extra_states(model):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        info = _StorageInfo(_NOTHING, 0, len(content.getvalue()))
        places.append(WriteResult(MetadataIndex(key), info.length, info))
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [places])
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 0}, folder / COMMON)
    versions = {"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / BACKEND).write_text(json.dumps({"sharded_backend": "torch_dist", **versions}))
    (out / TRACKER).write_text(RELEASE)
    return folder


def _stacked(model: ModelConfig) -> bool:
    """Whether Megatron stacks the tensors of all layers: where all have the same."""
    return len(moe_layers(model)) in (0, model.num_layers)


def _weights(model: ModelConfig, read: _Read, dtype: torch.dtype) -> dict[str, LazyTensor]:
    """Every tensor by Megatron's key, each part computed when it is written."""
    parts: defaultdict[str, dict[_Index, Entry]] = defaultdict(dict)
    for entry in entries(model):
        for key, index in _keys(entry.hf_name, model):
            parts[key][index] = entry
    return {key: _lazy(at, model, read, dtype) for key, at in parts.items()}


def _keys(name: str, model: ModelConfig) -> Iterator[tuple[str, _Index]]:
    """The keys under which a tensor is stored, and where in its stack.

    The norm before a mixture has two names in Megatron-Core: one of its local modules, one of TransformerEngine's.
    """
    match = _LAYER.match(name)
    if not match:
        yield name, ()
        return
    i, stacked = int(match[1]), _stacked(model)
    prefix = "decoder.layers." if stacked else f"decoder.layers.{i}."
    index = (i,) if stacked else ()
    if match[2]:
        yield f"{prefix}mlp.experts.experts.{match[4]}", (*index, int(match[3]))
        return
    yield prefix + match[4], index
    alone, fused = "pre_mlp_layernorm.", FUSED["pre_mlp_layernorm."]
    if is_moe(model, i) and match[4].startswith(fused):
        yield prefix + alone + match[4].removeprefix(fused), index


def _lazy(at: dict[_Index, Entry], model: ModelConfig, read: _Read, dtype: torch.dtype) -> LazyTensor:
    first = next(iter(at.values()))
    depth, kind = len(next(iter(at))), first.dtype(dtype)

    def make(offset: _Index) -> Tensor:
        entry = at[offset[:depth]]
        values = read(entry.name, entry.our_offset, entry.our_shape).to(kind)
        values = to_their_rows(entry.hf_name, values.view(entry.shape), model)
        return values.reshape(*(1 for _ in range(depth)), *entry.shape).contiguous()

    zeros, ones = (0,) * len(first.shape), (1,) * depth
    shape = (*(1 + max(index[dim] for index in at) for dim in range(depth)), *first.shape)
    return lazy_tensor(shape, {(*index, *zeros): (*ones, *first.shape) for index in at}, kind, make)


def _extra_states(model: ModelConfig) -> Iterator[str]:
    """Keys of the state of FP8 recipes, for which every layer of TransformerEngine asks; here it is None."""
    layers, experts = model.num_layers, model.num_experts
    yield "decoder.final_layernorm._extra_state/shard_0_1"
    for i in range(layers):
        stacked = _stacked(model)
        prefix = "decoder.layers." if stacked else f"decoder.layers.{i}."
        place, size = (f"{i}", f"{layers}") if stacked else ("0", "1")
        attention = ["linear_qkv", "linear_proj", "core_attention", *(["q_layernorm", "k_layernorm"] * model.qk_norm)]
        modules = [f"self_attention.{module}" for module in attention]
        if is_moe(model, i):
            modules += ["pre_mlp_layernorm"]
            modules += [f"mlp.shared_experts.linear_fc{n}" for n in (1, 2) if model.shared_ffn_hidden_size]
            outer = (f"{i}.", f"{layers}.") if stacked else ("", "")
            for e in range(experts):
                shard = f"_extra_state/shard_{outer[0]}{e}_{outer[1]}{experts}"
                yield from (f"{prefix}mlp.experts.experts.linear_fc{n}.{shard}" for n in (1, 2))
        else:
            modules += ["mlp.linear_fc1", "mlp.linear_fc2"]
        yield from (f"{prefix}{module}._extra_state/shard_{place}_{size}" for module in modules)

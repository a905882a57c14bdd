"""Writes a `torch_dist` checkpoint that Megatron-LM loads on any layout."""

import io
import json
import re
import uuid
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import (
    Dims,
    LazyTensor,
    ReadRectangle,
    ShardedTensors,
)
from megatron5d.checkpoint.megatron.names import FUSED, megatron_entries, to_megatron_rows
from megatron5d.checkpoint.megatron.reader import BACKEND, COMMON, TRACKER
from megatron5d.checkpoint.tensor_file import Save, write_rank_file
from megatron5d.config.derived import is_moe, moe_layers
from megatron5d.config.schema import ModelConfig

# A release has no optimizer and starts at iteration 0, which Megatron-LM knows without further
# flags.
RELEASE = "release"
# our kinds of optimizer state, and Megatron-Core's
STATES = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_EMPTY_STATE = "__0_1.distcp"  # file with the one object that all extra states are
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)$")
_MODULE_NORM = "pre_mlp_layernorm."
# by index in a stack, of a layer or an expert or both; () where the tensor is not stacked
_Stack = dict[Dims, Entry]


class TrainingState(NamedTuple):
    """What Megatron-LM needs to continue a run."""

    iteration: int  # steps done
    read: dict[str, ReadRectangle]  # as of the weights, for each of STATES
    common: dict[str, Any]  # what the optimizer and its schedule keep besides tensors


def write_checkpoint(
    out: Path,
    model: ModelConfig,
    args: Namespace,
    read: ReadRectangle,
    dtype: torch.dtype,
    training: TrainingState | None = None,
) -> Path:
    """Writes `out/release` or an iteration's folder, and the tracker file, with one layer's tensor
    in memory at a time.

    Args:
        out: an empty directory; created if it does not exist.
        read: reads a rectangle of our tensor.
        training: None = a release.

    Returns:
        The folder of the checkpoint.

    Raises:
        OSError: a file cannot be written.
    """
    iteration = training.iteration if training else 0
    folder = out / (f"iter_{iteration:07d}" if training else RELEASE)
    folder.mkdir(parents=True)

    # tensors
    stacks = _stacks(model)
    tensors: ShardedTensors = {
        key: _lazy(stack, model, read, dtype) for key, stack in stacks.items()
    }
    for kind, read_state in (training.read if training else {}).items():
        for key, stack in stacks.items():
            # routers' biases have no state, because no gradient moves them
            if not next(iter(stack.values())).wide:
                state = _lazy(stack, model, read_state, torch.float32)
                tensors[f"optimizer.state.{STATES[kind]}.{key}"] = state
    message = write_rank_file(folder, tensors, 0, Save(uuid.uuid4().hex, 0))
    _, metadata, results = IndexWriter().build([message])
    _write_index(folder, metadata, results, stacks)

    # everything that is no tensor
    common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
    torch.save(common | (training.common if training else {}), folder / COMMON)
    backend = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    (folder / BACKEND).write_text(json.dumps(backend))
    (out / TRACKER).write_text(str(iteration) if training else RELEASE)
    return folder


def _write_index(
    folder: Path, metadata: Metadata, results: list[WriteResult], stacks: dict[str, _Stack]
) -> None:
    """Writes the extra states and DCP's index."""
    content = io.BytesIO()
    torch.save([None], content)  # an object in a list, as Megatron-Core writes the shards of one
    (folder / _EMPTY_STATE).write_bytes(content.getvalue())
    for key in _extra_states(stacks):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        info = _StorageInfo(_EMPTY_STATE, 0, len(content.getvalue()))
        results.append(WriteResult(MetadataIndex(key), info.length, info))
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def _stacks(model: ModelConfig) -> dict[str, _Stack]:
    """Tensors that Megatron stacks, by its key.

    The norm before a mixture has two names in Megatron-Core: one of its local modules, one of
    TransformerEngine's.
    """
    # Megatron stacks the tensors of all layers if all layers have the same; otherwise each layer
    # has separate keys
    stacked = len(moe_layers(model)) in (0, model.num_layers)
    stacks: defaultdict[str, _Stack] = defaultdict(dict)
    for entry in megatron_entries(model):
        if not (match := _LAYER.match(entry.stored_name)):
            stacks[entry.stored_name][()] = entry
            continue
        layer, expert, name = int(match[1]), match[2], match[3]
        prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
        index: Dims = (layer,) if stacked else ()
        if expert:
            index += (int(expert),)
            stacks[f"{prefix}mlp.experts.experts.{name}"][index] = entry
            continue
        stacks[prefix + name][index] = entry
        if is_moe(model, layer) and name.startswith(FUSED[_MODULE_NORM]):
            kind = name.removeprefix(FUSED[_MODULE_NORM])
            stacks[prefix + _MODULE_NORM + kind][index] = entry
    return stacks


def _lazy(stack: _Stack, model: ModelConfig, read: ReadRectangle, dtype: torch.dtype) -> LazyTensor:
    index, first = next(iter(stack.items()))
    depth, dtype = len(index), first.dtype(dtype)
    ones, zeros = (1,) * depth, (0,) * len(first.stored_shape)

    def make(offset: Dims) -> Tensor:
        entry = stack[offset[:depth]]
        values = read(entry.name, entry.model_offset, entry.model_shape).to(dtype)
        values = to_megatron_rows(entry.stored_name, values.view(entry.stored_shape), model)
        return values.reshape(*ones, *entry.stored_shape).contiguous()

    sizes = [1 + max(index[dim] for index in stack) for dim in range(depth)]
    extents = {(*index, *zeros): (*ones, *first.stored_shape) for index in stack}
    return LazyTensor((*sizes, *first.stored_shape), extents, dtype, make)


def _extra_states(stacks: dict[str, _Stack]) -> Iterator[str]:
    """Keys of the state of FP8 recipes, which every layer of TransformerEngine requests; here it is
    empty."""
    for key, stack in stacks.items():
        module = key.removesuffix(".weight")
        modules = [module] if module != key else []
        if module.endswith("linear_qkv"):
            modules.append(module.replace("linear_qkv", "core_attention"))
        sizes = [str(1 + last) for last in max(stack)] or ["1"]
        for index in stack:
            shard = f"{'.'.join(map(str, index)) or 0}_{'.'.join(sizes)}"
            yield from (f"{name}._extra_state/shard_{shard}" for name in modules)

"""Reads Megatron-LM's `torch_dist` checkpoints: a folder of DCP, and `common.pt` with what is no tensor."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron5d.checkpoint.folder import METADATA
from megatron5d.checkpoint.index import read_pickled
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.megatron.names import layer_name
from megatron5d.checkpoint.megatron.sources import Source, concatenated, load_inert, saved_args
from megatron5d.config.json_file import read_json

COMMON, BACKEND = "common.pt", "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_HALF = re.compile(r"(linear_fc1\.(?:weight|bias))_([wv])$")  # the gate and up rows under names of their own


class _Reader(dcp.FileSystemReader):
    """DCP's reader with metadata that were read without executing what they name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        try:
            self._metadata = read_pickled((folder / METADATA).read_bytes())
        except (ValueError, OSError) as error:
            raise ValueError(f"{folder / METADATA} is refused: {error}") from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_distributed(folder: Path) -> tuple[Namespace, int, dict[str, Source]]:
    """Arguments, iteration and tensors of a `torch_dist` folder."""
    backend = read_json(folder / BACKEND).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder / BACKEND}: sharded_backend = {backend!r}: only 'torch_dist' is read")
    common, reader = load_inert(folder / COMMON), _Reader(folder)
    sources: dict[str, Source] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not key.startswith(("optimizer.", "chained_")):
            _add_layers(sources, key, _stored(reader, key, entry))
    return saved_args(common, folder / COMMON), int(common.get("iteration", 0)), _joined_halves(sources)


def _stored(reader: _Reader, key: str, entry: TensorStorageMetadata) -> Source:
    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape, dtype=entry.properties.dtype)
        dcp.load({key: ShardedTensor(entry.size, [(offset, values)], values.dtype)}, storage_reader=reader, no_dist=True)
        return values

    return Source(tuple(entry.size), entry.properties.dtype, read)


def _add_layers(sources: dict[str, Source], key: str, source: Source) -> None:
    """Adds a stored tensor under the name of each layer and each expert in it."""
    match = _LAYER.match(key)
    if not match:
        sources[key] = source
        return
    layers = [int(match[1])] if match[1] else range(source.shape[0])
    for i in layers:
        layer = source if match[1] else _index(source, i)
        experts = _EXPERTS.match(match[2])
        if experts is None:
            sources[layer_name(i, match[2])] = layer
            continue
        for e in [int(experts[1])] if experts[1] else range(layer.shape[0]):
            name = layer_name(i, f"mlp.experts.{e}.{experts[2]}")
            sources[name] = layer if experts[1] else _index(layer, e)


def _index(source: Source, i: int) -> Source:
    """Tensor i of a stack."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return source.read((i, *offset), (1, *shape))[0]

    return Source(source.shape[1:], source.dtype, read)


def _joined_halves(sources: dict[str, Source]) -> dict[str, Source]:
    """Puts gate and up rows under each other where they are stored apart."""
    for name in [name for name in sources if (half := _HALF.search(name)) and half[2] == "w"]:
        halves = [sources.pop(name), sources.pop(name[:-1] + "v", None)]
        if halves[1] is None:
            raise ValueError(f"the checkpoint holds {name} and no {name[:-1]}v")
        sources[name[:-2]] = concatenated(halves, 0)
    return sources

"""Reads Megatron-LM's `torch_dist` checkpoints: a folder of DCP, and `common.pt` with what is no tensor."""

from __future__ import annotations

import re
from argparse import Namespace
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import METADATA
from megatron5d.checkpoint.index import SavedTensor
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.megatron.names import layer_name
from megatron5d.checkpoint.megatron.sources import Source, concatenated, load_inert, saved_args
from megatron5d.checkpoint.storage import Reader, read
from megatron5d.config.json_file import read_json

COMMON, BACKEND = "common.pt", "metadata.json"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.([^.]+)\.)?(.+)$")
BUCKETS = "buckets"  # kind of an optimiser's state that lies by buckets of data parallelism, not by parameter
_HALF = re.compile(r"(linear_fc1\.(?:weight|bias))_([wv])$")  # the gate and up rows under names of their own


class _Reader(Reader):
    """Reads tensors of a folder in which files.json and index.json are not there."""

    def _content(self) -> bytes:
        return METADATA.encode() + b"\n" + (self._folder / METADATA).read_bytes()

    def advice(self) -> str:
        return "Copy the checkpoint again"


def read_distributed(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and tensors of a `torch_dist` folder: weights ("") and what the optimiser keeps, by kind.

    Raises:
        ValueError: a file is damaged, names what is not admitted, or is of another format.
    """
    backend = read_json(folder / BACKEND).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder / BACKEND}: sharded_backend = {backend!r}: only 'torch_dist' is read")
    common, reader = load_inert(folder / COMMON), _Reader(folder)
    kinds: defaultdict[str, dict[str, Source]] = defaultdict(dict)
    for key, saved in reader.tensors().items():
        state = _STATE.match(key)
        kind, name = (state[1] or BUCKETS, state[2]) if state else ("", key)
        _add_layers(kinds[kind], name, _stored(reader, key, saved))
    found = {kind: _with_joined_halves(sources) for kind, sources in kinds.items()}
    return saved_args(common, folder / COMMON), int(common.get("iteration", 0)), found


def _stored(reader: Reader, key: str, saved: SavedTensor) -> Source:
    def values(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        found = torch.empty(shape, dtype=saved.dtype)
        read(reader, [{key: ShardedTensor(saved.size, [(offset, found)], saved.dtype)}])
        return found

    return Source(tuple(saved.size), saved.dtype, values)


def _add_layers(sources: dict[str, Source], key: str, source: Source) -> None:
    """Adds a stored tensor under the name of each layer and each expert in it."""
    match = _LAYER.match(key)
    if not match:
        sources[key] = source
        return
    layers = [int(match[1])] if match[1] else range(source.shape[0])
    for i in layers:
        layer = source if match[1] else source.element(i)
        experts = _EXPERTS.match(match[2])
        if experts is None:
            sources[layer_name(i, match[2])] = layer
            continue
        for e in [int(experts[1])] if experts[1] else range(layer.shape[0]):
            name = layer_name(i, f"mlp.experts.{e}.{experts[2]}")
            sources[name] = layer if experts[1] else layer.element(e)


def _with_joined_halves(sources: dict[str, Source]) -> dict[str, Source]:
    """Puts gate and up rows under each other where they are stored apart."""
    for name in [name for name in sources if (half := _HALF.search(name)) and half[2] == "w"]:
        gate, up = sources.pop(name), sources.pop(name[:-1] + "v", None)
        if up is None:
            raise ValueError(f"the checkpoint holds {name} and no {name[:-1]}v")
        sources[name[:-2]] = concatenated([gate, up], 0)
    return sources

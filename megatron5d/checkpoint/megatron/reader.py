"""Opens a Megatron-LM checkpoint of either format and reads its tensors.

    torch_dist   a folder of DCP, and `common.pt` with everything that is no tensor
    older        `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each model-parallel rank

Tensors are read when they are needed. Nothing that a file names is executed (files.py).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import METADATA
from megatron5d.checkpoint.hf.safetensors_folder import StoredTensor
from megatron5d.checkpoint.megatron.files import Source, concatenated, load_inert, saved_args
from megatron5d.checkpoint.megatron.names import EMBEDDING, HEAD, from_megatron_rows, layer_name
from megatron5d.checkpoint.megatron.rank_files import read_rank_files
from megatron5d.checkpoint.reader import Reader
from megatron5d.checkpoint.tensor_file import Save
from megatron5d.config.json_file import read_json
from megatron5d.config.schema import ModelConfig

COMMON, BACKEND = "common.pt", "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
# kind of an optimizer's state that is stored by buckets of data parallelism, not by parameter
BUCKETS = "buckets"
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)$")
_EXPERTS = re.compile(r"mlp\.experts\.experts\.(?:(\d+)\.)?(.+)$")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.([^.]+)\.)?(.+)$")
# gate or up rows under a separate name
_HALF = re.compile(r"(linear_fc1\.(?:weight|bias))_([wv])$")
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class MegatronTensors:
    """Tensors of one kind, one layer and one expert at a time, under the names of names.py."""

    def __init__(self, folder: Path, sources: dict[str, Source]) -> None:
        self.folder, self._sources = folder, sources
        self.scales: dict[str, StoredTensor] = {}
        self._config: ModelConfig | None = None
        self.tensors = {
            name: StoredTensor("", source.shape, _DTYPES.get(source.dtype, str(source.dtype)))
            for name, source in sources.items()
        }

    def fit(self, config: ModelConfig) -> None:
        """Leaves out the rows that pad the vocabulary, and an output layer that is tied to the
        embedding."""
        self._config = config
        for name in (EMBEDDING, HEAD):
            stored = self.tensors.get(name)
            if stored and stored.shape[0] > config.vocab_size:
                shape = (config.vocab_size, *stored.shape[1:])
                self.tensors[name] = StoredTensor("", shape, stored.dtype)
        if config.tie_embeddings:
            self.tensors.pop(HEAD, None)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset`, with rows in our order; a fused QKV must be
        read completely."""
        assert self._config is not None
        values = self._sources[name].read(tuple(offset), tuple(shape))
        return from_megatron_rows(name, values, self._config)


class MegatronCheckpoint(NamedTuple):
    """One iteration of Megatron-LM."""

    args: Namespace
    iteration: int
    weights: MegatronTensors
    optimizer: dict[str, MegatronTensors]  # by kind: fp32_param, exp_avg, ..., or BUCKETS


def open_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Opens the checkpoint in a folder of one iteration, or in one with the tracker file.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or its format is not supported.
    """
    folder = _iteration_folder(folder)
    distributed = (folder / COMMON).is_file()
    args, iteration, kinds = (_read_distributed if distributed else read_rank_files)(folder)
    if EMBEDDING not in kinds.get("", {}):
        raise ValueError(
            f"{folder} holds no {EMBEDDING}: only GPT models of Megatron-Core are supported"
        )
    tensors = {kind: MegatronTensors(folder, sources) for kind, sources in kinds.items()}
    return MegatronCheckpoint(args, iteration, tensors.pop(""), tensors)


def _iteration_folder(folder: Path) -> Path:
    """The folder of one iteration: itself, or the one that the tracker file in it names."""
    tracker = folder / TRACKER
    if tracker.is_file():
        latest = tracker.read_text().strip()
        iteration = int(latest) if latest.isdigit() else 0
        folder = folder / ("release" if latest == "release" else f"iter_{iteration:07d}")
    if (folder / COMMON).is_file() or any(folder.glob("mp_rank_*")):
        return folder
    if not folder.exists():
        raise ValueError(f"there is no folder {folder} (seen from {Path.cwd()})")
    raise ValueError(
        f"{folder} is no checkpoint of Megatron-LM: it has neither {COMMON} nor mp_rank_00; name "
        f"an iter_ folder, or the directory with {TRACKER}"
    )


class _Reader(Reader):
    """Reads tensors of a folder without files.json and index.json."""

    def _index_content(self) -> bytes:
        return METADATA.encode() + b"\n" + (self._folder / METADATA).read_bytes()

    def advice(self) -> str:
        return "Copy the checkpoint again"

    def _check_save(self, save: Save | None) -> None:
        """Accepts a file of any save: to-megatron's files name theirs, Megatron's none, and no
        index says which is right."""


def _read_distributed(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and tensors of a `torch_dist` folder: weights ("") and what the
    optimizer keeps, by kind."""
    backend = read_json(folder / BACKEND).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"{folder / BACKEND}: sharded_backend = {backend!r}: only 'torch_dist' is supported"
        )
    common, reader = load_inert(folder / COMMON), _Reader(folder)
    kinds: defaultdict[str, dict[str, Source]] = defaultdict(dict)
    for key, saved in reader.tensors().items():
        state = _STATE.match(key)
        kind, name = (state[1] or BUCKETS, state[2]) if state else ("", key)
        source = Source(tuple(saved.size), saved.dtype, partial(reader.read, key))
        _add_layers(kinds[kind], name, source)
    for sources in kinds.values():
        _join_halves(sources)
    return saved_args(common, folder / COMMON), int(common.get("iteration", 0)), dict(kinds)


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


def _join_halves(sources: dict[str, Source]) -> None:
    """Joins gate and up rows that are stored apart."""
    for name in [name for name in sources if (half := _HALF.search(name)) and half[2] == "w"]:
        gate, up = sources.pop(name), sources.pop(name[:-1] + "v", None)
        if up is None:
            raise ValueError(f"the checkpoint holds {name} and no {name[:-1]}v")
        sources[name[:-2]] = concatenated([gate, up], 0)

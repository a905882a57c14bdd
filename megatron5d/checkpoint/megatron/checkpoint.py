"""The weights of a Megatron-LM checkpoint of either format, tensor by tensor."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.safetensors_folder import StoredTensor
from megatron5d.checkpoint.megatron.distributed import COMMON, read_distributed
from megatron5d.checkpoint.megatron.names import EMBEDDING, HEAD, to_our_rows
from megatron5d.checkpoint.megatron.rank_files import read_rank_files
from megatron5d.checkpoint.megatron.sources import Source
from megatron5d.config.schema import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def iteration_folder(folder: Path) -> Path:
    """Returns the folder of one iteration: itself, or the one that the tracker file in it names.

    Raises:
        ValueError: there is none; says what a Megatron checkpoint looks like.
    """
    tracker = folder / TRACKER
    if tracker.is_file():
        latest = tracker.read_text().strip()
        folder = folder / ("release" if latest == "release" else f"iter_{int(latest) if latest.isdigit() else 0:07d}")
    if (folder / COMMON).is_file() or any(folder.glob("mp_rank_*")):
        return folder
    raise ValueError(
        f"{folder} is no checkpoint of Megatron-LM: it has neither {COMMON} nor mp_rank_00; name an iter_ folder, or "
        f"the directory with {TRACKER}"
    )


class MegatronTensors:
    """Tensors of one kind, one layer and one expert at a time, under the names of names.py.

    Args:
        folder: of the iteration.
        sources: its tensors.
    """

    def __init__(self, folder: Path, sources: dict[str, Source]) -> None:
        self.folder, self._sources = folder, sources
        self.scales: dict[str, StoredTensor] = {}
        self._config: ModelConfig | None = None
        self.tensors = {
            name: StoredTensor("", source.shape, _KINDS.get(source.dtype, str(source.dtype)))
            for name, source in sources.items()
        }

    def fit(self, config: ModelConfig) -> None:
        """Leaves out the rows that pad the vocabulary, and an output layer that is the embedding."""
        self._config = config
        for name in (EMBEDDING, HEAD):
            if name in self.tensors and self.tensors[name].shape[0] > config.vocab_size:
                rest = self.tensors[name].shape[1:]
                self.tensors[name] = StoredTensor("", (config.vocab_size, *rest), self.tensors[name].dtype)
        if config.tie_embeddings:
            self.tensors.pop(HEAD, None)

    def read(self, name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Reads the rectangle of `shape` at `offset`, whose rows are ordered as ours: of a fused QKV all rows."""
        assert self._config is not None
        return to_our_rows(name, self._sources[name].read(tuple(offset), tuple(shape)), self._config)


class MegatronCheckpoint(NamedTuple):
    """One iteration of Megatron-LM."""

    args: Namespace
    iteration: int
    weights: MegatronTensors
    optimizer: dict[str, MegatronTensors]  # by kind: fp32_param, exp_avg, ..., or BUCKETS


def open_checkpoint(folder: Path) -> MegatronCheckpoint:
    """Opens the checkpoint in a folder of one iteration, or with the tracker file.

    Raises:
        ValueError: it holds no such checkpoint, a damaged one, or one of a format that is not read.
    """
    folder = iteration_folder(folder)
    distributed = (folder / COMMON).is_file()
    args, iteration, kinds = (read_distributed if distributed else read_rank_files)(folder)
    if EMBEDDING not in kinds.get("", {}):
        raise ValueError(f"{folder} holds no {EMBEDDING}: only GPT models of Megatron-Core are read")
    tensors = {kind: MegatronTensors(folder, sources) for kind, sources in kinds.items()}
    return MegatronCheckpoint(args, iteration, tensors.pop(""), tensors)

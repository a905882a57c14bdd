"""The weights of a Megatron-LM checkpoint of either format, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.safetensors_folder import StoredTensor
from megatron5d.checkpoint.megatron.distributed import COMMON, read_distributed
from megatron5d.checkpoint.megatron.names import EMBEDDING, HEAD, to_our_rows
from megatron5d.checkpoint.megatron.rank_files import read_rank_files
from megatron5d.config.schema import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def iteration_folder(folder: Path) -> Path:
    """The folder of one iteration: itself, or the one that the tracker file in it names.

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


class MegatronCheckpoint:
    """The weights of one iteration, one layer and one expert at a time, under the names of names.py.

    Args:
        folder: of the iteration, or with the tracker file.

    Raises:
        ValueError: it holds no such checkpoint, a damaged one, or one of a format that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = iteration_folder(folder)
        self.scales: dict[str, StoredTensor] = {}
        self._config: ModelConfig | None = None
        distributed = (self.folder / COMMON).is_file()
        self.args, self.iteration, self._sources = (read_distributed if distributed else read_rank_files)(self.folder)
        self.tensors = {
            name: StoredTensor("", source.shape, _KINDS.get(source.dtype, str(source.dtype)))
            for name, source in self._sources.items()
        }
        if EMBEDDING not in self.tensors:
            raise ValueError(f"{self.folder} holds no {EMBEDDING}: only GPT models of Megatron-Core are read")

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

"""Replayed routing: trains with the experts that another run, or an inference engine, has chosen.

The experts' weights are still the router's scores, from which it learns. So rounding or different
kernels cannot route a token differently than when it was generated.
Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay.

The file is a .npy of integers `[samples, train.seq_len, MoE blocks, top_k]`: the experts of every
token in each MoE block, prediction blocks included, by the number of its sample and its position.
"""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.token_share import Tokens


class RoutingFile:
    """The experts of every token; each rank reads or writes those of the tokens it routes.

    The file is opened when the first tokens are routed, because tools also build models to count,
    convert or query them, without the files of a run.

    Args:
        path: of the file.
        model: whose experts are chosen.
        seq_len: tokens of a sample.
        samples: number of samples of the run that writes the file; None = the file is read.
    """

    def __init__(
        self, path: str, model: ModelConfig, seq_len: int, samples: int | None = None
    ) -> None:
        self.path, self.num_experts, self._samples = path, model.num_experts, samples
        moe_blocks = [block for block in blocks(model) if is_moe(model, block)]
        self._index = {block: i for i, block in enumerate(moe_blocks)}
        self._shape = seq_len, len(moe_blocks), model.top_k

    @cached_property
    def experts(self) -> np.ndarray:
        """The file, memory-mapped; a file to write is created first.

        Raises:
            ValueError: the file has another shape or dtype.
        """
        if self._samples is not None:
            self._create()
        mode: Any = "r" if self._samples is None else "r+"
        try:
            experts = np.load(self.path, mmap_mode=mode, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} is not a routing file: {error}") from error
        if not isinstance(experts, np.ndarray):
            raise ValueError(f"{self.path} is not a routing file: expected one array, as in .npy")
        if experts.dtype.kind not in "iu" or experts.shape[1:] != self._shape:
            expected = ", ".join(map(str, self._shape))
            raise ValueError(
                f"{self.path}: expected integers [samples, train.seq_len, MoE blocks, model.top_k] "
                f"of shape (…, {expected}), got {experts.dtype} of shape {experts.shape}"
            )
        return experts

    def check_existing(self) -> None:
        """Checks that an existing file to write is one that this run has begun.

        Raises:
            ValueError: it is another file.
        """
        header, dtype, shape = self._header()
        with open(self.path, "rb") as file:
            if not header.startswith(file.read(len(header))):
                raise ValueError(
                    f"moe.record={self.path} exists, but does not hold {dtype} of shape {shape}: "
                    "remove it"
                )

    def _header(self) -> tuple[bytes, np.dtype, tuple[int, ...]]:
        """Header, dtype and shape of the file to write."""
        assert self._samples is not None
        dtype, header = np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16), io.BytesIO()
        shape = self._samples, *self._shape
        fields = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue(), dtype, shape

    def _create(self) -> None:
        """Creates the file with zeros; other ranks, and a run that resumes, write the same."""
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        Path(self.path).touch()
        self.check_existing()
        header, dtype, shape = self._header()
        with open(self.path, "r+b") as file:
            file.write(header)
            file.truncate(len(header) + int(np.prod(shape)) * dtype.itemsize)

    def read(self, block: int, tokens: Tokens) -> Tensor:
        """The experts of this rank's tokens in a block, int64 `[n, k]`.

        Raises:
            ValueError: the file lacks a sample, or an expert does not exist.
        """
        sample, position = self._indices(tokens)
        last_sample = int(sample.max())
        if len(self.experts) <= last_sample:
            raise ValueError(
                f"moe.replay: sample {last_sample} is not among the {len(self.experts)} of "
                f"{self.path}"
            )
        experts = self.experts[sample, position, self._index[block]].astype(np.int64)
        low, high = int(experts.min()), int(experts.max())
        if low < 0 or high >= self.num_experts:
            raise ValueError(
                f"moe.replay: {self.path} has experts {low} to {high} of {self.num_experts} in "
                f"samples {int(sample.min())} to {last_sample}; repair it, or set moe.replay=null "
                "to route by the router"
            )
        return torch.from_numpy(experts).to(tokens.order.device)

    def write(self, block: int, tokens: Tokens, experts: Tensor) -> None:
        """Writes the experts `[n, k]` of this rank's tokens in a block."""
        sample, position = self._indices(tokens)
        # Without padding: under cp its position can be that of another rank's token.
        real = slice(None) if tokens.real is None else tokens.real.cpu().numpy()
        self.experts[sample[real], position[real], self._index[block]] = experts.cpu().numpy()[real]

    def _indices(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Sample and position of each token; the last position for padding to equal shares."""
        assert tokens.samples is not None
        position = (tokens.order // tokens.num_sequences).clamp(max=self.experts.shape[1] - 1)
        return tokens.samples[tokens.sequence].cpu().numpy(), position.cpu().numpy()

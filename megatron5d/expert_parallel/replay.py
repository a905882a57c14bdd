"""Replayed routing: trains with the experts that another run, or an inference engine, has chosen.

The experts' weights are still the router's scores, from which it learns. So rounding or different
kernels cannot route a token differently than when it was generated.
Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay.

The file is a .npy of integers `[samples, train.seq_len, MoE blocks, top_k]`: the experts of every
token in each MoE block, prediction blocks included, by the number of its sample and its position.
A row of k experts names them once each. Where all k are -1, or 255 of uint8 or 65535 of uint16
without that many experts, the row was not recorded, and the router chooses. `moe.record` marks
padding so; the rest of samples that a run has not reached stays zero.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.token_share import Tokens

NOT_RECORDED = -1


def rows_of_file(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Rows `[n, k]` of a file as int64, NOT_RECORDED where it has the mark of its dtype."""
    experts = rows.astype(np.int64)
    if rows.dtype.kind == "u" and (mark := np.iinfo(rows.dtype).max) >= num_experts:
        experts[rows == mark] = NOT_RECORDED
    return experts


def row_fault(chunks: Iterable[np.ndarray], num_experts: int) -> str | None:
    """What is wrong with rows of a file; None = nothing.

    Args:
        chunks: of rows `[n, k]`, as the file has them.
        num_experts: E.
    """
    low, high, repeated, total = np.iinfo(np.int64).max, -1, 0, 0
    for chunk in chunks:
        rows = rows_of_file(chunk, num_experts)
        recorded = rows[(rows != NOT_RECORDED).any(-1)]
        low, high = int(recorded.min(initial=low)), int(recorded.max(initial=high))
        in_order = np.sort(recorded, axis=-1)
        repeated += int((in_order[:, 1:] == in_order[:, :-1]).any(-1).sum())
        total += len(rows)
    if low < 0 or high >= num_experts:
        return f"experts {low} to {high} of {num_experts}"
    return f"an expert twice in {repeated:,} of {total:,} rows" if repeated else None


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
        # The largest value marks what is not recorded.
        dtype, header = np.dtype(np.uint8 if self.num_experts <= 255 else np.uint16), io.BytesIO()
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
        """The experts of this rank's tokens in a block.

        Returns:
            int64 `[n, k]`; NOT_RECORDED in all of a row where the file has none.

        Raises:
            ValueError: the file lacks a sample, names an expert that does not exist, or one twice.
        """
        sample, position = self._indices(tokens)
        last_sample = int(sample.max())
        if len(self.experts) <= last_sample:
            raise ValueError(
                f"moe.replay: sample {last_sample} is not among the {len(self.experts)} of "
                f"{self.path}"
            )
        # Padding to equal shares has no row.
        rows = self.experts[sample, position.clip(max=self._shape[0] - 1), self._index[block]]
        real = slice(None) if tokens.real is None else tokens.real.cpu().numpy()
        if fault := row_fault([rows[real]], self.num_experts):
            raise ValueError(
                f"moe.replay: {self.path} has {fault} in samples {int(sample.min())} to "
                f"{last_sample}; repair it, mark rows that were not recorded with -1, or set "
                "moe.replay=null to route by the router"
            )
        experts = torch.from_numpy(rows_of_file(rows, self.num_experts))
        return experts.to(tokens.order.device)

    def write(self, block: int, tokens: Tokens, experts: Tensor) -> None:
        """Writes the experts `[n, k]` of this rank's tokens in a block; marks padding."""
        sample, position = self._indices(tokens)
        if tokens.real is not None:
            mark = int(np.iinfo(self.experts.dtype).max)
            experts = experts.masked_fill(~tokens.real[:, None], mark)
        inside = position < self._shape[0]  # padding to equal shares is not
        rows = experts.cpu().numpy()[inside]
        self.experts[sample[inside], position[inside], self._index[block]] = rows

    def _indices(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Sample and position of each token."""
        assert tokens.samples is not None
        position = tokens.order // tokens.num_sequences
        return tokens.samples[tokens.sequence].cpu().numpy(), position.cpu().numpy()

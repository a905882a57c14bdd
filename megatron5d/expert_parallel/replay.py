"""Replayed routing: training with the experts that another run, or an inference engine, has chosen.

The weights of the experts are still the router's own scores, through which it learns. Rounding, or
other kernels, can then send no token another way than the one by which it was generated.
Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay.

The file is a .npy of whole numbers `[samples, train.seq_len, MoE blocks, top_k]`: of every token
that a run reads, by the number of its sample and its place in it, the experts of each block that
has some, prediction blocks included.
"""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.token_share import Tokens


class RoutingFile:
    """The experts of every token, of which a rank reads or writes those that it routes.

    The file is opened when the first tokens are routed: models are also built to be counted,
    converted or asked, and such ones have nothing to do with the files of a run.

    Args:
        seq_len: tokens of a sample.
        samples: of the run, for which a new file is made (or one of the same shape continued); None
            = read it.
    """

    def __init__(
        self, path: str, model: ModelConfig, seq_len: int, samples: int | None = None
    ) -> None:
        self.path, self.num_experts, self._samples = path, model.num_experts, samples
        self._place = {
            block: i for i, block in enumerate(b for b in blocks(model) if is_moe(model, b))
        }
        self._shape = seq_len, len(self._place), model.top_k

    @cached_property
    def experts(self) -> np.ndarray:
        """The file, mapped; it is made first where it is to be written.

        Raises ValueError: it has another shape or kind.
        """
        if self._samples is not None:
            self._create()
        try:
            found = np.load(
                self.path, mmap_mode="r" if self._samples is None else "r+", allow_pickle=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} is no file of routing: {error}") from error
        if not isinstance(found, np.ndarray):
            raise ValueError(
                f"{self.path} is no file of routing: it holds several arrays, and .npy has one"
            )
        if found.dtype.kind not in "iu" or found.shape[1:] != self._shape:
            raise ValueError(
                f"{self.path} holds {found.dtype} of shape {found.shape}; routing here is whole numbers "
                f"[samples, train.seq_len, MoE blocks, model.top_k] = (…, {', '.join(map(str, self._shape))})"
            )
        return found

    def refuse_another(self) -> None:
        """Raises ValueError where a file that is not that of this run, begun before, is where it is
        to be written."""
        begin, dtype, shape = self._header()
        with open(self.path, "rb") as file:
            if not begin.startswith(file.read(len(begin))):
                raise ValueError(
                    f"moe.record={self.path} is there, and no file of {dtype} of shape {shape}: remove it"
                )

    def _header(self) -> tuple[bytes, np.dtype, tuple[int, ...]]:
        """Returns how the file that is written begins, its kind of numbers and its shape."""
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
        """Makes the file with zeros. Ranks that do so at the same time, and a run that continues,
        write the same."""
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        Path(self.path).touch()
        self.refuse_another()
        begin, dtype, shape = self._header()
        with open(self.path, "r+b") as file:
            file.write(begin)
            file.truncate(len(begin) + int(np.prod(shape)) * dtype.itemsize)

    def chosen(self, block: int, tokens: Tokens) -> Tensor:
        """Returns int64 `[n, k]`, the experts of this rank's tokens in a block.

        Raises ValueError: the file has no such sample, or no such expert.
        """
        sample, position = self._rows(tokens)
        if len(self.experts) <= int(sample.max()):
            raise ValueError(
                f"moe.replay: {self.path} ends before sample {int(sample.max())}: it has {len(self.experts)}"
            )
        experts = torch.from_numpy(
            self.experts[sample, position, self._place[block]].astype(np.int64)
        )
        if int(experts.min()) < 0 or int(experts.max()) >= self.num_experts:
            raise ValueError(
                f"moe.replay: {self.path} names experts {int(experts.min())} to {int(experts.max())} of "
                f"{self.num_experts} in samples {int(sample.min())} to {int(sample.max())}: repair them, or take the "
                "router's own with moe.replay=null"
            )
        return experts.to(tokens.order.device)

    def note(self, block: int, tokens: Tokens, experts: Tensor) -> None:
        """Writes the experts `[n, k]` of this rank's tokens in a block."""
        sample, position = self._rows(tokens)
        # what pads to equal shares has, under cp, the place of another rank's token
        real = slice(None) if tokens.real is None else tokens.real.cpu().numpy()
        self.experts[sample[real], position[real], self._place[block]] = experts.cpu().numpy()[real]

    def _rows(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sample of each token, and its place in it; the last place for what pads to
        equal shares."""
        assert tokens.samples is not None
        position = (tokens.order // tokens.num_sequences).clamp(max=self.experts.shape[1] - 1)
        return tokens.samples[tokens.sequence].cpu().numpy(), position.cpu().numpy()

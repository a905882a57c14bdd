"""Replayed routing: training with the experts that another run, or an inference engine, has chosen.

The weights of the experts are still the router's own scores, through which it learns. Rounding, or other kernels, can
then send no token another way than the one by which it was generated.
Source: Ma et al. 2025 (arXiv:2510.11370), rollout routing replay.

The file is a .npy of whole numbers `[samples, train.seq_len, MoE blocks, top_k]`: of every token that a run reads, by
the number of its sample and its place in it, the experts of each block that has some, prediction blocks included.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.load_balancing import Tokens


class RoutingFile:
    """The experts of every token, of which a rank reads or writes those that it routes.

    Args:
        seq_len: tokens of a sample.
        samples: of the run, for which a new file is made (or one of the same shape continued); None = read it.

    Raises:
        ValueError: the file has another shape or kind.
    """

    def __init__(self, path: str, model: ModelConfig, seq_len: int, samples: int | None = None) -> None:
        self.path, self.num_experts = path, model.num_experts
        self._place = {block: i for i, block in enumerate(b for b in blocks(model) if is_moe(model, b))}
        shape = seq_len, len(self._place), model.top_k
        if samples is not None:
            self._create((samples, *shape))
        try:
            self._experts = np.load(path, mmap_mode="r" if samples is None else "r+", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no file of routing: {error}") from error
        if self._experts.dtype.kind not in "iu" or self._experts.shape[1:] != shape:
            raise ValueError(
                f"{path} holds {self._experts.dtype} of shape {self._experts.shape}; routing here is whole numbers "
                f"[samples, train.seq_len, MoE blocks, model.top_k] = (…, {', '.join(map(str, shape))})"
            )

    def _create(self, shape: tuple[int, ...]) -> None:
        """Makes the file with zeros. Ranks that do so at the same time, and a run that continues, write the same."""
        dtype, header = np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16), io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, fields)
        begin = header.getvalue()
        Path(self.path).touch()
        with open(self.path, "r+b") as file:
            if not begin.startswith(file.read(len(begin))):
                raise ValueError(f"moe.record={self.path} is there, and no file of {dtype} of shape {shape}: remove it")
            file.seek(0)
            file.write(begin)
            file.truncate(len(begin) + int(np.prod(shape)) * dtype.itemsize)

    def chosen(self, block: int, tokens: Tokens) -> Tensor:
        """Returns int64 `[n, k]`, the experts of this rank's tokens in a block.

        Raises ValueError: the file has no such sample, or no such expert.
        """
        sample, position = self._rows(tokens)
        if len(self._experts) <= int(sample.max()):
            raise ValueError(f"{self.path} ends before sample {int(sample.max())}: it has {len(self._experts)}")
        experts = torch.from_numpy(self._experts[sample, position, self._place[block]].astype(np.int64))
        if int(experts.min()) < 0 or int(experts.max()) >= self.num_experts:
            raise ValueError(f"{self.path} names experts {int(experts.min())} to {int(experts.max())} of "
                             f"{self.num_experts}")  # fmt: skip
        return experts.to(tokens.order.device)

    def note(self, block: int, tokens: Tokens, experts: Tensor) -> None:
        """Writes the experts `[n, k]` of this rank's tokens in a block."""
        sample, position = self._rows(tokens)
        real = (tokens.order < tokens.num_sequences * self._experts.shape[1]).cpu().numpy()  # not what pads to shares
        self._experts[sample[real], position[real], self._place[block]] = experts.cpu().numpy()[real]

    def _rows(self, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sample of each token, and its place in it; the last place for what pads to equal shares."""
        assert tokens.samples is not None
        position = (tokens.order // tokens.num_sequences).clamp(max=self._experts.shape[1] - 1)
        return tokens.samples[tokens.sequence].cpu().numpy(), position.cpu().numpy()

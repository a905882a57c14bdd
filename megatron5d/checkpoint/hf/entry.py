"""A tensor on disk and its place in ours: a row of the tables that describe a folder."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Entry:
    """One tensor on disk and its place in ours.

    Args:
        name: global name of our tensor.
        rows: (start, stop) in dim 0 of our tensor, or of one expert of it; the other dims are whole.
        hf_name: name on disk.
        shape: shape on disk.
        transposed: on disk it is [..., in, out] (GPT-2's Conv1D, gpt-oss) where ours is [..., out, in].
        expert: which expert of our stack `[experts, rows, ...]`; None = our tensor is no stack of experts.
        heads: number of heads whose q, k and v each lie together on disk (GPT-NeoX); None = all q, all k, all v.
        interleaved: a stack of experts in which gate and up rows alternate on disk (gpt-oss).
        wide: at least fp32 on disk and in memory, whatever the model's dtype (a router's bias).
    """

    name: str
    rows: tuple[int, int]
    hf_name: str
    shape: tuple[int, ...]
    transposed: bool = False
    expert: int | None = None
    wide: bool = False
    heads: int | None = None
    interleaved: bool = False

    @property
    def our_shape(self) -> tuple[int, ...]:
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape
        return shape if self.expert is None else (1, *shape)

    @property
    def our_offset(self) -> tuple[int, ...]:
        """First index of the tensor in ours."""
        inner = (self.rows[0], *(0 for _ in self.shape[1:]))
        return inner if self.expert is None else (self.expert, *inner)

    def ours(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on disk, or whole experts of a stack, with dims and rows in our order."""
        values = values.transpose(-1, -2) if self.transposed else values
        if self.interleaved:
            return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return values if self.heads is None else values.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)

    def theirs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns our tensor as it is on disk; the inverse of `ours`."""
        if self.interleaved:
            values = values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if self.heads is not None:
            values = values.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)
        return values.transpose(-1, -2) if self.transposed else values

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of this tensor in a model whose weights have `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.wide else dtype

"""From rows of tokens to a micro-batch: inputs, labels, the loss mask, positions and documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron5d.pipeline_parallel.microbatch import IGNORED, MicroBatch


def make_micro_batch(
    rows: Tensor,
    *,
    document_mask: bool = False,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    document_starts: Sequence[np.ndarray] | None = None,
) -> MicroBatch:
    """Cuts rows of seq_len + 1 tokens into inputs and labels.

    The label of a document's last token is the first token of the next document. Its loss counts, as in Megatron,
    unless `eod_mask_loss` is set.

    Args:
        rows: int64 `[b, s+1]`; IGNORED for padding.
        document_mask: number the documents of each row and restart positions in each document.
        eod: id of the end-of-document token; a new document begins after each.
        eod_mask_loss: do not count the prediction made at an end-of-document token.
        document_starts: where documents begin, one array of offsets per row; used when there is no `eod`.

    Returns:
        A micro-batch of `[b, s]`; tokens of padding are 0 and their labels are not counted.

    Raises:
        ValueError: the settings need an end-of-document token, and none is given.
    """
    assert rows.ndim == 2 and rows.dtype == torch.int64, (rows.shape, rows.dtype)
    if eod_mask_loss and eod is None:
        raise ValueError("data.eod_mask_loss=true, but data.eod is not set and data.tokenizer names none; set data.eod")
    inputs, labels = rows[:, :-1], rows[:, 1:].contiguous()
    loss_mask = (labels != IGNORED).float()
    if eod_mask_loss:
        loss_mask = loss_mask * (inputs != eod)
    ignored = inputs == IGNORED
    tokens = inputs.masked_fill(ignored, 0)
    padding = ignored if ignored.any() else None
    if not document_mask:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape).contiguous()
        return MicroBatch(tokens, labels, loss_mask, positions, None, padding)
    begins = torch.zeros(tokens.shape, dtype=torch.bool)
    if eod is not None:
        begins[:, 1:] = inputs[:, :-1] == eod  # not `tokens`, where padding is 0, which may be the same id
    elif document_starts is not None:
        for row, starts in enumerate(document_starts):
            begins[row, torch.from_numpy(starts[starts < tokens.shape[1]])] = True
    else:
        raise ValueError("data.document_mask=true, but nothing says where documents begin; set data.eod")
    return MicroBatch(tokens, labels, loss_mask, positions_from_begins(begins), begins.long().cumsum(1), padding)


def positions_from_begins(begins: Tensor) -> Tensor:
    """Positions that restart at 0 where documents begin.

    Args:
        begins: bool `[b, s]`; the first column counts as a beginning in any case.

    Returns:
        int64 `[b, s]`.
    """
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    latest = torch.where(begins, index, 0).cummax(dim=1).values
    return index - latest

"""From rows of tokens to a micro-batch: inputs, labels, the loss mask, positions and documents.

What context parallelism means to the model: this rank's positions, and the attention that reaches all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.config.derived import split_of
from megatron5d.config.schema import Config
from megatron5d.context_parallel.block_plan import Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.pipeline_parallel.phase import IGNORED, MicroBatch
from megatron5d.topology.mesh import Mesh


def make_micro_batch(
    rows: Tensor,
    *,
    seq_len: int | None = None,
    document_mask: bool = False,
    eod: int | None = None,
    eod_mask_loss: bool = False,
    document_starts: Sequence[np.ndarray] | None = None,
    causal: bool = True,
) -> MicroBatch:
    """Cuts rows of a sample's length + 1 tokens into inputs and labels.

    The label of a document's last token is the first token of the next document. Its loss counts, as in Megatron,
    unless `eod_mask_loss` is set. A prediction made at padding, or of padding, never counts. Attention leaves padding
    out: where a token could see it, a run of padding is a document of its own, and what follows it another.

    Args:
        rows: int64 `[b, s+1]`; IGNORED for padding.
        seq_len: tokens of a sequence, whose end padding fills; None = those of a sample.
        document_mask: number the documents of each row and restart positions in each document.
        eod: id of the end-of-document token; a new document begins after each.
        eod_mask_loss: do not count the prediction made at an end-of-document token.
        document_starts: where documents begin, one array of offsets per row; used when there is no `eod`.
        causal: tokens see none after them (model.attention_causal), so padding at the end of a row is never seen.

    Returns:
        A micro-batch of `[b, s]`; tokens of padding are 0.

    Raises:
        ValueError: the settings need an end-of-document token, and none is given.
    """
    assert rows.ndim == 2 and rows.dtype == torch.int64, (rows.shape, rows.dtype)
    if eod_mask_loss and eod is None:
        raise ValueError("data.eod_mask_loss=true, but data.eod is not set and data.tokenizer names none; set data.eod")
    padded = 0 if seq_len is None else seq_len + 1 - rows.shape[1]  # not by IGNORED in rows: a label would be an input
    inputs, labels = (F.pad(part, (0, padded), value=IGNORED) for part in (rows[:, :-1], rows[:, 1:]))
    ignored = inputs == IGNORED
    loss_mask = ((labels != IGNORED) & ~ignored & (inputs != (eod if eod_mask_loss else IGNORED))).float()
    tokens = inputs.masked_fill(ignored, 0)
    padding = ignored if ignored.any() else None
    begins = _document_begins(inputs, eod, document_starts) if document_mask else torch.zeros_like(ignored)
    seen = ignored & (~ignored).flip(1).cummax(1).values.flip(1) if causal else ignored  # a token comes after it
    begins[:, 1:] |= seen[:, 1:] != seen[:, :-1]
    positions = positions_from_begins(begins & document_mask)
    documents = begins.long().cumsum(1) if document_mask or seen.any() else None
    return MicroBatch(tokens, labels, loss_mask, positions, documents, padding)


def _document_begins(inputs: Tensor, eod: int | None, starts: Sequence[np.ndarray] | None) -> Tensor:
    """Returns where documents begin inside rows, bool `[b, s]`: after each `eod`, or at the offsets of `starts`."""
    begins = torch.zeros(inputs.shape, dtype=torch.bool)
    if eod is not None:
        begins[:, 1:] = inputs[:, :-1] == eod  # not of tokens, where padding is 0, which may be the same id
    elif starts is not None:
        for row, offsets in enumerate(starts):
            begins[row, torch.from_numpy(offsets[offsets < inputs.shape[1]])] = True
    else:
        raise ValueError("data.document_mask=true, but nothing says where documents begin; set data.eod")
    return begins


def positions_from_begins(begins: Tensor) -> Tensor:
    """Returns the positions that restart at 0 where documents begin.

    Args:
        begins: bool `[b, s]`; the first column counts as a beginning in any case.

    Returns:
        int64 `[b, s]`.
    """
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    latest = torch.where(begins, index, 0).cummax(dim=1).values
    return index - latest


_SEQUENCES = (  # fields of a micro-batch whose last dim is the sequence
    "tokens", "labels", "loss_mask", "positions", "padding", "ahead_tokens", "ahead_labels", "ahead_mask",
)  # fmt: skip


class SequenceSharding:
    """Turns a micro-batch of whole sequences into what this cp rank's model reads; the loader calls it.

    Multi-token prediction looks ahead while sequences are whole; then attention is planned, and this rank's positions
    are taken.

    Args:
        config: of the run (parallel.cp_method, cp_inner, train.seq_len, the model's masks and num_mtp_layers).
        mesh: this rank's axes.
        device: where the plan's index tensors will be used.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.cp, model = mesh["cp"], config.model
        layout = SequenceLayout(config.train.seq_len, *split_of(config))
        self.depths = model.num_mtp_layers
        masks: dict[str, Any] = {"causal": model.attention_causal, "window": model.attention_window}
        self._plan = Planner(layout, self.cp.rank, **masks, device=device)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Returns `[b, s]` -> `[b, s/cp]`, positions and labels still those of the whole sequence.

        Args:
            batch: whole sequences, on the CPU (the plan looks at where documents end).
        """
        batch = look_ahead(batch, self.depths)
        if self.cp.size == 1:
            return batch
        plan = self._plan(batch.documents)
        held = torch.from_numpy(plan.layout.rows(self.cp.rank))  # [s/cp]: the positions that this rank holds
        whole = {name: getattr(batch, name) for name in _SEQUENCES}
        # each [b, s] -> [b, s/cp]; what looks ahead [D, b, s] -> [D, b, s/cp]
        local: dict[str, Any] = {name: None if values is None else values[..., held] for name, values in whole.items()}
        return replace(batch, **local, documents=None, context=plan)


def look_ahead(batch: MicroBatch, depths: int) -> MicroBatch:
    """Adds what the prediction blocks read. It needs whole sequences, so it comes before cp takes its rows.

    A prediction of depth k counts where the main prediction k tokens later counts, none of the tokens before that is
    padding and, if documents are told apart, all are in the same document.

    Args:
        batch: whole sequences.
        depths: model.num_mtp_layers.

    Returns:
        The batch with `[depths, b, s]` tokens, labels and masks; 0, IGNORED and 0 past the end of a sequence.
    """
    if depths == 0:
        return batch
    tokens, labels, masks = [], [], []
    following = batch.labels.clamp(min=0)  # token i+1; padding is 0, as in tokens
    padding = torch.zeros_like(batch.tokens, dtype=torch.bool) if batch.padding is None else batch.padding
    real = torch.ones_like(batch.loss_mask)
    for k in range(1, depths + 1):
        tokens.append(F.pad(following[:, k - 1 :], (0, k - 1)))
        labels.append(F.pad(batch.labels[:, k:], (0, k), value=IGNORED))
        real = real * F.pad(~padding[:, k - 1 :], (0, k - 1))
        mask = F.pad(batch.loss_mask[:, k:], (0, k)) * real
        if batch.documents is not None:
            mask = mask * (F.pad(batch.documents[:, k:], (0, k), value=-1) == batch.documents)
        masks.append(mask)
    stacked = {"tokens": tokens, "labels": labels, "mask": masks}
    return replace(batch, **{f"ahead_{name}": torch.stack(rows) for name, rows in stacked.items()})

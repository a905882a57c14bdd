"""Micro-batches of one rank from samples: inputs, labels, loss mask, positions and documents.

With context parallelism, `SequenceSharding` takes this rank's positions and plans attention. A
thread reads steps ahead. The loader's only state is `consumed_samples`: a new loader that starts
there continues like the old one.
"""

import queue
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.config.derived import BatchSchedule, global_batch_size, split_of
from megatron5d.config.schema import Config
from megatron5d.context_parallel.block_attention import Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.data.samples import Samples
from megatron5d.phases.phase import IGNORED, MicroBatch
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
    """Splits rows of a sample's length + 1 tokens into inputs and labels.

    The label of a document's last token is the first token of the next document. Its loss counts,
    as in Megatron, unless `eod_mask_loss` is set. A prediction at padding, or of padding, never
    counts. No token sees padding, and padding hides no token from another.

    Args:
        rows: int64 `[b, s+1]`; IGNORED for padding.
        seq_len: tokens of a sequence, filled up with padding; None = those of a sample.
        document_mask: number the documents of each row and restart positions at the first token of
            each document, which padding may precede.
        eod: id of the end-of-document token; a new document begins after each.
        eod_mask_loss: ignore the prediction at an end-of-document token.
        document_starts: offsets of documents, one array per row; used if there is no `eod`.
        causal: tokens see no later ones (model.attention_causal), so that they never see padding at
            the end of a row.

    Returns:
        A micro-batch of `[b, s]`; tokens of padding are 0.

    Raises:
        ValueError: the settings require an end-of-document token, and there is none.
    """
    assert rows.ndim == 2 and rows.dtype == torch.int64, (rows.shape, rows.dtype)
    if eod_mask_loss and eod is None:
        raise ValueError("data.eod_mask_loss=true requires data.eod (data.tokenizer names none)")
    # Padding is added after the split into inputs and labels: the last label is not an input.
    num_padding = 0 if seq_len is None else seq_len + 1 - rows.shape[1]
    inputs = F.pad(rows[:, :-1], (0, num_padding), value=IGNORED)
    labels = F.pad(rows[:, 1:], (0, num_padding), value=IGNORED)
    ignored = inputs == IGNORED
    makes_no_prediction = ignored | (inputs == eod) if eod_mask_loss else ignored
    loss_mask = ((labels != IGNORED) & ~makes_no_prediction).float()
    tokens = inputs.masked_fill(ignored, 0)
    padding = ignored if ignored.any() else None
    documents, positions = None, torch.arange(inputs.shape[1]).repeat(len(inputs), 1)
    if document_mask:
        documents = _document_begins(inputs, eod, document_starts).long().cumsum(1)
        positions = _positions_in_documents(documents, ignored)
    # With a causal mask, only padding before a token is visible.
    if ((ignored[:, :-1] & ~ignored[:, 1:]) if causal else ignored).any():
        # Padding is separate, but beside the document that it lies in: block masks skip ranges of
        # documents, so numbers far apart would make each block with padding visit all others.
        documents = ignored.long() if documents is None else 2 * documents + ignored
    return MicroBatch(tokens, labels, loss_mask, positions, documents, padding)


def _document_begins(
    inputs: Tensor, eod: int | None, starts: Sequence[np.ndarray] | None
) -> Tensor:
    """Beginnings of documents in rows, bool `[b, s]`: after each `eod`, or at offsets `starts`."""
    begins = torch.zeros(inputs.shape, dtype=torch.bool)
    if eod is not None:
        # In `inputs` padding is IGNORED; in tokens it is 0, which may be the id of `eod`.
        begins[:, 1:] = inputs[:, :-1] == eod
    elif starts is not None:
        for row, offsets in enumerate(starts):
            begins[row, torch.from_numpy(offsets[offsets < inputs.shape[1]])] = True
    else:
        raise ValueError("data.document_mask=true requires data.eod, or the .idx of documents")
    return begins


def _positions_in_documents(documents: Tensor, padding: Tensor) -> Tensor:
    """Positions int64 `[b, s]` that restart at 0 at the first token of each document."""
    index = torch.arange(documents.shape[1]).expand(documents.shape)
    latest = documents.masked_fill(padding, -1).cummax(1).values
    begins = F.pad(latest[:, 1:] != latest[:, :-1], (1, 0))
    return index - torch.where(begins, index, 0).cummax(1).values


_SEQUENCES = (  # fields of a micro-batch whose last dim is the sequence
    "tokens",
    "labels",
    "loss_mask",
    "positions",
    "padding",
    "ahead_tokens",
    "ahead_labels",
    "ahead_mask",
)


class SequenceSharding:
    """Turns a micro-batch of full sequences into what this cp rank's model reads.

    Labels of multi-token prediction come from full sequences; then attention is planned, and this
    rank's positions are taken.

    Args:
        config: of the run (parallel.cp_method, cp_inner, train.seq_len, the model's masks and
            num_mtp_layers).
        device: of the plan's index tensors.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.cp, model = mesh["cp"], config.model
        layout = SequenceLayout(config.train.seq_len, *split_of(config))
        self.depths = model.num_mtp_layers
        masks: dict[str, Any] = {
            "causal": model.attention_causal,
            "window": model.attention_window,
            "some_unwindowed": model.window_layers is not None,
        }
        self._plan = Planner(layout, self.cp.rank, **masks, device=device)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """Maps `[b, s]` -> `[b, s/cp]`, with positions and labels of the full sequence.

        Args:
            batch: full sequences, on the CPU (the plan reads where documents end).
        """
        batch = look_ahead(batch, self.depths)
        if self.cp.size == 1:
            return batch
        plan = self._plan(batch.documents)
        local_rows = torch.from_numpy(plan.layout.rows(self.cp.rank))  # [s/cp]
        # [b, s] -> [b, s/cp]; of multi-token prediction [D, b, s] -> [D, b, s/cp]
        fields = {name: getattr(batch, name) for name in _SEQUENCES}
        local: dict[str, Any] = {
            name: None if values is None else values[..., local_rows]
            for name, values in fields.items()
        }
        return replace(batch, **local, documents=None, context=plan)


def look_ahead(batch: MicroBatch, depths: int) -> MicroBatch:
    """Adds the inputs and labels of multi-token prediction, which requires full sequences.

    A prediction of depth k counts if the main prediction k tokens later counts, no token before
    that is padding and, with a document mask, all are in the same document.

    Returns:
        The batch with `[depths, b, s]` tokens, labels and masks; 0, IGNORED and 0 past the end of a
        sequence.
    """
    if depths == 0:
        return batch
    tokens, labels, masks = [], [], []
    following = batch.labels.clamp(min=0)  # token i+1; padding is 0, as in tokens
    padding = batch.padding
    if padding is None:
        padding = torch.zeros_like(batch.tokens, dtype=torch.bool)
    no_padding = torch.ones_like(batch.loss_mask)
    for k in range(1, depths + 1):
        tokens.append(F.pad(following[:, k - 1 :], (0, k - 1)))
        labels.append(F.pad(batch.labels[:, k:], (0, k), value=IGNORED))
        no_padding = no_padding * F.pad(~padding[:, k - 1 :], (0, k - 1))
        mask = F.pad(batch.loss_mask[:, k:], (0, k)) * no_padding
        if batch.documents is not None:
            mask = mask * (F.pad(batch.documents[:, k:], (0, k), value=-1) == batch.documents)
        masks.append(mask)
    stacked = {"tokens": tokens, "labels": labels, "mask": masks}
    return replace(batch, **{f"ahead_{name}": torch.stack(rows) for name, rows in stacked.items()})


Step = tuple[int, list[MicroBatch]]  # consumed_samples after the step, its micro-batches


class Loader:
    """Yields, for each step, the list of micro-batches of this rank.

    A thread reads up to `prefetch` steps ahead. It starts with the first step, so that the process
    may fork before that. `__next__` raises errors of the thread.

    Args:
        batches: the run's schedule of global batches, from `batch_schedule`.
        dp_rank: this rank's position on the data-parallel axis.
        vocab_size: ids must be below it; None = not checked.
        key: configuration key of the files, for errors.
        skipped: number of consumed samples before each step that reads nothing (data.skip_steps).
        prefetch: steps read ahead; 0 = no thread.
        pin_memory: put micro-batches into page-locked memory.
        transform: applied to each micro-batch (takes this cp rank's rows).
        options: of `make_micro_batch`, except document_starts.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batches: BatchSchedule,
        mbs: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        vocab_size: int | None = None,
        key: str = "data.train",
        prefetch: int = 2,
        skipped: Container[int] = (),
        pin_memory: bool = False,
        transform: Callable[[MicroBatch], MicroBatch] | None = None,
        **options: Any,
    ) -> None:
        self.samples, self.consumed_samples = samples, consumed_samples
        self._batches, self._sizes = batches, (mbs, dp_rank, dp_size)
        self._make: Callable[..., MicroBatch] = partial(make_micro_batch, **options)
        self._reads_starts = options.get("document_mask", False) and options.get("eod") is None
        self._vocab_size, self._pin_memory, self._transform = vocab_size, pin_memory, transform
        self._prefetch, self._key, self._skipped = prefetch, key, skipped
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(max(prefetch, 1))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        """Micro-batches of the next step; advances `consumed_samples`.

        Raises:
            ValueError: a token id is not in the vocabulary, or a file is no longer readable.
            IndexError: there are no more samples (data.order=megatron).
        """
        if self._prefetch == 0:
            self.consumed_samples, batches = self._read_step(self.consumed_samples)
            return batches
        if self._thread is None:
            assert not self._stop.is_set(), "the loader was closed"
            self._thread = threading.Thread(
                target=self._read_ahead, args=(self.consumed_samples,), daemon=True
            )
            self._thread.start()
        item = self._queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.consumed_samples, batches = item
        return batches

    def close(self) -> None:
        """Ends the thread. The loader cannot be used afterwards."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _read_ahead(self, consumed: int) -> None:
        """Runs in the thread: puts steps into the queue, or the error that ends it."""
        item: Step | BaseException
        while not self._stop.is_set():
            try:
                item = self._read_step(consumed)
                consumed = item[0]
            except BaseException as error:  # __next__ raises it
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(item, BaseException):
                return

    def _read_step(self, consumed: int) -> Step:
        size = global_batch_size(consumed, self._batches)
        if consumed in self._skipped:
            return consumed + size, []
        numbers = micro_batch_samples(consumed, size, *self._sizes)
        try:
            return consumed + size, [self._read_micro_batch(n) for n in numbers]
        except (ValueError, OSError) as error:
            raise ValueError(f"{self._key}: {error}") from error

    def _read_micro_batch(self, numbers: range) -> MicroBatch:
        rows = np.stack([self.samples[i] for i in numbers])  # int64 [b, s+1]
        self._check_vocab(numbers, rows)
        starts = [self.samples.document_starts(i) for i in numbers] if self._reads_starts else None
        # [b, s+1] -> tokens, labels [b, s]
        batch = self._make(torch.from_numpy(rows), document_starts=starts)
        batch = replace(batch, samples=torch.tensor(numbers))
        if self._transform is not None:
            batch = self._transform(batch)  # [b, s] -> [b, s/cp]
        return batch.pin_memory() if self._pin_memory else batch

    def _check_vocab(self, numbers: range, rows: np.ndarray) -> None:
        """Rejects ids outside the vocabulary, for which an embedding over tp would return zeros."""
        limit = self._vocab_size
        if limit is None or (int(rows.max()) < limit and int(rows.min()) >= 0):
            return
        wrong = (rows >= limit) | ((rows < 0) & (rows != IGNORED))
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        stream, _ = self.samples.locate(numbers[row])
        token = int(rows[row, column])
        fix = (
            "tokenize with the model's tokenizer or set model.vocab_size to at least "
            f"{int(rows.max()) + 1}"
        )
        if token < 0:
            fix = (
                f"ids begin at 0 ({IGNORED} is padding): the file is damaged or holds no token ids"
            )
        raise ValueError(
            f"{stream.dataset.prefix}: sample {numbers[row]} requires ids below model.vocab_size = "
            f"{limit} (got {token}); {fix}"
        )

"""The micro-batches of one data-parallel rank, step by step, read ahead by a thread.

The loader's whole state is `consumed_samples`: a new loader that starts there yields what the old one would have.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatron5d.config.derived import BatchSchedule, global_batch_size
from megatron5d.data.batch import make_micro_batch
from megatron5d.data.sample_order import micro_batch_samples
from megatron5d.data.samples import Samples
from megatron5d.pipeline_parallel.phase import IGNORED, MicroBatch

Step = tuple[int, list[MicroBatch]]  # consumed_samples after the step, its micro-batches


class Loader:
    """Yields, for each step, the list of micro-batches of this rank.

    A thread reads up to `prefetch` steps ahead. It starts with the first step, so the process may fork before that. An
    error in the thread is raised when the step is asked for.

    Args:
        samples: all samples in their global order.
        batches: the run's schedule of global batches, as of `batch_schedule`.
        mbs: micro-batch, in sequences.
        dp_rank: this rank's position on the data-parallel axis.
        dp_size: ranks on that axis.
        consumed_samples: sequences that earlier steps have taken.
        seq_len: tokens of a row, of which padding fills what a sample leaves; None = those of a sample.
        document_mask: see `make_micro_batch`.
        eod: see `make_micro_batch`.
        eod_mask_loss: see `make_micro_batch`.
        causal: see `make_micro_batch`.
        vocab_size: ids must be below it; None = not checked.
        knob: config key of the files, for errors.
        prefetch: steps read ahead; 0 = none, without a thread.
        pin_memory: put micro-batches into page-locked memory.
        transform: applied to each micro-batch when it is read (takes this cp rank's rows).
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
        seq_len: int | None = None,
        document_mask: bool = False,
        eod: int | None = None,
        eod_mask_loss: bool = False,
        causal: bool = True,
        vocab_size: int | None = None,
        knob: str = "data.train",
        prefetch: int = 2,
        pin_memory: bool = False,
        transform: Callable[[MicroBatch], MicroBatch] | None = None,
    ) -> None:
        self.samples, self.consumed_samples = samples, consumed_samples
        self._batches, self._sizes = batches, (mbs, dp_rank, dp_size)
        self._make = partial(
            make_micro_batch,
            seq_len=seq_len,
            document_mask=document_mask,
            eod=eod,
            eod_mask_loss=eod_mask_loss,
            causal=causal,
        )
        self._wants_starts = document_mask and eod is None
        self._vocab_size, self._pin_memory, self._transform = vocab_size, pin_memory, transform
        self._prefetch, self._knob = prefetch, knob
        self._queue: queue.Queue[Step | BaseException] = queue.Queue(max(prefetch, 1))
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self

    def __next__(self) -> list[MicroBatch]:
        """Returns the micro-batches of the next step; `consumed_samples` counts that step from then on.

        Raises:
            ValueError: a token id is not in the vocabulary, or a file cannot be read any more; names key and file.
            IndexError: there are no more samples (data.order=megatron).
        """
        if self._prefetch == 0:
            self.consumed_samples, batches = self._read_step(self.consumed_samples)
            return batches
        if self._thread is None:
            assert not self._stop.is_set(), "the loader was closed"
            self._thread = threading.Thread(target=self._read_ahead, args=(self.consumed_samples,), daemon=True)
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
        """Returns the thread: puts one step after another, or the error that ends it, into the queue."""
        item: Step | BaseException
        while not self._stop.is_set():
            try:
                item = self._read_step(consumed)
                consumed = item[0]
            except BaseException as error:  # noqa: BLE001 - raised again by __next__
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
        numbers = micro_batch_samples(consumed, size, *self._sizes)
        try:
            return consumed + size, [self._read_micro_batch(each) for each in numbers]
        except (ValueError, OSError) as error:
            raise ValueError(f"{self._knob}: {error}") from error

    def _read_micro_batch(self, numbers: range) -> MicroBatch:
        rows = np.stack([self.samples[i] for i in numbers])  # int64 [b, s+1]: labels are one ahead of tokens
        self._check_vocab(numbers, rows)
        starts = [self.samples.document_starts(i) for i in numbers] if self._wants_starts else None
        batch = self._make(torch.from_numpy(rows), document_starts=starts)  # [b, s+1] -> tokens, labels [b, s]
        batch = replace(batch, samples=torch.tensor(numbers))
        if self._transform is not None:
            batch = self._transform(batch)  # [b, s] -> [b, s/cp]
        return batch.pin_memory() if self._pin_memory else batch

    def _check_vocab(self, numbers: range, rows: np.ndarray) -> None:
        """Refuses ids outside the vocabulary: an embedding that is cut over tp would return zeros for them."""
        limit = self._vocab_size
        if limit is None or (int(rows.max()) < limit and int(rows.min()) >= 0):
            return
        wrong = (rows >= limit) | ((rows < 0) & (rows != IGNORED))
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        stream, _ = self.samples.locate(numbers[row])
        token = int(rows[row, column])
        if token < 0:
            way_out = f"ids begin at 0, and {IGNORED} is padding: the file is damaged, or does not hold token ids"
        else:
            way_out = f"tokenise with the model's tokenizer or set model.vocab_size to at least {int(rows.max()) + 1}"
        raise ValueError(
            f"{stream.dataset.prefix}: sample {numbers[row]} has token id {token}, model.vocab_size is {limit}; "
            f"{way_out}"
        )

"""The data of a run: samples that this data-parallel rank reads for training and validation."""

from collections.abc import Callable, Container, Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron5d.config.derived import (
    BatchSchedule,
    batch_schedule,
    global_batch_size,
    left_out_steps,
    named_entries,
    sample_len,
    samples_of_steps,
    source_of,
    split_shares,
)
from megatron5d.config.schema import Config
from megatron5d.data.batch import Loader, SequenceSharding, look_ahead, make_micro_batch
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.samples import Samples, open_samples, split_range
from megatron5d.phases.phase import MicroBatch
from megatron5d.topology.all_ranks import on_every_rank, on_rank_0
from megatron5d.topology.mesh import Mesh

SAMPLED = 64  # samples at most, for a note at the start


class ValidationSet(NamedTuple):
    """Data of one validation loss.

    Args:
        key: of the configuration that names the files.
        entries: "weight prefix" each.
        split: whose valid part is read; None = all documents.
    """

    key: str
    entries: list[str]
    split: str | None


def validation_sets(config: Config) -> dict[str, ValidationSet]:
    """Validation sets by the suffix of `valid_loss` in a record.

    "" is data.valid, or the valid part of data.split; "/web" is the set named web in
    data.valid_sets.

    Raises:
        ValueError: the split is invalid.
    """
    data = config.data
    sets: dict[str, ValidationSet] = {}
    if data.valid:
        sets[""] = ValidationSet("data.valid", data.valid, None)
    elif split_shares(data.split)[1] > 0:
        sets[""] = ValidationSet("data.train", data.train, data.split)
    for name, entry in named_entries(data.valid_sets):
        sets.setdefault(f"/{name}", ValidationSet("data.valid_sets", [], None)).entries.append(
            entry
        )
    return sets


def read_sources(config: Config) -> list[tuple[str, str, str, str | None]]:
    """(key, "train" or "valid", prefix, split) of each pair of .bin and .idx that the run reads.

    Raises:
        ValueError: the split is invalid.
    """
    data = config.data
    sets = [("train", ValidationSet("data.train", data.train, data.split))]
    sets += [("valid", valid) for valid in validation_sets(config).values()]
    return [
        (key, split_name, source_of(entry).prefix, split)
        for split_name, (key, entries, split) in sets
        for entry in entries
    ]


def may_hold_padding(config: Config) -> bool:
    """Whether samples are padded, or a file has a signed dtype: padding is negative."""
    if sample_len(config) < config.train.seq_len:
        return True
    prefixes = [prefix for _, _, prefix, _ in read_sources(config)]
    return any(IndexedDataset(prefix, checked=False).dtype.kind == "i" for prefix in prefixes)


def _batch_of(config: Config, samples: Samples, numbers: range) -> MicroBatch:
    data, eod = config.data, end_of_document(config)
    rows = torch.from_numpy(np.stack([samples[i] for i in numbers]))
    starts = None
    if data.document_mask and eod is None:
        starts = [samples.document_starts(i) for i in numbers]
    return make_micro_batch(
        rows,
        document_mask=data.document_mask,
        eod=eod,
        eod_mask_loss=data.eod_mask_loss,
        document_starts=starts,
        causal=config.model.attention_causal,
    )


def refuse_valid_without_targets(config: Config) -> None:
    """Rejects validation data without any target; reads samples until it finds one.

    Raises:
        ValueError: names the key and the files.
    """
    count = config.train.eval_batches * config.train.gbs
    for valid in validation_sets(config).values():
        samples = _valid_samples(config, valid)
        batches = (_batch_of(config, samples, range(i, i + 1)) for i in range(count))
        if not any(int(batch.target_counts[0]) for batch in batches):
            files = ", ".join(source_of(entry).prefix for entry in valid.entries)
            raise ValueError(
                f"{valid.key}: the {count} samples of an evaluation from {files} have no target "
                "token: padding (-100) or data.eod_mask_loss masks all of their loss; "
                f"set {valid.key} to other files"
            )


def without_targets(config: Config) -> list[str]:
    """Note on depths of multi-token prediction for which the first samples have no target."""
    depths = config.model.num_mtp_layers
    if depths == 0:
        return []
    count = min(config.train.gbs, SAMPLED)
    batch = _batch_of(config, _train_samples(config), range(count))
    counts = look_ahead(batch, depths).target_counts.tolist()
    missing = [str(depth) for depth, targets in enumerate(counts) if depth and not targets]
    if not missing:
        return []
    return [
        f"model.num_mtp_layers = {depths}: the first {count} samples have no target of depth "
        f"{', '.join(missing)} (data.document_mask, data.eod_mask_loss and padding mask targets); "
        "mtp_loss is the mean over depths with targets, or null"
    ]


def tokens_of_part(dataset: IndexedDataset, split: str | None, split_name: str) -> int:
    """Tokens of the documents that `data.split` gives to train, valid or test.

    Raises:
        ValueError: it gives none, or the index is damaged.
    """
    begin, end = split_range(split, split_name, dataset.num_documents)
    return dataset.document_start(end) - dataset.document_start(begin)


def end_of_document(config: Config) -> int | None:
    """Id after which a new document begins: data.eod, or the tokenizer's."""
    if config.data.eod is not None or config.data.tokenizer is None:
        return config.data.eod
    return eod_and_size(config.data.tokenizer)[0]


@cache
def eod_and_size(tokenizer: str) -> tuple[int | None, int]:
    """The token that ends a document, and the number of tokens.

    Cached, because every evaluation calls it, and reading 128,000 tokens takes a quarter of a
    second.
    """
    from megatron5d.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return loaded.eod, loaded.vocab_size


class BlankSamples(Samples):
    """Samples without tokens for the middle stages of a pipeline, which only need positions."""

    def __init__(self, seq_len: int) -> None:
        super().__init__([], lambda i: (0, i), seq_len, None)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(self.seq_len + 1, dtype=np.int64)


def train_loader(
    config: Config, mesh: Mesh, consumed_samples: int, *, reads: bool = True, num_steps: int = 0
) -> Loader:
    """Training data of this data-parallel rank, from `consumed_samples` on.

    Args:
        reads: whether this rank needs tokens, not only their positions.
        num_steps: steps until the run ends; those in data.skip_steps read nothing.

    Raises:
        ValueError: on every rank, if one cannot read its files, or the order has too few samples.
        OSError: the same.

    Comm: that of `_opened`.
    """
    train = config.train
    batches, unit = batch_schedule(config), train.mbs * mesh["dp"].size
    end = samples_of_steps(num_steps, batches, consumed_samples)
    if (size := global_batch_size(consumed_samples, batches)) % unit:
        raise ValueError(
            f"train.gbs_ramp = {','.join(train.gbs_ramp or [])} requires batches that are "
            "multiples "
            f"of train.mbs·dp = {unit} (got {size} after {consumed_samples} samples); "
            "resume on fewer data-parallel ranks, or with train.gbs_ramp=null"
        )

    def open_files() -> Samples:
        samples = _train_samples(config)
        if num_steps > 0 and samples.num_samples is not None and end > samples.num_samples:
            raise ValueError(
                f"data.order = megatron has {samples.num_samples} samples for train.steps = "
                f"{train.steps} and train.gbs = {train.gbs}; {consumed_samples} are consumed, and "
                f"{num_steps} more steps require {end - consumed_samples}: resume with the same "
                "train.gbs and train.gbs_ramp, or with more train.steps"
            )
        return samples

    samples = _opened(config, reads, open_files)
    done = (train.stop_after or train.steps) - num_steps
    return loader_of(config, mesh, samples, consumed_samples, done, reads=reads)


def loader_of(
    config: Config, mesh: Mesh, samples: Samples, consumed_samples: int, done: int, *, reads: bool
) -> Loader:
    """Training data of this data-parallel rank from samples, after `done` steps.

    Args:
        reads: whether this rank needs tokens, not only their positions.
    """
    batches, prefetch = batch_schedule(config), config.data.prefetch if reads else 0
    skipped = {
        samples_of_steps(step - 1 - done, batches, consumed_samples)
        for step in left_out_steps(config, done)
    }
    return _loader(
        config, mesh, samples, consumed_samples, batches, prefetch, "data.train", skipped
    )


def valid_loader(config: Config, mesh: Mesh, valid: ValidationSet, *, reads: bool = True) -> Loader:
    """Validation data from its beginning, the same batches at every evaluation.

    Args:
        valid: one of `validation_sets`.
        reads: whether this rank needs tokens, not only their positions.
    """
    samples = _opened(config, reads, lambda: _valid_samples(config, valid))
    return _loader(config, mesh, samples, 0, [(0, config.train.gbs)], 0, valid.key)


def _samples(
    config: Config, entries: list[str], split: str | None, split_name: str, order: str, count: int
) -> Samples:
    data = config.data
    return open_samples(
        entries,
        seq_len=sample_len(config),
        order=order,
        seed=config.train.seed,
        num_samples=count,
        split=split,
        split_name=split_name,
        cache_dir=data.cache_dir,
        unweighted=data.weights,
    )


def _train_samples(config: Config) -> Samples:
    data, count = config.data, samples_of_steps(config.train.steps, batch_schedule(config))
    return _samples(config, data.train, data.split, "train", data.order, count)


def _valid_samples(config: Config, valid: ValidationSet) -> Samples:
    order = "megatron" if config.data.order == "megatron" else "sequential"
    count = config.train.eval_batches * config.train.gbs
    return _samples(config, valid.entries, valid.split, "valid", order, count)


def samples_of_step(config: Config, step: int, count: int) -> Iterator[tuple[Tensor, np.ndarray]]:
    """The first `count` samples of a run's step, which counts from 1.

    Yields:
        Tokens, int64 `[s+1]`, and the offsets at which documents of the index begin.

    Raises:
        ValueError: the files cannot be read, or a token is not in the model's vocabulary.
    """
    samples, first = _train_samples(config), samples_of_steps(step - 1, batch_schedule(config))
    for number in range(first, first + count):
        row = torch.from_numpy(samples[number])
        if row.max() >= config.model.vocab_size:
            raise ValueError(
                "data.train requires ids below model.vocab_size = "
                f"{config.model.vocab_size} (got {row.max()})"
            )
        yield row, samples.document_starts(number)


def _opened(config: Config, reads: bool, open_files: Callable[[], Samples]) -> Samples:
    """Samples on ranks that read tokens, blank ones elsewhere.

    Megatron's order has an index that takes long to build and is then cached on disk. Rank 0 builds
    it before other ranks read it: a lock for thousands of ranks is slow, and on file systems
    without locks every rank would build its own.

    Raises:
        ValueError: on every rank, if one cannot read its files.
        OSError: the same.

    Comm: `first_failure`'s; with data.order=megatron also a broadcast over the world.
    """
    opened = list[Samples]()
    if config.data.order == "megatron":
        on_rank_0(lambda: opened.append(open_files()))

    def open_here() -> Samples:
        if not reads:
            return BlankSamples(sample_len(config))
        return opened[0] if opened else open_files()

    return on_every_rank(open_here)


def _loader(
    config: Config,
    mesh: Mesh,
    samples,
    consumed: int,
    batches: BatchSchedule,
    prefetch: int,
    key: str,
    skipped: Container[int] = (),
) -> Loader:
    data, train = config.data, config.train
    device = torch.device("cpu")
    if torch.cuda.is_available():
        # With its index, because the current GPU of the loader's thread is the first one.
        device = torch.device("cuda", torch.cuda.current_device())
    return Loader(
        samples,
        batches=batches,
        mbs=train.mbs,
        dp_rank=mesh["dp"].rank,
        dp_size=mesh["dp"].size,
        consumed_samples=consumed,
        seq_len=train.seq_len,
        document_mask=data.document_mask,
        eod=end_of_document(config),
        eod_mask_loss=data.eod_mask_loss,
        causal=config.model.attention_causal,
        vocab_size=config.model.vocab_size,
        key=key,
        skipped=skipped,
        prefetch=prefetch,
        pin_memory=torch.cuda.is_available(),
        transform=SequenceSharding(config, mesh, device),
    )

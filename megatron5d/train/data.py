"""The data of a run: which samples this data-parallel rank reads, for training and for
validation."""

from collections.abc import Callable, Container
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

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

LOOKED_AT = 64  # samples at most, for a note at the start


class Part(NamedTuple):
    """Sources that are read together."""

    knob: str  # that names them
    entries: list[str]  # "weight prefix"
    split: str | None  # of which a part is read; None = all of them


def held_out(config: Config) -> dict[str, Part]:
    """Returns what evaluations read, by what stands behind `valid_loss` in a record.

    "" is data.valid, or the valid part of data.split; "/web" is the set that data.valid_sets calls
    web.

    Raises ValueError: an illegal split.
    """
    data, found = config.data, {}
    if data.valid:
        found[""] = Part("data.valid", data.valid, None)
    elif split_shares(data.split)[1] > 0:
        found[""] = Part("data.train", data.train, data.split)
    for name, entry in named_entries(data.valid_sets):
        found.setdefault(f"/{name}", Part("data.valid_sets", [], None)).entries.append(entry)
    return found


def read_sources(config: Config) -> list[tuple[str, str, str, str | None]]:
    """Returns (knob, part, prefix, split) of each pair of .bin and .idx that is read. Raises
    ValueError: an illegal split."""
    parts = [("train", Part("data.train", config.data.train, config.data.split))]
    parts += [("valid", held) for held in held_out(config).values()]
    return [
        (knob, part, source_of(entry).prefix, split)
        for part, (knob, entries, split) in parts
        for entry in entries
    ]


def may_hold_padding(config: Config) -> bool:
    """Says if samples are padded, or a file can hold padding, which is negative: ids up to 65,535
    are unsigned."""
    return sample_len(config) < config.train.seq_len or any(
        IndexedDataset(prefix, checked=False).dtype.kind == "i"
        for _, _, prefix, _ in read_sources(config)
    )


def _batch_of(config: Config, samples: Samples, numbers: range) -> MicroBatch:
    data, eod = config.data, end_of_document(config)
    rows = torch.from_numpy(np.stack([samples[i] for i in numbers]))
    starts = (
        [samples.document_starts(i) for i in numbers]
        if data.document_mask and eod is None
        else None
    )
    return make_micro_batch(
        rows,
        document_mask=data.document_mask,
        eod=eod,
        eod_mask_loss=data.eod_mask_loss,
        document_starts=starts,
        causal=config.model.attention_causal,
    )


def refuse_valid_without_targets(config: Config) -> None:
    """Refuses held-out data of which an evaluation has no loss. Reads until a target is found,
    usually one sample. Raises ValueError: names the key and the files."""
    count = config.train.eval_batches * config.train.gbs
    for part in held_out(config).values():
        samples = _valid_samples(config, part)
        if not any(
            int(_batch_of(config, samples, range(i, i + 1)).target_counts[0]) for i in range(count)
        ):
            files = ", ".join(source_of(entry).prefix for entry in part.entries)
            raise ValueError(
                f"{part.knob}: the {count} samples that an evaluation takes of {files} have no target token: padding "
                f"(-100) or data.eod_mask_loss masks all of their loss; set {part.knob} to other files"
            )


def without_targets(config: Config) -> list[str]:
    """Returns a note on the depths of multi-token prediction for which the run's first samples have
    no target."""
    depths = config.model.num_mtp_layers
    if depths == 0:
        return []
    count = min(config.train.gbs, LOOKED_AT)
    batch = _batch_of(config, _train_samples(config), range(count))
    missing = [
        k
        for k, targets in enumerate(look_ahead(batch, depths).target_counts.tolist())
        if k and not targets
    ]
    if not missing:
        return []
    return [
        f"model.num_mtp_layers = {depths}: the first {count} samples have no target of depth "
        f"{', '.join(map(str, missing))} (data.document_mask, data.eod_mask_loss and padding leave targets out); "
        "mtp_loss is the mean over the depths that have some, and null where none has"
    ]


def tokens_of_part(dataset: IndexedDataset, split: str | None, part: str) -> int:
    """Returns tokens of the documents that `data.split` gives to train, valid or test. Raises
    ValueError: it gives none, or the index is damaged."""
    begin, end = split_range(split, part, dataset.num_documents)
    return dataset.document_start(end) - dataset.document_start(begin)


def end_of_document(config: Config) -> int | None:
    """Returns the id after which a new document begins: data.eod, or the tokenizer's."""
    if config.data.eod is not None or config.data.tokenizer is None:
        return config.data.eod
    return eod_and_size(config.data.tokenizer)[0]


@cache
def eod_and_size(tokenizer: str) -> tuple[int | None, int]:
    """Returns the token that ends a document, and the number of tokens.

    Every evaluation of every set asks, and to read a vocabulary of 128,000 tokens takes a quarter
    of a second.
    """
    from megatron5d.data.tokenizer import load_tokenizer

    found = load_tokenizer(tokenizer)
    return found.eod, found.vocab_size


class BlankSamples(Samples):
    """What the middle stages of a pipeline read: nothing. Their micro-batches have positions alone,
    and no file is opened for them."""

    def __init__(self, seq_len: int) -> None:
        super().__init__([], lambda i: (0, i), seq_len, None)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(self.seq_len + 1, dtype=np.int64)


def train_loader(
    config: Config, mesh: Mesh, consumed_samples: int, *, reads: bool = True, steps_left: int = 0
) -> Loader:
    """Returns the training data of this data-parallel rank, from `consumed_samples` on.

    Args:
        reads: this rank needs the tokens, not only their positions.
        steps_left: steps that the run will still make; of those in data.skip_steps nothing is read.

    Raises:
        ValueError, OSError: on every rank, if one cannot read its files, or fewer steps remain of
            an order that has an end.

    Comm: that of `_opened`.
    """
    train = config.train
    batches, unit = batch_schedule(config), train.mbs * mesh["dp"].size
    end = samples_of_steps(steps_left, batches, consumed_samples)
    if (size := global_batch_size(consumed_samples, batches)) % unit:
        raise ValueError(
            f"train.gbs_ramp = {','.join(train.gbs_ramp or [])}: after {consumed_samples} samples a batch has {size} "
            f"sequences, no multiple of train.mbs·dp = {unit}; resume on fewer data-parallel ranks, or with "
            "train.gbs_ramp=null"
        )

    def open_files() -> Samples:
        samples = _train_samples(config)
        if steps_left > 0 and samples.num_samples is not None and end > samples.num_samples:
            raise ValueError(
                f"data.order = megatron has {samples.num_samples} samples for train.steps = {train.steps} and "
                f"train.gbs = {train.gbs}; {consumed_samples} have been taken, and {steps_left} steps more would take "
                f"{end - consumed_samples}: resume with train.gbs and train.gbs_ramp as before, or with more "
                "train.steps"
            )
        return samples

    samples = _opened(config, reads, open_files)
    prefetch = config.data.prefetch if reads else 0
    done = (train.stop_after or train.steps) - steps_left
    left_out = {
        samples_of_steps(step - 1 - done, batches, consumed_samples)
        for step in left_out_steps(config, done)
    }
    return _loader(
        config, mesh, samples, consumed_samples, batches, prefetch, "data.train", left_out
    )


def valid_loader(config: Config, mesh: Mesh, part: Part, *, reads: bool = True) -> Loader:
    """Returns validation data from its beginning, the same batches at every evaluation.

    Args:
        part: one of `held_out`.
        reads: this rank needs the tokens, not only their positions.
    """
    samples = _opened(config, reads, lambda: _valid_samples(config, part))
    return _loader(config, mesh, samples, 0, [(0, config.train.gbs)], 0, part.knob)


def _samples(
    config: Config, entries: list[str], split: str | None, part: str, order: str, count: int
) -> Samples:
    data = config.data
    return open_samples(
        entries,
        seq_len=sample_len(config),
        order=order,
        seed=config.train.seed,
        num_samples=count,
        split=split,
        part=part,
        cache_dir=data.cache_dir,
        unweighted=data.weights,
    )


def _train_samples(config: Config) -> Samples:
    data, count = config.data, samples_of_steps(config.train.steps, batch_schedule(config))
    return _samples(config, data.train, data.split, "train", data.order, count)


def _valid_samples(config: Config, part: Part) -> Samples:
    order = "megatron" if config.data.order == "megatron" else "sequential"
    count = config.train.eval_batches * config.train.gbs
    return _samples(config, part.entries, part.split, "valid", order, count)


def first_rows(config: Config, steps: int) -> torch.Tensor:
    """Returns int64 `[steps·gbs, s+1]`: the samples of a run's first steps, all of each global
    batch. Raises
    ValueError: the files cannot be read so, or a token is not in the model's vocabulary."""
    samples = _train_samples(config)
    rows = torch.from_numpy(np.stack([samples[i] for i in range(steps * config.train.gbs)]))
    if rows.max() >= config.model.vocab_size:
        raise ValueError(
            f"data.train has token id {rows.max()}, model.vocab_size is {config.model.vocab_size}"
        )
    return rows


def _opened(config: Config, reads: bool, open_files: Callable[[], Samples]) -> Samples:
    """Samples where they are read, blank ones elsewhere.

    Megatron's order is an index that takes long to build and lies on disk afterwards. Rank 0 builds
    it before anybody else looks: a lock for thousands of ranks is slow, and file systems without
    locks would have each build its own.

    Raises ValueError, OSError: on every rank, if one cannot read its files.

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
    knob: str,
    left_out: Container[int] = (),
) -> Loader:
    data, train = config.data, config.train
    # with its number: the thread that reads ahead has a current GPU of its own, which is the first
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
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
        knob=knob,
        left_out=left_out,
        prefetch=prefetch,
        pin_memory=torch.cuda.is_available(),
        transform=SequenceSharding(config, mesh, device),
    )

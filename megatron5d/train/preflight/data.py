"""Errors in a run's data files that can be found before it starts."""

from bisect import bisect_right
from functools import partial
from os.path import exists, isfile

from megatron5d.config.convert import value_of
from megatron5d.config.derived import (
    batch_schedule,
    resumed_progress,
    sample_len,
    samples_of_steps,
)
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.data.indexed_dataset import OPEN_FILES, IndexedDataset
from megatron5d.data.samples import split_range
from megatron5d.topology.process import file_limit_for_data
from megatron5d.train.data import end_of_document, read_sources, tokens_of_part

# Ids are compared with the vocabulary in samples at equal distances: of one file, and of all files
# together, so that thousands of ranks with hundreds of files start quickly.
FILE_SAMPLES = 8
TOTAL_SAMPLES = 512
SAMPLE_TOKENS = 1 << 13


def data_faults(config: Config, world: int) -> list[Fault]:
    """Errors in existing files: damaged, of another kind, or too short for a single sample.

    Only sizes and a few samples are read; training reports other errors in the files.
    """
    try:
        sources = read_sources(config)
    except ValueError:
        sources = []  # a check reports the invalid split
    needed, limit = OPEN_FILES * len(sources), file_limit_for_data(world)
    if needed > limit:
        reason = (
            f"data.train and the validation sets name {len(sources)} pairs of .bin and .idx, which "
            f"require {needed} open files (this system allows a process {limit:.0f}, ulimit -Hn)"
        )
        merge = "python tools/tokens.py merge --out PREFIX PREFIXES"
        fix = f"ulimit -n {needed + 1024}, or merge: {merge}"
        return [Fault("data-open-files", ("data.train",), reason, fix, True)]
    num_samples = max(1, min(FILE_SAMPLES, TOTAL_SAMPLES // max(1, len(sources))))
    faults = []
    for key, split_name, prefix, split in sources:
        if all(isfile(prefix + suffix) for suffix in (".bin", ".idx")):
            of_source = _source_faults(config, key, prefix, split, split_name)
            faults += of_source or _vocabulary_faults(config, key, prefix, num_samples)
    if config.data.tokenizer is not None and exists(config.data.tokenizer):
        faults += _tokenizer_faults(config)
    # With data.split, training and validation read the same files.
    return list(dict.fromkeys(faults))


def _source_faults(
    config: Config, key: str, prefix: str, split: str | None, split_name: str
) -> list[Fault]:
    """Why one pair of .bin and .idx gives no samples."""
    example = f"{key}=[{'NAME ' if key == 'data.valid_sets' else ''}PREFIX]"
    fix = f"{example} of undamaged files, as tools/preprocess.py writes them"
    damaged = partial(Fault, "data-broken", (key,), fix=fix)
    try:
        dataset = IndexedDataset(prefix, checked=False)
    except (ValueError, OSError) as error:
        return [damaged(f"{key}: {error}", local=True)]
    if dataset.num_tokens == 0:
        return []  # a check reports it
    is_megatron = config.data.order == "megatron"
    try:
        split_range(
            split, split_name, dataset.num_sequences if is_megatron else dataset.num_documents
        )
    except ValueError as error:
        keys, reason = (key, "data.split"), f"{prefix}: {error}"
        return [Fault("data-split-part", keys, reason, "data.split=null", True)]
    if is_megatron:
        return []  # it joins epochs, so that few tokens suffice for any sample
    try:
        tokens, seq_len = tokens_of_part(dataset, split, split_name), sample_len(config)
    except ValueError as error:
        return [damaged(f"{key}: {error}", local=True)]
    if tokens > seq_len:
        return []
    length_key = "data.sample_len" if config.data.sample_len else "train.seq_len"
    of_split = f"'s part for {split_name} (data.split = {split})" if split is not None else ""
    reason = (
        f"{key}: a sample requires {length_key} + 1 = {seq_len + 1} tokens "
        f"({prefix}{of_split} has {tokens})"
    )
    shorter = f"{length_key}={tokens - 1} or less, or " if tokens > 1 else ""
    fix = f"{shorter}{example} of at least {seq_len + 1} tokens"
    return [Fault("data-too-short", (key, length_key), reason, fix, True)]


def _sampled_ranges(size: int, count: int) -> list[tuple[int, int]]:
    """(start, length) of samples at equal distances in a file of `size` items; none overlap."""
    last = max(0, size - SAMPLE_TOKENS)
    starts = sorted({last * i // max(1, count - 1) for i in range(count)}) if last else [0]
    ends = [*starts[1:], size]
    return [(start, min(SAMPLE_TOKENS, end - start)) for start, end in zip(starts, ends)]


def _vocabulary_faults(config: Config, key: str, prefix: str, num_samples: int) -> list[Fault]:
    """Ids outside of the model's vocabulary, in samples of one pair of .bin and .idx."""
    dataset, size = IndexedDataset(prefix, checked=False), config.model.vocab_size
    try:
        ranges = _sampled_ranges(dataset.num_tokens, num_samples)
        samples = [dataset.tokens(start, count) for start, count in ranges]
    except (ValueError, OSError) as error:
        fix = f"{key}=[PREFIX] of readable files"
        return [Fault("data-broken", (key,), f"{key}: {error}", fix, True)]
    largest = max((int(ids.max()) for ids in samples if len(ids)), default=0)
    if largest < size:
        return []
    reason = f"{key}: {prefix} requires model.vocab_size > {largest} (got {size})"
    fix = f"model.vocab_size={largest + 1} or more, or {key}=[PREFIX] of the model's tokenizer"
    return [Fault("data-vocabulary", (key, "model.vocab_size"), reason, fix, True)]


def _tokenizer_faults(config: Config) -> list[Fault]:
    """Why a tokenizer does not give the end-of-document token that a key requires."""
    data = config.data
    try:
        eod = end_of_document(config)
    except (ValueError, OSError) as error:
        key, reason = "data.tokenizer", f"data.tokenizer: {error}"
        fix = "data.tokenizer=FILE from tools/tokenizer.py or of a published model, or null"
        return [Fault("data-tokenizer-kind", (key,), reason, fix, True)]
    if eod is not None or not data.eod_mask_loss:
        return []
    reason = (
        "data.eod_mask_loss=true requires an end-of-document token "
        f"(data.tokenizer = {data.tokenizer} names none)"
    )
    keys = ("data.eod_mask_loss", "data.tokenizer")
    fix = "data.eod=ID of that token, or data.eod_mask_loss=false"
    return [Fault("data-tokenizer-eod", keys, reason, fix, True)]


def routing_faults(config: Config, world: int) -> list[Fault]:
    """Errors in the file of experts that `moe.replay` reads or `moe.record` writes.

    As of data, only samples of a long file are read; other errors in it end the run.
    """
    moe = config.moe
    if moe.record is not None:
        return _record_faults(config, moe.record)
    if moe.replay is not None and isfile(moe.replay):  # a check reports a missing file
        return _replay_faults(config, moe.replay)
    return []


def _record_faults(config: Config, file: str) -> list[Fault]:
    from megatron5d.expert_parallel.replay import RoutingFile

    capacity = samples_of_steps(config.train.steps, batch_schedule(config))
    try:
        if isfile(file):
            RoutingFile(file, config.model, config.train.seq_len, capacity).check_existing()
    except (ValueError, OSError) as error:
        fix = f"moe.record={file}.new, or null"
        return [Fault("moe-record-another", ("moe.record",), str(error), fix, True)]
    needed = _samples_needed(config)
    if needed <= capacity:
        return []
    reason = (
        f"moe.record: the resumed run requires {needed} samples "
        f"(the file has the {capacity} of train.steps)"
    )
    fix = "moe.record=null, or train.gbs and train.gbs_ramp as before"
    return [Fault("moe-record-too-short", ("moe.record", "train.gbs"), reason, fix, True)]


def _replay_faults(config: Config, file: str) -> list[Fault]:
    from megatron5d.expert_parallel.replay import RoutingFile, row_fault

    fix = "moe.replay=FILE with -1 in rows that were not recorded, or null (docs/experts.md)"
    damaged = partial(Fault, "moe-replay-broken", ("moe.replay",), fix=fix)
    try:
        experts = RoutingFile(file, config.model, config.train.seq_len).experts
    except ValueError as error:
        return [damaged(f"moe.replay: {error}")]
    needed = _samples_needed(config)
    if needed > len(experts):
        return [_too_short(config, len(experts), needed)]
    rows = experts.reshape(-1, config.model.top_k, order="C" if experts.flags.c_contiguous else "F")
    if experts.flags.c_contiguous:
        rows = rows[: needed * experts[0].size // config.model.top_k]
    samples = (rows[start : start + n] for start, n in _sampled_ranges(len(rows), TOTAL_SAMPLES))
    fault = row_fault(samples, config.model.num_experts)
    return [damaged(f"moe.replay: {file} names {fault}")] if fault else []


def _samples_needed(config: Config, steps: int | None = None) -> int:
    """Number of samples until a step, including earlier ones; None = the last step of the run."""
    last = (config.train.stop_after or config.train.steps) if steps is None else steps
    done = resumed_progress(config)
    remaining = max(0, last - done.get("step", 0))
    return samples_of_steps(remaining, batch_schedule(config), done.get("consumed_samples", 0))


def _too_short(config: Config, capacity: int, needed: int) -> Fault:
    """Error of a file of `moe.replay` with fewer samples than the run takes."""
    train, file = config.train, config.moe.replay
    key = "train.stop_after" if train.stop_after else "train.steps"
    steps = range(1, train.steps + 1)
    most = bisect_right(steps, capacity, key=lambda step: _samples_needed(config, step))
    reason = (
        f"moe.replay: {key} = {value_of(config, key)} requires {needed} samples "
        f"({file} has {capacity})"
    )
    shorter = f"{key}={most} or less, or " if most > resumed_progress(config).get("step", 0) else ""
    fix = f"{shorter}moe.replay=FILE of at least {needed} samples, or null"
    return Fault("moe-replay-too-short", ("moe.replay", key), reason, fix, True)

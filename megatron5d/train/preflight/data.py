"""What is wrong with the files of a run's data, as far as it can be seen before anything starts."""

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

STRETCHES = 8  # of a file, at equal distances, in which ids are compared with the vocabulary
# of all files together, so that thousands of ranks with hundreds of files begin quickly
STRETCHES_OF_ALL = 512
STRETCH_TOKENS = 1 << 13


def data_faults(config: Config, world: int) -> list[Fault]:
    """Returns what is wrong with files that are there: broken, of another kind, or too short for a
    single sample.

    Sizes and a few stretches of tokens are read; other faults inside of the files are reported
    while training.
    """
    found = []
    try:
        sources = read_sources(config)
    except ValueError:
        sources = []  # an illegal split, which a check reports
    if (needed := OPEN_FILES * len(sources)) > (left := file_limit_for_data(world)):
        return [
            Fault(
                "data-open-files",
                ("data.train",),
                f"data.train and what is held out name {len(sources)} pairs of .bin"
                f" and .idx, {needed} open files, and this system lets a process have {left:.0f} of them (ulimit -Hn)",
                f"ulimit -n {needed + 1024}, or merge: python tools/tokens.py merge --out PREFIX PREFIXES",
                True,
            )
        ]
    for knob, part, prefix, split in sources:
        if all(isfile(prefix + ending) for ending in (".bin", ".idx")):
            found += _source_faults(config, knob, prefix, split, part) or _vocabulary_faults(
                config, knob, prefix, max(1, min(STRETCHES, STRETCHES_OF_ALL // len(sources)))
            )
    if config.data.tokenizer is not None and exists(config.data.tokenizer):
        found += _tokenizer_faults(config)
    # of a prefix for training and validation (data.split) most are the same
    return list(dict.fromkeys(found))


def _source_faults(
    config: Config, knob: str, prefix: str, split: str | None, part: str
) -> list[Fault]:
    """Returns what keeps one pair of .bin and .idx from giving samples."""
    example = f"{knob}=[{'NAME ' if knob == 'data.valid_sets' else ''}PREFIX]"
    broken = partial(
        Fault,
        "data-broken",
        (knob,),
        fix=f"{example} of whole files, as tools/preprocess.py writes them",
    )
    try:
        dataset = IndexedDataset(prefix, checked=False)
    except (ValueError, OSError) as error:
        return [broken(f"{knob}: {error}", local=True)]
    if dataset.num_tokens == 0:
        return []  # which a check reports
    megatron = config.data.order == "megatron"
    try:
        split_range(split, part, dataset.num_sequences if megatron else dataset.num_documents)
    except ValueError as error:
        return [
            Fault(
                "data-split-part",
                (knob, "data.split"),
                f"{prefix}: {error}",
                "data.split=null",
                True,
            )
        ]
    if megatron:
        return []  # its epochs are joined, so that few tokens are enough for any sample
    try:
        tokens, seq_len = tokens_of_part(dataset, split, part), sample_len(config)
    except ValueError as error:
        return [broken(f"{knob}: {error}", local=True)]
    if tokens > seq_len:
        return []
    length_key = "data.sample_len" if config.data.sample_len else "train.seq_len"
    of_it = f"'s part for {part} (data.split = {split})" if split is not None else ""
    reason = f"{knob}: {prefix}{of_it} holds {tokens} tokens, and one sample takes {length_key} + 1 = {seq_len + 1}"
    shorter = f"{length_key}={tokens - 1} or less, or " if tokens > 1 else ""
    fix = f"{shorter}{example} of at least {seq_len + 1} tokens"
    return [Fault("data-too-short", (knob, length_key), reason, fix, True)]


def _looked_at(size: int, stretches: int) -> list[tuple[int, int]]:
    """Returns the stretches of a file of `size` numbers that are looked at: where each begins, and
    its length."""
    last = max(0, size - STRETCH_TOKENS)
    starts = {last * i // max(1, stretches - 1) for i in range(stretches)} if last else {0}
    return [(at, min(STRETCH_TOKENS, size - at)) for at in sorted(starts)]


def _vocabulary_faults(config: Config, knob: str, prefix: str, stretches: int) -> list[Fault]:
    """Ids of one pair of .bin and .idx that the model does not have, as far as some stretches of it
    show."""
    dataset, size = IndexedDataset(prefix, checked=False), config.model.vocab_size
    try:
        ids = [dataset.tokens(at, count) for at, count in _looked_at(dataset.num_tokens, stretches)]
    except (ValueError, OSError) as error:
        return [
            Fault(
                "data-broken",
                (knob,),
                f"{knob}: {error}",
                f"{knob}=[PREFIX] of files that can be read",
                True,
            )
        ]
    largest = max((int(each.max()) for each in ids if len(each)), default=0)
    if largest < size:
        return []
    reason = f"{knob}: {prefix} has token id {largest}, and model.vocab_size is {size}"
    fix = f"model.vocab_size={largest + 1} or more, or {knob}=[PREFIX] of ids of the model's tokenizer"
    return [Fault("data-vocabulary", (knob, "model.vocab_size"), reason, fix, True)]


def _tokenizer_faults(config: Config) -> list[Fault]:
    """Returns why a tokenizer's file does not say which token ends a document, where a setting
    needs it."""
    try:
        eod = end_of_document(config)
    except (ValueError, OSError) as error:
        fix = "data.tokenizer=FILE from tools/tokenizer.py or of a published model, or null"
        return [
            Fault("data-tokenizer-kind", ("data.tokenizer",), f"data.tokenizer: {error}", fix, True)
        ]
    if eod is not None or not config.data.eod_mask_loss:
        return []
    reason = f"data.eod_mask_loss = true, and data.tokenizer = {config.data.tokenizer} names no token that ends a document"
    knobs = ("data.eod_mask_loss", "data.tokenizer")
    return [
        Fault(
            "data-tokenizer-eod",
            knobs,
            reason,
            "data.eod=ID of that token, or data.eod_mask_loss=false",
            True,
        )
    ]


def routing_faults(config: Config, world: int) -> list[Fault]:
    """Returns what is wrong with the file of experts that `moe.replay` reads, or in the way of that
    of `moe.record`.

    As of data, some stretches are read of a long file; other faults inside of it end the run.
    """
    moe, model, seq_len = config.moe, config.model, config.train.seq_len
    if moe.replay is None and moe.record is None:
        return []
    from megatron5d.expert_parallel.replay import RoutingFile  # few runs need it

    if moe.record is not None:
        whole = samples_of_steps(config.train.steps, batch_schedule(config))
        try:
            if isfile(moe.record):
                RoutingFile(moe.record, model, seq_len, whole).check_existing()
        except (ValueError, OSError) as error:
            fix = f"moe.record={moe.record}.new, or null"
            return [Fault("moe-record-another", ("moe.record",), str(error), fix, True)]
        if (needed := _samples_needed(config)) <= whole:
            return []
        reason = f"moe.record: the file has the {whole} samples of train.steps, and the resumed run comes to {needed}"
        fix = "moe.record=null, or train.gbs and train.gbs_ramp as before"
        return [Fault("moe-record-too-short", ("moe.record", "train.gbs"), reason, fix, True)]
    assert moe.replay is not None
    if not isfile(moe.replay):
        return []  # which a check reports
    broken = partial(
        Fault,
        "moe-replay-broken",
        ("moe.replay",),
        fix="moe.replay=FILE as moe.record writes it, or null",
    )
    try:
        experts = RoutingFile(moe.replay, model, seq_len).experts
    except ValueError as error:
        return [broken(f"moe.replay: {error}")]
    if (needed := _samples_needed(config)) > len(experts):
        return [_too_short(config, len(experts), needed)]
    flat = experts.ravel(order="K")
    part = flat[: needed * experts[0].size] if experts.flags.c_contiguous else flat
    seen = [part[at : at + count] for at, count in _looked_at(len(part), STRETCHES_OF_ALL)]
    least, most = min(int(each.min()) for each in seen), max(int(each.max()) for each in seen)
    if least >= 0 and most < model.num_experts:
        return []
    return [
        broken(f"moe.replay: {moe.replay} names experts {least} to {most} of {model.num_experts}")
    ]


def _samples_needed(config: Config, steps: int | None = None) -> int:
    """Returns the number after that of the last sample of a run; `steps` = train.stop_after, or
    all."""
    last = (config.train.stop_after or config.train.steps) if steps is None else steps
    done = resumed_progress(config)
    left = max(0, last - done.get("step", 0))
    return samples_of_steps(left, batch_schedule(config), done.get("consumed_samples", 0))


def _too_short(config: Config, have: int, needed: int) -> Fault:
    """Returns the fault of a file of `moe.replay` that has fewer samples than the run takes."""
    key, first = (
        "train.stop_after" if config.train.stop_after else "train.steps",
        resumed_progress(config),
    )
    most = bisect_right(
        range(1, config.train.steps + 1), have, key=lambda last: _samples_needed(config, last)
    )
    reason = f"moe.replay: {config.moe.replay} has {have} samples, and {key} = {value_of(config, key)} takes {needed}"
    shorter = f"{key}={most} or less, or " if most > first.get("step", 0) else ""
    fix = f"{shorter}moe.replay=FILE of at least {needed} samples, or null"
    return Fault("moe-replay-too-short", ("moe.replay", key), reason, fix, True)

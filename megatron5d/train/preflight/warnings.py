"""What a user should know when a run starts, though nothing is wrong enough to refuse it."""

import math
from pathlib import Path

from megatron5d.checkpoint.folder import (
    LEFT_SUFFIX,
    Keep,
    errors_of_newer,
    errors_of_older,
    saved_after,
)
from megatron5d.config.derived import (
    batch_schedule,
    resumed_progress,
    sample_len,
    samples_of_steps,
    source_of,
)
from megatron5d.config.schema import Config
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.samples import mixing_weights, normalised
from megatron5d.train.data import (
    end_of_document,
    eod_and_size,
    held_out,
    read_sources,
    tokens_of_part,
)

LOOKED_AT = 64  # documents of a file
LOOKED_AT_TOKENS = 1 << 16  # at the end of each
SHOWN = 8  # datasets


def passed_over(config: Config, checkpoint: Path | None) -> str:
    """Says in the log that a restarted job continues from its own checkpoint instead of
    checkpoint.resume."""
    resume, folder = config.checkpoint.resume, config.checkpoint.dir
    if (
        checkpoint is None
        or folder is None
        or resume == "auto"
        or checkpoint.parent != Path(folder)
    ):
        return ""
    if resume != "none" and Path(resume).resolve() in (
        checkpoint.resolve(),
        checkpoint.parent.resolve(),
    ):
        return ""
    instead = f"checkpoint.resume={resume}"
    return f"continues from {checkpoint}, which this job saved before it was started again, instead of {instead}"


def broken_checkpoints(config: Config) -> list[str]:
    """Says why `auto` does not resume from what looks like a newer checkpoint, and which older ones
    are not whole."""
    c = config.checkpoint
    faults = errors_of_newer(Path(c.dir)) if c.dir is not None and c.resume == "auto" else []
    older = errors_of_older(Path(c.dir)) if c.dir is not None else []
    end = "a later save removes it" if any(Keep.of(c.keep)) else "nothing removes it but you"
    return [f"not resumed from: {fault}" for fault in faults] + [
        f"not whole: {fault}; {end}" for fault in older
    ]


def checkpoints_ahead(config: Config, step: int) -> list[str]:
    """Says which checkpoints are of later steps than the one at which this run begins: its first
    save renames them."""
    folder = config.checkpoint.dir
    if folder is None or not (later := saved_after(Path(folder), step)):
        return []
    return [
        f"begins at step {step}, though checkpoint.dir = {folder} holds step {', '.join(map(str, later))}: the next "
        f"checkpoint renames these to step-*{LEFT_SUFFIX}, so that checkpoint.resume=auto continues from this run's"
    ]


def unmarked_documents(config: Config) -> list[str]:
    """Files whose documents lack the token by which data.document_mask and data.eod_mask_loss know
    their ends."""
    data, eod = config.data, end_of_document(config)
    asking = [knob for knob in ("document_mask", "eod_mask_loss") if getattr(data, knob)]
    if eod is None or not asking:
        return []
    notes = []
    for prefix in dict.fromkeys(prefix for _, _, prefix, _ in read_sources(config)):
        dataset = IndexedDataset(prefix, checked=False)
        looked_at = min(dataset.num_documents, LOOKED_AT)
        ends = [
            (dataset.document_start(i), dataset.document_start(i + 1)) for i in range(looked_at)
        ]
        tails = [(max(start, end - LOOKED_AT_TOKENS), end) for start, end in ends]
        if looked_at > 1 and not any(
            (dataset.tokens(start, end - start) == eod).any() for start, end in tails
        ):
            named_by = "data.eod" if data.eod is not None else "data.tokenizer"
            notes.append(
                f"no effect on {prefix} of data.{' and data.'.join(asking)}: its first {looked_at} documents hold no "
                f"token {eod}, which ends a document as {named_by} says; tools/preprocess.py --append-eod writes it "
                "(where neither key is set, data.document_mask goes by the .idx)"
            )
    return notes


def small_vocabulary(config: Config) -> list[str]:
    """Says if the tokenizer has tokens that the model does not know: the first of them in the data
    ends the run."""
    data, size = config.data, config.model.vocab_size
    if data.tokenizer is None or data.eod is not None:  # which leaves the tokenizer unread
        return []
    tokens = eod_and_size(data.tokenizer)[1]
    if tokens <= size:
        return []
    return [
        f"data.tokenizer = {data.tokenizer} has {tokens} tokens, model.vocab_size is {size}: a higher id in the data "
        "will end the run"
    ]


def repeated_validation(config: Config) -> list[str]:
    """Returns the held-out files that an evaluation passes more than once, so that some samples
    count more."""
    train = config.train
    if config.data.order == "megatron":  # whose epochs are joined
        return []
    notes = []
    for knob, entries, split in held_out(config).values():
        for prefix, share, tokens in _shares(config, entries, split, "valid"):
            samples, taken = (
                (tokens - 1) // sample_len(config),
                math.ceil(share * train.eval_batches * train.gbs),
            )
            if samples < taken:
                notes.append(
                    f"{knob}: {prefix} holds {samples} samples, and an evaluation (train.eval_batches · "
                    f"train.gbs) takes {taken} of it: some count more often than others"
                )
    return notes


def _shares(
    config: Config, entries: list[str], split: str | None, part: str
) -> list[tuple[str, float, int]]:
    """Returns (prefix, share of the samples, tokens) of each dataset of a mixture."""
    sources = [source_of(entry) for entry in entries]
    tokens = [
        tokens_of_part(IndexedDataset(source.prefix, checked=False), split, part)
        for source in sources
    ]
    shares = normalised(mixing_weights(sources, tokens, config.data.weights))
    return [(source.prefix, share, size) for source, share, size in zip(sources, shares, tokens)]


def epochs(config: Config) -> list[str]:
    """Returns how often the run goes through each of its datasets, from its first step to its
    last."""
    # those before a resume may have been of another train.gbs
    data, done = config.data, resumed_progress(config)
    left = max(0, config.train.steps - done.get("step", 0))
    samples = samples_of_steps(left, batch_schedule(config), done.get("consumed_samples", 0))
    taken = samples * sample_len(config)
    told = [
        f"{share * taken / tokens:.3g} epochs of {prefix} ({share:.1%} of the samples, {tokens:,} tokens)"
        for prefix, share, tokens in _shares(config, data.train, data.split, "train")
    ]
    more = f"; and {len(told) - SHOWN} datasets more" if len(told) > SHOWN else ""
    return [f"data.train: {taken:,} tokens are {'; '.join(told[:SHOWN])}{more}"]


def idle_routers(config: Config) -> list[str]:
    """Returns which balancing has no effect, its coefficient being 0, and whether the loss cannot
    teach routers."""
    if config.model.num_experts == 0:
        return []
    knobs = {
        kind: "bias_rate" if kind == "bias" else "aux_coef"
        for kind in config.moe.balance
        if kind != "none"
    }
    idle = {kind: knob for kind, knob in knobs.items() if getattr(config.moe, knob) == 0}
    notes = [f"moe.balance={kind} does nothing while moe.{knob} = 0" for kind, knob in idle.items()]
    if config.moe.force_balanced:
        notes.append(
            "moe.force_balanced=true: tokens take experts by turns; for benchmarks, not for a model to be used"
        )
    if config.model.norm_topk_prob and config.model.top_k == 1:
        notes.append(
            "with model.top_k = 1, model.norm_topk_prob=true makes every weight 1: the loss teaches no router"
        )
    return notes

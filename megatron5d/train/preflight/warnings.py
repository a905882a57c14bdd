"""Notes for the log at the start of a run about what is legal but may surprise."""

import math
from pathlib import Path

from megatron5d.checkpoint.folder import (
    LEFT_SUFFIX,
    Keep,
    errors_of_newer,
    errors_of_older,
    saved_after,
)
from megatron5d.config.convert import default_of, value_of
from megatron5d.config.derived import (
    batch_schedule,
    resumed_progress,
    sample_len,
    samples_of_steps,
    source_of,
)
from megatron5d.config.schema import Config
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.data.samples import mixing_weights, normalized
from megatron5d.train.data import (
    end_of_document,
    eod_and_size,
    read_sources,
    tokens_of_part,
    validation_sets,
)

SAMPLED_DOCUMENTS = 64  # of each file
SAMPLED_TOKENS = 1 << 16  # at the end of each document
SHOWN = 8  # datasets


def passed_over(config: Config, checkpoint: Path | None) -> str:
    """Note that a restarted job continues from its own checkpoint, not checkpoint.resume."""
    resume, folder = config.checkpoint.resume, config.checkpoint.dir
    if checkpoint is None or folder is None or resume == "auto":
        return ""
    if checkpoint.parent != Path(folder):
        return ""
    if resume != "none" and Path(resume).resolve() in (
        checkpoint.resolve(),
        checkpoint.parent.resolve(),
    ):
        return ""
    newest = f"{checkpoint}, which this job saved before it was restarted"
    return f"continues from {newest}, instead of checkpoint.resume={resume}"


def broken_checkpoints(config: Config) -> list[str]:
    """Notes on incomplete checkpoints: newer ones that `auto` skips, and older ones."""
    c = config.checkpoint
    if c.dir is None:
        return []
    newer = errors_of_newer(Path(c.dir)) if c.resume == "auto" else []
    end = "a later save removes it" if any(Keep.of(c.keep)) else "no save removes it"
    return [f"not resumed from: {error}" for error in newer] + [
        f"incomplete: {error}; {end}" for error in errors_of_older(Path(c.dir))
    ]


def checkpoints_ahead(config: Config, step: int) -> list[str]:
    """Note on checkpoints of later steps, which the first save of this run renames."""
    folder = config.checkpoint.dir
    if folder is None or not (later := saved_after(Path(folder), step)):
        return []
    steps = ", ".join(map(str, later))
    return [
        f"begins at step {step}, but checkpoint.dir = {folder} holds step {steps}: the next "
        f"checkpoint renames these to step-*{LEFT_SUFFIX}, so that checkpoint.resume=auto "
        "continues from this run's"
    ]


def unmarked_documents(config: Config) -> list[str]:
    """Notes on files whose documents lack the end-of-document token that a mask needs."""
    data, eod = config.data, end_of_document(config)
    keys = [f"data.{key}" for key in ("document_mask", "eod_mask_loss") if getattr(data, key)]
    if eod is None or not keys:
        return []
    source = "data.eod" if data.eod is not None else "data.tokenizer"
    notes = []
    for prefix in dict.fromkeys(prefix for _, _, prefix, _ in read_sources(config)):
        dataset = IndexedDataset(prefix, checked=False)
        num_sampled = min(dataset.num_documents, SAMPLED_DOCUMENTS)
        if num_sampled > 1 and not _any_ends_with(dataset, num_sampled, eod):
            notes.append(
                f"{' and '.join(keys)} has no effect on {prefix}: its first {num_sampled} "
                f"documents hold no token {eod}, the end of a document by {source}; "
                "tools/preprocess.py --append-eod writes it "
                "(without either key, data.document_mask uses the .idx)"
            )
    return notes


def _any_ends_with(dataset: IndexedDataset, num_documents: int, eod: int) -> bool:
    """Whether one of the first documents holds the token near its end."""
    for i in range(num_documents):
        end = dataset.document_start(i + 1)
        start = max(dataset.document_start(i), end - SAMPLED_TOKENS)
        if (dataset.tokens(start, end - start) == eod).any():
            return True
    return False


def small_vocabulary(config: Config) -> list[str]:
    """Note on a tokenizer with more tokens than the model: the first such token ends the run."""
    data, size = config.data, config.model.vocab_size
    # With data.eod, the tokenizer is not read.
    if data.tokenizer is None or data.eod is not None:
        return []
    tokens = eod_and_size(data.tokenizer)[1]
    if tokens <= size:
        return []
    return [
        f"data.tokenizer = {data.tokenizer} has {tokens} tokens, but model.vocab_size = {size}: "
        "a higher id in the data will end the run"
    ]


def repeated_validation(config: Config) -> list[str]:
    """Notes on validation files that an evaluation reads more than once."""
    train = config.train
    if config.data.order == "megatron":  # its epochs are joined
        return []
    notes = []
    for key, entries, split in validation_sets(config).values():
        for prefix, share, tokens in _shares(config, entries, split, "valid"):
            samples = (tokens - 1) // sample_len(config)
            num_read = math.ceil(share * train.eval_batches * train.gbs)
            if samples < num_read:
                notes.append(
                    f"{key}: {prefix} holds {samples} samples, but an evaluation "
                    f"(train.eval_batches · train.gbs) reads {num_read}: "
                    "some count more often than others"
                )
    return notes


def _shares(
    config: Config, entries: list[str], split: str | None, split_name: str
) -> list[tuple[str, float, int]]:
    """(prefix, share of the samples, tokens) of each dataset of a mixture."""
    sources = [source_of(entry) for entry in entries]
    tokens = [
        tokens_of_part(IndexedDataset(source.prefix, checked=False), split, split_name)
        for source in sources
    ]
    shares = normalized(mixing_weights(sources, tokens, config.data.weights))
    return [(source.prefix, share, size) for source, share, size in zip(sources, shares, tokens)]


def epochs(config: Config) -> list[str]:
    """Note on how often the run reads each of its datasets, from its first step to its last."""
    # A run may be resumed with another train.gbs than that of its earlier steps.
    data, done = config.data, resumed_progress(config)
    steps = max(0, config.train.steps - done.get("step", 0))
    samples = samples_of_steps(steps, batch_schedule(config), done.get("consumed_samples", 0))
    num_tokens = samples * sample_len(config)
    datasets = [
        f"{share * num_tokens / tokens:.3g} epochs of {prefix} "
        f"({share:.1%} of the samples, {tokens:,} tokens)"
        for prefix, share, tokens in _shares(config, data.train, data.split, "train")
    ]
    more = f"; and {len(datasets) - SHOWN} more datasets" if len(datasets) > SHOWN else ""
    return [f"data.train: {num_tokens:,} tokens are {'; '.join(datasets[:SHOWN])}{more}"]


def as_released(config: Config) -> list[str]:
    """Note on a Hugging Face model that the run trains in another precision or at another length
    than its own."""
    if (folder := config.init.from_hf) is None or resumed_progress(config):
        return []
    from megatron5d.checkpoint.hf.import_config import read_hf_config

    settings = read_hf_config(folder)
    dtype = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    length = settings.get("max_position_embeddings")
    released = {}
    if dtype == "bfloat16" and config.precision.dtype != "bf16":
        released["precision.dtype"] = "bf16"
    if isinstance(length, int) and config.train.seq_len == default_of("train.seq_len") < length:
        released["train.seq_len"] = str(length)
    if not released:
        return []
    current = ", ".join(f"{key}={value_of(config, key)}" for key in released)
    overrides = " ".join(f"{key}={value}" for key, value in released.items())
    return [f"trains {folder} with {current}; as it was released: {overrides}"]


def idle_routers(config: Config) -> list[str]:
    """Notes on balancing without effect, and on routers that the loss cannot train."""
    m, moe = config.model, config.moe
    if m.num_experts == 0:
        return []
    notes = []
    for kind in moe.balance:
        key = "bias_rate" if kind == "bias" else "aux_coef"
        if kind != "none" and getattr(moe, key) == 0:
            notes.append(f"moe.balance={kind} has no effect with moe.{key} = 0")
    if moe.force_balanced:
        notes.append(
            "moe.force_balanced=true assigns experts in turn; use it for benchmarks, not to train"
        )
    if m.norm_topk_prob and m.top_k == 1:
        notes.append(
            "with model.top_k = 1, model.norm_topk_prob=true makes every weight 1: "
            "the loss does not train the router"
        )
    return notes

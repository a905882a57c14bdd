"""What is wrong with the files of a run's data, as far as it can be seen before anything starts.

What a configuration asks of the kind of GPU that it is to run on.
"""

import fnmatch
from dataclasses import replace
from functools import partial
from os.path import exists, isfile

import torch

from megatron5d.config.convert import value_of
from megatron5d.config.derived import sample_len
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config, OptimConfig, ParallelConfig
from megatron5d.data.indexed_dataset import OPEN_FILES, IndexedDataset
from megatron5d.data.samples import split_range
from megatron5d.kernels import tuning
from megatron5d.kernels.dispatch import HAS_TRITON
from megatron5d.model.gpt import GPT
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.process import files_left_for_data
from megatron5d.topology.shard_spec import spec_of, without_memory
from megatron5d.train.data import end_of_document, read_sources, tokens_of_part

STRETCHES = 8  # of a file, at equal distances, in which ids are compared with the vocabulary
STRETCHES_OF_ALL = 512  # of all files together, so that thousands of ranks with hundreds of files begin quickly
STRETCH_TOKENS = 1 << 13


def data_faults(config: Config, world: int) -> list[Fault]:
    """Returns what is wrong with files that are there: broken, of another kind, or too short for a single sample.

    Sizes and a few stretches of tokens are read; other faults inside of the files are reported while training.
    """
    found = []
    try:
        sources = read_sources(config)
    except ValueError:
        sources = []  # an illegal split, which a check reports
    if (needed := OPEN_FILES * len(sources)) > (left := files_left_for_data(world)):
        return [
            Fault(
                "data-open-files", ("data.train",), f"data.train and what is held out name {len(sources)} pairs of .bin"
                f" and .idx, {needed} open files, and this system lets a process have {left:.0f} of them (ulimit -Hn)",
                f"ulimit -n {needed + 1024}, or merge: python tools/tokens.py merge --out PREFIX PREFIXES", True,
            )
        ]  # fmt: skip
    for knob, part, prefix, split in sources:
        if all(isfile(prefix + ending) for ending in (".bin", ".idx")):
            found += _source_faults(config, knob, prefix, split, part) or _vocabulary_faults(
                config, knob, prefix, max(1, min(STRETCHES, STRETCHES_OF_ALL // len(sources)))
            )
    if config.data.tokenizer is not None and exists(config.data.tokenizer):
        found += _tokenizer_faults(config)
    return found


def _source_faults(config: Config, knob: str, prefix: str, split: str | None, part: str) -> list[Fault]:
    """Returns what keeps one pair of .bin and .idx from giving samples."""
    example = f"{knob}=[{'NAME ' if knob == 'data.valid_sets' else ''}PREFIX]"
    broken = partial(Fault, "data-broken", (knob,), fix=f"{example} of whole files, as tools/preprocess.py writes them")
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
        return [Fault("data-split-part", (knob, "data.split"), f"{prefix}: {error}", "data.split=null", True)]
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


def _vocabulary_faults(config: Config, knob: str, prefix: str, stretches: int) -> list[Fault]:
    """Ids of one pair of .bin and .idx that the model does not have, as far as some stretches of it show."""
    dataset, size = IndexedDataset(prefix, checked=False), config.model.vocab_size
    last = max(0, dataset.num_tokens - STRETCH_TOKENS)
    starts = {last * i // max(1, stretches - 1) for i in range(stretches)} if last else {0}
    try:
        ids = [dataset.tokens(at, min(STRETCH_TOKENS, dataset.num_tokens - at)) for at in sorted(starts)]
    except (ValueError, OSError) as error:
        return [Fault("data-broken", (knob,), f"{knob}: {error}", f"{knob}=[PREFIX] of files that can be read", True)]
    largest = max((int(each.max()) for each in ids if len(each)), default=0)
    if largest < size:
        return []
    reason = f"{knob}: {prefix} has token id {largest}, and model.vocab_size is {size}"
    fix = f"model.vocab_size={largest + 1} or more, or {knob}=[PREFIX] of ids of the model's tokenizer"
    return [Fault("data-vocabulary", (knob, "model.vocab_size"), reason, fix, True)]


def _tokenizer_faults(config: Config) -> list[Fault]:
    """Returns why a tokenizer's file does not say which token ends a document, where a setting needs it."""
    try:
        eod = end_of_document(config)
    except (ValueError, OSError) as error:
        fix = "data.tokenizer=FILE from tools/tokenizer.py or of a published model, or null"
        return [Fault("data-tokenizer-kind", ("data.tokenizer",), f"data.tokenizer: {error}", fix, True)]
    if eod is not None or not config.data.eod_mask_loss:
        return []
    reason = (
        f"data.eod_mask_loss = true, and data.tokenizer = {config.data.tokenizer} names no token that ends a document"
    )
    knobs = ("data.eod_mask_loss", "data.tokenizer")
    return [Fault("data-tokenizer-eod", knobs, reason, "data.eod=ID of that token, or data.eod_mask_loss=false", True)]


def parameter_names(config: Config) -> list[str]:
    """Returns the global names of a model's weights, which do not depend on the layout."""
    whole = replace(config, parallel=ParallelConfig())
    with without_memory():
        return [spec_of(tensor).name for tensor in GPT(whole, build_mesh(resolve(1)), "meta").weights()]


def glob_faults(config: Config, world: int) -> list[Fault]:
    """Globs of parameter names that match none of the model's: what they were to exclude is treated as all else."""
    optim, default = config.optim, OptimConfig()
    asked = {"decay_exclude": optim.decay_exclude}
    if optim.name == "muon" and optim.muon_exclude != default.muon_exclude:
        asked["muon_exclude"] = optim.muon_exclude
    if not any(asked.values()):
        return []
    names, found = parameter_names(config), []
    for key, globs in asked.items():
        if lost := [glob for glob in globs if not fnmatch.filter(names, glob)]:
            kept = ",".join(f"'{glob}'" for glob in globs if glob not in lost)
            reason = f"optim.{key}: {' and '.join(lost)} matches no parameter; there are for example {names[0]}, "
            shown = names[len(names) // 2]
            found.append(
                Fault("optim-globs-match", (f"optim.{key}",), f"{reason}{shown}", f'"optim.{key}=[{kept}]"', False)
            )
    return found


# what asks for FP8 kernels: its value without them, and the operation that it cannot do without
FP8_OPTIONS: dict[str, tuple[object, str]] = {
    "precision.fp8": ("none", "fp8_matmul"),
    "moe.fp8_dispatch": (False, "fp8_quantize"),
}


def fp8_faults(config: Config, architecture: str) -> list[Fault]:
    """Returns what a GPU's table of kernel configurations has no FP8 operations for.

    Args:
        config: a valid configuration.
        architecture: for example sm_80; the newest older one with a table stands for it.
    """
    served = tuning.nearest(architecture)
    lacking = [
        knob
        for knob, (idle, operation) in FP8_OPTIONS.items()
        if value_of(config, knob) != idle and operation not in tuning.table(served)
    ]
    if not lacking:
        return []
    asked = " and ".join(f"{knob} = {str(value_of(config, knob)).lower()}" for knob in lacking)
    reason = (
        f"{asked} needs FP8 kernels, and {architecture} is served by kernels/configs/{served}.json, which has "
        "none for that; sm_90 (compute capability 9.0) and newer ones of NVIDIA have them"
    )
    fix = " ".join(f"{knob}={str(FP8_OPTIONS[knob][0]).lower()}" for knob in lacking)
    return [Fault("fp8-needs-its-kernels", tuple(lacking), reason, fix, local=True)]


def device_faults(config: Config, world: int) -> list[Fault]:
    """Returns what this process's GPU cannot do; nothing where there is none."""
    if not torch.cuda.is_available():
        return []
    if not HAS_TRITON and config.precision.dtype != "fp64":
        reason = f"precision.dtype = {config.precision.dtype} runs kernels on a GPU, and triton is not installed"
        return [Fault("gpu-needs-triton", ("precision.dtype",), reason, "pip install triton", local=True)]
    from megatron5d.train.kernel_choice import capability_here, kernel_faults  # on a GPU alone

    return fp8_faults(config, tuning.architecture(torch.device("cuda"))) + kernel_faults(config, capability_here())

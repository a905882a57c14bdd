"""Conversion from and to Hugging Face folders, with one tensor in memory at a time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron5d.checkpoint.folder import read_run, saved_config
from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.files import check_vacant
from megatron5d.checkpoint.hf.import_config import (
    end_tokens,
    read_hf_config,
    read_model_config,
    token_ids,
    token_source,
)
from megatron5d.checkpoint.hf.names import IGNORED, hf_copies, hf_entries
from megatron5d.checkpoint.hf.safetensors_folder import (
    Entry,
    SafetensorsFolder,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.hf.weights import hf_weights, prediction_layers, unread
from megatron5d.checkpoint.load import SavedWeights, whole_checkpoint
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron5d.data.tokenizer import load_tokenizer, tokenizer_file
from megatron5d.data.tokenizer_export import exported_tokenizer
from megatron5d.model.block_inputs import DTYPES
from megatron5d.train.state import twin
from tools.conversion.new_checkpoint import check_empty, save_weights, widest_dtype

OUT_BIAS = ".attention.out.bias"


def from_hf(args: argparse.Namespace) -> int:
    """Writes a checkpoint of step 0, and prints its folder; returns 0.

    Raises:
        ValueError: the folder is not one of ours to read, or `out` holds checkpoints.
    """
    hf: Path = args.hf
    model = read_model_config(hf)
    check_empty(args.out)
    home = str(hf.resolve())
    with SafetensorsFolder(hf) as stored:
        if args.mtp:
            model = replace(model, num_mtp_layers=len(prediction_layers(model, stored)))
        family = read_hf_config(hf)["model_type"]
        wide = {entry.hf_name for entry in hf_entries(model, family) if entry.wide}
        tables = re.compile("|".join(IGNORED[family]))  # rotary frequencies are fp32 beside weights in bf16, too
        found = {t.dtype for name, t in stored.tensors.items() if name not in wide and not tables.search(name)}
        for line in unread(model, stored):
            print(line, file=sys.stderr)
        dtype = args.dtype or widest_dtype(found)
        data = DataConfig(tokenizer=home if _holds_tokenizer(hf) else None)
        config = Config(model=replace(model, from_hf=home), precision=PrecisionConfig(dtype=dtype), data=data)
        tensors = hf_weights(model, stored, DTYPES[dtype])
        print(f"wrote {save_weights(args.out, dict(tensors), config)}")
    return 0


def to_hf(args: argparse.Namespace) -> int:
    """Writes a Hugging Face folder, and prints the size of its weights; returns 0.

    Raises:
        ValueError: no whole checkpoint, an architecture that no family computes, a tokenizer that cannot leave with its
            ids, or `out` holds files that transformers would read.
    """
    folder = whole_checkpoint(args.checkpoint, "--checkpoint")
    check_vacant(args.out)
    run, config = read_run(folder), saved_config(folder)
    dtype = args.dtype or config.precision.dtype
    source = _token_source(args, config)
    model = _as_long_as_trained(config, run["progress"]["step"])
    model, files = _settings(config, model, dtype, source, not args.no_tokenizer)
    kind = torch.float16 if dtype == "fp16" else DTYPES[dtype]
    weights = SavedWeights(folder, torch.float32 if dtype == "fp16" else kind, twin)
    entries = hf_entries(model, json.loads(files["config.json"])["model_type"])
    zeros = {entry.name for entry in entries if entry.name.endswith(OUT_BIAS)} - set(weights.tensors)
    zeros = zeros if model.attention_out_bias > config.model.attention_out_bias else set()
    check_complete(weights, [entry for entry in entries if entry.name not in zeros], folder)
    entries += hf_copies(model)

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape) if name in zeros else weights.read(name, offset, shape)

    bar = tqdm(entries, unit="tensor", disable=not sys.stderr.isatty())
    size = save_folder(args.out, stored_tensors(bar, read, kind), round(args.max_shard_gb * 1e9))
    for name, content in files.items():
        (args.out / name).parent.mkdir(exist_ok=True)
        (args.out / name).write_text(content, encoding="utf-8")
    print(f"wrote {size:,} bytes of weights to {args.out}")
    return 0


def _as_long_as_trained(config: Config, step: int) -> ModelConfig:
    """The architecture with as many positions as training used: beyond its max_position_embeddings servers cut."""
    model, seq_len = config.model, config.train.seq_len
    if model.position != "rope" or step == 0 or seq_len <= model.max_positions:
        return model
    print(f"max_position_embeddings becomes train.seq_len = {seq_len}, which is more than model.max_positions = "
          f"{model.max_positions}", file=sys.stderr)  # fmt: skip
    return replace(model, max_positions=seq_len)


def _holds_tokenizer(path: Path) -> bool:
    try:
        return tokenizer_file(path).is_file()
    except ValueError:
        return False


def _token_source(args: argparse.Namespace, config: Config) -> Path | None:
    """The tokenizer to export; None where the run names none, which is told.

    Raises:
        ValueError: one is named and is not there.
    """
    source, otherwise = args.tokenizer or token_source(config), "give it by --tokenizer PATH"
    if args.no_tokenizer:
        return source
    if source is None or not (args.tokenizer or config.data.tokenizer or _holds_tokenizer(source)):
        where = "names no data.tokenizer" if source is None else f"has no data.tokenizer, and {source} holds none"
        print(f"no tokenizer is written: the run {where}; {otherwise}", file=sys.stderr)
    elif not _holds_tokenizer(source):
        knob = "--tokenizer" if args.tokenizer else "the run's data.tokenizer ="
        raise ValueError(f"{knob} {source} is no tokenizer, or not there any more; {otherwise}, or --no-tokenizer")
    return source


def _settings(
    config: Config, model: ModelConfig, dtype: str, source: Path | None, with_tokenizer: bool
) -> tuple[ModelConfig, dict[str, str]]:
    """All files but the weights, and the architecture that they describe.

    transformers reads every model_type qwen2 with Qwen2Tokenizer, whatever tokenizer_config.json names. Another
    tokenizer leaves with a Llama that computes the same: its further biases, behind attention, are zero.
    """
    ids, generation = _token_ids(config, source)
    described, files = hf_config_from_model(model, dtype, ids), dict[str, str]()
    if with_tokenizer and source is not None and _holds_tokenizer(source):
        if (size := load_tokenizer(source, config.data.eod).vocab_size) > model.vocab_size:
            print(f"{source} has {size} tokens, the model has model.vocab_size = {model.vocab_size}", file=sys.stderr)
        try:
            files = exported_tokenizer(source, config.data.eod, described)
        except ValueError as error:
            if described["model_type"] != "qwen2" or model.attention_window is not None:
                raise ValueError(f"{error}; --no-tokenizer writes the rest without one") from error
            model = replace(model, attention_out_bias=True)
            described = hf_config_from_model(model, dtype, ids)
            files = exported_tokenizer(source, config.data.eod, described)
            print(f"written as {described['model_type']}, since as qwen2 {error}", file=sys.stderr)
        if find_spec("transformers") is None:
            print("the ids were compared without AutoTokenizer: transformers is not installed", file=sys.stderr)
    files |= {"generation_config.json": _json(generation), "config.json": _json(described)}
    return model, files


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _token_ids(config: Config, source: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids of special tokens for config.json, and generation_config.json: as the tokenizer's folder has them.

    The token that ended documents in training is among those that end a text.
    """
    eod = config.data.eod
    home = source if source is None or source.is_dir() else source.parent
    ids, generation = token_ids(home) if home is not None else ({}, {})
    if eod is None and source is not None and _holds_tokenizer(source):
        eod = load_tokenizer(source).eod
    ends = [*(end_tokens(home) if home is not None else ()), *([] if eod is None else [eod])]
    known = [i for i in dict.fromkeys(ends) if i < config.model.vocab_size]
    at_end: Any = known if len(known) > 1 else next(iter(known), None)
    named = ids.get("eos_token_id")
    if named is None or not set(named if isinstance(named, list) else [named]) <= set(known):
        named = eod if eod in known else None
    ids = {key: i for key, i in ids.items() if isinstance(i, int) and i < config.model.vocab_size}
    return ids | {"eos_token_id": named}, generation | ids | {"eos_token_id": at_end}


def check_complete(weights: SavedWeights, entries: Sequence[Entry], folder: Path) -> None:
    """Raises ValueError unless a checkpoint holds just the tensors of a table; names those that are wrong."""
    wanted, saved = {entry.name for entry in entries}, set(weights.tensors)
    biases = sorted(name for name in saved - wanted if name.endswith(".router.bias"))
    if biases:
        raise ValueError(
            f"{folder}: experts were chosen with {len(biases)} biases ({biases[0]} ...) that moe.balance=bias moved, "
            f"and the family of this model has none; train with another moe.balance, or DeepSeek-V3's router "
            f"(model.router_score=sigmoid model.router_bias=true)"
        )
    if wanted != saved:
        raise ValueError(
            f"{folder} does not hold the model that its configuration describes: "
            f"missing {sorted(wanted - saved)}, unexpected {sorted(saved - wanted)}"
        )

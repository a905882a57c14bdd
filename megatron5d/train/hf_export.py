"""A checkpoint as a Hugging Face folder: what it will hold, and each rank's share of its weights.

Ranks exchange nothing: each reads from the checkpoint what it writes, whatever layout has saved it.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.import_config import end_tokens, token_ids, token_source
from megatron5d.checkpoint.hf.safetensors_folder import finalize_files, stored_tensors, write_shards
from megatron5d.checkpoint.hf.tensor_table import Entry, hf_entries, mtp_copies
from megatron5d.checkpoint.load import SavedWeights
from megatron5d.config.convert import from_dict
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.data.tokenizer import load_tokenizer, tokenizer_file
from megatron5d.data.tokenizer_export import exported_tokenizer
from megatron5d.model.block_inputs import DTYPES
from megatron5d.topology.all_ranks import on_rank_0
from megatron5d.train.state import twin_key

OUT_BIAS = ".attention.out.bias"
FOLDER = "hf"  # in checkpoint.dir: what checkpoint.hf_export writes, by step
SHARD_BYTES = 1 << 30  # of a file, whose tensors are in memory at once

Tell = Callable[[str], None]


@dataclass(frozen=True)
class HfExport:
    """A Hugging Face folder that is to be written."""

    files: dict[str, str]  # content of all files but the weights, by name
    model: ModelConfig
    dtype: torch.dtype
    # the model has no biases behind attention, and the folder's have zeros there
    without_bias: bool

    @cached_property
    def entries(self) -> list[Entry]:
        return hf_entries(
            self.model, json.loads(self.files["config.json"])["model_type"]
        ) + mtp_copies(self.model)

    def write(self, checkpoint: Path, folder: Path, rank: int, world: int) -> bytes:
        """Writes this rank's share of the weights, about as many bytes as every other's. No
        communication.

        Returns:
            For `finish`: which tensors are in which file, and their size, as JSON.

        Raises:
            ValueError: the checkpoint does not hold the model, or a file of it is damaged.
            OSError: a file cannot be written; names it.
        """
        sizes = [
            prod(entry.stored_shape) * entry.dtype(self.dtype).itemsize for entry in self.entries
        ]
        total, before, mine = sum(sizes), 0, []
        for entry, size in zip(self.entries, sizes):
            if (before + size // 2) * world // max(total, 1) == rank:
                mine.append(entry)
            before += size
        if not mine:
            return json.dumps([[], 0]).encode()
        return json.dumps(
            write_shards(folder, self.tensors(checkpoint, mine), SHARD_BYTES, rank)
        ).encode()

    def tensors(
        self, checkpoint: Path, entries: Iterable[Entry] | None = None
    ) -> Iterable[tuple[str, Tensor]]:
        """Returns tensors of a checkpoint as the folder stores them, each read when it is asked
        for."""
        weights = SavedWeights(
            checkpoint, torch.float32 if self.dtype == torch.float16 else self.dtype, twin_key
        )
        added = (
            {entry.name for entry in self.entries if entry.name.endswith(OUT_BIAS)}
            if self.without_bias
            else set()
        )
        check_tensor_names(
            weights, [entry for entry in self.entries if entry.name not in added], checkpoint
        )

        def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
            return torch.zeros(shape) if name in added else weights.read(name, offset, shape)

        return stored_tensors(self.entries if entries is None else entries, read, self.dtype)

    def write_files(self, folder: Path) -> None:
        """Writes everything but the weights."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")


class RunExport:
    """The Hugging Face folders of a run: `hf/step-…` in its directory of checkpoints. Used by
    `Saver`."""

    def __init__(self, export: HfExport, directory: Path) -> None:
        self.export, self._directory = export, directory / FOLDER

    def begin(self, checkpoint: Path) -> None:
        """Makes the folder that all ranks write to and removes what interruptions left, on rank
        0."""
        for half in self._directory.glob("*.tmp"):
            shutil.rmtree(half)
        self.temporary(checkpoint).mkdir(parents=True)

    def write(self, checkpoint: Path, rank: int, world: int) -> bytes:
        """Writes this rank's part: `HfExport.write`."""
        return self.export.write(checkpoint, self.temporary(checkpoint), rank, world)

    def finish(self, checkpoint: Path, messages: list[bytes]) -> None:
        """Completes the folder and gives it its name, on rank 0."""
        folder, parts, total = self.temporary(checkpoint), list[tuple[str, list[str]]](), 0
        for message in messages:
            written, size = json.loads(message)
            parts, total = parts + written, total + size
        finalize_files(folder, parts, total)
        self.export.write_files(folder)
        final = folder.with_suffix("")
        if final.exists():  # of a run that went back
            shutil.rmtree(final)
        folder.rename(final)

    def temporary(self, checkpoint: Path) -> Path:
        """Returns the folder that is written for a checkpoint."""
        return self._directory / f"{checkpoint.name}.tmp"


def export_faults(config: Config, world: int) -> list[Fault]:
    """Says why `checkpoint.hf_export` could write no folder: no family has the model, or its
    tokenizer cannot leave."""
    if config.checkpoint.hf_export is None:
        return []
    try:
        plan_export(config, lambda line: None)
    except (ValueError, OSError) as error:
        reason = f"checkpoint.hf_export = {config.checkpoint.hf_export}: as tools/convert.py to-hf says, {error}"
        return [
            Fault(
                "hf-export-possible",
                ("checkpoint.hf_export",),
                reason,
                "checkpoint.hf_export=null",
                True,
            )
        ]
    return []


def plan_export(
    config: Config,
    tell: Tell,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    bare: bool = False,
    trained: bool = True,
) -> HfExport:
    """Plans the Hugging Face folder of a run's model; the ids of its tokenizer are compared.

    Args:
        tell: takes lines about what the folder lacks, or has otherwise.
        dtype: of the weights, fp16 too; None = the run's.
        tokenizer: file or folder; None = the run's.
        bare: without a tokenizer.
        trained: the run has made a step.

    Raises:
        ValueError: no family computes this architecture, or the tokenizer cannot leave with its
            ids.
    """
    dtype = dtype or config.precision.dtype
    source = _token_source(config, tell, tokenizer, bare)
    model = _as_long_as_trained(config, tell) if trained else config.model
    model, files = _settings(config, model, dtype, None if bare else source, source, tell)
    kind = torch.float16 if dtype == "fp16" else DTYPES[dtype]
    export = HfExport(
        files, model, kind, model.attention_out_bias > config.model.attention_out_bias
    )
    if "bias" in config.moe.balance and not any(
        entry.name.endswith(".router.bias") for entry in export.entries
    ):
        raise ValueError(
            _no_router_bias("experts are chosen with biases that moe.balance=bias moves")
        )
    return export


def agree_on_export(config: Config, tell: Tell) -> HfExport:
    """Plans the same on every rank; only rank 0 compares the ids of the tokenizer. Comm: a
    broadcast over the world."""

    def plan() -> list[Any]:
        export = plan_export(config, tell)
        return [export.files, asdict(export.model), export.without_bias]

    files, model, without_bias = on_rank_0(plan)
    return HfExport(
        files, from_dict({"model": model}).model, DTYPES[config.precision.dtype], without_bias
    )


def _as_long_as_trained(config: Config, tell: Tell) -> ModelConfig:
    """Returns the architecture with as many positions as training used, beyond which servers
    cut."""
    model, seq_len = config.model, config.train.seq_len
    if model.position != "rope" or seq_len <= model.max_positions:
        return model
    more = (
        f"train.seq_len = {seq_len}, which is more than model.max_positions = {model.max_positions}"
    )
    tell(f"max_position_embeddings becomes {more}")
    return replace(model, max_positions=seq_len)


def has_tokenizer(path: Path) -> bool:
    """Returns whether a file or folder is there that `load_tokenizer` may read."""
    try:
        return tokenizer_file(path).is_file()
    except ValueError:
        return False


def _token_source(config: Config, tell: Tell, given: Path | None, bare: bool) -> Path | None:
    """Returns the tokenizer to export; None where the run names none, which is told."""
    source, otherwise = given or token_source(config), "give it by --tokenizer PATH"
    if bare:
        return source
    if source is None or not (given or config.data.tokenizer or has_tokenizer(source)):
        where = (
            "names no data.tokenizer"
            if source is None
            else f"has no data.tokenizer, and {source} holds none"
        )
        tell(
            f"no tokenizer is written: the run {where}; a run takes data.tokenizer=PATH, to-hf --tokenizer PATH"
        )
    elif not has_tokenizer(source):
        knob = "--tokenizer" if given else "the run's data.tokenizer ="
        raise ValueError(
            f"{knob} {source} is no tokenizer, or not there any more; {otherwise}, or --no-tokenizer"
        )
    return source


def _settings(
    config: Config,
    model: ModelConfig,
    dtype: str,
    source: Path | None,
    home: Path | None,
    tell: Tell,
) -> tuple[ModelConfig, dict[str, str]]:
    """Returns all files but the weights, and the architecture that they describe.

    transformers reads every model_type qwen2 with Qwen2Tokenizer, whatever tokenizer_config.json
    names. Another tokenizer leaves with a Llama that computes the same: its further biases, behind
    attention, are zero.
    """
    ids, generation = _token_ids(config, home)
    described, files = hf_config_from_model(model, dtype, ids), dict[str, str]()
    if source is not None and has_tokenizer(source):
        if (size := load_tokenizer(source, config.data.eod).vocab_size) > model.vocab_size:
            tell(f"{source} has {size} tokens, the model has model.vocab_size = {model.vocab_size}")
        try:
            files = exported_tokenizer(source, config.data.eod, described)
        except ValueError as error:
            if described["model_type"] != "qwen2" or model.attention_window is not None:
                raise ValueError(f"{error}; --no-tokenizer writes the rest without one") from error
            model = replace(model, attention_out_bias=True)
            described = hf_config_from_model(model, dtype, ids)
            files = exported_tokenizer(source, config.data.eod, described)
            tell(f"written as {described['model_type']}, since as qwen2 {error}")
        if find_spec("transformers") is None:
            tell("the ids were compared without AutoTokenizer: transformers is not installed")
    files |= {"generation_config.json": _json(generation), "config.json": _json(described)}
    return model, files


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _token_ids(config: Config, source: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids of special tokens for config.json, and generation_config.json: as the tokenizer's folder
    has them.

    The token that ended documents in training is among those that end a text.
    """
    eod = config.data.eod
    home = source if source is None or source.is_dir() else source.parent
    ids, generation = token_ids(home) if home is not None else ({}, {})
    if eod is None and source is not None and has_tokenizer(source):
        eod = load_tokenizer(source).eod
    ends = [*(end_tokens(home) if home is not None else ()), *([] if eod is None else [eod])]
    known = [i for i in dict.fromkeys(ends) if i < config.model.vocab_size]
    at_end: Any = known if len(known) > 1 else next(iter(known), None)
    named = ids.get("eos_token_id")
    if named is None or not set(named if isinstance(named, list) else [named]) <= set(known):
        named = eod if eod in known else None
    ids = {key: i for key, i in ids.items() if isinstance(i, int) and i < config.model.vocab_size}
    return ids | {"eos_token_id": named}, generation | ids | {"eos_token_id": at_end}


def _no_router_bias(chosen: str) -> str:
    return (
        f"{chosen}, and the family of this model has none; train with another moe.balance, or DeepSeek-V3's router "
        "(model.router_score=sigmoid model.router_bias=true)"
    )


def check_tensor_names(weights: SavedWeights, entries: Iterable[Entry], folder: Path) -> None:
    """Raises ValueError unless a checkpoint holds just the tensors of a table; names those that are
    wrong."""
    wanted, saved = {entry.name for entry in entries}, set(weights.tensors)
    biases = sorted(name for name in saved - wanted if name.endswith(".router.bias"))
    if biases:
        chosen = f"experts were chosen with {len(biases)} biases ({biases[0]} ...) that moe.balance=bias moved"
        raise ValueError(_no_router_bias(f"{folder}: {chosen}"))
    if wanted != saved:
        raise ValueError(
            f"{folder} does not hold the model that its configuration describes: "
            f"missing {sorted(wanted - saved)}, unexpected {sorted(saved - wanted)}"
        )

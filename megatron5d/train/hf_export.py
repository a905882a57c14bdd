"""A checkpoint as a Hugging Face folder: its files, and each rank's share of its weights.

Ranks exchange nothing: each reads from the checkpoint what it writes, whatever layout saved it.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import EXPORTS, checkpoint_error, set_aside
from megatron5d.checkpoint.hf.export_config import expert_scale, hf_config_from_model
from megatron5d.checkpoint.hf.import_config import end_tokens, token_ids, token_source
from megatron5d.checkpoint.hf.safetensors_folder import finalize_files, stored_tensors, write_shards
from megatron5d.checkpoint.hf.tensor_table import Entry, hf_entries, mtp_copies
from megatron5d.checkpoint.layout import Dims
from megatron5d.checkpoint.load import SavedWeights
from megatron5d.config.convert import from_dict
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.data.tokenizer import load_tokenizer, tokenizer_file
from megatron5d.data.tokenizer_export import exported_tokenizer
from megatron5d.model.block_inputs import DTYPES
from megatron5d.topology.all_ranks import on_rank_0
from megatron5d.topology.owned_output import owned
from megatron5d.train.state import twin_key

OUT_BIAS = ".attention.out.bias"
SHARD_BYTES = 1 << 30  # of a file, whose tensors are in memory together

Notify = Callable[[str], None]


@dataclass(frozen=True)
class HfExport:
    """A Hugging Face folder to be written."""

    files: dict[str, str]  # content of all files except the weights, by name
    model: ModelConfig
    dtype: torch.dtype
    # the model has no biases of the attention output, and the folder has zeros there
    without_bias: bool

    @property
    def family(self) -> str:
        return json.loads(self.files["config.json"])["model_type"]

    @property
    def scale(self) -> float:
        return expert_scale(self.model, self.family)

    @cached_property
    def entries(self) -> list[Entry]:
        return [
            replace(entry, scale=self.scale) if ".experts.down." in entry.name else entry
            for entry in hf_entries(self.model, self.family) + mtp_copies(self.model)
        ]

    def write(self, checkpoint: Path, folder: Path, rank: int, world: int) -> bytes:
        """Writes this rank's share of the weights, about the same number of bytes on each rank. No
        communication.

        Returns:
            For `finish`: which tensors are in which file, and their size, as JSON.

        Raises:
            ValueError: the checkpoint does not hold the model, or one of its files is damaged.
            OSError: a file cannot be written; names it.
        """
        sizes = [
            prod(entry.stored_shape) * entry.dtype(self.dtype).itemsize for entry in self.entries
        ]
        total, before, share = max(sum(sizes), 1), 0, []
        for entry, size in zip(self.entries, sizes):
            if (before + size // 2) * world // total == rank:
                share.append(entry)
            before += size
        if not share:
            return json.dumps([[], 0]).encode()
        shards = write_shards(folder, self.tensors(checkpoint, share), SHARD_BYTES, rank)
        return json.dumps(shards).encode()

    def tensors(
        self, checkpoint: Path, entries: Iterable[Entry] | None = None
    ) -> Iterable[tuple[str, Tensor]]:
        """Tensors of a checkpoint in the folder's form, each read when the iterator reaches it."""
        dtype = torch.float32 if self.dtype == torch.float16 else self.dtype
        weights = SavedWeights(checkpoint, dtype, twin_key)
        zeros: set[str] = set()
        if self.without_bias:
            zeros = {entry.name for entry in self.entries if entry.name.endswith(OUT_BIAS)}
        saved = [entry for entry in self.entries if entry.name not in zeros]
        check_tensor_names(weights, saved, checkpoint)

        def read(name: str, offset: Dims, shape: Dims) -> Tensor:
            return torch.zeros(shape) if name in zeros else weights.read(name, offset, shape)

        return stored_tensors(self.entries if entries is None else entries, read, self.dtype)

    def write_files(self, folder: Path) -> None:
        """Writes everything except the weights."""
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(content, encoding="utf-8")


class RunExport:
    """The Hugging Face folders of a run: `hf/step-…` in its directory of checkpoints. Used by
    `Saver`."""

    def __init__(self, export: HfExport, directory: Path) -> None:
        self.export, self._directory = export, directory / EXPORTS
        self._lock = ExitStack()  # of the folder that is being written, on rank 0

    def begin(self, checkpoint: Path) -> None:
        """Makes the folder that all ranks write to and removes interrupted ones, on rank 0."""
        final = self._directory / checkpoint.name
        self._lock.enter_context(owned(final, option="checkpoint.hf_export:"))
        for unfinished in self._directory.glob("step-*.tmp"):
            shutil.rmtree(unfinished)
        self._temporary(checkpoint).mkdir(parents=True)

    def write(self, checkpoint: Path, rank: int, world: int) -> bytes:
        """Writes this rank's share of the weights (`HfExport.write`)."""
        return self.export.write(checkpoint, self._temporary(checkpoint), rank, world)

    def finish(self, checkpoint: Path, messages: list[bytes]) -> None:
        """Completes the folder and gives it its name, on rank 0."""
        folder, shards, total_bytes = self._temporary(checkpoint), [], 0
        for message in messages:
            of_rank, num_bytes = json.loads(message)
            shards += of_rank
            total_bytes += num_bytes
        finalize_files(folder, shards, total_bytes)
        self.export.write_files(folder)
        final = folder.with_suffix("")
        if final.exists():  # of the same step, saved before
            set_aside(final)
        folder.rename(final)

    def end(self) -> None:
        """Releases the folder, whether or not it was finished."""
        self._lock.close()

    def is_interrupted(self, checkpoint: Path) -> bool:
        """Whether an earlier process was killed while it exported this complete checkpoint."""
        return self._temporary(checkpoint).is_dir() and checkpoint_error(checkpoint) is None

    def _temporary(self, checkpoint: Path) -> Path:
        return self._directory / f"{checkpoint.name}.tmp"


def export_faults(config: Config, world: int) -> list[Fault]:
    """Fault of a run whose `checkpoint.hf_export` could write no folder: no family computes the
    model, or its tokenizer would give other ids."""
    knob, export = "checkpoint.hf_export", config.checkpoint.hf_export
    if export is None:
        return []
    try:
        plan_export(config, lambda note: None)
    except (ValueError, OSError) as error:
        reason = (
            f"{knob} = {export} cannot write a folder, nor could tools/convert.py to-hf: {error}"
        )
        return [Fault("hf-export-possible", (knob,), reason, f"{knob}=null", True)]
    return []


def plan_export(
    config: Config,
    notify: Notify,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    with_tokenizer: bool = True,
    trained: bool = True,
) -> HfExport:
    """Plans the Hugging Face folder of a run's model; compares the ids of its tokenizer.

    Args:
        notify: receives lines about what the folder lacks or changes.
        dtype: of the weights, also fp16; None = the run's.
        tokenizer: file or folder; None = the run's.
        with_tokenizer: False = write none.
        trained: the run has made a step.

    Raises:
        ValueError: no family computes this architecture, or the exported tokenizer would give other
            ids.
    """
    dtype = dtype or config.precision.dtype
    source = _tokenizer_source(config, notify, tokenizer, with_tokenizer)
    model = _with_trained_length(config, notify) if trained else config.model
    model, files = _settings(config, model, dtype, source, with_tokenizer, notify)
    kind = torch.float16 if dtype == "fp16" else DTYPES[dtype]
    without_bias = model.attention_out_bias > config.model.attention_out_bias
    export = HfExport(files, model, kind, without_bias)
    if export.scale != 1:
        notify(
            f"{export.family} has no setting for model.routed_scaling_factor = {export.scale:g}: "
            "the experts' down projections are multiplied by it"
        )
    if "bias" in config.moe.balance and not any(
        entry.name.endswith(".router.bias") for entry in export.entries
    ):
        raise ValueError(_no_router_bias("moe.balance=bias changes biases of the routers"))
    return export


def agree_on_export(config: Config, notify: Notify) -> HfExport:
    """Plans the same export on every rank; only rank 0 compares the ids of the tokenizer.

    Comm:
        A broadcast over the world.
    """

    def plan() -> list[Any]:
        export = plan_export(config, notify)
        return [export.files, asdict(export.model), export.without_bias]

    files, fields, without_bias = on_rank_0(plan)
    model = from_dict({"model": fields}).model
    return HfExport(files, model, DTYPES[config.precision.dtype], without_bias)


def _with_trained_length(config: Config, notify: Notify) -> ModelConfig:
    """The architecture with no fewer positions than training used: servers truncate beyond
    max_position_embeddings."""
    model, seq_len = config.model, config.train.seq_len
    if model.position != "rope" or seq_len <= model.max_positions:
        return model
    notify(
        f"max_position_embeddings becomes train.seq_len = {seq_len}, which exceeds "
        f"model.max_positions = {model.max_positions}"
    )
    return replace(model, max_positions=seq_len)


def has_tokenizer(path: Path) -> bool:
    """Whether there is a file or folder that `load_tokenizer` may read."""
    try:
        return tokenizer_file(path).is_file()
    except ValueError:
        return False


def _tokenizer_source(
    config: Config, notify: Notify, tokenizer: Path | None, with_tokenizer: bool
) -> Path | None:
    """File or folder of the tokenizer to export, or with the ids of its special tokens; None where
    the run names none."""
    source = tokenizer or token_source(config)
    if not with_tokenizer:
        return source
    if source is None or not (tokenizer or config.data.tokenizer or has_tokenizer(source)):
        reason = "names no data.tokenizer"
        if source is not None:
            reason = f"has no data.tokenizer, and {source} holds none"
        notify(
            f"no tokenizer is written: the run {reason}; a run takes data.tokenizer=PATH, to-hf "
            "--tokenizer PATH"
        )
    elif not has_tokenizer(source):
        knob = "--tokenizer" if tokenizer else "the run's data.tokenizer ="
        raise ValueError(
            f"{knob} {source} is no tokenizer, or does not exist any more; give it by --tokenizer "
            "PATH, or --no-tokenizer"
        )
    return source


def _settings(
    config: Config,
    model: ModelConfig,
    dtype: str,
    source: Path | None,
    with_tokenizer: bool,
    notify: Notify,
) -> tuple[ModelConfig, dict[str, str]]:
    """All files except the weights, and the architecture that they describe.

    transformers reads every model_type qwen2 with Qwen2Tokenizer, whatever tokenizer_config.json
    names. A model with another tokenizer is written as a Llama that computes the same: its
    additional biases, of the attention output, are zero.
    """
    ids, generation = _token_ids(config, source)
    settings, files = hf_config_from_model(model, dtype, ids), dict[str, str]()
    if with_tokenizer and source is not None and has_tokenizer(source):
        size = load_tokenizer(source, config.data.eod).vocab_size
        if size > model.vocab_size:
            notify(
                f"{source} has {size} tokens, the model has model.vocab_size = {model.vocab_size}"
            )
        try:
            files = exported_tokenizer(source, config.data.eod, settings)
        except ValueError as error:
            if settings["model_type"] != "qwen2" or model.attention_window is not None:
                raise ValueError(f"{error}; --no-tokenizer writes the rest without one") from error
            model = replace(model, attention_out_bias=True)
            settings = hf_config_from_model(model, dtype, ids)
            files = exported_tokenizer(source, config.data.eod, settings)
            notify(f"written as {settings['model_type']}, since as qwen2 {error}")
        if find_spec("transformers") is None:
            notify("the ids were compared without AutoTokenizer: transformers is not installed")
    files |= {"generation_config.json": _json(generation), "config.json": _json(settings)}
    return model, files


def _json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _token_ids(config: Config, source: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ids of special tokens for config.json, and generation_config.json, as the tokenizer's folder
    has them.

    The token that ended documents in training is among those that end a text.
    """
    eod, vocab_size = config.data.eod, config.model.vocab_size
    folder = source if source is None or source.is_dir() else source.parent
    ids, generation = token_ids(folder) if folder is not None else ({}, {})
    if eod is None and source is not None and has_tokenizer(source):
        eod = load_tokenizer(source).eod
    ends = end_tokens(folder) if folder is not None else []
    ends += [] if eod is None else [eod]
    valid_ends = [i for i in dict.fromkeys(ends) if i < vocab_size]
    end = ids.get("eos_token_id")
    if end is None or not set(end if isinstance(end, list) else [end]) <= set(valid_ends):
        end = eod if eod in valid_ends else None
    ids = {key: i for key, i in ids.items() if isinstance(i, int) and i < vocab_size}
    generation_end: Any = valid_ends if len(valid_ends) > 1 else next(iter(valid_ends), None)
    return ids | {"eos_token_id": end}, generation | ids | {"eos_token_id": generation_end}


def _no_router_bias(reason: str) -> str:
    return (
        f"{reason}, and the family of this model has none; train with another moe.balance, or with "
        "DeepSeek-V3's router (model.router_score=sigmoid model.router_bias=true)"
    )


def check_tensor_names(weights: SavedWeights, entries: Iterable[Entry], folder: Path) -> None:
    """Makes sure that a checkpoint holds exactly the tensors of a table.

    Raises:
        ValueError: it does not; names those that are missing or unexpected.
    """
    expected, saved = {entry.name for entry in entries}, set(weights.tensors)
    missing, unexpected = sorted(expected - saved), sorted(saved - expected)
    biases = [name for name in unexpected if name.endswith(".router.bias")]
    if biases:
        reason = f"moe.balance=bias changed {len(biases)} biases of routers ({biases[0]} ...)"
        raise ValueError(_no_router_bias(f"{folder}: {reason}"))
    if missing or unexpected:
        raise ValueError(
            f"{folder} does not hold the model that its configuration describes: missing "
            f"{missing}, unexpected {unexpected}"
        )

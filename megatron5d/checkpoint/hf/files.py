"""Which files of a Hugging Face folder hold what, and what the usual wrong ones are; each tensor's
place in ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron5d.config.json_file import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What transformers looks for in a folder: weights, settings, tokenizers, templates, adapters.
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "*.gguf")
_READ = (
    *WEIGHTS,
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "adapter_config.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_OTHER_WEIGHTS = {
    "pytorch_model*.bin": "a pickle, and pickles are not read here; "
    "save it again with transformers: model.save_pretrained(folder, safe_serialization=True)",
    "model-*.safetensors": f"one file of several, and {INDEX}, which names them all, is missing",
    "adapter_model.*": "an adapter (LoRA) of another model: merge_and_unload() of the package peft makes a whole one",
    "*.gguf": "a quantised model of llama.cpp, which is not read here: get the folder that it was made from",
    "consolidated*": "of the publisher's own format; transformers' convert_*_weights_to_hf.py makes a folder of it",
    "*.pth": "a pickle, and pickles are not read here; transformers' convert_*_weights_to_hf.py makes a folder of it",
}
_BEGINNINGS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder",
    b"<": "a web page, not the file itself (a download that was refused?): download it again",
    b"PK\x03\x04": "a pickle of torch (zip), which is not read here: save it with safetensors",
    b"\x80": "a pickle, which is not read here: save it with safetensors",
    b"GGUF": "a GGUF file of llama.cpp, which is not read here: get the folder that it was made from",
    b"\x1f\x8b": "compressed: unpack it with gunzip",
}


def check_no_model_files(folder: Path, patterns: Sequence[str] = _READ) -> None:
    """Refuses a folder with files that transformers would read together with new ones. Raises
    ValueError: there are such files; names them."""
    old = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
    if old:
        raise ValueError(
            f"{folder} already holds {', '.join(old)}: give an empty folder, old files would mix with new"
        )


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Returns the names that the index places in each file; None = all that the only file holds."""
    index, single, shards = (
        folder / INDEX,
        (folder / SINGLE).is_file(),
        dict[str, list[str] | None](),
    )
    if index.is_file():
        try:
            for name, file in read_json(index)["weight_map"].items():
                if Path(file).name != file:
                    raise ValueError(f"{index} places {name} in {file}, which is no name of a file")
                names = shards.setdefault(file, [])
                assert names is not None
                names.append(name)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index} is damaged, it has no weight_map of tensors and files: {error!r}"
            ) from error
    parts = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    if single and (
        others := sorted(
            (parts | {name for name in shards if (folder / name).is_file()}) - {SINGLE}
        )
    ):
        raise ValueError(
            f"{folder} holds {SINGLE} and {others[0]}: two sets of weights; remove the older one"
        )
    if single:
        return {SINGLE: None}
    if shards and (stale := sorted(parts - set(shards))):
        raise ValueError(
            f"{folder} holds {stale[0]}, which {INDEX} does not name: remove it, it is of another save"
        )
    if shards:
        return shards
    for pattern, told in _OTHER_WEIGHTS.items():
        if found := sorted(folder.glob(pattern)):
            raise ValueError(
                f"{folder} has neither {SINGLE} nor {INDEX}; {found[0].name} is {told}"
            )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def wrong_kind(path: Path) -> str | None:
    """Returns what a file is instead of what its name says, in words; None where its beginning does
    not tell."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        return "empty: download it again"
    return next(
        (
            told
            for begin, told in _BEGINNINGS.items()
            if head.lstrip(b"\xef\xbb\xbf \n").startswith(begin)
        ),
        None,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a Hugging Face folder. Raises ValueError: the file holds
    no JSON, or no object; says which usual wrong file it is."""
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(
            f"{path} is {wrong_kind(path) or f'not a file of settings: {error}'}"
        ) from error


@dataclass(frozen=True)
class Entry:
    """One tensor on disk and its place in ours."""

    name: str  # global name of our tensor
    # (start, stop) in dim 0 of our tensor, or of one expert of it; the other dims are whole
    rows: tuple[int, int]
    stored_name: str  # name on disk
    stored_shape: tuple[int, ...]
    # on disk it is [..., in, out] (GPT-2's Conv1D, gpt-oss) where ours is [..., out, in] which
    # expert of our stack `[experts, rows, ...]`; None = our tensor is no stack of experts
    transposed: bool = False
    expert: int | None = None
    # at least fp32 on disk and in memory, whatever the model's dtype (a router's bias) number of
    # heads whose q, k and v each lie together on disk (GPT-NeoX); None = all q, all k, all v
    wide: bool = False
    heads: int | None = None
    # a stack of experts in which gate and up rows alternate on disk (gpt-oss)
    interleaved: bool = False

    @property
    def model_shape(self) -> tuple[int, ...]:
        shape = (
            (*self.stored_shape[:-2], self.stored_shape[-1], self.stored_shape[-2])
            if self.transposed
            else self.stored_shape
        )
        return shape if self.expert is None else (1, *shape)

    @property
    def model_offset(self) -> tuple[int, ...]:
        """First index of the tensor in ours."""
        inner = (self.rows[0], *(0 for _ in self.stored_shape[1:]))
        return inner if self.expert is None else (self.expert, *inner)

    def from_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the tensor on disk, or whole experts of a stack, with dims and rows in our
        order."""
        values = values.transpose(-1, -2) if self.transposed else values
        if self.interleaved:
            return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return (
            values
            if self.heads is None
            else values.unflatten(0, (self.heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        )

    def to_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Returns our tensor as it is on disk; the inverse of `ours`."""
        if self.interleaved:
            values = values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if self.heads is not None:
            values = values.unflatten(0, (3, self.heads, -1)).transpose(0, 1).flatten(0, 2)
        return values.transpose(-1, -2) if self.transposed else values

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of this tensor in a model whose weights have `dtype`."""
        return torch.promote_types(dtype, torch.float32) if self.wide else dtype

"""Files of a Hugging Face folder: which ones hold weights, and which wrong ones are common."""

from collections.abc import Sequence
from pathlib import Path

from megatron5d.checkpoint.hf.families import Settings
from megatron5d.config.json_file import parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*.bin", "*.gguf")
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "tekken.json", "chat_template*", "additional_chat_templates"),
)
# what transformers reads in a folder: weights, settings, tokenizers, templates, adapters
_MODEL_FILES = (
    *WEIGHTS,
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("processor_config.json", "preprocessor_config.json"),
    *TOKENIZER_FILES,
)
_CONVERT = "transformers' convert_*_weights_to_hf.py makes a folder of it"
# weights in other formats, with what to do
_OTHER_WEIGHTS = {
    "pytorch_model*.bin": "a pickle, which is not read; save it again with transformers: "
    "model.save_pretrained(folder, safe_serialization=True)",
    "model-*.safetensors": f"one file of several, but {INDEX}, which names them all, is missing",
    "adapter_model.*": "an adapter (LoRA) of another model; merge it with merge_and_unload() of "
    "the package peft",
    "*.gguf": "a quantized model of llama.cpp, which is not read; get the folder that it was made "
    "from",
    "consolidated*": f"in the publisher's own format; {_CONVERT}",
    "*.pth": f"a pickle, which is not read; {_CONVERT}",
}
# first bytes of wrong files, with what to do
_FIRST_BYTES = {
    b"version https://git-lfs": "a Git LFS pointer; run `git lfs pull` in its folder",
    b"<": "a web page instead of the file, perhaps from a refused download; download it again",
    b"PK\x03\x04": "a pickle of torch (zip), which is not read; save it with safetensors",
    b"\x80": "a pickle, which is not read; save it with safetensors",
    b"GGUF": "a GGUF file of llama.cpp, which is not read; get the folder that it was made from",
    b"\x1f\x8b": "compressed; unpack it with gunzip",
}


def check_no_model_files(folder: Path, patterns: Sequence[str] = _MODEL_FILES) -> None:
    """Makes sure that a folder has no files that transformers would read together with new ones.

    Raises:
        ValueError: there are such files; names them.
    """
    old = sorted({path.name for pattern in patterns for path in folder.glob(pattern)})
    if old:
        more = f" and {len(old) - 4} more" if len(old) > 4 else ""
        raise ValueError(
            f"{folder} already holds {', '.join(old[:4])}{more}, which would mix with the new "
            "files; give an empty folder"
        )


def weight_files(folder: Path) -> dict[str, list[str] | None]:
    """Names of the tensors that the index places in each file; None = all in the only file."""
    shards = _indexed_files(folder / INDEX) if (folder / INDEX).is_file() else {}
    numbered = {path.name for path in folder.glob("model-*-of-*.safetensors")}
    if (folder / SINGLE).is_file():
        indexed = {name for name in shards if (folder / name).is_file()}
        if shard_files := sorted((numbered | indexed) - {SINGLE}):
            raise ValueError(
                f"{folder} holds {SINGLE} and {shard_files[0]}: two sets of weights; remove the "
                "older one"
            )
        return {SINGLE: None}
    if shards:
        if stale := sorted(numbered - set(shards)):
            raise ValueError(
                f"{folder} holds {stale[0]}, which {INDEX} does not name: it is of another save; "
                "remove it"
            )
        return {**shards}
    for pattern, advice in _OTHER_WEIGHTS.items():
        if files := sorted(folder.glob(pattern)):
            raise ValueError(
                f"{folder} has neither {SINGLE} nor {INDEX}; {files[0].name} is {advice}"
            )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}")


def _indexed_files(index: Path) -> dict[str, list[str]]:
    """Names of the tensors in each file of an index."""
    shards: dict[str, list[str]] = {}
    try:
        for name, file in read_json(index)["weight_map"].items():
            if Path(file).name != file:
                raise ValueError(f"{index} places {name} in {file}, which is no name of a file")
            shards.setdefault(file, []).append(name)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is damaged, it has no weight_map of tensors and files: {error!r}"
        ) from error
    return shards


def wrong_kind(path: Path) -> str | None:
    """What a file is instead of what its name says; None where its first bytes do not say."""
    with path.open("rb") as file:
        content = file.read(64)
    if not content:
        return "empty; download it again"
    content = content.lstrip(b"\xef\xbb\xbf \n")
    kinds = (kind for first_bytes, kind in _FIRST_BYTES.items() if content.startswith(first_bytes))
    return next(kinds, None)


def read_json(path: Path) -> Settings:
    """Reads the object in a JSON file of a Hugging Face folder.

    Raises:
        ValueError: the file holds no JSON, or no object; says which common wrong file it is.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        kind = wrong_kind(path) or f"not a file of settings: {error}"
        raise ValueError(f"{path} is {kind}") from error

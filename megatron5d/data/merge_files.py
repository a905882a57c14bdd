"""Reads the pair vocab.json and merges.txt of a byte-level BPE, as GPT-2 and the older Qwen have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron5d.data.special_tokens import FilesBeside, read_object
from megatron5d.data.tiktoken_ranks import PUBLISHED, QWEN2_PATTERN, QWEN_SPECIAL

# ends of the two names: of transformers, of Megatron's gpt2-vocab.json too, and of OpenAI
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast", "")
QWEN2_CLASSES = ("Qwen2Tokenizer", "Qwen2TokenizerFast")


def pair_of(path: Path) -> tuple[Path, Path] | None:
    """The (vocabulary, merges) to which a file belongs by its name; None = the name is another, or one is missing."""
    for ends in PAIRS:
        for end in ends:
            if path.name.endswith(end):
                begin = path.name.removesuffix(end)
                vocab, merges = (path.with_name(begin + each) for each in ends)
                if vocab.is_file() and merges.is_file():
                    return vocab, merges
    return None


def byte_level_bpe(vocab: Path, merges: Path, beside: FilesBeside) -> Any:
    """The `tokenizers.Tokenizer` of a pair.

    Text is split as the folder's `tokenizer_class` does, GPT-2's or Qwen2's; where none is named, the number of tokens
    says whether it is Qwen's.

    Raises:
        ValueError: a file is damaged, the class is another, or an added token cannot have its id.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    named = str(beside.config.get("tokenizer_class") or "")
    tokens = read_object(vocab)
    qwen2 = named in QWEN2_CLASSES or (not named and len(tokens) in (n for n in PUBLISHED if PUBLISHED[n].normal_form))
    if not qwen2 and named not in GPT2_CLASSES:
        raise ValueError(
            f"{vocab}: tokenizer_class {named} may split text in its own way; write its tokenizer.json beside it: "
            f"transformers.AutoTokenizer.from_pretrained({str(vocab.parent)!r}).save_pretrained(...)"
        )
    try:
        model = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the package raises bare Exception
        raise ValueError(f"{vocab} and {merges.name} are no byte-level BPE: {error}") from error
    space = bool(beside.config.get("add_prefix_space"))
    if qwen2:
        model.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), "isolated")
        whole = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False)
        model.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    else:
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    model.decoder = decoders.ByteLevel()
    added = {token: number for token, number in beside.added().items() if token not in tokens}
    if qwen2 and not added:
        added = {token: len(tokens) + i for i, token in enumerate(t for t in QWEN_SPECIAL[:3] if t not in tokens)}
    for token, number in sorted(added.items(), key=lambda item: item[1]):
        model.add_tokens([AddedToken(token, normalized=False)])
        if model.token_to_id(token) != number:
            raise ValueError(
                f"{vocab}: the added token {token!r} has id {number}; the next free one is {model.token_to_id(token)}"
            )
    return model

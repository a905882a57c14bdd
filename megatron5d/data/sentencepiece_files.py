"""Sentencepiece models: how one is opened, which of its pieces are never read from text, and tokens
that files beside it add as text."""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megatron5d.data.special_tokens import FilesBeside


def sentencepiece_model(path: Path, content: bytes) -> Any:
    """The `SentencePieceProcessor` of a file.

    Raises:
        ValueError: the package is not installed, or this is no model.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package sentencepiece: pip install sentencepiece"
        ) from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise ValueError(
            f"{path}: not a sentencepiece model, tokenizer.json, tekken.json, vocab.json with "
            "merges.txt or tiktoken file, or a damaged one: "
            f"{len(content)} bytes that begin with {content[:16]!r}"
        ) from error


def never_read(model: bytes, pieces: Collection[str]) -> bytes:
    """Serialized sentencepiece model in which pieces that were USER_DEFINED are CONTROL symbols.

    The first kind is found in text, the second never. A message of a piece is: 1, its length and
    text; 2, its score in four bytes; 3, its type.
    """
    for text in map(str.encode, pieces):
        if len(text) > 127:  # whose length would take two bytes
            continue
        head = b"\n" + bytes([len(text)]) + text
        pattern = re.escape(head) + rb"(\x15.{4}\x18)\x04"
        model = re.sub(pattern, lambda m: m[0][:-1] + b"\x03", model, flags=re.DOTALL)
    return model


class AddedText:
    """Tokens that the files beside a sentencepiece model add as text.

    They are cut out of a text first, and the model encodes what is between them, each stretch with
    its dummy prefix, as transformers does with `legacy: true`.
    """

    def __init__(self, ids: dict[str, int], beside: FilesBeside) -> None:
        self.ids, self._beside = ids, beside
        # the longest of those that begin at one place
        self._names = sorted(ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(self._alternative, self._names)))

    def _alternative(self, name: str) -> str:
        flags, text = self._beside.flags(name), f"({re.escape(name)})"
        if flags.get("single_word"):
            text = rf"(?<!\w){text}(?!\w)"
        blanks = (r"\s*" if flags.get(side) else "" for side in ("lstrip", "rstrip"))
        return text.join(blanks)

    def encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Ids of a text, of which `encode` makes those of the stretches between the tokens."""
        if not self.ids:
            return encode(text)
        ids, end = [], 0
        for match in self._pattern.finditer(text):
            assert match.lastindex is not None  # each alternative has one group
            ids += encode(text[end : match.start()])
            ids.append(self.ids[self._names[match.lastindex - 1]])
            end = match.end()
        return ids + encode(text[end:])

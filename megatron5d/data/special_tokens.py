"""Finds the tokens that begin and end a document, in all files of a tokenizer's folder that may
name them."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron5d.config.json_file import parse_json

# Names of the end-of-document token in published tokenizers, the more specific ones first. They
# count only where no file names a token. A text may hold </s> as an HTML tag (Gemma 3).
EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<eod>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|im_end|>",
)
BOS_NAMES = (
    "<|begin_of_text|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<s>",
    "<bos>",
    "[BOS]",
)
# the ends of a chat's turn: <|im_end|>, <|eot_id|>, <end_of_turn>, <|return|>, <|end|>
_TURN_END = re.compile(
    r"turn|im_?end|\beo[tm](\b|_)|message|assistant|user|<\|end\|>", re.IGNORECASE
)
ROLES = ("eos", "bos", "pad", "unk", "sep", "cls", "mask")


def read_object(path: Path) -> dict[str, Any]:
    """Content of a JSON file of settings; {} where there is none.

    Raises:
        ValueError: it is not a JSON object.
    """
    try:
        return parse_json(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON object of settings: {error}") from error


def _text(token: Any) -> str:
    """Token in any of its forms: the string itself, or an object with its content."""
    return str(token.get("content") or "") if isinstance(token, dict) else str(token or "")


@dataclass(frozen=True)
class FilesBeside:
    """What the files beside a tokenizer say of its special tokens."""

    path: Path  # of the tokenizer

    @cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        return read_object(self.path.with_name("tokenizer_config.json"))

    @cached_property
    def _maps(self) -> dict[str, dict[str, Any]]:
        """The files that name tokens, in the order in which transformers asks them."""
        tokens = {"tokenizer_config.json": self.config}
        legacy = {
            "special_tokens_map.json": read_object(self.path.with_name("special_tokens_map.json"))
        }
        return tokens | legacy if "added_tokens_decoder" in self.config else legacy | tokens

    def added(self) -> dict[str, int]:
        """Tokens with their ids that tokenizer_config.json and added_tokens.json add to the
        vocabulary.

        Raises:
            ValueError: an id is no number.
        """
        file = self.path.with_name("added_tokens.json")
        try:
            tokens = {str(token): int(i) for token, i in read_object(file).items()}
            file = self.path.with_name("tokenizer_config.json")
            decoder = self.config.get("added_tokens_decoder") or {}
            return tokens | {_text(token): int(i) for i, token in decoder.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: tokens and ids of added tokens cannot be read: {error}"
            ) from error

    def flags(self, token: str) -> dict[str, Any]:
        """What tokenizer_config.json says of how an added token is read: `special`, `lstrip`, ...

        A token is special if any file marks it or gives it a role, as in transformers.
        """
        names, entry = ("special", "lstrip", "rstrip", "single_word"), self._entries.get(token, {})
        flags = {name: bool(entry[name]) for name in names if name in entry}
        return flags | ({"special": True} if token in self.special else {})

    @cached_property
    def _entries(self) -> dict[str, dict[str, Any]]:
        """Added tokens of tokenizer_config.json that are objects, by their text."""
        entries = (self.config.get("added_tokens_decoder") or {}).values()
        return {_text(entry): entry for entry in entries if isinstance(entry, dict)}

    @cached_property
    def special(self) -> set[str]:
        """Every token that has a role, or that tokenizer_config.json marks as special."""
        tokens = {token for token, entry in self._entries.items() if entry.get("special")}
        for content in self._maps.values():
            tokens.update(_text(content.get(f"{role}_token")) for role in ROLES)
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = content.get(key) or []
                tokens.update(map(_text, listed.values() if isinstance(listed, dict) else listed))
        return tokens - {""}

    def named(self, role: str) -> Iterator[tuple[str, str]]:
        """Yields (file, token) of each file that names the token of a role, "eos" or "bos"."""
        for name, content in self._maps.items():
            if token := _text(content.get(f"{role}_token")):
                yield str(self.path.with_name(name)), token

    def numbered(self, role: str) -> Iterator[tuple[str, int]]:
        """Yields (file, id) of each file of the model's that gives the token's number, and of each
        of several ids."""
        for name in ("generation_config.json", "config.json"):
            content = read_object(self.path.with_name(name))
            inner = content.get("text_config")
            value = content.get(
                f"{role}_token_id",
                inner.get(f"{role}_token_id") if isinstance(inner, dict) else None,
            )
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int):
                    yield str(self.path.with_name(name)), number

    def has_no_bos(self) -> bool:
        """Whether tokenizer_config.json says that no token begins a text."""
        return "bos_token" in self.config and not any(self.named("bos"))


def asked_for(path: Path, requested: str | int, known: Mapping[str, int], what: str) -> int:
    """Id of the token that a user names.

    Raises:
        ValueError: it is not in the vocabulary.
    """
    try:
        number = int(requested)  # digits are an id, even if they are a token as well
    except ValueError:
        number = known.get(str(requested), -1)
    if number not in known.values():
        usual = [name for name in (*EOD_NAMES, *BOS_NAMES) if name in known]
        raise ValueError(
            f"{path}: {what} token {requested!r} is not in the vocabulary; it has {usual}"
        )
    return number


def end_of_document(
    beside: FilesBeside,
    known: Mapping[str, int],
    special: Collection[int],
    model_id: int | None,
    is_text: Callable[[int], bool],
) -> int | None:
    """Id of the token that ends a document.

    Args:
        beside: the files in the tokenizer's folder.
        known: token -> id.
        special: ids of special and of added tokens.
        model_id: the one that the tokenizer's file itself names.
        is_text: whether a text that spells a token gets its id.

    Returns:
        The first one that a file names: tokenizer_config.json and special_tokens_map.json, the
        tokenizer's own, generation_config.json and config.json, else the first of EOD_NAMES that
        text never yields or no text means (<|this|>); None = there is none. An id that stands for
        text may end what a model generates, but no document, which may hold that text.

    Raises:
        ValueError: a file names one that is not in the vocabulary.
    """
    fix = "name the right one with --eod TOKEN (in training data.eod=ID), or correct that file"
    for source, name in beside.named("eos"):
        if name not in known:
            raise ValueError(
                f"{source}: eos_token {name!r} is not in the vocabulary of {beside.path.name}; "
                f"{fix}"
            )
        return known[name]
    if model_id is not None:
        return model_id
    for source, number in beside.numbered("eos"):
        if number in special:
            return number
        if number not in known.values():
            raise ValueError(f"{source}: eos_token_id {number} is not in {beside.path.name}; {fix}")
    return next(_usual(EOD_NAMES, known, is_text), None)


def ends_turn(name: str) -> bool:
    """Whether a token is called like the end of a turn of a chat, not of a document."""
    return _TURN_END.search(name) is not None


def _usual(
    names: Sequence[str], known: Mapping[str, int], is_text: Callable[[int], bool]
) -> Iterator[int]:
    for name in names:
        if name in known and (name[1] in "|\uff5c" or not is_text(known[name])):
            yield known[name]


def begin_of_document(
    beside: FilesBeside,
    known: Mapping[str, int],
    special: Collection[int],
    model_id: int | None,
    is_text: Callable[[int], bool],
) -> int | None:
    """Id of the token that begins a document, found as `end_of_document` is; None =
    there is none.

    What does not exist is passed over, since few runs use this token.
    """
    if beside.has_no_bos():
        return None
    names = [known[name] for _, name in beside.named("bos") if name in known]
    numbers = [number for _, number in beside.numbered("bos") if number in special]
    usual = _usual(BOS_NAMES, known, is_text)
    return next(
        iter([*names, *([model_id] if model_id is not None else []), *numbers, *usual]), None
    )

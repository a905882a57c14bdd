"""Encodes byte-level BPE with tiktoken, where its ids are those of the tokenizers library."""

import json
import re
import unicodedata
from itertools import pairwise
from typing import Any

from megatron5d.data.bpe_files import GPT2_PATTERN, byte_signs

RUN = 25_000  # characters, as in Llama 3's own tokenizer
# what both engines' regular expressions read alike, but for the characters that belong to a class
_ALIKE = re.compile(r"(?:\\p\{\w+\}|\\[sSrn]|\(\?(?:i:|:|!)|[]\[()^|?+*' /a-z]|\{\d,\d\})+")
_CLASSES = re.compile(r"\\p\{\w+\}|\\s|\(\?i:")


def may_hold_long_run(text: str) -> bool:
    """False where no RUN characters in a row are all blank or all not, for which tiktoken's
    stack may end."""
    # each such run fills one of these windows
    half = re.compile(rf"\s{{{RUN // 2}}}|\S{{{RUN // 2}}}")
    return any(half.match(text, at) for at in range(0, len(text), RUN // 2))


class TiktokenEngine:
    """Encodes as a `tokenizers.Tokenizer` of byte-level BPE does, with tiktoken, which takes a
    fifth of its time.

    The first merges pairs of tokens that a list names, in its order; the second any pair whose
    bytes are a token, the lowest id first. No merge crosses the ends of a token that comes of it,
    so inside a text its bytes go through the states that they go through alone. If, alone, they end
    as this token, then only one pair ever makes it, and that pair is in the list. So the ids are
    the same if ids rise along the list and tokens that are not reached alone are left out. All of
    it is checked here. Which characters are letters, numbers or blanks is asked of both engines for
    each character when a text first holds it.

    Raises:
        ValueError: the ids may differ, or tiktoken is not installed; says why.
    """

    def __init__(self, model: Any) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError("the package tiktoken is not installed") from error
        content = json.loads(model.to_str())
        pattern = _splitting(content)
        self._normal_form = content["normalizer"] is not None
        self._added = [
            token["content"] for token in content["added_tokens"] if not token["special"]
        ]
        self._encoding = tiktoken.Encoding(
            "tokenizer.json",
            pat_str=pattern,
            mergeable_ranks=_reached(content["model"]),
            special_tokens={},
        )
        byte_ids = {bytes([byte]): byte for byte in range(256)}
        classes = [
            "(?i:[a-z])" if char_class == "(?i:" else char_class
            for char_class in sorted({*_CLASSES.findall(pattern)})
        ]
        self._classes = [
            (
                char_class,
                tiktoken.Encoding(
                    "class", pat_str=char_class, mergeable_ranks=byte_ids, special_tokens={}
                ),
            )
            for char_class in classes
        ]
        self._alike: set[str] = set()  # characters whose classes are the same in both
        self._differ: set[str] = set()

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text; None = they may differ, as in a text with an added token or a
        very long run."""
        if may_hold_long_run(text) or any(token in text for token in self._added):
            return None
        if not text.isascii():
            if self._normal_form and not unicodedata.is_normalized("NFC", text):
                return None
            letters = set(text)
            if unknown := letters - self._alike:
                self._compare("".join(unknown - self._differ))
                if not self._differ.isdisjoint(letters):
                    return None
        return self._encoding.encode_ordinary(text)

    def _compare(self, letters: str) -> None:
        """Finds the characters that are of a class for one engine alone, or whose normal form
        Python does not know."""
        from tokenizers import Regex, pre_tokenizers

        for pattern, encoding in self._classes:
            split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
            theirs = {letter for piece, _ in split.pre_tokenize_str(letters) for letter in piece}
            self._differ |= theirs ^ set(bytes(encoding.encode_ordinary(letters)).decode())
        if self._normal_form:
            self._differ |= {letter for letter in letters if unicodedata.category(letter) == "Cn"}
        self._alike |= set(letters) - self._differ


def _splitting(content: dict[str, Any]) -> str:
    """Pattern by which a tokenizer.json splits text; a ValueError where that and
    merging is not all."""
    if content["normalizer"] not in (None, {"type": "NFC"}):
        raise ValueError(f"it changes text first ({content['normalizer']['type']})")
    steps = content["pre_tokenizer"] or {}
    steps = steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]
    last, model = steps[-1], content["model"]
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    pattern = GPT2_PATTERN if last.get("use_regex") else None
    if len(steps) == 2 and pattern is None and split.items() <= steps[0].items():
        pattern = steps[0]["pattern"].get("Regex")
    if (
        last.get("type") != "ByteLevel"
        or last["add_prefix_space"]
        or len(steps) > 2
        or pattern is None
    ):
        raise ValueError("its way of splitting text is another than that of byte-level BPE")
    if not _ALIKE.fullmatch(pattern):
        raise ValueError(f"its pattern {pattern!r} may be read in two ways")
    if model["type"] != "BPE" or any(
        model.get(key)
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        raise ValueError("its model is no plain BPE")
    return pattern


def _reached(model: dict[str, Any]) -> dict[bytes, int]:
    """Tokens to which merges lead, with their ids; a ValueError where tiktoken may
    merge otherwise."""
    from tokenizers import models

    vocab: dict[str, int] = model["vocab"]
    merges = [
        tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]
    ]
    if any(a > b for a, b in pairwise(vocab[first + second] for first, second in merges)):
        raise ValueError("its ids do not rise along its merges")
    bytes_of = {sign: byte for byte, sign in byte_signs().items()}
    if not bytes_of.keys() <= vocab.keys():
        raise ValueError("not all of the 256 bytes are tokens")
    spelled = [token for token in vocab if token and bytes_of.keys() >= set(token)]
    bpe = models.BPE(vocab, merges)
    num_pieces = {token: len(bpe.tokenize(token)) for token in spelled}
    if model["ignore_merges"] and 2 in num_pieces.values():
        raise ValueError("a token of its vocabulary has no merge")
    reachable = (
        spelled
        if model["ignore_merges"]
        else [token for token in spelled if num_pieces[token] == 1]
    )
    return {bytes(bytes_of[sign] for sign in token): vocab[token] for token in reachable}

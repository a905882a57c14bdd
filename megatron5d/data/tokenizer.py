"""Tokenizers: text to token ids and back, from sentencepiece, Hugging Face, tiktoken and Mistral
files.

Special tokens are never read from text: a document that contains the characters `<|endoftext|>`
gets the ids of those characters. No begin-of-text token is added. A token is special by its mark in
a file, by a role in the folder's files, or because it ends or begins documents, never by its name:
tokens that a file adds to its vocabulary as text (`special: false`) are read as transformers does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron5d.data.bpe_files import (
    PAIRS,
    add_listed,
    byte_level_bpe,
    looks_like_ranks,
    mark_special,
    pair_of,
    read_ranks,
    read_tekken,
    switch_off,
)
from megatron5d.data.sentencepiece_files import AddedText, never_read, sentencepiece_model
from megatron5d.data.special_tokens import (
    FilesBeside,
    asked_for,
    begin_of_document,
    end_of_document,
)
from megatron5d.data.tiktoken_engine import RUN, TiktokenEngine, may_hold_long_run

_LONG_RUN = re.compile(rf"\s{{{RUN}}}|\S{{{RUN}}}")
IN_FOLDERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "tokenizer.tiktoken",
    "qwen.tiktoken",
    "tiktoken.model",
)
Asked = str | int | None  # a token or its id; None = the tokenizer's own

# how a file begins that is often mistaken for a tokenizer -> what it is, and what to do
MISTAKEN = (
    (
        rb"version https://git-lfs",
        "is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder",
    ),
    (
        rb"(?i)\s*<(!doctype|html)",
        "is a web page, not the file itself: download it from the link that says 'raw'",
    ),
    (rb"\x1f\x8b", "is compressed: gunzip it first"),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "is an archive of weights, not a tokenizer"),
    (rb".{8}\{", "is a safetensors file of weights, not a tokenizer"),
    (
        rb"\[PAD\]\r?\n",
        "is a WordPiece vocabulary, which is not read: save it as tokenizer.json with transformers",
    ),
    (
        rb"<unk>\t0\r?\n",
        "is the list for readers beside a sentencepiece model: name the .model file",
    ),
    (
        rb"#version",
        (
            "is one half of a pair: its vocab.json must stand beside it (gpt2-vocab.json beside "
            "gpt2-merges.txt)"
        ),
    ),
)


def load_tokenizer(path: str | os.PathLike[str], eod: Asked = None, bos: Asked = None) -> Tokenizer:
    """Opens a tokenizer file of any kind.

    Args:
        path: a sentencepiece `.model`, a Hugging Face `tokenizer.json`, a tiktoken file of base64
            ranks, a `tekken.json`, a `vocab.json` with its `merges.txt`, or a folder with one of
            them. The kind is recognized by content, since Llama 3's tiktoken file is
            `tokenizer.model`.
        eod: token or id that ends a document; None = the one that the file or one beside it names,
            or a usual name.
        bos: token or id that begins a document; None = the same.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the file is missing, damaged or of an unknown kind, its package is not
            installed, or `eod` or `bos` is not in its vocabulary.
    """
    file = tokenizer_file(path)
    pair = pair_of(file)
    if pair is not None:
        for member in pair:
            _head(member, MISTAKEN[:-1])
        return HuggingFaceTokenizer(pair[0], eod, bos, pair[1])
    head = _head(file)
    if head.lstrip()[:1] == b"{":
        if b'"added_tokens"' in head:
            return HuggingFaceTokenizer(file, eod, bos)
        return _of_json(file, eod, bos)
    if looks_like_ranks(head):
        return TiktokenTokenizer(file, eod, bos)
    return SentencePieceTokenizer(file, eod, bos)


def _head(file: Path, mistaken: Sequence[tuple[bytes, str]] = MISTAKEN) -> bytes:
    """First bytes of a file."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    if not head:
        raise ValueError(f"{file}: the tokenizer file is empty")
    for begin, what in mistaken:
        if re.match(begin, head, re.DOTALL):
            raise ValueError(f"{file} {what}")
    return head


def _of_json(file: Path, eod: Asked, bos: Asked) -> Tokenizer:
    """Tokenizer in a JSON file whose beginning does not say which kind it is."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a tokenizer.json, and no JSON: {error}") from error
    if isinstance(content.get("vocab"), list):
        return TiktokenTokenizer(file, eod, bos, content)
    if "model" in content:
        return HuggingFaceTokenizer(file, eod, bos)
    if content and all(isinstance(number, int) for number in content.values()):
        raise ValueError(
            f"{file} is a vocab.json without its merges, not a tokenizer.json: merges.txt must "
            "stand beside it "
            "(gpt2-merges.txt beside gpt2-vocab.json, vocab.bpe beside encoder.json)"
        )
    raise ValueError(
        f"{file}: JSON, but not a tokenizer.json, tekken.json or vocab.json; name one of these, or "
        "the folder with it"
    )


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """File that `load_tokenizer` would read: `path` itself, or the one inside a folder.

    Raises:
        ValueError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        pairs = [path / vocab for vocab, merges in PAIRS if (path / merges).is_file()]
        for file in [
            *(path / name for name in IN_FOLDERS),
            *pairs,
            *sorted(path.glob("*.tiktoken")),
        ]:
            if file.is_file():
                return file
        raise ValueError(
            f"{path}: the folder has no tokenizer.json, tokenizer.model, tekken.json, *.tiktoken "
            "file, or vocab.json "
            "with merges.txt"
        )
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer file")
    return path


def tokenizer_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the file that `load_tokenizer` would read, or of both files of a pair."""
    file = tokenizer_file(path)
    return hashlib.sha256(
        b"".join(member.read_bytes() for member in pair_of(file) or [file])
    ).hexdigest()


def changes_text(tokenizer: Tokenizer) -> list[str]:
    """What the tokenizer does not keep of a text, in words; [] = nothing is known."""
    tried = {
        "line breaks": "a\nb",
        "tabs": "a\tb",
        "runs of spaces": "a  b",
        "capital letters": "aB",
    }
    return [
        what for what, text in tried.items() if tokenizer.decode(_encoded(tokenizer, text)) != text
    ]


def text_may_hold(tokenizer: Tokenizer, number: int) -> bool:
    """Whether a text that spells a token gets its id, so that it does not only stand where
    it was put."""
    return any(
        number in _encoded(tokenizer, text)
        for text in (tokenizer.token(number), tokenizer.decode([number]))
    )


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text; none where the tokenizer has none, and no token for what is unknown."""
    try:
        return tokenizer.encode(text)
    except Exception:  # bare ones of the package tokenizers
        return []


class Tokenizer:
    """Text to ids and back, without special tokens; a subclass for each kind of file."""

    vocab_size: int  # one more than the largest id
    eod: int | None  # id of the end-of-document token; None = it has none
    bos: int | None  # id of the begin-of-text token; None = it has none
    # texts begin with `bos` for the model that the files belong to; `encode` does not add it
    adds_bos: bool
    engine: str  # of `encode_all`, in words
    switched_off: str = ""  # random part of the file, in words: a text has the same ids each time
    _names: dict[int, str]

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        raise NotImplementedError

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids that `encode` does; may take seconds to begin, and less for each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        raise NotImplementedError

    def token(self, number: int) -> str:
        """How a token is written in the vocabulary."""
        return self._names[number]

    def has_token(self, name: str) -> bool:
        """Whether the vocabulary has a token that is written so."""
        return name in self._names.values()

    def _name_tokens(
        self,
        beside: FilesBeside,
        known: dict[str, int],
        special: Collection[int],
        requested: tuple[Asked, Asked],
        model_ids: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Fills the fields.

        Args:
            beside: the files in the tokenizer's folder.
            known: token -> id.
            special: ids of special and of added tokens.
            requested: the tokens that the user names for the end and the beginning of a document.
            model_ids: those that the tokenizer's file itself names.
        """
        self._names = {number: name for name, number in known.items()}
        self.vocab_size = max(self._names, default=-1) + 1
        path, (eod, bos) = beside.path, requested
        self.eod, self.bos = (
            find(beside, known, special, named, lambda i: text_may_hold(self, i))
            if token is None
            else asked_for(path, token, known, what)
            for find, named, token, what in (
                (end_of_document, model_ids[0], eod, "end-of-document"),
                (begin_of_document, model_ids[1], bos, "begin-of-text"),
            )
        )


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece `.model`."""

    engine = "sentencepiece"

    def __init__(self, path: Path, eod: Asked = None, bos: Asked = None) -> None:
        content, beside = path.read_bytes(), FilesBeside(path)
        self._model = model = sentencepiece_model(path, content)
        self._size = model.get_piece_size()
        known = {model.id_to_piece(i): i for i in range(self._size)}
        special = {i for i in known.values() if model.is_control(i) or model.is_unknown(i)}
        unread = known.keys() & beside.special
        for token, i in beside.added().items():
            if token not in known and i >= self._size:
                known[token] = i
                special.add(i)
        self._read_only(path, content, beside, known, unread)
        eos, first = model.eos_id(), model.bos_id()
        self._name_tokens(
            beside,
            known,
            special | {known[name] for name in unread},
            (eod, bos),
            (eos if eos >= 0 else None, first if first >= 0 else None),
        )
        ends = {self._names[i] for i in (self.eod, self.bos) if i is not None}
        self._read_only(path, content, beside, known, unread | ends)
        sampling = (beside.config.get("sp_model_kwargs") or {}).get("enable_sampling")
        self.switched_off = "sampling (sp_model_kwargs)" if sampling else ""
        llama = str(beside.config.get("tokenizer_class") or "").startswith("Llama")
        self.adds_bos = self.bos is not None and bool(beside.config.get("add_bos_token", llama))

    def _read_only(
        self,
        path: Path,
        content: bytes,
        beside: FilesBeside,
        known: dict[str, int],
        unread: Collection[str],
    ) -> None:
        """Opens the model so that some tokens are never read from text."""
        self._model = model = sentencepiece_model(path, never_read(content, unread))
        in_text = {
            token: i
            for token, i in beside.added().items()
            if token not in unread
            and token not in beside.special
            and known.get(token) == i
            # an id of the model itself that it finds anyway, or never
            and not (i < self._size and (model.is_control(i) or i in model.encode(token)))
        }
        self._added_text = AddedText(in_text, beside)

    def encode(self, text: str) -> list[int]:
        return self._added_text.encode(text, self._model.encode)

    def decode(self, ids: list[int]) -> str:
        names = {i: name for name, i in self._added_text.ids.items()}
        pieces = groupby(map(int, ids), lambda i: names.get(i))
        return "".join(
            name * len([*group])
            if name
            else self._model.decode([i for i in group if i < self._size])
            for name, group in pieces
        )

    def serialized(self) -> bytes:
        """Model as it encodes: symbols that are never read from text are control
        symbols here."""
        return self._model.serialized_model_proto()


class HuggingFaceTokenizer(Tokenizer):
    """A Hugging Face `tokenizer.json`, or a `vocab.json` with its merges."""

    def __init__(
        self, path: Path, eod: Asked = None, bos: Asked = None, merges: Path | None = None
    ) -> None:
        beside = FilesBeside(path)
        self._model = model = _huggingface_model(path, merges, beside)
        self.switched_off = switch_off(model)
        model.encode_special_tokens = True  # encode their characters as text, too
        model.no_truncation()
        model.no_padding()
        missing = add_listed(model, beside)
        known = model.get_vocab(with_added_tokens=True)
        used_ids = set(known.values())
        known |= {token: i for token, i in missing.items() if i not in used_ids}
        added = set(model.get_added_tokens_decoder()) | (set(known.values()) - used_ids)
        unread = known.keys() & beside.special
        mark_special(model, [name for name in unread if known[name] in added & used_ids])
        self._name_tokens(beside, known, added | {known[name] for name in unread}, (eod, bos))
        unread |= {self._names[i] for i in (self.eod, self.bos) if i is not None}
        # a word of the vocabulary that has a role (a pad_token "!") stays text, and is decoded
        mark_special(
            model,
            [
                name
                for name in unread
                if known[name] in used_ids
                and (known[name] in added or not text_may_hold(self, known[name]))
            ],
        )
        begins = model.encode("", add_special_tokens=True).ids[:1]
        adds_bos = merges is not None and bool(beside.config.get("add_bos_token"))
        self.adds_bos = self.bos is not None and (begins == [self.bos] or adds_bos)

    def encode(self, text: str) -> list[int]:
        return self._model.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        fast = self._fast
        encodings = [None if isinstance(fast, str) else fast.encode(text) for text in texts]
        return [self.encode(text) if ids is None else ids for text, ids in zip(texts, encodings)]

    @cached_property
    def _fast(self) -> TiktokenEngine | str:
        """tiktoken's engine, or why it is not used."""
        try:
            return TiktokenEngine(self._model)
        except ValueError as error:
            return str(error)

    @property
    def engine(self) -> str:  # type: ignore[override]
        return (
            f"tokenizers; no tiktoken: {self._fast}"
            if isinstance(self._fast, str)
            else "tiktoken, ids proved equal"
        )

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)

    def serialized(self) -> str:
        """tokenizer.json in which the tokens that are never read from text are special."""
        return self._model.to_str()


class TiktokenTokenizer(Tokenizer):
    """A tiktoken file, one base64 token and its rank per line, or a `tekken.json`."""

    engine = "tiktoken"

    def __init__(
        self, path: Path, eod: Asked = None, bos: Asked = None, tekken: dict[str, Any] | None = None
    ) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError(
                f"{path} needs the package tiktoken: pip install 'megatron5d[data]'"
            ) from error
        beside = FilesBeside(path)
        self.ranks = ranks = read_ranks(path) if tekken is None else read_tekken(path, tekken)
        special = ranks.special
        try:
            self._model = tiktoken.Encoding(
                path.stem,
                pat_str=ranks.pattern,
                mergeable_ranks=ranks.ranks,
                special_tokens=special,
            )
        except ValueError as error:
            raise ValueError(
                f"{path}: the pattern {ranks.pattern!r} cannot be used: {error}"
            ) from error
        self._in_text = set(ranks.in_text)
        self._special = {i for token, i in special.items() if token not in self._in_text}
        plain = {}
        if (eod, bos) != (None, None):
            plain = {token.decode("utf-8", "replace"): rank for token, rank in ranks.ranks.items()}
        self._name_tokens(beside, {**plain, **special}, set(special.values()), (eod, bos))
        self._in_text -= {self._names[i] for i in (self.eod, self.bos) if i is not None}
        self._special = {i for token, i in special.items() if token not in self._in_text}
        self.vocab_size = self._model.n_vocab
        self.adds_bos = ranks.adds_bos and self.bos is not None

    def encode(self, text: str) -> list[int]:
        if self.ranks.normal_form:
            text = unicodedata.normalize("NFC", text)
        pieces, in_text = _without_long_runs(text), self._in_text
        if not in_text:
            return [i for piece in pieces for i in self._model.encode_ordinary(piece)]
        encode = self._model.encode
        return [
            i
            for piece in pieces
            for i in encode(piece, allowed_special=in_text, disallowed_special=())
        ]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode([int(i) for i in ids if int(i) not in self._special])


def _without_long_runs(text: str) -> list[str]:
    """Cuts a text after every RUN characters that are all blank or all not: in longer runs
    tiktoken's stack ends."""
    cuts = [match.end() for match in _LONG_RUN.finditer(text)] if may_hold_long_run(text) else []
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]


def _huggingface_model(path: Path, merges: Path | None, beside: FilesBeside) -> Any:
    """The `tokenizers.Tokenizer` of a tokenizer.json, or of a vocab.json with its merges."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"{path} needs the package tokenizers: pip install 'megatron5d[data]'"
        ) from error
    try:
        if merges is not None:
            return byte_level_bpe(path, merges, beside)
        return tokenizers.Tokenizer.from_file(str(path))
    except ValueError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise ValueError(
            f"{path}: not a tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}"
        ) from error

"""Tokenizers: text to token ids and back, from sentencepiece, Hugging Face and tiktoken files.

Special tokens are never read from text: a document that contains the characters `<|endoftext|>` gets the ids of those
characters. No begin-of-sequence token is added.

Reads tiktoken files, and knows what they do not say: the pattern that splits text, and the special tokens.

The number of ranks in a file tells which published vocabulary it is. Any other vocabulary gets the cl100k pattern and
one special token after the last rank.

Source: openai/tiktoken, tiktoken_ext/openai_public.py; meta-llama/llama-models, llama3/tokenizer.py.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import Protocol

from megatron5d.config.json_file import parse_json

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_PATTERN = (
    CONTRACTIONS + r"""|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{CONTRACTIONS}?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{CONTRACTIONS}?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
LLAMA3_RANKS = 128_000
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]
LLAMA3_NUM_SPECIAL = 256

# ranks in the file -> (pattern, special tokens)
PUBLISHED: dict[int, tuple[str, dict[str, int]]] = {
    50256: (GPT2_PATTERN, {"<|endoftext|>": 50256}),
    50280: (GPT2_PATTERN, {"<|endoftext|>": 50256}),  # p50k_base leaves a gap at 50256
    100256: (CL100K_PATTERN, {"<|endoftext|>": 100257, "<|endofprompt|>": 100276}),
    199998: (O200K_PATTERN, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    LLAMA3_RANKS: (
        CL100K_PATTERN,
        {
            (LLAMA3_SPECIAL[i] if i < len(LLAMA3_SPECIAL) else f"<|special_{i}|>"): LLAMA3_RANKS + i
            for i in range(LLAMA3_NUM_SPECIAL)
        },
    ),
}


def looks_like_ranks(head: bytes) -> bool:
    """Whether a file with this beginning is a list of base64 tokens and ranks."""
    return re.fullmatch(rb"[A-Za-z0-9+/]+={0,2} \d+\r?", head.split(b"\n", 1)[0]) is not None


def read_ranks(path: Path) -> tuple[dict[bytes, int], str, dict[str, int]]:
    """Reads a tiktoken file.

    Args:
        path: of the file.

    Returns:
        token -> rank; the pattern that splits text; special token -> id.

    Raises:
        ValueError: a line is not a base64 token and a rank (names the line), two tokens have the same rank, or a single
            byte is not a token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"{path}:{number}: {line[:60]!r} is not 'base64-token rank'") from None
    if len(set(ranks.values())) != len(ranks):
        raise ValueError(
            f"{path}: {len(ranks)} tokens share {len(set(ranks.values()))} ranks; each rank is one token's"
        )
    if lacking := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(
            f"{path}: {len(lacking)} of the 256 bytes are no tokens (0x{lacking[0]:02x} is the first), and a text that "
            "has them could not be encoded: the file is not whole"
        )
    after = max(ranks.values()) + 1
    return ranks, *PUBLISHED.get(len(ranks), (CL100K_PATTERN, {"<|endoftext|>": after}))


# Names of the end-of-document token in published tokenizers, the more specific ones first.
EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek
    "<eod>",
    "</s>",
    "<eos>",
    "<|im_end|>",
)


RUN = 25_000  # characters, as in Llama 3's own tokenizer
_LONG_RUN = re.compile(rf"\s{{{RUN}}}|\S{{{RUN}}}")


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eod(self) -> int | None:
        """Id of the end-of-document token; None = it has none."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""


def load_tokenizer(path: str | os.PathLike[str], eod: str | int | None = None) -> Tokenizer:
    """Opens a tokenizer file of any kind.

    Args:
        path: a sentencepiece `.model`, a Hugging Face `tokenizer.json`, a tiktoken file of base64 ranks, or a folder
            with one of them. The kind is recognised by content, since Llama 3's tiktoken file is `tokenizer.model`.
        eod: token or id that ends a document; None = the file's own end-of-sequence token, or a usual name.

    Returns:
        The tokenizer.

    Raises:
        ValueError: the file is missing, damaged or of an unknown kind, its package is not installed, or `eod` is not in
            its vocabulary.
    """
    file = tokenizer_file(path)
    with file.open("rb") as opened:
        head = opened.read(4096)
    if not head:
        raise ValueError(f"{file}: the tokenizer file is empty")
    if head.lstrip()[:1] == b"{":
        return HuggingFaceTokenizer(file, eod)
    if looks_like_ranks(head):
        return TiktokenTokenizer(file, eod)
    return SentencePieceTokenizer(file, eod)


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """The file that `load_tokenizer` would read: `path` itself, or the one inside a folder.

    Raises:
        ValueError: there is no such file.
    """
    path = Path(path)
    if path.is_dir():
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer.tiktoken", "qwen.tiktoken"):
            if (path / name).is_file():
                return path / name
        raise ValueError(f"{path}: the folder has no tokenizer.json, tokenizer.model or *.tiktoken file")
    if not path.is_file():
        raise ValueError(f"{path}: no such tokenizer file")
    return path


class SentencePieceTokenizer:
    """A sentencepiece `.model`."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        try:
            import sentencepiece
        except ImportError as error:
            raise ValueError(f"{path} needs the package sentencepiece: pip install sentencepiece") from error
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:
            raise ValueError(f"{path}: not a sentencepiece model, tokenizer.json or tiktoken file ({error})") from error
        self.vocab_size: int = self._model.get_piece_size()
        known = {self._model.id_to_piece(i): i for i in range(self.vocab_size)}
        usual = self._model.eos_id()
        self.eod = _find_eod(path, eod, known, usual if usual >= 0 else None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self._model.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return self._model.decode([int(i) for i in ids])


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"{path} needs the package tokenizers: pip install 'megatron5d[data]'") from error
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ValueError(
                f"{path}: not a tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}"
            ) from error
        self._model.encode_special_tokens = True  # encode their characters as text, too
        self._model.no_truncation()
        self._model.no_padding()
        known = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(known.values(), default=-1) + 1
        self.eod = _find_eod(path, eod, known, known.get(self._eos_of_config(path)))

    @staticmethod
    def _eos_of_config(path: Path) -> str:
        """The `eos_token` in tokenizer_config.json beside the file; "" where there is none."""
        config = path.with_name("tokenizer_config.json")
        try:
            eos = parse_json(config.read_bytes()).get("eos_token") if config.is_file() else None
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{config} is no JSON object of settings: {error}") from error
        return str(eos.get("content", "") if isinstance(eos, dict) else eos or "")

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return self._model.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=True)


class TiktokenTokenizer:
    """A tiktoken file: one base64 token and its rank per line."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        try:
            import tiktoken
        except ImportError as error:
            raise ValueError(f"{path} needs the package tiktoken: pip install 'megatron5d[data]'") from error
        ranks, pattern, special = read_ranks(path)
        self._special = set(special.values())
        self._model = tiktoken.Encoding(path.stem, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.vocab_size: int = self._model.n_vocab
        plain = {token.decode("utf-8", "replace"): rank for token, rank in ranks.items()} if eod is not None else {}
        self.eod = _find_eod(path, eod, {**plain, **special}, None)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens."""
        return [i for part in _without_long_runs(text) for i in self._model.encode_ordinary(part)]

    def decode(self, ids: list[int]) -> str:
        """Text of ids."""
        return self._model.decode([int(i) for i in ids if int(i) not in self._special])


def _without_long_runs(text: str) -> list[str]:
    """The text, cut after every RUN characters that are all blank or all not: in longer runs tiktoken's stack ends."""
    cuts = [match.end() for match in _LONG_RUN.finditer(text)] if len(text) >= RUN else []
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]


def _find_eod(path: Path, wanted: str | int | None, known: dict[str, int], usual: int | None) -> int | None:
    """The id of the end-of-document token.

    Args:
        path: of the tokenizer, for the message.
        wanted: the token or id that was asked for; None = none.
        known: token -> id.
        usual: the file's own end-of-sequence token.

    Returns:
        The one asked for, else `usual`, else the first of EOD_NAMES that is known; None = there is none.
    """
    if wanted is None:
        return usual if usual is not None else next((known[name] for name in EOD_NAMES if name in known), None)
    try:
        number = int(wanted)  # digits are an id, even if they are a token as well
    except ValueError:
        number = known.get(str(wanted), -1)
    if number not in known.values():
        usual_names = [name for name in EOD_NAMES if name in known]
        raise ValueError(f"{path}: end-of-document token {wanted!r} is not in the vocabulary; it has {usual_names}")
    return number

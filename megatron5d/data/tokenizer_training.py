"""Trains BPE tokenizers that decode every text back unchanged: sentencepiece, or byte-level as a tokenizer.json."""

import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megatron5d.data.bpe_files import PATTERNS, byte_level

EOD = "<|endoftext|>"
LEAST_PIECES = 258  # of a sentencepiece vocabulary without merges: all bytes, unknown and EOD
LEAST_TOKENS = 257  # of a byte-level one: all bytes and EOD
MAX_PIECE_BYTES = 1 << 16  # longer texts are divided, because sentencepiece drops long inputs silently

SETTINGS: dict[str, Any] = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.9995,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "max_sentence_length": 4 * MAX_PIECE_BYTES,
    "unk_id": 0,
    "eos_id": 1,
    "eos_piece": EOD,
    "bos_id": -1,
    "pad_id": -1,
    "minloglevel": 2,
}


def train_sentencepiece(texts: Iterable[str], vocab_size: int, out: str | os.PathLike[str]) -> Path:
    """Trains a tokenizer and writes it.

    There is no normalisation and no added space, and all 256 bytes are in the vocabulary, so decode(encode(text)) is
    the text (except for U+2581, sentencepiece's own sign for a space). Line ends take part in merges, which suits
    source code.

    Args:
        vocab_size: number of ids, with special ones and bytes.
        out: path of the `.model` file; the suffix may be left out.

    Returns:
        The path of the `.model` file.

    Raises:
        ValueError: there is no text, or sentencepiece cannot make that number of pieces of it; says why. Errors of
            `texts` are passed on.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError("training a tokenizer needs the package sentencepiece: pip install sentencepiece") from error
    if vocab_size < LEAST_PIECES:
        raise ValueError(f"--vocab-size {vocab_size} is below {LEAST_PIECES}: 256 bytes, 'unknown' and {EOD}")
    model = _learn(sentencepiece.SentencePieceTrainer, _some(_pieces(texts)), vocab_size)
    return _write(Path(f"{os.fspath(out).removesuffix('.model')}.model"), model)


def train_byte_level(
    texts: Iterable[str], vocab_size: int, out: str | os.PathLike[str], pattern: str = "cl100k"
) -> Path:
    """Trains a byte-level BPE and writes a folder that AutoTokenizer opens.

    Args:
        vocab_size: number of ids: EOD is 0, the 256 bytes follow, then the merges.
        out: the folder for tokenizer.json and tokenizer_config.json.
        pattern: a name of PATTERNS, which splits text into the pieces within which tokens are merged.

    Returns:
        The path of the tokenizer.json.

    Raises:
        ValueError: there is no text, or the vocabulary is too small, or larger than the merges that the texts give.
            Errors of `texts` are passed on.
    """
    try:
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError("training a tokenizer.json needs the package tokenizers: pip install tokenizers") from error
    if vocab_size < LEAST_TOKENS:
        raise ValueError(f"--vocab-size {vocab_size} is below {LEAST_TOKENS}: 256 bytes and {EOD}")
    model = byte_level(models.BPE(), PATTERNS[pattern])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(_some(_pieces(texts)), trainer)
    if model.get_vocab_size() < vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: these texts give {model.get_vocab_size()} tokens; give that many, or more text"
        )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOD, "clean_up_tokenization_spaces": False}
    _write(Path(out) / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    return _write(Path(out) / "tokenizer.json", model.to_str(pretty=True).encode())


def _some(pieces: Iterator[str]) -> Iterator[str]:
    """Returns the pieces unchanged. Raises ValueError: there is none."""
    first = next(pieces, None)
    if first is None:
        raise ValueError("--input: every file is empty, there is nothing to train on")
    return chain([first], pieces)


def _write(path: Path, content: bytes) -> Path:
    """Writes a file, all or nothing, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return path


def _learn(trainer: Any, pieces: Iterable[str], vocab_size: int) -> bytes:
    """Trains a `.model`. An error of `pieces` is raised itself, not what sentencepiece makes of it."""
    failed: list[BaseException] = []

    def watched() -> Iterator[str]:
        try:
            yield from pieces
        except BaseException as error:
            failed.append(error)
            raise

    model = io.BytesIO()
    try:
        trainer.train(sentence_iterator=watched(), model_writer=model, vocab_size=vocab_size, **SETTINGS)
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        reason = re.sub(r"^Internal: \S+ \[.*?\]\s*", "", str(error), flags=re.IGNORECASE)
        raise ValueError(f"--vocab-size {vocab_size}: sentencepiece refuses: {reason}") from error
    return model.getvalue()


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yields the texts in pieces of at most MAX_PIECE_BYTES characters, divided at line ends where possible."""
    for text in texts:
        while len(text) > MAX_PIECE_BYTES:
            cut = text.rfind("\n", 0, MAX_PIECE_BYTES) + 1 or MAX_PIECE_BYTES
            yield text[:cut]
            text = text[cut:]
        if text:
            yield text

"""Train a tokenizer, or show how one encodes a text.

    python tools/tokenizer.py train --input src/ --glob '*.py' --vocab-size 4096 --out data/tok
    python tools/tokenizer.py train --input src/ --format tokenizer.json --out data/bpe
    python tools/tokenizer.py show data/tok.model --text "def f(x): return x"

`train` makes a sentencepiece BPE with byte fallback, or a byte-level BPE in a folder for
AutoTokenizer. `show` opens sentencepiece, tokenizer.json, tekken.json, vocab.json with merges.txt,
and tiktoken files. Exit codes: 0 done; 1 the text does not survive a round trip; 2 for bad input.
"""

import io
import json
import os
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron5d.checkpoint.hf.files import TOKENIZER_FILES
from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.config.json_file import write_whole
from megatron5d.data.bpe_files import PATTERNS, byte_level
from megatron5d.data.corpus import kinds_of, list_files, units
from megatron5d.data.documents import BadLine, documents
from megatron5d.data.tokenizer import changes_text, load_tokenizer
from megatron5d.tools.options import add_corpus, add_json
from megatron5d.topology.owned_output import check_not_read, owned, staged


def arguments() -> Namespace:
    """Parses the command line."""
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train a BPE")
    add_corpus(train)
    train.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        help="ids, with the 256 bytes and special tokens (default 4096)",
    )
    train.add_argument(
        "--max-mb",
        type=float,
        default=100.0,
        help="MB of text to train on (default: the first 100)",
    )
    train.add_argument(
        "--format",
        choices=["sentencepiece", "tokenizer.json"],
        default="sentencepiece",
        help="kind of tokenizer (default: sentencepiece)",
    )
    train.add_argument(
        "--pattern",
        choices=list(PATTERNS),
        default="cl100k",
        help="how a tokenizer.json splits text into words (default: cl100k)",
    )
    train.add_argument(
        "--out",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.model, or tokenizer.json in the folder PREFIX",
    )
    train.add_argument("--overwrite", action="store_true", help="replace the tokenizer at --out")
    show = commands.add_parser("show", help="describe a tokenizer; encode and decode a text")
    show.add_argument("file", help="tokenizer file, or a folder with one")
    show.add_argument("--text", help="text to encode; '-' reads stdin")
    for command in (train, show):
        add_json(command)
    args = parser.parse_args()
    writes_file = args.command == "train" and args.format == "sentencepiece"
    if writes_file and args.out.endswith((os.sep, ".")):
        parser.error(f"--out {args.out} does not end in a file name")
    return args


EOD = "<|endoftext|>"
MIN_SENTENCEPIECES = 258  # all bytes, unknown and EOD
MIN_TOKENS = 257  # of a byte-level BPE: all bytes and EOD
# longer texts are divided, because sentencepiece drops long inputs silently
MAX_PIECE_BYTES = 1 << 16

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
    """Trains a sentencepiece BPE and writes it.

    It does not normalize text nor add spaces, and all 256 bytes are in the vocabulary, so that
    decode(encode(text)) is the text (except for U+2581, sentencepiece's own sign for a space).
    Merges may include line ends, which suits source code.

    Args:
        vocab_size: number of ids, with special tokens and bytes.
        out: path of the `.model` file, with or without its suffix.

    Returns:
        The path of the `.model` file.

    Raises:
        ValueError: there is no text, or sentencepiece cannot make that number of pieces of it; says
            why. Errors of `texts` are passed on.
    """
    try:
        import sentencepiece
    except ImportError as error:
        raise ValueError(
            "training requires the package sentencepiece: pip install sentencepiece"
        ) from error
    if vocab_size < MIN_SENTENCEPIECES:
        raise ValueError(
            f"--vocab-size {vocab_size} is below {MIN_SENTENCEPIECES}: 256 bytes, unknown and {EOD}"
        )
    pieces = _not_empty(_pieces(texts))
    model = _train_model(sentencepiece.SentencePieceTrainer, pieces, vocab_size)
    return _write(Path(f"{os.fspath(out).removesuffix('.model')}.model"), model)


def train_byte_level(
    texts: Iterable[str], vocab_size: int, out: str | os.PathLike[str], pattern: str = "cl100k"
) -> Path:
    """Trains a byte-level BPE and writes a folder for AutoTokenizer.

    Args:
        vocab_size: number of ids: EOD is 0, the 256 bytes follow, then the merges.
        out: the folder for tokenizer.json and tokenizer_config.json.
        pattern: a name of PATTERNS, which splits text into the words within which tokens are
            merged.

    Returns:
        The path of the tokenizer.json.

    Raises:
        ValueError: there is no text, or the vocabulary is too small, or larger than the merges of
            the texts. Errors of `texts` are passed on.
    """
    try:
        from tokenizers import models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            "training a tokenizer.json requires the package tokenizers: pip install tokenizers"
        ) from error
    if vocab_size < MIN_TOKENS:
        raise ValueError(f"--vocab-size {vocab_size} is below {MIN_TOKENS}: 256 bytes and {EOD}")
    model = byte_level(models.BPE(), PATTERNS[pattern])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(_not_empty(_pieces(texts)), trainer)
    if (size := model.get_vocab_size()) < vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: these texts give {size} tokens; lower it, or add text"
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOD,
        "clean_up_tokenization_spaces": False,
    }
    _write(Path(out) / "tokenizer_config.json", (json.dumps(settings, indent=2) + "\n").encode())
    return _write(Path(out) / "tokenizer.json", model.to_str(pretty=True).encode())


def _not_empty(pieces: Iterator[str]) -> Iterator[str]:
    """Gives the pieces unchanged. Raises ValueError where there are none."""
    first = next(pieces, None)
    if first is None:
        raise ValueError("--input: every file is empty")
    return chain([first], pieces)


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)
    return path


def _train_model(trainer: Any, pieces: Iterable[str], vocab_size: int) -> bytes:
    """Trains a `.model`; raises an error of `pieces` itself, not sentencepiece's message on it."""
    errors: list[BaseException] = []

    def observed() -> Iterator[str]:
        try:
            yield from pieces
        except BaseException as error:
            errors.append(error)
            raise

    model = io.BytesIO()
    try:
        trainer.train(
            sentence_iterator=observed(), model_writer=model, vocab_size=vocab_size, **SETTINGS
        )
    except RuntimeError as error:
        # sentencepiece wraps an error of its iterator
        if errors:
            raise errors[0] from None
        # its messages begin with a place in its sources
        reason = re.sub(r"^Internal: \S+ \[.*?\]\s*", "", str(error), flags=re.IGNORECASE)
        raise ValueError(f"--vocab-size {vocab_size}: sentencepiece refuses: {reason}") from error
    return model.getvalue()


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Divides texts into pieces of at most MAX_PIECE_BYTES characters, at line ends if possible."""
    for text in texts:
        while len(text) > MAX_PIECE_BYTES:
            cut = text.rfind("\n", 0, MAX_PIECE_BYTES) + 1 or MAX_PIECE_BYTES
            yield text[:cut]
            text = text[cut:]
        if text:
            yield text


def read_texts(
    files: Sequence[Path], keys: Sequence[str], max_bytes: float, skip_bad: bool
) -> Iterator[str]:
    """Yields the texts of a corpus, until `max_bytes` are read."""
    num_bytes, total = 0, sum(file.stat().st_size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=None) as bar:
        for unit in units(files, kinds=kinds_of(files, keys=keys)):
            for document in documents(unit, keys):
                if isinstance(document, BadLine):
                    if skip_bad:
                        continue
                    raise ValueError(f"{document} (--skip-bad skips such lines)")
                for text in document:
                    yield text
                    num_bytes += len(text.encode())
                if num_bytes >= max_bytes:
                    return
            bar.update(unit.done_bytes - bar.n)


def train(args: Namespace) -> dict:
    """Trains and writes PREFIX.model, or PREFIX/tokenizer.json."""
    start = time.monotonic()
    files = list_files(args.input, args.glob, args.exclude)
    texts = read_texts(files, args.json_keys, args.max_mb * 1e6, args.skip_bad)

    if args.format == "sentencepiece":
        path = Path(f"{args.out.removesuffix('.model')}.model")
        check_not_read([path], files)
        with owned(path):
            if path.exists() and not args.overwrite:
                raise ValueError(f"{path} is there already; --overwrite replaces it")
            train_sentencepiece(texts, args.vocab_size, path)
    else:
        path = Path(args.out) / "tokenizer.json"
        check_not_read([path, path.with_name("tokenizer_config.json")], files)
        with staged(args.out, lambda folder: _check_vacant(folder, args.overwrite)) as staging:
            train_byte_level(texts, args.vocab_size, staging, args.pattern)
    tokenizer = load_tokenizer(path)
    return {
        "model": str(path),
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "seconds": round(time.monotonic() - start, 3),
    }


def _check_vacant(folder: Path, overwrite: bool) -> None:
    """Raises ValueError where a folder has files of a tokenizer that would be replaced, or read
    together with new ones."""
    present = {path.name for pattern in TOKENIZER_FILES for path in folder.glob(pattern)}
    if mixed := sorted(present - {"tokenizer.json", "tokenizer_config.json"}):
        raise ValueError(
            f"--out {folder} already holds {', '.join(mixed)}, which would mix with the new files; "
            "give another folder"
        )
    if present and not overwrite:
        raise ValueError(
            f"--out {folder} already holds {', '.join(sorted(present))}; --overwrite replaces it"
        )


def show(args: Namespace) -> dict:
    """Describes a tokenizer, and encodes and decodes a text."""
    tokenizer = load_tokenizer(args.file)
    description: dict[str, Any] = {
        "kind": type(tokenizer).__name__,
        "engine": tokenizer.engine,
        "vocab_size": tokenizer.vocab_size,
    }
    for role, number in (("eod", tokenizer.eod), ("bos", tokenizer.bos)):
        description[role] = number
        description[f"{role}_token"] = None if number is None else tokenizer.token(number)
    if tokenizer.switched_off:
        description["switched_off"] = tokenizer.switched_off
    if changes := changes_text(tokenizer):
        description["does_not_keep"] = changes
    if args.text is None:
        return description
    text = sys.stdin.read() if args.text == "-" else args.text
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    return {
        **description,
        "ids": ids,
        "pieces": [tokenizer.decode([i]) for i in ids],
        "decoded": decoded,
        "round_trip": decoded == text,
    }


def run(args: Namespace) -> int:
    result = train(args) if args.command == "train" else show(args)
    if args.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            quoted = name in ("decoded", "pieces")
            print(f"{name + ':':12} {value!r}" if quoted else f"{name + ':':12} {value}")
    return 0 if result.get("round_trip", True) else 1


def main() -> int:
    args = arguments()
    return exit_code("tokenizer", lambda: run(args), getattr(args, "out", None))


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

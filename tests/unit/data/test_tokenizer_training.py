"""Training of tokenizers, against the packages that read them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron5d.data.bpe_files import PATTERNS
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools.tokenizer import train_byte_level, train_sentencepiece

ROOT = Path(__file__).resolve().parents[3]
CORPUS = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests" / "unit" / "data").glob("*.py"))
]
TEXTS = [
    "",
    " ",
    "def f(x):\n        return  x\n\n\ttab\r\n",
    "naïve CAFÉ 中文 👩‍👩‍👧 \u200b\x00",
    "a <|endoftext|> b",
    "don't I'LL 've",
    "x=3.14 12345\xb2",
    "\r\n\r\n a\tb",
    "e\u0301 \xe9",
    "\u3000\xa0x",
    "a\u200d",
]


def tool(*arguments, **options):
    return subprocess.run(
        [sys.executable, "tools/tokenizer.py", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        **options,
    )


def test_tool_trains_and_shows(tmp_path):
    pytest.importorskip("sentencepiece")
    made = tool(
        "train",
        "--input",
        "tests/unit/data",
        "--glob",
        "*.py",
        "--vocab-size",
        600,
        "--out",
        tmp_path / "t",
        "--json",
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["vocab_size"] == 600
    shown = tool("show", tmp_path / "t.model", "--text", "-", "--json", input="def f():\n\tpass")
    found = json.loads(shown.stdout)
    assert (
        shown.returncode == 0
        and found["round_trip"]
        and "".join(found["pieces"]) == "def f():\n\tpass"
    )
    refused = tool("show", tmp_path / "nowhere.model")
    assert (
        refused.returncode == 2
        and "no such tokenizer file" in refused.stderr
        and "Traceback" not in refused.stderr
    )
    nameless = tool("train", "--input", "tests/unit/data", "--out", f"{tmp_path}/folder/")
    assert (
        nameless.returncode == 2
        and "does not end in a file name" in nameless.stderr
        and not (tmp_path / "folder").exists()
    )


def test_sentencepiece_is_trained_to_size(tmp_path):
    pytest.importorskip("sentencepiece")
    file = train_sentencepiece(CORPUS, 1000, tmp_path / "made" / "tok")
    tokenizer = load_tokenizer(file)
    assert file.name == "tok.model"
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000, 1)
    text = CORPUS[0]
    assert len(tokenizer.encode(text)) < len(text) / 2


def test_long_documents_are_not_dropped_from_training(tmp_path):
    pytest.importorskip("sentencepiece")
    words = "zebra quagga okapi " * 30_000  # far beyond sentencepiece's limit for one input
    path = train_sentencepiece([words], 300, tmp_path / "t")
    assert len(load_tokenizer(path).encode("quagga okapi")) <= 6


def test_impossible_vocabulary_gives_sentencepieces_reason(tmp_path):
    pytest.importorskip("sentencepiece")
    with pytest.raises(ValueError, match="--vocab-size 60000.*Vocabulary size too high.*<= "):
        train_sentencepiece(["a b c"], 60000, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_the_texts_is_told_as_it_is(tmp_path):
    pytest.importorskip("sentencepiece")

    def texts():
        yield "a b c"
        raise ValueError("corpus.jsonl:2: no field 'text'")

    with pytest.raises(ValueError, match="^corpus.jsonl:2: no field 'text'$"):
        train_sentencepiece(texts(), 270, tmp_path / "t")


@pytest.mark.parametrize(
    ("train", "texts", "vocab_size", "reason"),
    [
        (train_sentencepiece, [""], 600, "every file is empty"),
        (train_sentencepiece, ["a"], 257, "258"),
        (train_byte_level, [""], 600, "every file is empty"),
        (train_byte_level, ["a"], 256, "257"),
        (train_byte_level, ["ab ab"], 600, "--vocab-size 600: these texts give 259 tokens"),
    ],
)
def test_what_cannot_be_trained_is_said_in_our_words(tmp_path, train, texts, vocab_size, reason):
    with pytest.raises(ValueError, match=reason):
        train(texts, vocab_size, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("pattern", sorted(PATTERNS))
def test_a_trained_byte_level_bpe_is_what_transformers_and_tiktoken_make_of_it(tmp_path, pattern):
    transformers = pytest.importorskip("transformers")
    tiktoken = pytest.importorskip("tiktoken")
    made = tool(
        *(
            "train",
            "--input",
            "tests/unit/data",
            "--glob",
            "*.py",
            "--format",
            "tokenizer.json",
            "--pattern",
            pattern,
        ),
        *("--vocab-size", 700, "--out", tmp_path / "t", "--json"),
    )
    found = json.loads(made.stdout)
    assert made.returncode == 0 and (found["vocab_size"], found["eod"]) == (700, 0)
    ours, theirs = (
        load_tokenizer(tmp_path / "t"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "t"),
    )
    assert theirs.eos_token_id == ours.eod == 0
    # the package has a function of this name, too
    slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    letters = {letter: byte for byte, letter in slow.bytes_to_unicode().items()}
    vocab = theirs.get_vocab()
    ranks = {
        bytes(letters[c] for c in token): i
        for token, i in vocab.items()
        if token != "<|endoftext|>"
    }
    third = tiktoken.Encoding(
        "x", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
    )
    for text in [*TEXTS, *CORPUS[:2]]:
        ids = ours.encode(text)
        assert (
            ids == third.encode_ordinary(text) == theirs(text, split_special_tokens=True).input_ids
        )
        assert ours.decode(ids) == text

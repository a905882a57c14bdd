"""Tokenizers of the three kinds, each against the package or algorithm it stands for."""

import base64
import json
import re
import sys
from pathlib import Path

import pytest

from megatron5d.data.bpe_files import CL100K_PATTERN, GPT2_PATTERN, O200K_PATTERN
from megatron5d.data.tokenizer import RUN, load_tokenizer
from megatron5d.tools.tokenizer import train_sentencepiece

ROOT = Path(__file__).resolve().parents[3]
CORPUS = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests" / "unit" / "data").glob("*.py"))
]
TEXTS = [
    "",
    " ",
    "def f(x):\n        return  x\n\n\ttab\r\n",
    "  leading and trailing  ",
    "naïve café 中文 👩‍👩‍👧 \u200b\x00\x07",
    "a <|endoftext|> b </s> <unk> <0x41>",
    "12345 3.14",
]
AWKWARD = [
    "don't I'LL 've",
    "x=3.14 12345\xb2",
    "\r\n\r\n a\tb",
    "e\u0301 \xe9",
    "\u3000\xa0x",
    "[END]</s>",
    "a\ud7a3\u200d",
]


@pytest.fixture(scope="module")
def sentencepiece_file(tmp_path_factory):
    pytest.importorskip("sentencepiece")
    return train_sentencepiece(CORPUS, 1000, tmp_path_factory.mktemp("tok") / "made" / "tok")


@pytest.fixture(scope="module")
def hugging_face_file(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    path = tmp_path_factory.mktemp("hf") / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture(scope="module")
def tiktoken_file(tmp_path_factory):
    pytest.importorskip("tiktoken")
    ranks = [bytes([b]) for b in range(256)] + [b"ab", b"cd", b"abcd", b" ab"]
    path = tmp_path_factory.mktemp("tik") / "tokenizer.model"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)))
    beside = {"pattern": "cl100k", "added_tokens_decoder": {"260": {"content": "<|endoftext|>"}}}
    path.with_name("tokenizer_config.json").write_text(json.dumps(beside))
    return path


@pytest.fixture(params=["sentencepiece_file", "hugging_face_file", "tiktoken_file"])
def tokenizer_path(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS + CORPUS[:3])
def test_every_text_comes_back_unchanged(tokenizer_path, text):
    tokenizer = load_tokenizer(tokenizer_path)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids  # characters that spell a special token are characters


def test_eod_is_found_and_not_shown(tokenizer_path):
    tokenizer = load_tokenizer(tokenizer_path)
    assert tokenizer.eod is not None and tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.decode([*tokenizer.encode("x"), tokenizer.eod]) == "x"


def test_bos_of_a_hugging_face_template_is_not_added(hugging_face_file):
    assert 0 not in load_tokenizer(hugging_face_file).encode("hello")


def test_eos_of_the_config_beside_it_wins(hugging_face_file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(hugging_face_file.read_bytes())
    for eos in ("<s>", {"content": "<s>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(tmp_path).eod == 0  # the folder is enough
    assert load_tokenizer(tmp_path, eod="<|endoftext|>").eod == 1
    # id 7, not the digit
    assert load_tokenizer(tmp_path, eod=7).eod == load_tokenizer(tmp_path, eod="7").eod == 7
    with pytest.raises(
        ValueError, match="'<nope>' is not in the vocabulary; it has .*<|endoftext|>"
    ):
        load_tokenizer(tmp_path, eod="<nope>")


def test_tiktoken_takes_runs_of_any_length(tiktoken_file):
    """Where they are longer than RUN they are cut; in a million blanks its own stack ends, and the
    process with it."""
    tokenizer = load_tokenizer(tiktoken_file)
    text = "ab " * 20000 + "a" + " " * 1_100_000 + "b" * (2 * RUN + 1)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("cd" + "ab" * (RUN // 2)) == tokenizer.encode(
        "cd" + "ab" * (RUN // 2 - 1)
    ) + tokenizer.encode("ab")
    within = "ab" * (RUN // 2 - 1) + " ab"
    assert tokenizer.encode(within) == tokenizer._model.encode_ordinary(within)


def test_tiktoken_merges_by_rank(tiktoken_file):
    tokenizer = load_tokenizer(tiktoken_file)
    assert tokenizer.encode("abcd cd ab") == [258, ord(" "), 257, 259]
    assert (tokenizer.vocab_size, tokenizer.eod) == (261, 260)


def made_up_ranks(path, count):
    tokens = [bytes([b]) for b in range(256)] + [b"%06d" % i for i in range(count - 256)]
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    return path


@pytest.mark.parametrize(
    ("num_ranks", "vocab", "bos", "eod", "pieces"),
    [
        (50256, 50257, None, 50256, ["I", "'", "M", " Hello", "World", " 1234"]),
        (100256, 100277, None, 100257, ["I", "'M", " HelloWorld", " ", "123", "4"]),
        (128000, 128256, 128000, 128001, ["I", "'M", " HelloWorld", " ", "123", "4"]),
        (151643, 151851, None, 151643, ["I", "'M", " HelloWorld", " ", "1", "2", "3", "4"]),
        (163584, 163840, 163584, 163585, ["I'M", " Hello", "World", " ", "123", "4"]),
        (199998, 200019, None, 199999, ["I'M", " Hello", "World", " ", "123", "4"]),
        (200000, 202048, 200000, 200001, ["I'M", " Hello", "World", " ", "123", "4"]),
    ],
)
def test_published_tiktoken_vocabularies_are_known_by_their_size(
    tmp_path, num_ranks, vocab, bos, eod, pieces
):
    pytest.importorskip("tiktoken")
    regex = pytest.importorskip("regex")
    tokenizer = load_tokenizer(made_up_ranks(tmp_path / "x.tiktoken", num_ranks))
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (vocab, bos, eod)
    cut = regex.findall(tokenizer._model._pat_str, "I'M HelloWorld 1234", regex.VERSION1)
    assert (
        [piece for piece in cut if piece] == pieces if num_ranks != 50256 else cut[:2] == ["I", "'"]
    )
    if num_ranks == 151643:  # Qwen's own tokenizer composes characters first
        assert tokenizer.encode("e\u0301") == tokenizer.encode("\xe9")


@pytest.mark.parametrize("num_ranks", [100256, 128000, 151643])
def test_a_pattern_of_ones_own_replaces_the_published_one_and_nothing_else(tmp_path, num_ranks):
    pytest.importorskip("tiktoken")
    published = load_tokenizer(made_up_ranks(tmp_path / "x.tiktoken", num_ranks))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pattern": r"\S|\s"}))
    own = load_tokenizer(tmp_path / "x.tiktoken")
    assert own._model._pat_str == r"\S|\s" != published._model._pat_str
    # Qwen composes characters first, the others do not
    for text in ("e\u0301", "\xe9", "\u1100\u1161"):
        assert own.encode(text) == published.encode(text)
    told = ("vocab_size", "eod", "bos", "adds_bos", "_special")
    assert [getattr(own, name) for name in told] == [getattr(published, name) for name in told]


def test_ranks_of_an_unknown_vocabulary_are_refused_with_a_file_that_describes_them(tmp_path):
    """Pattern and special tokens cannot be guessed; what the message prints can be written into
    that file."""
    pytest.importorskip("tiktoken")
    path = made_up_ranks(tmp_path / "tokenizer.model", 300)
    with pytest.raises(
        ValueError, match="a vocabulary of 300 ranks is none of those known.*tokenizer.json"
    ) as refused:
        load_tokenizer(path)
    beside = path.with_name("tokenizer_config.json")
    example = re.search(r"\{.*\}", str(refused.value))[0]
    assert str(beside) in str(refused.value)
    beside.write_text(example)
    for tokenizer in (load_tokenizer(path), load_tokenizer(tmp_path)):
        assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.token(300)) == (
            301,
            300,
            "<|endoftext|>",
        )
    beside.write_text(json.dumps({**json.loads(example), "pattern": "("}))
    with pytest.raises(ValueError, match=r"pattern '\(' cannot be used"):
        load_tokenizer(path)
    beside.write_text(json.dumps({**json.loads(example), "pattern": "a+|."}))
    assert load_tokenizer(path).encode("aab") == [97, 97, 98]


def test_patterns_cut_text_as_published():
    regex = pytest.importorskip("regex")
    text = "I'll say HelloWorld 12345 times:\n\n  ok!!\tdone"
    cut = {
        GPT2_PATTERN: [
            "I",
            "'ll",
            " say",
            " HelloWorld",
            " 12345",
            " times",
            ":",
            "\n\n ",
            " ok",
            "!!",
            "\t",
            "done",
        ],
        CL100K_PATTERN: [
            "I",
            "'ll",
            " say",
            " HelloWorld",
            " ",
            "123",
            "45",
            " times",
            ":\n\n",
            " ",
            " ok",
            "!!",
            "\tdone",
        ],
        O200K_PATTERN: [
            "I'll",
            " say",
            " Hello",
            "World",
            " ",
            "123",
            "45",
            " times",
            ":\n\n",
            " ",
            " ok",
            "!!",
            "\tdone",
        ],
    }
    for pattern, pieces in cut.items():
        assert regex.findall(pattern, text) == pieces, pattern


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "no such tokenizer file"),
        ("empty.model", b"", "is empty"),
        ("noise.model", b"\x01\x02not a model", "not a sentencepiece model"),
        ("tokenizer.json", b'{"nothing": 1}', r"not a tokenizer\.json"),
        ("bad.tiktoken", b"YQ== 0\nYg== one\n", r"bad\.tiktoken:2: .*base64-token rank"),
        ("same.tiktoken", b"YQ== 0\nYg== 0\n", "2 tokens share 1 ranks"),
        (
            "cut.tiktoken",
            b"YQ== 0\nYg== 1\n",
            r"254 of the 256 bytes are no tokens \(0x00 is the first\)",
        ),
        (
            "tokenizer.json",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS pointer.*lfs pull",
        ),
        (
            "tokenizer.model",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "Git LFS pointer",
        ),
        ("tokenizer.model", b"\n<!DOCTYPE html><html>", "is a web page.*raw"),
        ("tokenizer.json.gz", b"\x1f\x8b\x08\0", "gunzip"),
        ("model.safetensors", b"\x40\0\0\0\0\0\0\0{}", "safetensors file of weights"),
        ("pytorch_model.bin", b"PK\x03\x04", "archive of weights"),
        ("vocab.txt", b"[PAD]\n[unused0]\n", "WordPiece vocabulary"),
        (
            "tok.vocab",
            b"<unk>\t0\n<s>\t0\n",
            r"list for readers beside a sentencepiece model.*\.model",
        ),
        ("merges.txt", b"#version: 0.2\na b\n", r"vocab\.json must stand beside"),
        ("vocab.json", b'{"a": 0, "b": 1}', r"without its merges.*merges\.txt must stand beside"),
        (
            "tokenizer_config.json",
            b'{"eos_token": "</s>"}',
            r"JSON, but not a tokenizer\.json.*folder",
        ),
        (
            "tekken.json",
            b'{"vocab": [], "config": {"pattern": "a"}}',
            r"not a tekken\.json: KeyError",
        ),
        ("half.json", b'{"model": {"vocab"', r"not a tokenizer\.json, and no JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        load_tokenizer(tmp_path / name)
    assert name in str(refused.value)


TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    "names",
    [
        ("vocab.json", "merges.txt"),
        ("gpt2-vocab.json", "gpt2-merges.txt"),
        ("encoder.json", "vocab.bpe"),
    ],
)
@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer"])
def test_vocabulary_and_merges_are_read_as_transformers_reads_them(
    hugging_face_file, tmp_path, names, kind
):
    transformers = pytest.importorskip("transformers")
    model = json.loads(hugging_face_file.read_text())["model"]
    vocab, merges = tmp_path / names[0], tmp_path / names[1]
    tokens = [
        token for token in model["vocab"] if kind == "GPT2Tokenizer" or token != "<|endoftext|>"
    ]
    vocab.write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    merges.write_text(
        "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"])
    )
    added = {
        len(tokens) + i: {"content": t, "special": True}
        for i, t in enumerate(t for t in TOKENS if t not in tokens)
    }
    settings = {
        "tokenizer_class": kind,
        "added_tokens_decoder": added,
        "eos_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = getattr(transformers, kind)(str(vocab), str(merges))
    assert theirs.eos_token_id == load_tokenizer(vocab).eod
    for path in (vocab, merges, tmp_path) if "gpt2" not in names[0] else (vocab, merges):
        ours = load_tokenizer(path)
        for text in [*TEXTS, *AWKWARD]:
            assert (
                ours.encode(text)
                == theirs(text, split_special_tokens=True, add_special_tokens=False).input_ids
            )
        assert ours.decode(ours.encode("a b\n")) == "a b\n" and ours.vocab_size == len(
            tokens
        ) + len(added)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "CodeGenTokenizer"})
    )
    with pytest.raises(
        ValueError, match="tokenizer_class CodeGenTokenizer may split text in its own way"
    ):
        load_tokenizer(vocab)
    merges.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=f"{merges.name} is a Git LFS pointer"):
        load_tokenizer(vocab)


def test_tekken_has_its_special_tokens_first(tmp_path):
    """As mistral_common does: an id is the rank plus the number of special tokens; ranks beyond the
    size are left."""
    tiktoken = pytest.importorskip("tiktoken")
    tokens = [bytes([b]) for b in range(256)] + [b"ab", b"cd", b"abcd", b" ab", b"unused"]
    content = {
        "config": {
            "pattern": r"\s?\w+|.|\n",
            "default_vocab_size": 360,
            "default_num_special_tokens": 100,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode()} for i, t in enumerate(tokens)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    ranks = {token: i for i, token in enumerate(tokens[:260])}
    theirs = tiktoken.Encoding(
        "x", pat_str=content["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    ours = load_tokenizer(tmp_path)
    assert (ours.vocab_size, ours.bos, ours.eod, ours.adds_bos, ours.token(99)) == (
        360,
        1,
        2,
        True,
        "<SPECIAL_99>",
    )
    for text in [*TEXTS, *AWKWARD, "abcd ab unused"]:
        ids = ours.encode(text)
        assert (
            ids == [i + 100 for i in theirs.encode_ordinary(text)]
            and ours.decode([1, *ids, 2]) == text
        )


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_named(tokenizer_path, monkeypatch):
    package = {
        "tok.model": "sentencepiece",
        "tokenizer.json": "tokenizers",
        "tokenizer.model": "tiktoken",
    }
    monkeypatch.setitem(sys.modules, package[tokenizer_path.name], None)
    with pytest.raises(
        ValueError, match=f"needs the package {package[tokenizer_path.name]}: pip install"
    ):
        load_tokenizer(tokenizer_path)

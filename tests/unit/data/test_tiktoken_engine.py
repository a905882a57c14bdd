"""tiktoken as the engine of a tokenizer.json: the ids of the package tokenizers for every text, or
no ids at all."""

import json
import random
import sys
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")
tiktoken = pytest.importorskip("tiktoken")

from megatron5d.data import tiktoken_engine  # noqa: E402
from megatron5d.data.bpe_files import GPT2_PATTERN, PATTERNS, byte_level, byte_signs  # noqa: E402
from megatron5d.data.corpus import Cursor, Unit  # noqa: E402
from megatron5d.data.documents import Recipe, tokenize_unit  # noqa: E402
from megatron5d.data.tiktoken_engine import RUN, TiktokenEngine  # noqa: E402
from megatron5d.data.tokenizer import load_tokenizer  # noqa: E402
from megatron5d.data.tokenizer_export import PROBES  # noqa: E402
from megatron5d.tools.tokenizer import train_byte_level  # noqa: E402

CORPUS = [
    Path(path).read_text(encoding="utf-8")
    for path in (random.__file__, json.__file__, tiktoken_engine.__file__)
]
ALL_CHARACTERS = [
    chr(code) for code in [*range(0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xE1000)]
]


def invented(seed):
    """A BPE of random merges, as no training makes them: tokens of several merges, of none, in any
    order."""
    draw = random.Random(seed)
    letters = "abc"[: draw.choice([1, 2, 3])]
    vocab, merges, known = (
        {sign: i for i, sign in enumerate(byte_signs().values())},
        [],
        list(letters),
    )
    for _ in range(draw.randrange(2, 25)):
        pair = draw.choice(known), draw.choice(known)
        token = "".join(pair)
        if len(token) <= 10 and pair not in merges and (token not in vocab or draw.random() < 0.3):
            merges.append(pair)
            if token not in vocab:
                known.append(token)
                vocab[token] = len(vocab)
    for _ in range(draw.choice([0, 0, 1, 2])):
        vocab.setdefault("".join(draw.choices(letters, k=draw.randrange(2, 7))), len(vocab))
    model = tokenizers.models.BPE(vocab, merges, ignore_merges=draw.random() < 0.5)
    texts = [
        "".join(draw.choices(f"{letters} ", k=draw.choice([5, 12, 40, 700]))) for _ in range(40)
    ]
    return byte_level(model, GPT2_PATTERN), [
        *texts,
        *(text.replace(" ", "") for text in texts),
    ]


def test_invented_vocabularies_are_refused_or_give_the_same_ids(monkeypatch):
    def differing(seeds):
        accepted, wrong = 0, 0
        for seed in seeds:
            model, texts = invented(seed)
            try:
                engine = TiktokenEngine(model)
            except ValueError:
                continue
            accepted += 1
            wrong += any(
                engine.encode(text) != model.encode(text, add_special_tokens=False).ids
                for text in texts
            )
        return accepted, wrong

    accepted, wrong = differing(range(150))
    assert accepted > 40 and wrong == 0
    # without the proof many of them differ, so these texts can tell
    taken = {sign: byte for byte, sign in byte_signs().items()}
    monkeypatch.setattr(
        tiktoken_engine,
        "_reached",
        lambda m: {bytes(taken[s] for s in token): i for token, i in m["vocab"].items()},
    )
    accepted, wrong = differing(range(60))
    assert accepted == 60 and wrong > 5


@pytest.fixture(scope="module", params=["gpt2", "cl100k", "o200k", "qwen2"])
def trained(request, tmp_path_factory):
    return load_tokenizer(
        train_byte_level(
            CORPUS, 1500, tmp_path_factory.mktemp("bpe") / request.param, request.param
        )
    )


def test_trained_vocabularies(trained):
    assert trained.engine == "tiktoken, ids proved equal"
    draw = random.Random(0)
    texts = [*CORPUS, *PROBES, "x" * (RUN + 3), "a <|endoftext|> b"]
    for _ in range(1500):
        kinds = [
            lambda: draw.choice(ALL_CHARACTERS),
            lambda: draw.choice("abcXYZ '\n\r\t 12.,-_/stdmSTDM"),
            lambda: " ",
        ]
        texts.append("".join(draw.choice(kinds)() for _ in range(draw.randrange(80))))
    assert trained.encode_all(texts) == [trained.encode(text) for text in texts]
    assert trained.eod not in trained.encode_all(["a <|endoftext|> b"])[0]


def test_every_character_is_of_the_same_class_or_known_to_differ(trained):
    """In the contexts in which a class decides; characters that the engines class differently leave
    to the slow one."""
    engine = trained._fast
    engine.encode(" ".join(ALL_CHARACTERS[::3]))
    assert len(engine._alike) + len(engine._differ) >= len(ALL_CHARACTERS) // 3
    texts = [
        "".join(f"a{c} {c}1{c}'s" for c in ALL_CHARACTERS[at : at + 400])
        for at in range(0, 0x3000, 400)
    ]
    assert trained.encode_all(texts) == [trained.encode(text) for text in texts]


def test_a_character_that_one_engine_classes_otherwise_is_left_to_the_exact_one(trained):
    engine = TiktokenEngine(trained._model)
    wrong = tiktoken.Encoding(
        "class",
        pat_str="[a-zé]",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={},
    )
    engine._classes = [(each, wrong) for each, _ in engine._classes]
    assert engine.encode("plain") and engine.encode("naïv") is None and engine.encode("中") is None


def test_what_is_not_only_splitting_and_merging_is_refused(trained):
    def refused(**change):
        content = json.loads(trained._model.to_str())
        content["model"] |= change.pop("model", {})
        with pytest.raises(ValueError) as raised:
            TiktokenEngine(tokenizers.Tokenizer.from_str(json.dumps(content | change)))
        return str(raised.value)

    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{L}+"},
        "behavior": "Isolated",
        "invert": False,
    }
    content = json.loads(trained._model.to_str())["model"]
    assert "changes text" in refused(normalizer={"type": "Lowercase"})
    assert "way of splitting" in refused(
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "never",
            "split": True,
        }
    )
    assert "way of splitting" in refused(pre_tokenizer=level | {"add_prefix_space": True})
    for change in ({"behavior": "Removed"}, {"invert": True}, {"pattern": {"String": "a"}}):
        steps = [split | change, level | {"use_regex": False}]
        assert "way of splitting" in refused(
            pre_tokenizer={"type": "Sequence", "pretokenizers": steps}
        )
    steps = [split | {"pattern": {"Regex": r"^\w+"}}, level | {"use_regex": False}]
    assert "two ways" in refused(pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    assert "no plain BPE" in refused(model={"dropout": 0.1})
    assert "do not rise" in refused(
        model={"merges": [content["merges"][1], content["merges"][0], *content["merges"][2:]]}
    )


def test_texts_with_added_tokens_and_changed_by_a_normal_form(tmp_path):
    model = byte_level(
        tokenizers.models.BPE({s: i for i, s in enumerate(byte_signs().values())}, []),
        PATTERNS["qwen2"],
        normal_form=True,
    )
    model.add_tokens(["hidden word"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    texts = ["a hidden word here", "e\u0301", "\u00e9", "\u212b\u0301", "hidden", "\U000107b0"]
    assert tokenizer.encode_all(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer._fast.encode(texts[0]) is None and tokenizer._fast.encode(texts[1]) is None
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_without_tiktoken_the_exact_engine_encodes(trained, tmp_path, monkeypatch):
    trained._model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert tokenizer.engine == "tokenizers; no tiktoken: the package tiktoken is not installed"
    assert tokenizer.encode_all(CORPUS) == trained.encode_all(CORPUS)


@pytest.mark.parametrize(("append_eod", "prepend_bos"), [(False, False), (True, True)])
def test_a_unit_is_tokenised_document_by_document(trained, tmp_path, append_eod, prepend_bos):
    trained._model.save(str(tmp_path / "tokenizer.json"))
    texts = ["", "é\n", "", *CORPUS, "a<|endoftext|>"]
    lines = "\n".join(json.dumps({"text": text, "other": text[:3]}) for text in texts).encode()
    recipe = Recipe(str(tmp_path), None, append_eod, ("text", "other"), False, "a", prepend_bos)
    found = tokenize_unit(Unit(Cursor(), 0, lines=lines, as_json=True), recipe)
    reference = load_tokenizer(tmp_path, bos="a")
    for k, key in enumerate([texts, [text[:3] for text in texts]]):
        ids = [reference.encode(text) for text in key]
        ids = [
            [reference.bos] * prepend_bos + each + [reference.eod] * append_eod if each else []
            for each in ids
        ]
        assert found.lengths[k].tolist() == [len(each) for each in ids]
        assert found.ids[k].tolist() == sum(ids, []) and found.ids[k].dtype == "int32"

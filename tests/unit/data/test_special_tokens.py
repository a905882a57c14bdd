"""Which token ends and begins a document, and that no text is read as one of them."""

import base64
import json

import pytest

from megatron5d.data import tokenizer_export
from megatron5d.data.bpe_files import mark_special
from megatron5d.data.documents import Recipe
from megatron5d.data.preprocess import Reporting, _opened
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.data.tokenizer_export import exported_tokenizer

AS_OBJECT = {"content": "[END]", "__type": "AddedToken", "special": True}
SPELLED = "a<|endoftext|>b[END]c</s>d<|x|>e"


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    """A tokenizer.json with ids 0 to 3 special and nothing that says which of them ends a
    document."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "[END]", "[BEGIN]", "<s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["a b c"], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "[END]", "bos_token": "[BEGIN]"}},
        {
            "tokenizer_config": {
                "eos_token": AS_OBJECT,
                "bos_token": {"content": "[BEGIN]", "__type": "AddedToken"},
            }
        },
        {"special_tokens_map": {"eos_token": "[END]", "bos_token": {"content": "[BEGIN]"}}},
        {
            "generation_config": {"eos_token_id": 1, "bos_token_id": 2},
            "config": {"eos_token_id": 3, "bos_token_id": 3},
        },
        {"generation_config": {}, "config": {"eos_token_id": [1, 0], "bos_token_id": 2}},
        {"config": {"text_config": {"eos_token_id": 1, "bos_token_id": 2}}},
        {
            "tokenizer_config": {"eos_token": None},
            "special_tokens_map": {"eos_token": "[END]", "bos_token": "[BEGIN]"},
        },
        # where both name one, transformers takes the first file if it lists the added tokens, else
        # the second
        {
            "tokenizer_config": {"eos_token": "<s>", "bos_token": "<s>"},
            "special_tokens_map": {"eos_token": "[END]", "bos_token": "[BEGIN]"},
        },
        {
            "tokenizer_config": {
                "eos_token": "[END]",
                "bos_token": "[BEGIN]",
                "added_tokens_decoder": {},
            },
            "special_tokens_map": {"eos_token": "<s>", "bos_token": "<s>"},
        },
    ],
)
def test_every_file_that_names_the_tokens_is_asked_before_usual_names(folder, files):
    # by their names alone
    assert (load_tokenizer(folder).eod, load_tokenizer(folder).bos) == (0, 3)
    write(folder, **files)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eod, tokenizer.bos) == (1, 2)
    transformers = pytest.importorskip("transformers")
    if "tokenizer_config" in files and files["tokenizer_config"].get("eos_token"):
        write(
            folder,
            tokenizer_config={
                **files["tokenizer_config"],
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        )
        assert transformers.AutoTokenizer.from_pretrained(folder).eos_token_id == 1
    assert (load_tokenizer(folder, eod="<s>", bos="0").eod, load_tokenizer(folder, bos=0).bos) == (
        3,
        0,
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"tokenizer_config": {"eos_token": "<|im_end|>"}},
            "tokenizer_config.json: eos_token '<|im_end|>' is not in",
        ),
        (
            {"special_tokens_map": {"eos_token": "<eot>"}},
            "special_tokens_map.json: eos_token '<eot>' is not in",
        ),
        (
            {"generation_config": {"eos_token_id": 5000}},
            "generation_config.json: eos_token_id 5000 is not in",
        ),
        ({"tokenizer_config": []}, "tokenizer_config.json is not a JSON object"),
        (
            {"tokenizer_config": {"added_tokens_decoder": {"x": "a"}}},
            "tokenizer_config.json: tokens and ids of added",
        ),
        ({"added_tokens": {"a": "x"}}, "added_tokens.json: tokens and ids of added"),
        ({"config": {"eos_token_id": [40, 5000]}}, "config.json: eos_token_id 5000 is not in"),
    ],
)
def test_a_named_end_that_cannot_be_is_refused(folder, files, reason):
    write(folder, **files)
    with pytest.raises(ValueError) as refused:
        load_tokenizer(folder)
    assert reason in str(refused.value)
    if "eos_token" in reason:
        assert "--eod TOKEN" in str(refused.value) and load_tokenizer(folder, eod="[END]").eod == 1


def test_text_that_ends_generation_ends_no_document(folder):
    write(folder, generation_config={"eos_token_id": 40}, config={"eos_token_id": [40, 1]})
    assert load_tokenizer(folder).eod == 1


def test_tokens_that_other_files_add_belong_to_the_vocabulary(folder):
    size = load_tokenizer(folder).vocab_size
    write(folder, tokenizer_config={"eos_token": "<|im_end|>"}, added_tokens={"<|im_end|>": size})
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eod, tokenizer.vocab_size) == (size, size + 1)
    assert tokenizer.decode([*tokenizer.encode("ab"), size]) == "ab"
    write(
        folder,
        tokenizer_config={
            "bos_token": None,
            "added_tokens_decoder": {str(size): {"content": "<|im_end|>"}},
        },
    )
    assert (
        load_tokenizer(folder, eod="<|im_end|>").eod == size and load_tokenizer(folder).bos is None
    )


def hugging_face(folder, special):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    content = json.loads(model.to_str())
    for token in content["added_tokens"]:
        token["special"] = special
    (folder / "tokenizer.json").write_text(json.dumps(content))
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_tokens(["</s>", "<|x|>"])
    model.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def sentencepiece_model(folder, user_defined):
    sentencepiece = pytest.importorskip("sentencepiece")
    symbols = ["<|endoftext|>", "[END]", "<|x|>"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcde abc de"] * 9),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        **{"user_defined_symbols" if user_defined else "control_symbols": symbols},
    )
    return folder / "m.model"


def rank_file(folder, tekken):
    pytest.importorskip("tiktoken")
    if tekken:
        config = {"pattern": r"\w+|.", "default_vocab_size": 266, "default_num_special_tokens": 10}
        vocab = [
            {"rank": b, "token_bytes": base64.b64encode(bytes([b])).decode()} for b in range(256)
        ]
        special = ["<unk>", "<s>", "</s>", "<|endoftext|>", "[END]", "<|x|>"]
        listed = [
            {"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)
        ]
        write(
            folder,
            tekken={"config": config, "vocab": [*vocab, *vocab[:9]], "special_tokens": listed},
        )
        return folder / "tekken.json"
    path = folder / "x.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(bytes([b])) + b" %d\n" % b for b in range(256)))
    added = ["<|endoftext|>", "[END]", "</s>", "<|x|>"]
    write(
        folder,
        tokenizer_config={
            "pattern": "o200k",
            "added_tokens_decoder": {256 + i: {"content": token} for i, token in enumerate(added)},
        },
    )
    return path


@pytest.mark.parametrize(
    ("make", "as_text"),
    [
        (lambda folder: hugging_face(folder, special=True), {"</s>", "<|x|>"}),
        (lambda folder: hugging_face(folder, special=False), {"[END]", "</s>", "<|x|>"}),
        (lambda folder: sentencepiece_model(folder, user_defined=True), {"[END]", "<|x|>"}),
        (lambda folder: sentencepiece_model(folder, user_defined=False), set()),
        (lambda folder: rank_file(folder, tekken=False), set()),
        (lambda folder: rank_file(folder, tekken=True), set()),
    ],
    ids=["special", "added", "user-defined", "control", "tiktoken", "tekken"],
)
def test_no_text_is_read_as_the_token_that_ends_a_document(folder, make, as_text):
    """Whatever kind of file it is, however it lists the token, and whichever token is named."""
    file = make(folder)
    for eod in ("<|endoftext|>", "[END]", "</s>", "<|x|>"):
        tokenizer = load_tokenizer(file, eod)
        ids = tokenizer.encode(SPELLED)
        names = {tokenizer._names.get(i) for i in ids}
        assert tokenizer.eod not in ids and as_text - {eod} <= names
        assert tokenizer.decode([*ids, tokenizer.eod]) == SPELLED
    tokenizer = load_tokenizer(file)
    assert tokenizer.eod is not None and tokenizer.eod not in tokenizer.encode(SPELLED)


USUAL = ["text", "</s>", "<eos>", "[EOS]", "<eod>", "<s>", "<bos>", "[BOS]", "<|im_end|>"]
OBJECT = {"special": False, "normalized": False, "lstrip": False, "rstrip": False}


def listed_beside(folder, first, **settings):
    """Tokens that tokenizer_config.json adds to the vocabulary from the id `first` on."""
    tokens = [{"content": name, "single_word": False, **OBJECT} for name in USUAL]
    tokens += [{"content": "[S]", "single_word": False, **OBJECT, "special": True}]
    write(
        folder,
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": dict(enumerate(tokens, first)),
            **settings,
        },
    )


def usual_in_tokenizer_json(folder, beside):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if not beside:
        added = [tokenizers.AddedToken(name, normalized=False) for name in USUAL]
        model.add_tokens(added)
        model.add_special_tokens(["[S]"])
        model.save(str(folder / "tokenizer.json"))
        write(folder, tokenizer_config={"eos_token": "<|endoftext|>"})
    else:
        content = json.loads(model.to_str())
        content["added_tokens"] = content["added_tokens"][:1]  # <s> is listed beside it, not here
        for name in ("[END]", "[BEGIN]", "<s>"):
            content["model"]["vocab"][f"_{name}"] = content["model"]["vocab"].pop(name)
        (folder / "tokenizer.json").write_text(json.dumps(content))
        listed_beside(folder, model.get_vocab_size(), eos_token="<|endoftext|>")
    return folder


def usual_in_a_pair(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    vocab = {t: i for t, i in content["model"]["vocab"].items() if i > 3} | {"<|endoftext|>": 0}
    vocab |= {f"_{i}": i for i in (1, 2, 3)}
    write(folder, vocab=vocab)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    kind = "GPT2Tokenizer"
    listed_beside(folder, len(vocab), tokenizer_class=kind, eos_token="<|endoftext|>")
    return folder


def usual_in_sentencepiece(folder, beside):
    sentencepiece = pytest.importorskip("sentencepiece")
    (folder / "tokenizer.json").unlink()
    symbols = {} if beside else {"user_defined_symbols": USUAL, "control_symbols": ["[S]"]}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abcde abc de"] * 9),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=320,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        eos_piece="<|endoftext|>",
        bos_piece="[BEGIN]",
        **symbols,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    if beside:
        listed_beside(folder, model.get_piece_size(), eos_token="<|endoftext|>")
    return folder


def usual_in_a_rank_file(folder):
    (folder / "tokenizer.json").unlink()
    rank_file(folder, tekken=False)
    listed_beside(folder, 256, pattern="o200k", eos_token="[S]")
    return folder


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: usual_in_tokenizer_json(folder, beside=False),
        lambda folder: usual_in_tokenizer_json(folder, beside=True),
        usual_in_a_pair,
        lambda folder: usual_in_sentencepiece(folder, beside=False),
        lambda folder: usual_in_sentencepiece(folder, beside=True),
        usual_in_a_rank_file,
    ],
    ids=["json", "json-beside", "pair", "user-defined", "model-beside", "tiktoken"],
)
def test_usual_names_without_a_role_are_text(folder, make):
    """Gemma 3 has <s> and </s> as HTML tags."""
    transformers = pytest.importorskip("transformers")
    make(folder)
    ours = load_tokenizer(folder)
    ids = {i for text in [*USUAL, "[S]"] for i in ours.encode(f"ab{text}c")}
    names = {ours._names.get(i) for i in ids}
    assert names >= {*USUAL} and "[S]" not in names
    assert ours.bos is None or ours.token(ours.bos) == "[BEGIN]"
    (folder / "out").mkdir()
    for name, content in exported_tokenizer(folder, None, {"model_type": "llama"}).items():
        (folder / "out" / name).write_text(content)
    theirs = [transformers.AutoTokenizer.from_pretrained(folder / "out")]
    if not (folder / "x.tiktoken").exists():  # which transformers does not open by itself
        theirs.append(transformers.AutoTokenizer.from_pretrained(folder))
    special = {} if (folder / "tokenizer.model").exists() else {"split_special_tokens": True}
    texts = [f"a{name}b {name}c{name}" for name in USUAL] + ["".join(USUAL), " ".join(USUAL)]
    texts += ["a[S]b<|endoftext|>"] if special else []
    for text in texts:
        for other in theirs:
            assert other(text, add_special_tokens=False, **special).input_ids == ours.encode(text)


def test_an_ordinary_token_with_a_role_stays_text(folder):
    """A pad_token "!" is in texts, and comes back."""
    write(
        folder,
        tokenizer_config={
            "eos_token": "[END]",
            "pad_token": "!",
            "additional_special_tokens": ["a"],
        },
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("a! b"), tokenizer.eod]) == "a! b"


def test_tokens_added_as_text_are_read_as_transformers_reads_them(folder):
    """Runs of spaces (GPT-NeoX) and tags (Gemma, Qwen 3) are in the vocabulary to be found in
    text."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in ("    ", "<think>")]
    )
    model.save(str(folder / "tokenizer.json"))
    text = "    <think>a\n    b"
    assert load_tokenizer(folder).encode(text) == model.encode(text).ids
    assert {262, 263} <= set(model.encode(text).ids)


def test_an_export_that_reads_an_added_token_in_another_way_is_rejected(folder, monkeypatch):
    usual_in_tokenizer_json(folder, beside=False)

    def without_tags(path, eod=None):
        tokenizer = load_tokenizer(path, eod)
        mark_special(tokenizer._model, ["<eos>"])
        return tokenizer

    monkeypatch.setattr(tokenizer_export, "load_tokenizer", without_tags)
    with pytest.raises(ValueError, match="other ids than those of training: .*<eos>"):
        exported_tokenizer(folder, None, {"model_type": "llama"})


def test_dropout_is_off_and_mentioned(folder):
    """BPE-dropout gives a text other ids each time (Provilkov et al. 2020)."""
    content = json.loads((folder / "tokenizer.json").read_text())
    words = " ".join(f"{word} abab" for word in ("the", "there", "then"))
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_str(json.dumps(content))
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"], show_progress=False, vocab_size=300
    )
    model.train_from_iterator([words] * 9, trainer)
    expected = model.encode(words).ids
    model.model.dropout = 0.5
    model.save(str(folder / "tokenizer.json"))
    warnings: list[str] = []
    tokenizer = _opened(Recipe(str(folder)), Reporting(warning=warnings.append))
    assert all(tokenizer.encode(words) == expected for _ in range(20))
    assert [text for text in warnings if "dropout 0.5 is off" in text]
    files = exported_tokenizer(folder, None, {"model_type": "llama"})
    assert json.loads(files["tokenizer.json"])["model"]["dropout"] is None


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("<|im_end|>", True),
        ("<|eot_id|>", True),
        ("<end_of_turn>", True),
        ("<|end|>", True),
        ("<|return|>", True),
        ("<|end_of_text|>", False),
        ("<eos>", False),
        ("<\uff5cend\u2581of\u2581sentence\uff5c>", False),
    ],
)
def test_documents_that_end_with_a_turn_of_a_chat_are_warned_of(folder, name, warned):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens([name])
    model.save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config={"eos_token": name})
    for recipe, expected in (
        (Recipe(str(folder), append_eod=True), warned),
        (Recipe(str(folder), append_eod=True, eod=name), False),
        (Recipe(str(folder)), False),
    ):
        warnings: list[str] = []
        _opened(recipe, Reporting(warning=warnings.append))
        turns = [text for text in warnings if "ends a turn of a chat" in text]
        assert bool(turns) == expected and all("--eod '<|endoftext|>'" in text for text in turns)

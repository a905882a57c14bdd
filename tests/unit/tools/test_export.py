"""What leaves with the weights: tokenizers with the ids of training, special tokens, templates, end
tokens."""

import base64
import json
import shutil
from functools import cache

import pytest
import torch
from hf_folders import random_model
from tool_runs import run

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.checkpoint.hf.import_config import end_tokens
from megatron5d.config.load import load_config
from megatron5d.config.schema import ModelConfig
from megatron5d.data.bpe_files import CL100K_PATTERN
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.data.tokenizer_export import exported_tokenizer, special_tokens
from megatron5d.tools import convert, generate
from megatron5d.train.hf_export import plan_export

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
sentencepiece = pytest.importorskip("sentencepiece")

DOCUMENTS = [
    f"item {i}: the year {1900 + i} had {i * 37} visitors, don't ask.\n" * (1 + i % 4)
    for i in range(200)
]
TEXTS = [
    "hello 1234 years",
    " two  spaces\n",
    "don't ask, WE'LL",
    "x=3.14",
    "\n\n\ta\r\n",
    "naïve 日本 🙂",
    "",
    "  ",
]
PIECES = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"},
    "unigram": {"model_type": "unigram", "vocab_size": 400, "byte_fallback": True, "pad_id": 3},
    "symbols": {
        "model_type": "bpe",
        "user_defined_symbols": ["<sep>", "\n", "."],
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "normalization_rule_name": "identity",
    },
}
KINDS = [*PIECES, "tokenizer.json", "tiktoken", "vocab.json and merges.txt", "tekken.json"]
FAMILIES = {
    "llama": "tiny",
    "mistral": "tiny model.attention_window=8",
    "qwen2": "tiny model.qkv_bias=true",
    "qwen3": "tiny_qwen3",
    "gpt2": "tiny_gpt2",
    "mixtral": "tiny_mixtral",
    "qwen3_moe": "tiny_qwen3_moe",
    "deepseek_v2": "deepseek_v2_lite",
    "deepseek_v3": "tiny_deepseek",
    "glm4_moe": "tiny_moe",
    "olmo2": "tiny model.qk_norm=true model.qk_norm_all_heads=true model.block_norm=post",
    "gpt_neox": "tiny_gpt2 model.position=rope model.parallel_block=two_norms "
    "model.tie_embeddings=false",
    "qwen2_moe": "tiny_mixtral model.qkv_bias=true model.shared_ffn_hidden_size=32 "
    "model.shared_expert_gate=true model.norm_topk_prob=false",
    "gemma": "gemma2_2b model.block_norm=pre model.attention_window=null model.window_layers=null "
    "model.query_pre_attn_scalar=null model.attention_softcap=0 model.logit_softcap=0",
    "gemma2": "gemma2_2b",
    "gemma3_text": "gemma3_1b",
    "gpt_oss": "gpt_oss_20b",
}


LLAMA = {"model_type": "llama"}
TOKENS = [bytes([i]) for i in range(256)]
TOKENS += [b" t", b"he", b" the", b"19", b"190", b"'t", b"don", b"\n\n", b"  "]


def train_sentencepiece(path, texts=DOCUMENTS, **options):
    options = {"vocab_size": 340, "minloglevel": 2, "hard_vocab_limit": False} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(path.with_suffix("")), **options
    )
    return path


def train_words(folder):
    """A tokenizer of words, which transformers has no equal for."""
    return train_sentencepiece(
        folder / "w.model", ["a b c d"] * 9, model_type="word", vocab_size=60
    )


def train_byte_level():
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer, model.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "[END]"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(DOCUMENTS, trainer)
    return model


def in_base64(token):
    return base64.b64encode(token).decode()


def write_ranks(path, tokens):
    lines = (f"{in_base64(token)} {i}\n" for i, token in enumerate(tokens))
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    paths = {
        name: train_sentencepiece(folder / f"{name}.model", **options)
        for name, options in PIECES.items()
    }
    own, ranks, pair = (folder / name for name in ("own", "ranks", "pair"))
    for path in (own, ranks, pair):
        path.mkdir()
    model = train_byte_level()
    model.save(str(own / "tokenizer.json"))
    model.model.save(str(pair))
    settings = {
        "pattern": "cl100k",
        "added_tokens_decoder": {"265": {"content": "<|endoftext|>"}},
        "eos_token": "<|endoftext|>",
    }
    (ranks / "tokenizer_config.json").write_text(json.dumps(settings))
    special = ("<unk>", "<s>", "</s>", "<pad>")
    tekken = {
        "config": {
            "pattern": CL100K_PATTERN,
            "default_num_special_tokens": len(special),
            "default_vocab_size": len(special) + len(TOKENS),
        },
        "special_tokens": [{"token_str": name, "rank": i} for i, name in enumerate(special)],
        "vocab": [{"token_bytes": in_base64(token), "rank": i} for i, token in enumerate(TOKENS)],
    }
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return paths | {
        "tokenizer.json": own,
        "tiktoken": write_ranks(ranks / "ranks.tiktoken", TOKENS),
        "vocab.json and merges.txt": pair,
        "tekken.json": folder / "tekken.json",
    }


@cache
def model_of(family: str) -> ModelConfig:
    return load_config(f"model={FAMILIES[family]}".split()).model


def write_export(folder, source, settings):
    """Writes the files of an exported tokenizer, and opens them with transformers."""
    folder.mkdir(exist_ok=True)
    files = exported_tokenizer(source, None, settings)
    for name, content in ({"config.json": json.dumps(settings)} | files).items():
        (folder / name).write_text(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_ids_of_training(sources, tmp_path, family, kind):
    settings = hf_config_from_model(model_of(family), "fp32")
    assert settings["model_type"] == family
    if family == "qwen2":
        with pytest.raises(ValueError, match="leaves with other ids .*AutoTokenizer makes "):
            exported_tokenizer(sources[kind], None, settings)
        return
    ours, theirs = load_tokenizer(sources[kind]), write_export(tmp_path, sources[kind], settings)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids, text
        assert theirs(text).input_ids == ids, text
        if "⁇" not in ours.decode(ids):  # sentencepiece's text of an unknown token
            assert theirs.decode(ids) == ours.decode(ids)
    assert theirs.eos_token_id == ours.eod
    assert theirs("ask" + theirs.eos_token).input_ids[-1] == ours.eod


def test_an_ordinary_token_that_ended_documents_stays_ordinary(sources):
    """As a special token it would no longer be the id of any text."""
    line_end = load_tokenizer(sources["tokenizer.json"]).encode("\n")[0]
    files = exported_tokenizer(sources["tokenizer.json"], line_end, LLAMA)
    assert "eos_token" not in json.loads(files["tokenizer_config.json"])


def test_ids_may_leave_gaps(tmp_path, capfd):
    """As in cl100k, which is known by its number of ranks: its end of text is two beyond the last
    rank."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes([i, j]) for i in range(256) for j in range(256)]
    tokens += [bytes([i, j, k]) for i in b"aeiou" for j in range(256) for k in range(256)]
    path = write_ranks(tmp_path / "cl.tiktoken", tokens[:100256])
    files = exported_tokenizer(path, None, LLAMA)
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    added = json.loads(files["tokenizer.json"])["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    expected = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|endofprompt|>": 100276}
    assert expected.items() <= ids.items()
    assert not any(capfd.readouterr())


def test_a_tokenizer_that_would_give_other_ids_is_rejected(sources, tmp_path):
    """One of words has no equal; the added tokens of a folder must continue the vocabulary."""
    with pytest.raises(ValueError, match="words or characters"):
        exported_tokenizer(train_words(tmp_path), None, LLAMA)
    shutil.copy(sources["bpe"], tmp_path / "tokenizer.model")
    (tmp_path / "added_tokens.json").write_text('{"<|chat|>": 9999}')
    message = "gives the token '<.chat.>' id 9999, and with tokenizer.model it becomes"
    with pytest.raises(ValueError, match=message):
        exported_tokenizer(tmp_path, None, LLAMA)


def random_folder(family, folder, source, **settings):
    """Writes a random model with a tokenizer to a folder, and returns it."""
    sizes = {
        "vocab_size": 352,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[family]
    model = random_model(config(**sizes | settings))
    model.save_pretrained(folder)
    for path in source.iterdir() if source.is_dir() else [source]:
        shutil.copy(path, folder / ("tokenizer.model" if path.suffix == ".model" else path.name))
    return model


def import_folder(tmp_path):
    """The checkpoint of tmp_path/hf."""
    assert run(convert, f"from-hf --hf {tmp_path}/hf --out {tmp_path}/ours") == 0
    return tmp_path / "ours"


def export(tmp_path, options="", name="out"):
    """The exit code of exporting tmp_path/ours."""
    return run(convert, f"to-hf --checkpoint {tmp_path}/ours --out {tmp_path / name} {options}")


@pytest.mark.parametrize(("kind", "end"), [("tokenizer.json", "[END]"), ("bpe", "</s>")])
def test_settings_of_tokens_in_a_folder_are_exported_again(sources, tmp_path, kind, end):
    """Special tokens, chat template, added tokens, several end tokens, settings of generation."""
    hf, out = tmp_path / "hf", tmp_path / "out"
    random_folder("llama", hf, sources[kind], eos_token_id=[0, 5])
    size = load_tokenizer(sources[kind]).vocab_size
    flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
    settings = {
        "tokenizer_class": "Own",
        "auto_map": {"AutoTokenizer": ["own.Own", None]},
        "pad_token": "<|chat|>",
        "added_tokens_decoder": {str(size): {"content": "<|chat|>", "special": True, **flags}},
        "model_max_length": 77,
        "eos_token": end,
    }
    (hf / "tokenizer_config.json").write_text(json.dumps(settings))
    (hf / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<|chat|>")
    generation = {"eos_token_id": [7, 5], "temperature": 0.6, "top_p": 0.9}
    (hf / "generation_config.json").write_text(json.dumps(generation))
    import_folder(tmp_path)
    assert export(tmp_path) == 0
    eod = load_tokenizer(hf).eod
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (eod, size, 77)
    chat = theirs.apply_chat_template([{"role": "user", "content": "ask"}], return_dict=False)
    assert chat[-1] == size and theirs("ask<|chat|>").input_ids[-1] == size
    exported = transformers.GenerationConfig.from_pretrained(out)
    assert exported.eos_token_id == list(dict.fromkeys([7, 5, 0, eod]))
    assert exported.temperature == 0.6
    assert transformers.AutoConfig.from_pretrained(out).eos_token_id == [0, 5]
    assert set(end_tokens(out)) == {7, 5, 0, eod}


def test_texts_begin_and_end_as_the_source_says(sources, tmp_path):
    """Llama's class puts <s> before a text unless its settings say otherwise; a bare model file
    says nothing."""
    shutil.copy(sources["bpe"], tmp_path / "tokenizer.model")
    ids = load_tokenizer(sources["bpe"]).encode("ask")
    llama = {"tokenizer_class": "LlamaTokenizer"}
    for settings, begin, end in (
        ({}, [], []),
        (llama, [1], []),
        (llama | {"add_bos_token": False}, [], []),
        (llama | {"add_eos_token": True}, [1], [2]),
        ({"add_eos_token": True}, [], [2]),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        theirs = write_export(tmp_path / "out", tmp_path, LLAMA)
        assert theirs("ask").input_ids == begin + ids + end


def test_qwen2_with_another_tokenizer_is_exported_as_an_equal_llama(sources, tmp_path, capsys):
    model = random_folder("qwen2", tmp_path / "hf", sources["bpe"])
    import_folder(tmp_path)
    assert export(tmp_path) == 0
    assert "written as llama, since as qwen2" in capsys.readouterr().err
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert loaded.config.model_type == "llama"
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    ours = load_tokenizer(sources["bpe"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert all(theirs(text).input_ids == ours.encode(text) for text in TEXTS)
    assert export(tmp_path, "--no-tokenizer", "bare") == 0
    names = {path.name for path in (tmp_path / "bare").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["model_type"] == "qwen2"


def test_a_missing_tokenizer_is_reported(sources, tmp_path, capsys):
    hf = tmp_path / "hf"
    random_folder("llama", hf, sources["tokenizer.json"])
    import_folder(tmp_path)
    (hf / "tokenizer.json").rename(hf / "elsewhere")
    assert export(tmp_path) == 2
    message = f"{hf} is no tokenizer, or does not exist any more; give it by --tokenizer PATH"
    assert message in capsys.readouterr().err
    assert export(tmp_path, f"--tokenizer {train_words(tmp_path)}") == 2
    assert "; --no-tokenizer writes the rest without one" in capsys.readouterr().err
    # run.json may name any file
    (hf / "tokenizer.json").write_text("root:x:0:0:root:/root:/bin/bash\n")
    assert export(tmp_path) == 2 and not (tmp_path / "out").exists()
    (hf / "tokenizer.json").unlink()
    shutil.rmtree(tmp_path / "ours")
    import_folder(tmp_path)
    assert export(tmp_path) == 0
    printed = capsys.readouterr().err
    assert "no tokenizer is written" in printed
    assert "a run takes data.tokenizer=PATH, to-hf --tokenizer PATH" in printed


def test_no_file_of_another_model_stays_beside_an_export(sources, tmp_path, capsys):
    random_folder("llama", tmp_path / "hf", sources["tokenizer.json"])
    import_folder(tmp_path)
    for name in (
        "tokenizer.json",
        "generation_config.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "pytorch_model.bin",
        "x.safetensors",
        "spiece.model",
        "special_tokens_map.json",
        "added_tokens.json",
        "adapter_config.json",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
        assert export(tmp_path, name=name) == 2
        assert f"already holds {name}" in capsys.readouterr().err
        assert [path.name for path in (tmp_path / name).iterdir()] == [name]


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "text_config"])
@pytest.mark.parametrize("source", ["hf", "checkpoint"])
def test_generation_ends_at_every_end_token_of_the_folder(sources, tmp_path, capsys, source, place):
    hf = tmp_path / "hf"
    model = random_folder("llama", hf, sources["tokenizer.json"])
    with torch.no_grad():  # a model that always says token 5
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()[5] = 1.0
    model.save_pretrained(hf)
    ends, file = {"eos_token_id": [0, 5] if source == "hf" else 5}, hf / place
    if place == "text_config":  # beside a vision tower
        file = hf / "config.json"
    settings = json.loads(file.read_text())
    if place == "text_config":
        del settings["eos_token_id"]
        ends = {place: ends}
    file.write_text(json.dumps(settings | ends))
    folder = import_folder(tmp_path) if source == "checkpoint" else hf
    capsys.readouterr()
    options = "--prompt ask[END] --special-tokens --temperature 0 --json --max-tokens 70"
    assert run(generate, f"--{source} {folder} {options}") == 0
    out, err = capsys.readouterr()
    tokens = json.loads(out.splitlines()[-1])["tokens"]
    assert tokens == [*load_tokenizer(sources["tokenizer.json"]).encode("ask"), 1]
    assert "exceed the model's 64 positions" in err


def test_special_tokens_have_names(sources):
    assert special_tokens(sources["tokenizer.json"]) == {"<|endoftext|>": 0, "[END]": 1}
    assert special_tokens(sources["bpe"]) == {"<unk>": 0, "<s>": 1, "</s>": 2}
    assert special_tokens(sources["tiktoken"]) == {"<|endoftext|>": 265}


PRESETS = (convert.Path(convert.__file__).parents[1] / "conf/model").glob("*.yaml")
NO_FAMILY = ("palm_8b", "palm_62b", "palm_540b")  # a parallel block with SwiGLU


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS))
def test_every_preset_has_a_family_or_is_rejected(name):
    model = load_config([f"model={name}"] if name != "default" else []).model
    if name in NO_FAMILY:
        with pytest.raises(ValueError, match="no Hugging Face family .*\n.*model.parallel_block"):
            hf_config_from_model(model, "fp16")
        return
    assert hf_config_from_model(model, "fp16")["dtype"] == "float16"


@pytest.mark.parametrize(("step", "positions"), [(0, 16), (1, 64)])
def test_an_export_has_the_positions_of_its_training(step, positions):
    """Servers cut at max_position_embeddings; a model that was only imported keeps its own."""
    config = load_config(["model=tiny", "model.max_positions=16", "train.seq_len=64"])
    notes: list[str] = []
    files = plan_export(config, notes.append, with_tokenizer=False, trained=step > 0).files
    assert json.loads(files["config.json"])["max_position_embeddings"] == positions
    assert any("model.max_positions = 16" in note for note in notes) == (step > 0)

"""convert.py, logits.py and generate.py: Hugging Face folders in and out, logits and text of either
kind."""

import json
import os

import numpy as np
import pytest
import torch
from hf_folders import random_model
from ranks import run_ranks
from runs import whole_tensors
from safetensors.torch import load_file, save_file
from tool_runs import run, save

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.config.schema import Config, DataConfig, PrecisionConfig
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools import convert, generate, logits
from megatron5d.train import hf_export

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=61
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def imported(request, tmp_path_factory):
    """(their model, its folder, our checkpoint of it, token ids)"""
    model = random_model(CONFIGS[request.param]())
    hf, checkpoint = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("ours") / "ckpt"
    model.save_pretrained(hf)
    assert run(convert, f"from-hf --hf {hf} --out {checkpoint}") == 0
    ids = torch.randint(0, 61, (5, 13))
    np.save(hf / "ids.npy", ids.numpy().astype(np.int32))
    return model, hf, checkpoint, ids


def test_logits_of_folder_and_checkpoint(imported, tmp_path):
    model, hf, checkpoint, ids = imported
    with torch.no_grad():
        expected = model(ids).logits.numpy()
    for source in (f"--hf {hf}", f"--checkpoint {checkpoint}"):
        out = tmp_path / "logits.npy"
        assert run(logits, f"{source} --tokens {hf}/ids.npy --out {out} --mbs 2") == 0
        result = np.load(out)
        assert result.shape == (5, 13, 61) and result.dtype == np.float32
        np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(expected).max())


def test_logits_over_ranks(imported, tmp_path):
    """dp 2 × tp 2 with sp, an odd number of rows: the same numbers as one process, in fp64."""
    _, hf, checkpoint, _ = imported
    options = f"--tokens {hf}/ids.npy --dtype fp64 --out {tmp_path}"
    assert run(logits, f"--hf {hf} {options}/1.npy") == 0

    def on_rank(rank, world):
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), **address)
        command = f"--checkpoint {checkpoint} {options}/4.npy --tp 2 --sp --mbs 2"
        assert run(logits, command) == 0

    run_ranks(on_rank, 4)
    one, four = np.load(tmp_path / "1.npy"), np.load(tmp_path / "4.npy")
    assert one.dtype == four.dtype == np.float64
    np.testing.assert_allclose(four, one, rtol=1e-10, atol=1e-12)


def test_export_of_an_import_is_equal(imported, tmp_path):
    """In small files; transformers loads them and computes the same, to the bit."""
    model, _, checkpoint, ids = imported
    command = f"to-hf --checkpoint {checkpoint} --out {tmp_path} --max-shard-gb 2e-5"
    assert run(convert, command) == 0
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_export_in_bf16_with_its_tokenizer(imported, tmp_path, capsys):
    """The end-of-document token ends generation of transformers, which else never stops."""
    model, _, checkpoint, _ = imported
    tokenizer, out = word_tokenizer(tmp_path), tmp_path / "out"
    command = f"to-hf --checkpoint {checkpoint} --dtype bf16 --tokenizer {tokenizer}"
    assert run(convert, f"{command} --out {out}") == 0
    written = {path.name: json.loads(path.read_text()) for path in out.glob("*.json")}
    assert written["tokenizer.json"]["model"] == json.loads(tokenizer.read_text())["model"]
    assert written["config.json"]["torch_dtype"] == "bfloat16"
    for name in ("config.json", "generation_config.json"):
        assert written[name]["eos_token_id"] == 60
    mode = tokenizer.stat().st_mode & 0o777
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {mode}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    theirs = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[name].bfloat16()), name
    # older folders have tables in fp32, which must not determine the dtype
    is_gpt2 = model.config.model_type == "gpt2"
    table = (
        "transformer.h.0.attn.bias" if is_gpt2 else "model.layers.0.self_attn.rotary_emb.inv_freq"
    )
    weights = out / "model.safetensors"
    save_file(load_file(weights) | {table: torch.ones(8)}, weights)
    assert run(convert, f"from-hf --hf {out} --out {tmp_path}/again") == 0
    assert saved_config(tmp_path / "again/step-00000000").precision.dtype == "bf16"
    tokenizer.write_text("{}")
    assert run(convert, f"{command} --out {tmp_path}/no") == 2 and not (tmp_path / "no").exists()
    assert "not a tokenizer.json" in capsys.readouterr().err


def test_export_in_fp32_has_the_master_weights(imported, tmp_path):
    """A run in bf16 saves what it rounds its weights from; a folder in fp32 is as exact."""
    model, _, checkpoint, _ = imported
    folder, tensors = checkpoint / "step-00000000", {}
    for key, weight in whole_tensors(folder).items():
        tensors[key] = weight.bfloat16()
        tensors[key.replace("model.", "optim.master.", 1)] = weight
    config = Config(model=saved_config(folder).model, precision=PrecisionConfig(dtype="bf16"))
    save(tmp_path / "ckpt", config, tensors)
    for dtype, round_weight in (("fp32", lambda weight: weight), ("bf16", torch.Tensor.bfloat16)):
        out = tmp_path / dtype
        command = f"to-hf --checkpoint {tmp_path}/ckpt --out {out} --dtype {dtype}"
        assert run(convert, command) == 0
        written, theirs = load_file(out / "model.safetensors"), model.state_dict()
        assert written
        for name, tensor in written.items():
            assert torch.equal(tensor, round_weight(theirs[name])), name


def test_no_more_than_one_tensor_is_read_at_a_time(imported, tmp_path, monkeypatch):
    """While a checkpoint is written from a folder, each stored tensor is read once, when it is
    written."""
    _, hf, _, _ = imported
    read, reads = SafetensorsFolder.read, []

    def observed(self, name, offset, shape):
        files = list(tmp_path.glob("**/*.distcp"))
        reads.append((name, files[0].stat().st_size if files else 0))
        return read(self, name, offset, shape)

    monkeypatch.setattr(SafetensorsFolder, "read", observed)
    assert run(convert, f"from-hf --hf {hf} --out {tmp_path}/ckpt") == 0
    names, sizes = zip(*reads)
    assert len(names) == len(set(names))
    assert sizes[-1] > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--tokens {hf}/config.json", "is not a .npy file"),
        ("--tokens {tmp}/many.npz", "an archive of several (.npz)"),
        ("--tokens {tmp}/absent.npy", "absent.npy cannot be read: No such file"),
        (
            "--tokens {tmp}/far.npy",
            "id 61 at row 0, column 2 is outside the vocabulary 0 ... 60",
        ),
        ("--tokens {tmp}/real.npy", "(got float64"),
        ("--tokens {hf}/ids.npy --tp 3", "model.num_heads=4 must be divisible"),
        ("--tokens {hf}/ids.npy --mbs 0", "--mbs 0"),
    ],
)
def test_logits_rejects(imported, tmp_path, options, reason, capsys):
    _, hf, _, _ = imported
    np.save(tmp_path / "far.npy", np.array([[0, 60, 61]]))
    np.save(tmp_path / "real.npy", np.array([[0.5]]))
    np.savez(tmp_path / "many.npz", np.array([[1]]))
    options = options.format(hf=hf, tmp=tmp_path)
    assert run(logits, f"--hf {hf} --out {tmp_path}/out.npy {options}") == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()


def test_convert_rejects(imported, tmp_path, capsys):
    _, hf, checkpoint, _ = imported
    out = tmp_path / "out"
    for command, reason in {
        f"from-hf --hf {hf} --out {checkpoint}": "already holds the checkpoint of step 0",
        f"from-hf --hf {tmp_path} --out {out}": "config.json does not exist",
        f"from-hf --hf Qwen/Qwen3-0.6B --out {out}": "`hf download NAME",
        f"to-hf --checkpoint {tmp_path} --out {out}": "--checkpoint = ",
        f"to-hf --checkpoint {checkpoint} --out {hf}": (
            "already holds config.json, generation_config.json, model.safetensors"
        ),
    }.items():
        assert run(convert, command) == 2
        assert reason in capsys.readouterr().err


def test_biases_that_a_family_does_not_have_are_not_dropped(tmp_path):
    """A mixture without router biases of its own, balanced by them: its folder would choose other
    experts."""

    class Saved:
        tensors = {"layers.0.router.bias": None, "layers.1.router.bias": None}

    with pytest.raises(
        ValueError,
        match=r"moe.balance=bias changed 2 biases .*layers.0.*bias .*model.router_bias=true",
    ):
        hf_export.check_tensor_names(Saved(), [], tmp_path)


def word_tokenizer(folder):
    """A tokenizer of 61 words in the format of the tokenizers library."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(60)} | {"<|endoftext|>": 60}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_generate_greedy_as_transformers(imported, tmp_path, capsys):
    model, _, checkpoint, _ = imported
    command = f"--checkpoint {checkpoint} --tokenizer {word_tokenizer(tmp_path)} --json"
    assert run(generate, f"{command} --prompt 'w3 w7' --max-tokens 12 --temperature 0") == 0
    printed = json.loads(capsys.readouterr().out)
    tokens = [3, 7]
    with torch.no_grad():
        for _ in range(12):
            token = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            if token == 60:
                break
            tokens.append(token)
    assert printed["tokens"] == tokens
    assert printed["text"].split() == [f"w{token}" for token in tokens]


def test_a_prompt_begins_as_the_tokenizers_files_say(imported, tmp_path, capsys):
    """As with transformers for the folder; --bos and --no-bos overrule its files."""
    tokenizers = pytest.importorskip("tokenizers")
    _, hf, checkpoint, _ = imported
    path, settings = word_tokenizer(tmp_path), tmp_path / "tokenizer_config.json"
    command = f"--hf {hf} --tokenizer {tmp_path} --prompt 'w3 w7' --max-tokens 1 --temperature 0"

    def begin(options=""):
        assert run(generate, f"{command} --json {options}") == 0
        tokens = json.loads(capsys.readouterr().out)["tokens"]
        return tokens[: tokens.index(7) + 1]

    assert begin() == [3, 7]
    settings.write_text('{"bos_token": "w9"}')
    assert begin() == [3, 7] and begin("--bos") == [9, 3, 7]
    model = tokenizers.Tokenizer.from_file(str(path))
    template = tokenizers.processors.TemplateProcessing(single="w9 $A", special_tokens=[("w9", 9)])
    model.post_processor = template
    model.save(str(path))
    assert begin() == [9, 3, 7] and begin("--no-bos") == [3, 7]
    tokenizer, args = load_tokenizer(tmp_path), generate.parse(["--hf", "x", "--prompt", "w3"])
    imported_config = saved_config(checkpoint / "step-00000000")
    assert generate.begin_of_prompt(tokenizer, args, imported_config) == [9]
    assert generate.begin_of_prompt(tokenizer, args, Config(data=DataConfig(["corpus"]))) == []
    settings.write_text('{"bos_token": null}')
    assert run(generate, f"{command} --bos") == 2
    assert "--bos: the tokenizer names no begin-of-text token" in capsys.readouterr().err


def test_generate_rejects(imported, capsys):
    _, _, checkpoint, _ = imported
    for options, reason in {
        "": "--tokenizer PATH",
        "--max-tokens 0": "--max-tokens 0",
        "--tokenizer /nowhere/tok": "/nowhere/tok",
        "--tp 2": "fix: --tp 1, or use 2 ranks ",
    }.items():
        assert run(generate, f"--checkpoint {checkpoint} --prompt x {options}") == 2
        assert reason in capsys.readouterr().err

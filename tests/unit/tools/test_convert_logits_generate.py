"""The three tools from their command lines: Hugging Face folders in and out, logits and text of
either kind."""

import json
import os

import numpy as np
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.folder import read_run
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import SavedWeights
from megatron5d.checkpoint.save import Saver
from megatron5d.config.schema import Config, DataConfig
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools import convert, generate, logits
from megatron5d.train import hf_export

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
INV_FREQ = "model.layers.0.self_attn.rotary_emb.inv_freq"
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**TINY, head_dim=16, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=61
    ),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def imported(request, tmp_path_factory):
    """(their model, its folder, our checkpoint of it, token ids)"""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hf, checkpoints = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("ours") / "ckpt"
    model.save_pretrained(hf)
    assert convert.main(["from-hf", "--hf", str(hf), "--out", str(checkpoints)]) == 0
    ids = torch.randint(0, 61, (5, 13))
    np.save(hf / "ids.npy", ids.numpy().astype(np.int32))
    return model, hf, checkpoints, ids


def run_logits(*words):
    assert logits.main([str(word) for word in words]) == 0


def test_logits_of_folder_and_checkpoint(imported, tmp_path):
    model, hf, checkpoints, ids = imported
    with torch.no_grad():
        wanted = model(ids).logits.numpy()
    for i, source in enumerate((["--hf", hf], ["--checkpoint", checkpoints])):
        run_logits(*source, "--tokens", hf / "ids.npy", "--out", tmp_path / f"{i}.npy", "--mbs", 2)
        got = np.load(tmp_path / f"{i}.npy")
        assert got.shape == (5, 13, 61) and got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, atol=1e-4 * np.abs(wanted).max())


def test_logits_over_ranks(imported, tmp_path):
    """dp 2 × tp 2 with sp, an odd number of rows: the same numbers as one process, in fp64."""
    _, hf, checkpoints, _ = imported
    run_logits(
        "--hf", hf, "--tokens", hf / "ids.npy", "--out", tmp_path / "1.npy", "--dtype", "fp64"
    )

    def fn(rank, world):
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT="1"
        )
        run_logits(
            "--checkpoint",
            checkpoints,
            "--tokens",
            hf / "ids.npy",
            "--out",
            tmp_path / "4.npy",
            "--dtype",
            "fp64",
            "--tp",
            2,
            "--sp",
            "--mbs",
            2,
        )

    run_ranks(fn, 4)
    one, four = np.load(tmp_path / "1.npy"), np.load(tmp_path / "4.npy")
    assert one.dtype == four.dtype == np.float64
    np.testing.assert_allclose(four, one, rtol=1e-10, atol=1e-12)


def test_there_and_back_again(imported, tmp_path):
    """Export in small files; transformers loads it and computes the same, to the bit."""
    model, _, checkpoints, ids = imported
    words = [
        "to-hf",
        "--checkpoint",
        str(checkpoints),
        "--out",
        str(tmp_path),
        "--max-shard-gb",
        "2e-5",
    ]
    assert convert.main(words) == 0
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_export_in_bf16_with_its_tokenizer(imported, tmp_path):
    model, _, checkpoints, _ = imported
    made = word_tokenizer(tmp_path).rename(tmp_path / "made.json")
    out = tmp_path / "out"
    words = [
        "to-hf",
        "--checkpoint",
        str(checkpoints),
        "--out",
        str(out),
        "--dtype",
        "bf16",
        "--tokenizer",
        str(made),
    ]
    assert convert.main(words) == 0
    assert (
        json.loads((out / "tokenizer.json").read_text())["model"]
        == json.loads(made.read_text())["model"]
    )
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {made.stat().st_mode & 0o777}
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    theirs = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, theirs[name].bfloat16()), name
    table = {
        (
            "transformer.h.0.attn.bias" if "gpt2" in model.config.model_type else INV_FREQ
        ): torch.ones(8)
    }
    # as older folders have them
    save_file(load_file(out / "model.safetensors") | table, out / "model.safetensors")
    assert convert.main(["from-hf", "--hf", str(out), "--out", str(tmp_path / "again")]) == 0
    assert read_run(tmp_path / "again" / "step-00000000")["config"]["precision"]["dtype"] == "bf16"


def test_export_in_fp32_takes_the_masters(imported, tmp_path):
    """A run in bf16 saves what it rounds its weights from; a folder in fp32 is as exact."""
    model, _, checkpoints, _ = imported
    folder, tensors = checkpoints / "step-00000000", {}
    exact = SavedWeights(folder)
    for name, entry in exact.tensors.items():
        zero = (0,) * len(entry.size)
        values = exact.read(name, zero, entry.size)
        for key, copy in {"model": values.bfloat16(), "optim.master": values}.items():
            tensors[f"{key}.{name}"] = ShardedTensor(entry.size, [(zero, copy)], copy.dtype)
    Saver(tmp_path / "ckpt", keep=0).save(0, tensors, read_run(folder))
    for dtype, precise in (("fp32", lambda t: t), ("bf16", torch.Tensor.bfloat16)):
        out = tmp_path / dtype
        words = [
            "to-hf",
            "--checkpoint",
            str(tmp_path / "ckpt"),
            "--out",
            str(out),
            "--dtype",
            dtype,
        ]
        assert convert.main(words) == 0
        written, theirs = load_file(out / "model.safetensors"), model.state_dict()
        assert written
        for name, tensor in written.items():
            assert torch.equal(tensor, precise(theirs[name])), name


def test_no_more_than_one_tensor_is_read_at_a_time(imported, tmp_path, monkeypatch):
    """While a checkpoint is written from a folder, each stored tensor is read once, when its turn
    comes."""
    _, hf, _, _ = imported
    read, written = SafetensorsFolder.read, []

    def noted(self, name, offset, shape):
        files = list(tmp_path.glob("**/*.distcp"))
        written.append((name, files[0].stat().st_size if files else 0))
        return read(self, name, offset, shape)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    assert convert.main(["from-hf", "--hf", str(hf), "--out", str(tmp_path / "ckpt")]) == 0
    names, sizes = zip(*written)
    assert sorted(names) == sorted(set(names))
    assert sizes[-1] > 0


REFUSED = {
    "is not a .npy file": lambda hf, tmp: ["--tokens", hf / "config.json"],
    "an archive of several (.npz)": lambda hf, tmp: ["--tokens", tmp / "many.npz"],
    "absent.npy cannot be read: No such file": lambda hf, tmp: ["--tokens", tmp / "absent.npy"],
    "id 61 at row 0, column 2 is outside the vocabulary 0 ... 60": lambda hf, tmp: [
        "--tokens",
        tmp / "far.npy",
    ],
    "(got float64": lambda hf, tmp: ["--tokens", tmp / "real.npy"],
    "model.num_heads=4 must be divisible": lambda hf, tmp: ["--tokens", hf / "ids.npy", "--tp", 3],
    "--mbs 0": lambda hf, tmp: ["--tokens", hf / "ids.npy", "--mbs", 0],
}


@pytest.mark.parametrize("reason", list(REFUSED))
def test_logits_refuses(imported, tmp_path, reason, capsys):
    _, hf, _, _ = imported
    np.save(tmp_path / "far.npy", np.array([[0, 60, 61]]))
    np.save(tmp_path / "real.npy", np.array([[0.5]]))
    np.savez(tmp_path / "many.npz", np.array([[1]]))
    words = ["--hf", hf, "--out", tmp_path / "out.npy", *REFUSED[reason](hf, tmp_path)]
    assert logits.main([str(word) for word in words]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()


def test_convert_refuses(imported, tmp_path, capsys):
    _, hf, checkpoints, _ = imported
    for words, reason in [
        (["from-hf", "--hf", hf, "--out", checkpoints], "already holds the checkpoint of step 0"),
        (["from-hf", "--hf", tmp_path, "--out", tmp_path / "c"], "config.json does not exist"),
        (
            ["from-hf", "--hf", "Qwen/Qwen3-0.6B", "--out", tmp_path / "c"],
            "`hf download NAME",
        ),
        (["to-hf", "--checkpoint", tmp_path, "--out", tmp_path / "o"], "--checkpoint = "),
        (
            ["to-hf", "--checkpoint", checkpoints, "--out", hf],
            "already holds config.json, generation_config.json, model.safetensors",
        ),
    ]:
        assert convert.main([str(word) for word in words]) == 2
        assert reason in capsys.readouterr().err


def test_biases_that_a_family_has_no_place_for_are_not_dropped(tmp_path):
    """A mixture without biases of its own, balanced by them: its folder would choose other
    experts."""

    class Saved:
        tensors = {"layers.0.router.bias": None, "layers.1.router.bias": None}

    with pytest.raises(
        ValueError, match=r"2 biases .layers.0.*bias .* moe.balance=bias .*model.router_bias=true"
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


def test_an_exported_model_knows_what_ends_a_text(imported, tmp_path, capsys):
    """Else generate() of transformers never stops; a tokenizer that cannot be read is refused."""
    tokenizer = word_tokenizer(tmp_path)
    words = [
        "to-hf",
        "--checkpoint",
        imported[2],
        "--out",
        tmp_path / "out",
        "--tokenizer",
        tokenizer,
    ]
    assert convert.main([str(word) for word in words]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == 60
    tokenizer.write_text("{}")
    words[4] = tmp_path / "again"
    assert convert.main([str(word) for word in words]) == 2 and not words[4].exists()
    assert "not a tokenizer.json" in capsys.readouterr().err


def test_generate_greedy_as_transformers(imported, tmp_path, capsys):
    model, _, checkpoints, _ = imported
    words = [
        "--checkpoint",
        checkpoints,
        "--tokenizer",
        word_tokenizer(tmp_path),
        "--prompt",
        "w3 w7",
        "--json",
        "--max-tokens",
        12,
        "--temperature",
        0,
    ]
    assert generate.main([str(word) for word in words]) == 0
    got = json.loads(capsys.readouterr().out)
    tokens = [3, 7]
    with torch.no_grad():
        for _ in range(12):
            token = int(model(torch.tensor([tokens])).logits[0, -1].argmax())
            if token == 60:
                break
            tokens.append(token)
    assert got["tokens"] == tokens
    assert got["text"].split() == [f"w{token}" for token in tokens]


def test_a_prompt_begins_as_the_tokenizers_files_say(imported, tmp_path, capsys):
    """As transformers does for the folder; after training on data.train, and against the files, as
    --bos says."""
    tokenizers = pytest.importorskip("tokenizers")
    _, hf, checkpoints, _ = imported
    model = tokenizers.Tokenizer.from_file(str(word_tokenizer(tmp_path)))

    def tokens(*words):
        argv = [
            *words,
            "--tokenizer",
            tmp_path,
            "--prompt",
            "w3 w7",
            "--json",
            "--max-tokens",
            1,
            "--temperature",
            0,
        ]
        assert generate.main([str(word) for word in argv]) == 0
        return json.loads(capsys.readouterr().out)["tokens"]

    assert tokens("--hf", hf)[:2] == [3, 7]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "w9"}')
    assert tokens("--hf", hf)[:2] == [3, 7] and tokens("--hf", hf, "--bos")[:3] == [9, 3, 7]
    template = tokenizers.processors.TemplateProcessing(single="w9 $A", special_tokens=[("w9", 9)])
    model.post_processor = template
    model.save(str(tmp_path / "tokenizer.json"))
    for source in (["--hf", hf], ["--checkpoint", checkpoints]):
        assert tokens(*source)[:3] == [9, 3, 7] and tokens(*source, "--no-bos")[:2] == [3, 7]
    args = generate.parse(["--hf", "x", "--prompt", "w3"])
    trained = Config(data=DataConfig(["corpus"]))
    assert generate.begin_of_prompt(load_tokenizer(tmp_path), args, trained) == []
    assert generate.begin_of_prompt(load_tokenizer(tmp_path), args, Config()) == [9]
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": null}')
    assert (
        generate.main(["--hf", str(hf), "--tokenizer", str(tmp_path), "--prompt", "w3", "--bos"])
        == 2
    )
    assert "--bos: the tokenizer names no begin-of-text token" in capsys.readouterr().err


def test_generate_refuses(imported, capsys):
    _, _, checkpoints, _ = imported
    for words, reason in [
        (["--prompt", "x"], "--tokenizer PATH"),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens 0"),
        (["--prompt", "x", "--tokenizer", "/nowhere/tok"], "/nowhere/tok"),
        (["--prompt", "x", "--tp", "2"], "fix: --tp 1, or use 2 ranks "),
    ]:
        assert generate.main(["--checkpoint", str(checkpoints), *words]) == 2
        assert reason in capsys.readouterr().err

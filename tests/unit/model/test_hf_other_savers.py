"""Folders that other programs than save_pretrained wrote: one of two tied tensors, a prefix before
every name, a head that the configuration ties."""

import numpy as np
import pytest
import torch
from hf_folders import random_model, tiny_config
from safetensors.torch import load_file, save_file, save_model
from tool_runs import run

from megatron5d.checkpoint.hf.families import DEFAULTS
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder
from megatron5d.checkpoint.hf.tensor_table import BASE_PREFIX
from megatron5d.checkpoint.hf.weights import folder_model, folder_notes, hf_weights
from megatron5d.checkpoint.layout import slices
from megatron5d.tools import convert, logits

transformers = pytest.importorskip("transformers")

WEIGHTS = "model.safetensors"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """family -> (tied model, its folder)"""
    made = {}
    for family in DEFAULTS:
        model = random_model(tiny_config(family, tie_word_embeddings=True, pad_token_id=0))
        folder = tmp_path_factory.mktemp(family)
        model.save_pretrained(folder)
        made[family] = model, folder
    return made


def rewritten(source, folder, tensors):
    """A folder with the configuration of another one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def contents(folder):
    """Every tensor of the model in a folder by our name, and the lines for the user."""
    model = folder_model(folder)
    with SafetensorsFolder(folder) as stored:
        tensors = {}
        for name, tensor in hf_weights(model, stored, torch.float32).items():
            tensors[name] = torch.full(tuple(tensor.shape), torch.nan)
            for offset in tensor.shards:
                part = tensor.values(offset)
                tensors[name][slices(offset, part.shape)] = part
        return tensors, folder_notes(model, stored)


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize("family", list(DEFAULTS))
def test_one_of_two_tied_tensors_is_enough(tied, family, tmp_path):
    """safetensors' save_model keeps either of them, and names the other in the metadata; files
    without it, and those that keep the embedding alone or both, are the same model."""
    model, plain = tied[family]
    expected, _ = contents(plain)
    rewritten(plain, tmp_path, {})
    save_model(model, str(tmp_path / WEIGHTS), {"format": "pt"})
    assert_equal(contents(tmp_path)[0], expected)
    saved = load_file(tmp_path / WEIGHTS)
    embedding = next(name for name in load_file(plain / WEIGHTS) if name.endswith(EMBEDDINGS))
    heads = ("lm_head.weight", "embed_out.weight") if family == "gpt_neox" else ("lm_head.weight",)
    rest = {name: saved[name] for name in saved.keys() - {embedding, *heads}}
    values = model.get_input_embeddings().weight.detach()
    for names in (*([head] for head in heads), *([head, embedding] for head in heads)):
        tensors = rest | {name: values.clone() for name in names}
        assert_equal(contents(rewritten(plain, tmp_path, tensors))[0], expected)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("family", list(DEFAULTS))
def test_a_prefix_of_every_name_is_stripped(tied, family, bare, tmp_path):
    model, plain = tied[family]
    expected, notes = contents(plain)
    assert notes == []
    stored = load_file(plain / WEIGHTS)
    if bare:
        stored = {name.removeprefix(BASE_PREFIX[family]): t for name, t in stored.items()}
    for prefix in ("_orig_mod.", "module.", "model.module.", "student.inner."):
        tensors = {prefix + name: tensor for name, tensor in stored.items()}
        read, (note,) = contents(rewritten(plain, tmp_path, tensors))
        assert_equal(read, expected)
        assert f"all names begin with {prefix}, which is stripped" in note


def test_a_prefix_of_some_names_is_not(tied, tmp_path):
    _, plain = tied["qwen3"]
    first, *rest = load_file(plain / WEIGHTS).items()
    tensors = {first[0]: first[1]} | {f"module.{name}": tensor for name, tensor in rest}
    with pytest.raises(ValueError, match="does not fit the model"):
        contents(rewritten(plain, tmp_path, tensors))


def test_a_prefix_before_fp8_scales_and_tied_aliases(tied, tmp_path):
    model, plain = tied["llama"]
    rewritten(plain, tmp_path, {})
    save_model(torch.compile(model), str(tmp_path / WEIGHTS), {"format": "pt"})
    names = load_file(tmp_path / WEIGHTS)
    assert "_orig_mod.lm_head.weight" in names and len(names) == len(load_file(plain / WEIGHTS))
    assert_equal(contents(tmp_path)[0], contents(plain)[0])
    name = "_orig_mod.model.layers.0.mlp.up_proj.weight"
    scale = {f"{name}_scale_inv": torch.full((1, 1), 2.0)}
    quantized = names | {name: names[name].to(torch.float8_e4m3fn)} | scale
    read = contents(rewritten(plain, tmp_path, quantized))[0]
    part = read["model.layers.0.mlp.up.weight"][48:]
    assert torch.equal(part, quantized[name].float() * 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "gemma3_text", "deepseek_v3"])
def test_a_head_beside_a_tied_configuration_is_loaded(tied, family, tmp_path, capsys):
    """As transformers 5 does, which is the oracle; with a line that names the file and the key."""
    _, plain = tied[family]
    tensors = load_file(plain / WEIGHTS)
    embedding = next(name for name in tensors if name.endswith(EMBEDDINGS))
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    other = tensors[embedding].clone()
    other[-1, -1] += 1
    folder = rewritten(plain, tmp_path / "hf", tensors | {head: other})
    ids = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = loaded(ids).logits.numpy()
    np.save(tmp_path / "ids.npy", ids.numpy())
    assert run(convert, f"from-hf --hf {folder} --out {tmp_path}/ours") == 0
    lines = [capsys.readouterr().err]
    for source in (f"--checkpoint {tmp_path}/ours", f"--hf {folder}"):
        assert run(logits, f"{source} --tokens {tmp_path}/ids.npy --out {tmp_path}/out.npy") == 0
        np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, atol=1e-4)
    lines.append(capsys.readouterr().err)
    expected_line = f"{head} is loaded as a head of its own"
    for text in lines:
        (line,) = [line for line in text.splitlines() if expected_line in line]
        assert f"{folder}/config.json has tie_word_embeddings = true" in line
    assert run(convert, f"diff {folder} {tmp_path}/ours") == 0

"""Hugging Face folders with files that are not what their names say, or that do not belong
together."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megatron5d.checkpoint.hf.files import INDEX, SINGLE
from megatron5d.checkpoint.hf.import_config import end_tokens, read_hf_config
from megatron5d.checkpoint.hf.safetensors_folder import SafetensorsFolder, stored_tensors
from megatron5d.checkpoint.hf.tensor_table import Entry


def numbered(size):
    return torch.arange(size, dtype=torch.float32)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12\n"
WRONG = {
    "git lfs pull": POINTER,
    "web page": "<!DOCTYPE html>",
    "empty": "",
    "pickle of torch": "PK\x03\x04x",
    "GGUF": "GGUFx",
    "deeper": "[" * 200_000,
}


@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json", "generation_config.json"])
@pytest.mark.parametrize("word", WRONG)
def test_usual_wrong_files_are_called_by_their_names(tmp_path, name, word):
    (tmp_path / name).write_text(WRONG[word])
    if name == SINGLE and word == "deeper":
        word = "not a complete safetensors file"
    read = {"config.json": read_hf_config, "generation_config.json": end_tokens}.get(
        name, SafetensorsFolder
    )
    with pytest.raises(ValueError, match=f"{name}.*{word}"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "word"),
    [
        (["pytorch_model.bin"], "safe_serialization"),
        (["adapter_model.safetensors"], "LoRA"),
        (["x.gguf"], "llama.cpp"),
        (["consolidated.00.pth"], "publisher"),
        (["model-00001-of-00002.safetensors"], "names them all, is missing"),
    ],
)
def test_folders_of_other_formats_are_called_by_their_names(tmp_path, files, word):
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=word):
        SafetensorsFolder(tmp_path)


def sharded(folder, **tensors):
    """Two shards, a in the first and b in the second, with what else is given for each."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for own, name in zip("ab", names):
        save_file({own: numbered(3)} | tensors.get(own, {}), folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict(zip("ab", names))}))


def test_each_tensor_comes_from_the_file_that_the_index_names(tmp_path):
    stale = {"a": torch.zeros(3)}
    sharded(tmp_path, b=stale)
    with SafetensorsFolder(tmp_path) as stored:
        assert torch.equal(stored.read("a", (0,), (3,)), numbered(3))
    sharded(tmp_path, b={"c": numbered(1)})
    with pytest.raises(
        ValueError, match="00002.safetensors holds c, which .*index.json does not name"
    ):
        SafetensorsFolder(tmp_path)
    sharded(tmp_path)
    save_file(stale, tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(
        ValueError, match="model-00003-of-00003.safetensors, which .* does not name"
    ):
        SafetensorsFolder(tmp_path)
    save_file(stale, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="two sets of weights"):
        SafetensorsFolder(tmp_path)
    save_file({"b": numbered(3)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / SINGLE).unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        ValueError, match="places a in model-00001-of-00002.safetensors, which does not hold it"
    ):
        SafetensorsFolder(tmp_path)


def test_a_config_of_endless_layers_is_refused_at_once(tmp_path):
    for family, key in (
        ("llama", "num_hidden_layers"),
        ("gpt2", "n_layer"),
        ("mixtral", "num_experts"),
        ("deepseek_v3", "n_routed_experts"),
        ("deepseek_v3", "num_nextn_predict_layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, key: 10**12}))
        with pytest.raises(
            ValueError, match=r"= 1000000000000.* exceeds the limit of 1,000,000 layers and experts"
        ):
            read_hf_config(tmp_path)


def test_fp16_is_refused_where_a_weight_would_become_infinite():
    entries = [Entry("w", (0, 3), "w", (3,))]
    table = {"w": torch.tensor([1.0, 2.0, 65504.0])}
    assert (
        next(iter(stored_tensors(entries, lambda *_: table["w"], torch.float16)))[1].dtype
        == torch.float16
    )
    table["w"][0] = 7e4
    with pytest.raises(ValueError, match="w reaches 7e.04, but fp16 ends at 65504"):
        list(stored_tensors(entries, lambda *_: table["w"], torch.float16))

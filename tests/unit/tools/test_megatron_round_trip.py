"""What tools/convert.py to-megatron wrote, from-megatron reads again; a refusal leaves no folder
behind."""

import re

import pytest
import torch
from runs import whole_tensors

from megatron5d.checkpoint.folder import read_run
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig, TrainConfig
from megatron5d.model.gpt import GPT
from megatron5d.tools import convert
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.state import Progress

SIZES = {
    "vocab_size": 64,
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
}
MIXTURE = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 8}
KINDS = ("master", "exp_avg", "exp_avg_sq")


def run(*words):
    return convert.main([str(word) for word in words])


def saved(folder, dtype="fp32", kinds=(), **model):
    """A checkpoint of step 3 with random weights and what Adam keeps; returns its tensors."""
    config = Config(
        model=ModelConfig(**SIZES | model),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(),
        train=TrainConfig(seq_len=32, gbs=4),
    )
    torch.manual_seed(0)
    tensors = {}
    for parameter in GPT(config, build_mesh(resolve(1)), "cpu").parameters():
        name, shape = spec_of(parameter).name, spec_of(parameter).shape
        master = torch.randn(shape)
        tensors[f"model.{name}"] = master.to(parameter.dtype)
        tensors |= {
            f"optim.{kind}.{name}": master if kind == "master" else torch.rand(shape)
            for kind in kinds
        }
    return tensors, save_weights(
        folder, layout(tensors), config, Progress(3, consumed_samples=12, tokens=12 * 32)
    )


def layout(tensors):
    return {
        key: ShardedTensor(t.shape, [((0,) * t.dim(), t)], t.dtype) for key, t in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model", [{}, MIXTURE, {"tie_embeddings": True, "qk_norm": True, "qkv_bias": True}]
)
def test_weights_come_back_bit_equal(tmp_path, dtype, model):
    tensors, _ = saved(tmp_path / "ours", dtype, **model)
    assert run("to-megatron", "--checkpoint", tmp_path / "ours", "--out", tmp_path / "theirs") == 0
    assert run("from-megatron", "--megatron", tmp_path / "theirs", "--out", tmp_path / "again") == 0
    again = whole_tensors(resolve_checkpoint(tmp_path / "again", ""))
    assert again.keys() == tensors.keys()
    for key, values in tensors.items():
        assert again[key].dtype == values.dtype and torch.equal(again[key], values), key


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_optimiser_comes_back_bit_equal(tmp_path, dtype):
    kinds = KINDS if dtype == "bf16" else KINDS[1:]  # of a run in fp32 the weights are the masters
    tensors, folder = saved(tmp_path / "ours", dtype, kinds)
    words = [
        "to-megatron",
        "--checkpoint",
        tmp_path / "ours",
        "--out",
        tmp_path / "theirs",
        "--optimizer",
    ]
    assert run(*words) == 0
    assert run("from-megatron", "--megatron", tmp_path / "theirs", "--out", tmp_path / "again") == 0
    found = resolve_checkpoint(tmp_path / "again", "")
    assert found.name == folder.name
    assert read_run(found)["progress"] == read_run(folder)["progress"]
    again = whole_tensors(found)
    masters = {
        key.replace("model.", "optim.master.", 1): t
        for key, t in tensors.items()
        if key.startswith("model.")
    }
    for key, values in (masters | tensors).items():
        assert again.pop(key).equal(values), key
    assert not again


WORDS = {
    "from-megatron": ["--megatron", "theirs"],
    "average": ["ours"],
    "to-megatron": ["--checkpoint", "ours"],
    "to-hf": ["--checkpoint", "ours", "--max-shard-gb", "2e-6"],
    "upcycle": ["--checkpoint", "ours", "--num-experts", "4", "--top-k", "2"],
}


@pytest.mark.parametrize("command", WORDS)
def test_a_source_that_is_damaged_midway_leaves_nothing(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    saved("ours")
    assert run("to-megatron", "--checkpoint", "ours", "--out", "theirs") == 0
    for path in tmp_path.rglob("*.distcp"):  # found when a tensor is read, after the folder is made
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : -1000 : 64] = bytes(
            len(content[len(content) // 2 : -1000 : 64])
        )
        path.write_bytes(content)
    capsys.readouterr()
    assert run(command, *WORDS[command], "--out", "new/out") == 2
    told = capsys.readouterr().err
    assert (
        re.search(r"(ours|theirs)/\S*/__0_0.distcp is damaged", told)
        and "before this one" not in told
    )
    assert not (tmp_path / "new").exists(), list((tmp_path / "new").rglob("*"))


def test_nothing_is_written_that_no_tool_would_read(tmp_path):
    with pytest.raises(ConfigError, match="model.norm_eps must be above 0"):
        saved(tmp_path / "ours", norm_eps=0.0)
    with pytest.raises(SystemExit):  # before anything is read
        run(
            "from-megatron",
            "--megatron",
            tmp_path,
            "--out",
            tmp_path / "ours",
            "--vocab-size",
            "-1",
        )
    assert not (tmp_path / "ours").exists()


def test_a_refusal_leaves_a_folder_that_was_there(tmp_path):
    saved(tmp_path / "ours")
    (tmp_path / "out").mkdir()
    assert run("from-megatron", "--megatron", tmp_path / "ours", "--out", tmp_path / "out") == 2
    assert (tmp_path / "out").is_dir()

"""from-megatron reads what to-megatron of tools/convert.py wrote; failures leave no folder."""

import re

import pytest
import torch
from runs import whole_tensors
from tool_runs import SIZES, random_weights, run, save

from megatron5d.checkpoint.folder import read_run
from megatron5d.checkpoint.load import resolve_checkpoint
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig, TrainConfig
from megatron5d.tools import convert
from megatron5d.train.state import Progress

MIXTURE = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 8}


def saved(directory, dtype="fp32", optimizer=False, **model):
    """A checkpoint of step 3 with random weights, and Adam's state; its tensors and folder."""
    config = Config(
        model=ModelConfig(**SIZES | model),
        precision=PrecisionConfig(dtype=dtype),
        train=TrainConfig(seq_len=32, gbs=4),
    )
    tensors = random_weights(config)
    for key, weight in list(tensors.items()) if optimizer else ():
        name = key.removeprefix("model.")
        tensors |= {
            f"optim.{kind}.{name}": torch.rand(weight.shape) for kind in ("exp_avg", "exp_avg_sq")
        }
        if dtype == "bf16":
            tensors[f"optim.master.{name}"] = torch.randn(weight.shape)
            tensors[key] = tensors[f"optim.master.{name}"].bfloat16()
    progress = Progress(3, consumed_samples=12, tokens=12 * 32)
    return tensors, save(directory, config, tensors, progress=progress)


def round_trip(folder, options=""):
    """The folder of the checkpoint that returns from Megatron-LM's format."""
    ours, theirs, back = (folder / name for name in ("ours", "theirs", "back"))
    assert run(convert, f"to-megatron --checkpoint {ours} --out {theirs} {options}") == 0
    assert run(convert, f"from-megatron --megatron {theirs} --out {back}") == 0
    return resolve_checkpoint(back, "")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model", [{}, MIXTURE, {"tie_embeddings": True, "qk_norm": True, "qkv_bias": True}]
)
def test_weights_return_bit_equal(tmp_path, dtype, model):
    tensors, _ = saved(tmp_path / "ours", dtype, **model)
    returned = whole_tensors(round_trip(tmp_path))
    assert returned.keys() == tensors.keys()
    for key, values in tensors.items():
        assert returned[key].dtype == values.dtype and torch.equal(returned[key], values), key


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_optimizer_returns_bit_equal(tmp_path, dtype):
    tensors, folder = saved(tmp_path / "ours", dtype, optimizer=True)
    back = round_trip(tmp_path, "--optimizer")
    assert back.name == folder.name
    assert read_run(back)["progress"] == read_run(folder)["progress"]
    # of a run in fp32 the weights are the masters
    masters = {
        key.replace("model.", "optim.master.", 1): x
        for key, x in tensors.items()
        if key.startswith("model.")
    }
    returned = whole_tensors(back)
    for key, values in (masters | tensors).items():
        assert returned.pop(key).equal(values), key
    assert not returned


COMMANDS = (
    "from-megatron --megatron theirs",
    "average ours",
    "to-megatron --checkpoint ours",
    "to-hf --checkpoint ours --max-shard-gb 2e-6",
    "upcycle --checkpoint ours --num-experts 4 --top-k 2",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_damage_in_the_middle_of_a_source_leaves_nothing(tmp_path, monkeypatch, capsys, command):
    """It is found when a tensor is read, after the folder is made."""
    monkeypatch.chdir(tmp_path)
    saved("ours")
    assert run(convert, "to-megatron --checkpoint ours --out theirs") == 0
    for path in tmp_path.rglob("*.distcp"):
        content = bytearray(path.read_bytes())
        damaged = slice(len(content) // 2, -1000, 64)
        content[damaged] = bytes(len(content[damaged]))
        path.write_bytes(content)
    capsys.readouterr()
    assert run(convert, f"{command} --out new/out") == 2
    message = capsys.readouterr().err
    assert re.search(r"(ours|theirs)/\S*/__0_0.distcp is damaged", message)
    assert "before this one" not in message
    assert not (tmp_path / "new").exists(), list((tmp_path / "new").rglob("*"))


def test_nothing_is_written_that_no_tool_would_read(tmp_path):
    with pytest.raises(ConfigError, match="model.norm_eps must be above 0"):
        saved(tmp_path / "ours", norm_eps=0.0)
    with pytest.raises(SystemExit):  # before anything is read
        run(convert, f"from-megatron --megatron {tmp_path} --out {tmp_path}/ours --vocab-size -1")
    assert not (tmp_path / "ours").exists()


def test_a_failure_leaves_a_folder_that_was_there(tmp_path):
    saved(tmp_path / "ours")
    (tmp_path / "out").mkdir()
    assert run(convert, f"from-megatron --megatron {tmp_path}/ours --out {tmp_path}/out") == 2
    assert (tmp_path / "out").is_dir()

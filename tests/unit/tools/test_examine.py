"""tools/convert.py inspect, verify, diff and average: of sound, damaged, different and foreign
folders."""

import json
import os
import random
import shutil

import pytest
import torch
from runs import whole_tensors

from megatron5d.checkpoint.folder import step_folder
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.tools import convert
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of

CONFIG = Config(
    model=ModelConfig(
        vocab_size=64,
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
    ),
    precision=PrecisionConfig(dtype="fp32"),
)


def save(folder, seed, rows=None, change=lambda tensors: None):
    """A checkpoint with random weights, each in one part or cut after some rows."""
    torch.manual_seed(seed)
    tensors = {}
    for parameter in GPT(CONFIG, build_mesh(resolve(1)), "cpu").parameters():
        tensors[f"model.{spec_of(parameter).name}"] = torch.randn(spec_of(parameter).shape)
    change(tensors)
    sharded = {}
    for key, values in tensors.items():
        zeros = (0,) * (values.dim() - 1)
        cuts = [(0, values.shape[0])] if rows is None else [(0, rows), (rows, values.shape[0])]
        parts = [((first, *zeros), values[first:last]) for first, last in cuts]
        sharded[key] = ShardedTensor(values.shape, parts, values.dtype)
    save_weights(folder, sharded, CONFIG)
    return folder


@pytest.fixture
def one(tmp_path):
    return save(tmp_path / "one", 1)


def run(*words):
    return convert.main([str(word) for word in words])


def test_inspect_names_every_tensor_and_file(one, capsys):
    assert run("inspect", one, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"] == 0 and said["files"].keys() == {
        path.name for path in step_folder(one, 0).iterdir()
    }
    tensors = whole_tensors(step_folder(one, 0))
    assert {key: each["shape"] for key, each in said["tensors"].items()} == {
        k: list(t.shape) for k, t in tensors.items()
    }
    assert sum(each["bytes"] for each in said["tensors"].values()) == sum(
        t.nbytes for t in tensors.values()
    )
    assert run("inspect", one) == 0
    assert "model.layers.1.mlp.up.weight" in capsys.readouterr().out


def test_verify_finds_every_flipped_bit(one, capsys):
    assert run("verify", one) == 0
    assert "is intact: 1 files" in capsys.readouterr().out
    dice = random.Random(0)
    for path in step_folder(one, 0).iterdir():
        content = path.read_bytes()
        if path.name == "files.json":
            continue
        for _ in range(60 if path.suffix == ".distcp" else 3):
            changed = bytearray(content)
            changed[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            path.write_bytes(changed)
            code = run("verify", one, "--workers", "1")
            said = capsys.readouterr()
            assert code in (1, 2) and path.name in said.out + said.err
        path.write_bytes(content)
    assert run("verify", one) == 0


def test_verify_names_what_is_not_finite_and_what_does_not_belong(tmp_path, capsys):
    def spoil(tensors):
        tensors["model.layers.1.mlp.up.weight"][3, 2] = float("nan")

    folder = save(tmp_path / "nan", 1, change=spoil)
    (step_folder(folder, 0) / "more.pt").touch()
    assert run("verify", folder) == 1
    said = capsys.readouterr().out
    assert "__0_0.distcp holds a value of model.layers.1.mlp.up.weight that is not finite" in said
    assert "more.pt is not a file of this checkpoint" in said


def test_diff_is_of_values_not_of_layouts_or_formats(one, tmp_path, capsys):
    assert run("diff", one, save(tmp_path / "cut", 1, rows=5)) == 0
    assert run("to-hf", "--checkpoint", one, "--out", tmp_path / "hf", "--no-tokenizer") == 0
    assert (
        run("diff", one, tmp_path / "hf") == 0
        and run("diff", tmp_path / "hf", tmp_path / "hf") == 0
    )

    def nudge(tensors):
        tensors["model.layers.0.mlp.up.weight"][1, 1] += 1e-4
        tensors["model.embedding.weight"][0, 0] = float("inf")

    other = save(tmp_path / "other", 1, change=nudge)
    capsys.readouterr()
    assert run("diff", other, tmp_path / "hf") == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == [
        "model.embedding.weight",
        "model.layers.0.mlp.up.weight",
    ]
    assert "differs by inf" in said[0]
    assert run("diff", other, one, "--tolerance", "1e-3") == 1
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "model.embedding.weight"
    ]
    fewer = save(tmp_path / "fewer", 1, change=lambda tensors: tensors.pop("model.head.weight"))
    assert (
        run("diff", one, fewer) == 1 and "model.head.weight is only in" in capsys.readouterr().out
    )


def test_average_is_the_mean_with_its_weights(one, tmp_path):
    two, three = save(tmp_path / "two", 2, rows=7), save(tmp_path / "three", 3)
    a, b, c = (whole_tensors(step_folder(folder, 0)) for folder in (one, two, three))
    for words, factors in (
        ([], (1 / 3, 1 / 3, 1 / 3)),
        (["--weights", 1, 2, 5], (0.125, 0.25, 0.625)),
    ):
        out = tmp_path / f"mean{len(words)}"
        assert run("average", one, two, three, "--out", out, *words) == 0
        for key, values in whole_tensors(step_folder(out, 0)).items():
            wanted = sum(factor * each[key].double() for factor, each in zip(factors, (a, b, c)))
            assert values.dtype == torch.float32 and torch.equal(values, wanted.float()), key
    directory = tmp_path / "steps"
    for step, folder in enumerate((one, two, three)):
        shutil.copytree(step_folder(folder, 0), step_folder(directory, step))
    assert run("average", directory, "--last", 2, "--out", tmp_path / "last") == 0
    assert run("average", two, three, "--out", tmp_path / "pair") == 0
    assert run("diff", tmp_path / "last", tmp_path / "pair") == 0


def test_bad_input_is_refused_with_its_name(one, tmp_path, capsys):
    fewer = save(tmp_path / "fewer", 1, change=lambda tensors: tensors.pop("model.head.weight"))
    torn = shutil.copytree(one, tmp_path / "torn")
    os.truncate(step_folder(torn, 0) / "__0_0.distcp", 300)
    (tmp_path / "empty").mkdir()
    for words, reason in [
        (["inspect", tmp_path / "empty"], "has no files.json"),
        (["verify", torn], "__0_0.distcp has 300 bytes where"),
        (["diff", one, torn], "__0_0.distcp has 300 bytes where"),
        (["average", one, torn, "--out", tmp_path / "out"], "__0_0.distcp has 300 bytes where"),
        (["average", one, fewer, "--out", tmp_path / "out"], "head.weight is (64, 16) in"),
        (["average", one, "--out", one], "already holds the checkpoint"),
        (
            ["average", one, one, "--weights", 1, "--out", tmp_path / "out"],
            "(got [1.0] for 2 checkpoints)",
        ),
        (["average", one, "--last", 4, "--out", tmp_path / "out"], "has 1 complete checkpoints"),
    ]:
        assert run(*words) == 2, words
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

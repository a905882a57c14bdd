"""tools/convert.py inspect, verify, diff and average: of sound, damaged, different and foreign
folders."""

import json
import math
import os
import random
import shutil
from dataclasses import replace

import pytest
import tokenizers
import torch
from hf_folders import random_model, tiny_config
from runs import whole_tensors
from safetensors import safe_open
from tool_runs import SIZES, random_weights, run, save

from megatron5d.checkpoint.folder import step_folder
from megatron5d.config.schema import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron5d.tools import convert
from megatron5d.tools.conversion.average import decay_shares
from megatron5d.train.state import Progress

CONFIG = Config(model=ModelConfig(**SIZES), precision=PrecisionConfig(dtype="fp32"))
UP, HEAD = "model.layers.1.mlp.up.weight", "model.head.weight"


def save_random(folder, seed, rows=None, change=lambda tensors: None):
    """A directory with a checkpoint of random weights, which `change` may modify."""
    tensors = random_weights(CONFIG, seed)
    change(tensors)
    save(folder, CONFIG, tensors, rows)
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return save_random(tmp_path / "one", 1)


def keys_of(text):
    return [line.split()[0] for line in text.splitlines()]


def test_inspect_names_every_tensor_and_file(checkpoint, capsys):
    assert run(convert, f"inspect {checkpoint} --json") == 0
    printed = json.loads(capsys.readouterr().out)
    folder = step_folder(checkpoint, 0)
    assert printed["step"] == 0
    assert printed["files"].keys() == {path.name for path in folder.iterdir()}
    expected = {
        key: {"shape": list(x.shape), "dtype": "float32", "bytes": x.nbytes}
        for key, x in whole_tensors(folder).items()
    }
    assert printed["tensors"] == expected
    assert run(convert, f"inspect {checkpoint}") == 0
    assert UP in capsys.readouterr().out


def test_verify_finds_every_flipped_bit(checkpoint, capsys):
    assert run(convert, f"verify {checkpoint}") == 0
    assert "is intact: 1 files" in capsys.readouterr().out
    dice = random.Random(0)
    for path in step_folder(checkpoint, 0).iterdir():
        content = path.read_bytes()
        if path.name == "files.json":
            continue
        for _ in range(60 if path.suffix == ".distcp" else 3):
            damaged = bytearray(content)
            damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            path.write_bytes(damaged)
            code = run(convert, f"verify {checkpoint} --workers 1")
            printed = capsys.readouterr()
            assert code in (1, 2) and path.name in printed.out + printed.err
        path.write_bytes(content)
    assert run(convert, f"verify {checkpoint}") == 0


def test_verify_names_nonfinite_tensors_and_foreign_files(tmp_path, capsys):
    def spoil(tensors):
        tensors[UP][3, 2] = float("nan")

    directory = save_random(tmp_path / "nan", 1, change=spoil)
    (step_folder(directory, 0) / "more.pt").touch()
    assert run(convert, f"verify {directory}") == 1
    printed = capsys.readouterr().out
    assert f"__0_0.distcp holds a value of {UP} that is not finite" in printed
    assert "more.pt is not a file of this checkpoint" in printed


def test_diff_compares_values_across_layouts_and_formats(checkpoint, tmp_path, capsys):
    hf, cut = tmp_path / "hf", save_random(tmp_path / "cut", 1, rows=5)
    assert run(convert, f"to-hf --checkpoint {checkpoint} --out {hf} --no-tokenizer") == 0
    for one, other in ((checkpoint, cut), (checkpoint, hf), (hf, hf)):
        assert run(convert, f"diff {one} {other}") == 0

    rounded = tmp_path / "rounded"
    assert (
        run(convert, f"to-hf --checkpoint {cut} --out {rounded} --no-tokenizer --dtype bf16") == 0
    )
    capsys.readouterr()
    for flag, code in (("", 1), (" --bf16", 0)):
        assert run(convert, f"diff {checkpoint} {rounded}{flag}") == code
        printed = capsys.readouterr().out
        assert len(printed.splitlines()) == 1 and "rounding to bf16" in printed

    def nudge(tensors):
        tensors[UP][1, 1] += 1e-4
        tensors["model.embedding.weight"][0, 0] = float("inf")

    nudged = save_random(tmp_path / "nudged", 1, change=nudge)
    capsys.readouterr()
    assert run(convert, f"diff {nudged} {hf} --bf16") == 1
    printed = capsys.readouterr().out
    assert keys_of(printed) == ["model.embedding.weight", UP] and "differs by inf" in printed
    assert run(convert, f"diff {nudged} {checkpoint} --tolerance 1e-3") == 1
    assert keys_of(capsys.readouterr().out) == ["model.embedding.weight"]
    fewer = save_random(tmp_path / "fewer", 1, change=lambda tensors: tensors.pop(HEAD))
    assert run(convert, f"diff {checkpoint} {fewer}") == 1
    assert f"{HEAD} is only in" in capsys.readouterr().out


def test_average_is_the_mean_with_its_weights(checkpoint, tmp_path):
    two, three = save_random(tmp_path / "two", 2, rows=7), save_random(tmp_path / "three", 3)
    directories = (checkpoint, two, three)
    tensors = [whole_tensors(step_folder(directory, 0)) for directory in directories]
    for options, factors in (
        ("", (1 / 3, 1 / 3, 1 / 3)),
        ("--weights 1 2 5", (0.125, 0.25, 0.625)),
    ):
        out = tmp_path / f"mean{len(options)}"
        assert run(convert, f"average {checkpoint} {two} {three} --out {out} {options}") == 0
        for key, mean in whole_tensors(step_folder(out, 0)).items():
            expected = sum(factor * each[key].double() for factor, each in zip(factors, tensors))
            assert mean.dtype == torch.float32 and torch.equal(mean, expected.float()), key
    steps = tmp_path / "steps"
    for step, directory in enumerate(directories):
        shutil.copytree(step_folder(directory, 0), step_folder(steps, step))
    assert run(convert, f"average {steps} --last 2 --out {tmp_path}/last") == 0
    assert run(convert, f"average {two} {three} --out {tmp_path}/pair") == 0
    assert run(convert, f"diff {tmp_path}/last {tmp_path}/pair") == 0


def test_average_of_hugging_face_folders_and_checkpoints(tmp_path):
    one, two = tmp_path / "hf0", tmp_path / "hf1"
    for number, folder in enumerate((one, two)):
        random_model(tiny_config("llama"), std=0.1 + number).save_pretrained(folder)
        assert run(convert, f"from-hf --hf {folder} --out {tmp_path}/ck{number}") == 0
    out = tmp_path / "mean"
    assert run(convert, f"average {one} {two} --out {out}") == 0
    assert run(convert, f"average {tmp_path}/ck0 {two} --out {out}-mixed") == 0
    assert run(convert, f"average {tmp_path}/ck0 {tmp_path}/ck1 --out {out}-ours") == 0
    assert run(convert, f"diff {out} {out}-ours") == run(convert, f"diff {out} {out}-mixed") == 0
    with safe_open(one / "model.safetensors", "pt") as a:
        with safe_open(two / "model.safetensors", "pt") as b:
            key = "model.layers.1.mlp.down_proj.weight"
            expected = (a.get_tensor(key).double() + b.get_tensor(key).double()) / 2
    down = whole_tensors(step_folder(out, 0))["model.layers.1.mlp.down.weight"]
    assert torch.equal(down, expected.float())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rope_theta": 5e5}, "model.rope_theta = 500000.0, saved with 10000.0"),
        ({"norm_eps": 0.01}, "model.norm_eps = 0.01, saved with"),
        ({"attention_window": 8}, "model.attention_window = 8, saved with None"),
        ({"activation": "geglu_tanh"}, "model.activation = geglu_tanh, saved with swiglu"),
        ({"embedding_scale": 4.0}, "model.embedding_scale = 4.0, saved with 1.0"),
        ({"logit_softcap": 30.0}, "model.logit_softcap = 30.0, saved with 0.0"),
    ],
)
def test_other_functions_of_the_same_shapes_are_told(tmp_path, checkpoint, capsys, change, told):
    config = replace(CONFIG, model=replace(CONFIG.model, **change))
    save(tmp_path / "other", config, random_weights(config, 1))
    out = tmp_path / "out"
    assert run(convert, f"average {checkpoint} {tmp_path}/other --out {out}") == 2
    assert told in capsys.readouterr().err and not out.exists()
    assert run(convert, f"diff {checkpoint} {tmp_path}/other") == 0
    assert told in capsys.readouterr().err


def test_other_tokenizers_are_told(tmp_path, capsys):
    paths = []
    for number, vocabulary in enumerate(({"a": 0, "b": 1}, {"b": 0, "a": 1}, {"a": 0, "b": 1})):
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        folder = tmp_path / f"tokenizer{number}"
        folder.mkdir()
        tokenizer.save(str(folder / "tokenizer.json"), pretty=number == 2)  # other bytes
        config = replace(CONFIG, data=DataConfig(tokenizer=str(folder)))
        paths.append(tmp_path / f"ck{number}")
        save(paths[-1], config, random_weights(config, number))
    assert run(convert, f"average {paths[0]} {paths[1]} --out {tmp_path}/out") == 2
    assert "id 0 is 'b' and 'a'" in capsys.readouterr().err
    assert run(convert, f"average {paths[0]} {paths[2]} --out {tmp_path}/out") == 0


def test_decay_weights_are_those_of_a_run_that_decays(tmp_path, capsys):
    """Of SGD at a constant rate, the mean is where the same gradients lead at the decaying one."""
    updates = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.cat([torch.zeros(1, 8), updates]).cumsum(0)
    rates = {
        "linear": [0.8, 0.6, 0.4, 0.2],
        "cosine": [(1 + math.cos(math.pi * i / 5)) / 2 for i in (1, 2, 3, 4)],
        "1-sqrt": [1 - math.sqrt(i / 5) for i in (1, 2, 3, 4)],
    }
    for decay, rate in rates.items():
        shares = decay_shares(decay, [100.0, 110.0, 120.0, 130.0, 140.0])
        assert sum(shares) == pytest.approx(1) and min(shares) > 0
        mean = (torch.tensor(shares, dtype=torch.float64)[:, None] * weights).sum(0)
        decayed = (torch.tensor(rate, dtype=torch.float64)[:, None] * updates).sum(0)
        torch.testing.assert_close(mean, decayed)
    assert decay_shares("linear", [0, 1, 2, 3]) == pytest.approx([0.25] * 4)
    assert decay_shares("cosine", [7.0]) == [1.0]
    # updates of a longer interval decay further
    assert decay_shares("linear", [0, 3, 4]) == pytest.approx([0.5, 1 / 6, 1 / 3])
    steps = tmp_path / "steps"
    for step in (1, 2, 3):
        save(steps, CONFIG, random_weights(CONFIG, step), progress=Progress(step))
    assert run(convert, f"average {steps} --last 3 --decay cosine --out {tmp_path}/mean") == 0
    assert "3 models, their mean with weights 0.25, 0.5, 0.25" in capsys.readouterr().out
    one, two = (step_folder(steps, step) for step in (1, 2))
    for options, reason in {
        f"{two} {one} --decay cosine": "increasing steps (got [2, 1])",
        f"{one} {two} --decay cosine --weights 1 2": "leave one out",
    }.items():
        assert run(convert, f"average {options} --out {tmp_path}/no") == 2
        assert reason in capsys.readouterr().err


def test_bad_input_is_rejected_by_name(checkpoint, tmp_path, capsys):
    fewer = save_random(tmp_path / "fewer", 1, change=lambda tensors: tensors.pop(HEAD))
    torn = shutil.copytree(checkpoint, tmp_path / "torn")
    os.truncate(step_folder(torn, 0) / "__0_0.distcp", 300)
    (tmp_path / "empty").mkdir()
    truncated, out = "__0_0.distcp has 300 bytes where", tmp_path / "out"
    for command, reason in {
        f"inspect {tmp_path}/empty": "has no files.json",
        f"verify {torn}": truncated,
        f"diff {checkpoint} {torn}": truncated,
        f"average {checkpoint} {torn} --out {out}": truncated,
        f"average {checkpoint} {fewer} --out {out}": "head.weight is (64, 16) in",
        f"average {checkpoint} --out {checkpoint}": "already holds the checkpoint",
        f"average {checkpoint} {checkpoint} --weights 1 --out {out}": "(got [1.0] for 2",
        f"average {checkpoint} --last 4 --out {out}": "has 1 complete checkpoints",
    }.items():
        assert run(convert, command) == 2, command
        assert reason in capsys.readouterr().err
    assert not out.exists()

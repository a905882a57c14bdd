"""What a user can get wrong on a command line of eight ranks: each is refused with exit code 2, and
the message helps.

One line of broken_command_lines.txt is one of them: what is appended to a sound command line, and
words that the message must hold, among them the knob and a legal value. Nothing may be made on the
disk.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron5d.config.convert import kind_of, leaves, value_of
from megatron5d.config.errors import ConfigError, message, refuse
from megatron5d.config.load import load_config

SOUND = ["data.train=[corpus]", "train.gbs=16"]

CASES = (Path(__file__).parent / "broken_command_lines.txt").read_text().splitlines()[1:]
LINES = [[part.strip() for part in line.split(" | ")] for line in CASES]


def arguments(text: str) -> list[str]:
    """Split as a shell would where nobody quotes, but for the one value with a blank."""
    return [text] if text.startswith("data.train") else text.split(" ")


def no_such_folder(folder):
    raise FileNotFoundError(f"{folder}/config.json")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"\0\0")
    monkeypatch.chdir(tmp_path)


def told(argv: list[str], capsys) -> str:
    """What rank 0 of eight prints before it ends with exit code 2."""
    with pytest.raises(ConfigError) as error:
        load_config(argv, world=8, model_from_hf=no_such_folder)
    with pytest.raises(SystemExit) as stop:
        refuse(error.value.faults, rank=0)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert text.strip() == message(error.value.faults)
    return text


def test_the_sound_command_line_is_accepted():
    assert load_config(SOUND, world=8).train.gbs == 16


def test_there_are_enough_of_them():
    assert len(LINES) >= 60 and all(len(line) >= 2 for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=[line[0] for line in LINES])
def test_broken_command_line_is_refused_and_helped(line, capsys):
    before = sorted(os.listdir())
    text = told([*SOUND, *arguments(line[0])], capsys)
    for words in line[1:]:
        assert words in text, text
    assert sorted(os.listdir()) == before


def test_all_that_is_broken_is_told_at_once(capsys):
    text = told(
        [
            *SOUND,
            "train.stepz=5",
            "model=llama4",
            "optim.lr=abc",
            "parallel.tp=3",
            "train.seq_len=0",
            "data.order=up",
            "parallel.zero=4",
            "--verbose",
            "train.mbs=[1",
        ],
        capsys,
    )
    for words in (
        "9 faults",
        "train.stepz",
        "model=llama4",
        "(got 'abc')",
        "(got 8)",
        "train.seq_len must be",
        "data.order must be",
        "parallel.zero must be",
        "--verbose",
        "train.mbs=[1",
    ):
        assert words in text, text


def test_a_refused_run_leaves_no_trace(capsys):
    """Not even where every kind of output is asked for."""
    outputs = [
        "log.dir=run",
        "log.jsonl=run/log.jsonl",
        "checkpoint.dir=run/checkpoints",
        "data.cache_dir=cache",
    ]
    told([*SOUND, *outputs, "train.gbs=3"], capsys)
    assert sorted(os.listdir()) == ["corpus.bin", "corpus.idx"]


def test_the_documented_message_is_the_real_one(capsys):
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    command, _, shown = (
        page.partition("$ bash launch/local.sh 8 ")[2].partition("```")[0].partition("\n")
    )
    assert told(command.split(), capsys) == shown


# what is written, the key that is meant, and the value that it has once the fix is pasted
PASTED = [
    ("log.dir=~/runs/x", "log.dir", "/home/me/runs/x"),
    ('log.dir="~/runs/x"', "log.dir", "/home/me/runs/x"),
    ("log.dir=runs/${log.wandb.name}", "log.wandb.name", "NAME"),
    ("log.dir=a[b", "log.dir", "a[b"),
    ("log.dir=it's", "log.dir", "it's"),
    ("log.dir=None", "log.dir", None),
    ("data.eod=None", "data.eod", None),
    ("train.steps=5)", "train.steps", 100),
    ("optim.lr=choice(1e-3,2e-3)", "optim.lr", 1e-3),
    ("precision.fp8=false", "precision.fp8", "none"),
    ("log.wandb.mode=true", "log.wandb.mode", "online"),
    ("log.wandb.mode=none", "log.wandb.mode", "disabled"),
    ("recompute.mode=true", "recompute.mode", "selective"),
    ("optim.lr=1e-3,2e-3", "optim.lr", 1e-3),
    ('data.train=["~/a/b"]', "data.train", ["/home/me/a/b"]),
]


@pytest.mark.parametrize(("written", "key", "value"), PASTED, ids=[case[0] for case in PASTED])
def test_a_printed_fix_works_when_pasted(written, key, value, monkeypatch):
    """Through a real shell, in place of what was written; what names another key is added to it."""
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError) as error:
        load_config([*SOUND, written], world=1)
    (fault,) = (fault for fault in error.value.faults if not fault.id.startswith("data-"))
    fix = shlex.split(fault.fix.split(";")[0].split(", ")[0])[0]
    pasted = subprocess.run(
        ["bash", "-c", f"printf %s {shlex.quote(fix)}"], capture_output=True, text=True
    ).stdout
    kept = [written] if not pasted.startswith(f"{written.partition('=')[0]}=") else []
    try:
        config = load_config([*SOUND, *kept, pasted], world=1)
    except ConfigError as again:
        assert all(
            fault.id in ("data-train-files", "log-wandb-installed") for fault in again.faults
        ), again
        config = load_config([*SOUND, *kept, pasted])
    assert value_of(config, key) == value


def test_an_unknown_key_in_a_value_is_helped_by_its_neighbours(capsys):
    assert "the nearest are train.z_loss" in told(
        [*SOUND, "model.hidden_size=${train.foo}"], capsys
    )


@pytest.mark.parametrize(
    "written", [" train.steps=5", "log.wandb=false", "log.wandb=none", "experiment=null"]
)
def test_what_is_plain_is_taken(written):
    config = load_config(["data.train=[corpus]", "experiment=quickstart", written])
    assert config.log.wandb.mode == "disabled" or "wandb" not in written
    assert config.model.name != "quickstart" or written != "experiment=null"


@pytest.mark.parametrize("written", ["~log", "~model.hidden_size", "{[}=VALUE", "=3"])
def test_what_is_no_override_is_told_in_plain_words(written, capsys):
    text = told([*SOUND, written], capsys)
    assert "leave it out" in text or "options are written key=value" in text


@pytest.mark.parametrize("key", [key for key in leaves() if kind_of(key) is int])
def test_numbers_of_twenty_digits_are_refused_at_once(key, capsys):
    text = told([*SOUND, f"{key}={10**20}"], capsys)
    assert f"(got {10**20})" in text and "00000000000" not in text.partition("fix:")[2]

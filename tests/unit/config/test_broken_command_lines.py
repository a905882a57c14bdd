"""Mistakes on a command line of eight ranks: exit code 2, and a message that helps.

A line of broken_command_lines.txt is what is appended to a valid command line, and words of the
message, among them the knob and a legal value. Nothing may be created on the disk.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import described, keys, kind_of, leaves, value_of
from megatron5d.config.errors import ConfigError, message, refuse
from megatron5d.config.load import load_config

VALID = ["data.train=[corpus]", "train.gbs=16"]

LINES = (Path(__file__).parent / "broken_command_lines.txt").read_text().splitlines()[1:]
CASES = [[column.strip() for column in line.split(" | ")] for line in LINES]


def arguments(text: str) -> list[str]:
    """Splits at blanks as a shell does, except for the one value that has a blank."""
    return [text] if text.startswith("data.train") else text.split(" ")


def missing_folder(folder):
    raise FileNotFoundError(f"{folder}/config.json")


@pytest.fixture(autouse=True)
def corpus(tmp_path, monkeypatch):
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"\0\0")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def printed(capsys):
    """Runs a command line of rank 0 of eight that ends with exit code 2; gives its message."""

    def run(*argv: str) -> str:
        with pytest.raises(ConfigError) as error:
            load_config(argv, world=8, model_readers={"from_hf": missing_folder})
        with pytest.raises(SystemExit) as stop:
            refuse(error.value.faults, rank=0)
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert text.strip() == message(error.value.faults)
        return text

    return run


def test_the_valid_command_line_is_accepted():
    assert load_config(VALID, world=8).train.gbs == 16
    assert len(CASES) >= 60 and all(len(case) >= 2 for case in CASES)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_broken_command_line_is_rejected_with_help(case, printed):
    files = sorted(os.listdir())
    text = printed(*VALID, *arguments(case[0]))
    for words in case[1:]:
        assert words in text, text
    assert sorted(os.listdir()) == files


def test_all_faults_are_printed_at_once(printed):
    broken = (
        "train.stepz=5 model=llama4 optim.lr=abc parallel.tp=3 train.seq_len=0 data.order=up "
        "parallel.zero=4 --verbose train.mbs=[1"
    )
    text = printed(*VALID, *broken.split())
    for words in ("9 faults", "train.stepz", "model=llama4", "(got 'abc')", "(got 8)"):
        assert words in text, text
    for words in ("train.seq_len must be", "data.order must be", "parallel.zero must be"):
        assert words in text, text
    assert "--verbose" in text and "train.mbs=[1" in text


def test_a_rejected_run_writes_nothing(printed):
    """Not even where every kind of output is asked for."""
    outputs = "log.dir=run log.jsonl=run/log.jsonl checkpoint.dir=run/ck data.cache_dir=cache"
    printed(*VALID, *outputs.split(), "train.gbs=3")
    assert sorted(os.listdir()) == ["corpus.bin", "corpus.idx"]


def test_the_documented_message_is_the_real_one(printed):
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    example = page.partition("$ bash launch/local.sh 8 ")[2].partition("```")[0]
    command, _, text = example.partition("\n")
    assert printed(*command.split()) == text


# what is written, the key that is meant, and its value once the fix is pasted
PASTED = [
    ("log.dir=~/runs/x", "log.dir", "/home/me/runs/x"),
    ('log.dir="~/runs/x"', "log.dir", "/home/me/runs/x"),
    ('data.train=["~/a/b"]', "data.train", ["/home/me/a/b"]),
    ("log.dir=runs/${log.wandb.name}", "log.wandb.name", "NAME"),
    ("log.dir=a[b", "log.dir", "a[b"),
    ("log.dir=it's", "log.dir", "it's"),
    ("log.dir=None", "log.dir", None),
    ("data.eod=None", "data.eod", None),
    ("train.steps=5)", "train.steps", 100),
    ("optim.lr=choice(1e-3,2e-3)", "optim.lr", 1e-3),
    ("optim.lr=1e-3,2e-3", "optim.lr", 1e-3),
    ("optim.betas={0.9, 0.99}", "optim.betas", [0.9, 0.99]),
    ("optim.betas=(0.9)", "optim.betas", [0.9, 0.95]),
    ('optim.betas="(0.9,0.99)"', "optim.betas", [0.9, 0.99]),
    ('recompute.parts="(norm,activation)"', "recompute.parts", ["norm", "activation"]),
    ("data.train=(0.5 /a,0.5 /b)", "data.train", ["0.5 /a", "0.5 /b"]),
    ("pipeline.layout=E(t|)*2L", "pipeline.layout", [1, 1, 0]),
    ("precision.fp8=false", "precision.fp8", "none"),
    ("log.wandb.mode=true", "log.wandb.mode", "online"),
    ("log.wandb.mode=none", "log.wandb.mode", "disabled"),
    ("recompute.mode=true", "recompute.mode", "selective"),
]


# legal values of lists that have a form, as they are written
LISTS = {
    "parallel.order": "dp,pp,cp,tp",
    "train.gbs_ramp": "8,8,100",
    "data.skip_steps": "3,5-7",
    "optim.lr_scale": "2 *norm*,0.5 *out*",
    "optim.decay_scale": "2 *norm*,0.5 *out*",
    "optim.betas": "0.9,0.99",
}


@pytest.mark.parametrize(
    "key", [key for key in leaves() if kind_of(key) is list and key != "plugins"]
)
def test_a_list_in_parentheses_gets_a_fix_with_its_items(key):
    choices = [word for word in described(key).choices if word != "none"]
    items = "2,1" if "int" in str(keys()[key]) else "a,b*"
    text = LISTS.get(key) or ",".join(choices[:2]) or items
    for written in (f"({text})", "( " + text.replace(",", ", ") + " )"):
        with pytest.raises(ConfigError) as error:
            load_config([f"{key}={written}"])
        (fault,) = error.value.faults
        (fix,) = shlex.split(fault.fix)
        assert list(map(str, value_of(load_config([fix]), key))) == text.split(",")
        remaining = run_checks(load_config([fix]), world=8, files=False)
        assert not [fault for fault in remaining if fault.knobs == (key,)]


@pytest.mark.parametrize(("written", "key", "value"), PASTED, ids=[case[0] for case in PASTED])
def test_a_printed_fix_works_when_pasted(written, key, value, monkeypatch):
    """Through a real shell, in place of what was written; a fix of another key is added to it."""
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError) as error:
        load_config([*VALID, written], world=1)
    (fault,) = (fault for fault in error.value.faults if not fault.id.startswith("data-"))
    fix = shlex.split(fault.fix.split(";")[0].split(", ")[0])[0]
    command = ["bash", "-c", f"printf %s {shlex.quote(fix)}"]
    pasted = subprocess.run(command, capture_output=True, text=True).stdout
    same_key = pasted.startswith(f"{written.partition('=')[0]}=")
    argv = [*VALID, pasted] if same_key else [*VALID, written, pasted]
    try:
        load_config(argv, world=1)
    except ConfigError as remaining:
        ids = {fault.id for fault in remaining.faults}
        assert ids <= {"data-train-files", "wandb-installed"}, remaining
    assert value_of(load_config(argv), key) == value


def test_an_unknown_key_in_a_value_gets_the_nearest(printed):
    assert "the nearest are train.z_loss" in printed(*VALID, "model.hidden_size=${train.foo}")


@pytest.mark.parametrize(
    "written",
    ["log.wandb=dryrun", "log.wandb.mode=dryrun", "log.wandb={mode:dryrun}", "log.wandb=run"],
)
def test_older_words_of_wandb_are_accepted(written):
    mode = load_config(["data.train=[corpus]", written]).log.wandb.mode
    assert mode == ("online" if written.endswith("run") and "dry" not in written else "offline")


@pytest.mark.parametrize(
    "written", [" train.steps=5", "log.wandb=false", "log.wandb=none", "experiment=null"]
)
def test_unusual_but_clear_words_are_accepted(written):
    config = load_config(["data.train=[corpus]", "experiment=quickstart", written])
    assert config.log.wandb.mode == "disabled" or "wandb" not in written
    assert config.model.name != "quickstart" or written != "experiment=null"


@pytest.mark.parametrize("written", ["~log", "~model.hidden_size", "{[}=VALUE", "=3"])
def test_message_about_words_that_are_no_overrides(written, printed):
    text = printed(*VALID, written)
    assert "leave it out" in text or "options are written key=value" in text


@pytest.mark.parametrize("key", [key for key in leaves() if kind_of(key) is int])
def test_integers_of_twenty_digits_are_rejected(key, printed):
    text = printed(*VALID, f"{key}={10**20}")
    assert f"(got {10**20})" in text and "00000000000" not in text.partition("fix:")[2]

"""What a user can get wrong on a command line of eight ranks: each is refused with exit code 2, and the message helps.

One line of broken_command_lines.txt is one of them: what is appended to a sound command line, and words that the
message must hold, among them the knob and a legal value. Nothing may be made on the disk.
"""

import os
from pathlib import Path

import pytest

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


def test_options_quoted_as_one_word_are_taken_apart(capsys):
    text = told([*SOUND, "model=tiny train.steps=3"], capsys)
    assert "fix: model=tiny train.steps=3, each option a word of its own" in text


def test_all_that_is_broken_is_told_at_once(capsys):
    text = told(
        [*SOUND, "train.stepz=5", "model=llama4", "optim.lr=abc", "parallel.tp=3", "train.seq_len=0", "data.order=up",
         "parallel.zero=4", "--verbose", "train.mbs=[1"],
        capsys,
    )  # fmt: skip
    for words in (
        "9 faults", "train.stepz", "model=llama4", "optim.lr = 'abc'", "8 ranks", "train.seq_len = 0",
        "data.order = up", "parallel.zero = 4", "--verbose", "train.mbs=[1",
    ):  # fmt: skip
        assert words in text, text


def test_a_refused_run_leaves_no_trace(capsys):
    """Not even where every kind of output is asked for."""
    outputs = ["log.dir=run", "log.jsonl=run/log.jsonl", "checkpoint.dir=run/checkpoints", "data.cache_dir=cache"]
    told([*SOUND, *outputs, "train.gbs=3"], capsys)
    assert sorted(os.listdir()) == ["corpus.bin", "corpus.idx"]


def test_the_documented_message_is_the_real_one(capsys):
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    command, _, shown = page.partition("$ bash launch/local.sh 8 ")[2].partition("```")[0].partition("\n")
    assert told(command.split(), capsys) == shown

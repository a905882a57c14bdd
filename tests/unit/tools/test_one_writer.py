"""Every tool that writes several files owns its output meanwhile, and replaces nothing unasked."""

import json
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from safetensors.torch import load_file
from tool_runs import SIZES, random_weights, run, save

from megatron5d.config.schema import Config, ModelConfig
from megatron5d.tools import convert, logits, preprocess, tokenizer, tokens
from megatron5d.topology.owned_output import owned

pytest.importorskip("tokenizers"), pytest.importorskip("sentencepiece")

TOOLS = {"convert": convert, "preprocess": preprocess, "tokenizer": tokenizer, "tokens": tokens}
TRAIN = "tokenizer train --input text.txt --vocab-size"
# command -> the output that it owns, and the error of the same command without --overwrite
WRITERS = {
    "convert from-hf --hf hf --out OUT": ("OUT", "already holds the checkpoint of step 0"),
    "convert to-hf --checkpoint ck --out OUT": ("OUT", "already holds config.json"),
    "convert from-megatron --megatron meg --out OUT": ("OUT", "already holds the checkpoint"),
    "convert to-megatron --checkpoint ck --out OUT": ("OUT", "already holds a checkpoint of Meg"),
    "convert average ck ck --out OUT": ("OUT", "already holds the checkpoint of step 0"),
    "convert upcycle --checkpoint ck --out OUT --num-experts 4 --top-k 2": ("OUT", "already holds"),
    "convert reshard ck OUT parallel.pp=2": ("OUT", None),  # recognizes its own
    "tokens merge a a --out OUT": ("OUT", "OUT.idx is there already; --overwrite"),
    "tokens cut a --documents 0:1 --out OUT": ("OUT", "OUT.idx is there already; --overwrite"),
    "tokens import ids.npy --vocab-size 99 --out OUT": ("OUT", "OUT.idx is there already"),
    "preprocess --input text.txt --tokenizer tok.model --workers 1 --out OUT": ("OUT", None),
    f"{TRAIN} 300 --out OUT": ("OUT.model", "OUT.model is there already; --overwrite"),
    f"{TRAIN} 270 --format tokenizer.json --out OUT": ("OUT", "already holds tokenizer.json, "),
}
FOLDERS = [*list(WRITERS)[:7], list(WRITERS)[-1]]


def call(command: str) -> int:
    name, *words = shlex.split(command)
    if name == "convert":
        return convert.main(words)
    sys.argv = [name, *words]
    return TOOLS[name].main()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with an input for every tool."""
    folder = tmp_path_factory.mktemp("sources")
    config = Config(model=ModelConfig(**SIZES, max_positions=64))
    for seed, name in enumerate(("ck", "ck2")):
        save(folder / name, config, random_weights(config, seed))
    assert run(convert, f"to-hf --checkpoint {folder}/ck --out {folder}/hf") == 0
    assert run(convert, f"to-megatron --checkpoint {folder}/ck --out {folder}/meg") == 0
    words = [f"word{i} of some text number {i * 37}, again and again.\n" for i in range(300)]
    (folder / "text.txt").write_text("".join(words))
    np.save(folder / "ids.npy", np.arange(30).reshape(3, 10))
    (folder / "more.txt").write_text("".join(words[:9]))
    tokenizer.train_sentencepiece(words, 300, folder / "tok.model")
    return folder


@pytest.fixture
def inputs(sources, tmp_path, monkeypatch):
    """Works in a folder with links to the inputs, and token files."""
    for path in sources.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    assert call("tokens import ids.npy --vocab-size 99 --out a") == 0
    return tmp_path


def outputs() -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in Path().rglob("OUT*/**/*") if path.is_file()
    } | {path.name: path.read_bytes() for path in Path().glob("OUT*") if path.is_file()}


@pytest.mark.parametrize("command", WRITERS)
def test_a_second_writer_is_refused_and_nothing_is_replaced_unasked(inputs, command, capsys):
    owner, refusal = WRITERS[command]
    with owned(owner):
        held = outputs()
        assert call(command) == 2 and outputs() == held
        assert f"{owner} belongs to a run that is still going: process" in capsys.readouterr().err
    assert call(command) == 0
    written = outputs()
    assert written and not [name for name in written if "lock" in name or "tmp" in name]
    capsys.readouterr()
    assert call(command) == (2 if refusal else 0)
    if refusal:
        assert refusal in capsys.readouterr().err
    assert outputs() == written
    if command.startswith("preprocess"):
        command = command.replace("text.txt", "more.txt")
        assert call(command) == 2
        assert "from other inputs or settings; --overwrite" in capsys.readouterr().err
        assert outputs() == written
    if command.startswith(("preprocess", "tok")):
        assert call(f"{command} --overwrite") == 0 and outputs().keys() == written.keys()


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize("out", ["FILE", "FILE/sub"])
def test_a_file_in_place_of_a_folder_is_named(inputs, command, out, capsys):
    Path("FILE").write_text("content")
    assert call(command.replace("OUT", out)) == 2
    assert "requires a folder (got " in (error := capsys.readouterr().err), error
    assert Path("FILE").read_text() == "content" and not list(Path().glob("FILE?*"))


def test_one_of_two_exports_at_once_is_refused(inputs, capsys):
    barrier = Barrier(2)

    def export(name: str) -> int:
        barrier.wait()
        return convert.main(["to-hf", "--checkpoint", name, "--out", "OUT"])

    with ThreadPoolExecutor(2) as pool:
        codes = list(pool.map(export, ("ck", "ck2")))
    assert sorted(codes) == [0, 2], capsys.readouterr().err
    name = ("ck", "ck2")[codes.index(0)]
    assert convert.main(["to-hf", "--checkpoint", name, "--out", "alone"]) == 0
    one, other = (load_file(f"{folder}/model.safetensors") for folder in ("OUT", "alone"))
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize(
    "command", [name for name in WRITERS if name.startswith(("tokens", "pre"))]
)
def test_any_file_at_a_prefix_is_kept(inputs, command, suffix, capsys):
    Path(f"OUT.{suffix}").write_text("of another program")
    assert call(command) == 2 and "is there already" in capsys.readouterr().err
    assert outputs() == {f"OUT.{suffix}": b"of another program"}


@pytest.mark.parametrize("file", ["OUT/tokenizer.model", "OUT/vocab.json", "OUT/merges.txt"])
def test_files_of_two_tokenizers_do_not_mix(inputs, file, capsys):
    Path("OUT").mkdir()
    Path(file).write_text("{}")
    for overwrite in ("", "--overwrite"):
        assert call(f"{list(WRITERS)[-1]} {overwrite}") == 2
        assert "would mix with the new files" in capsys.readouterr().err
    assert [str(path) for path in Path("OUT").iterdir()] == [file]


@pytest.mark.parametrize(
    "command",
    [
        "tokens cut link --documents 0:1 --out a --overwrite",
        "tokens merge link link --out a --overwrite",
        "tokens cut a --documents 0:1 --out link --overwrite",
        "tokens import link.npy --vocab-size 99 --out a --overwrite",
        "preprocess --input link.bin --kind text --tokenizer tok.model --out a --overwrite",
        f"{TRAIN.replace('text.txt', 'link.txt')} 300 --out a --overwrite",
        f"{TRAIN.replace('text.txt', 'link.json')} 270 --format tokenizer.json --out a --overwrite",
    ],
)
def test_what_is_read_under_another_name_is_not_replaced(inputs, command, capsys):
    for name in ("link.bin", "link.idx"):
        Path(name).symlink_to(name.replace("link", "a"))
    Path("link.npy").symlink_to("a.bin")
    Path("a.model").write_text("some text\n" * 99)
    Path("link.txt").symlink_to("a.model")
    Path("a").mkdir()
    Path("a/tokenizer.json").write_text(json.dumps({"text": "words " * 99}))
    Path("link.json").symlink_to("a/tokenizer.json")
    before = {path: path.read_bytes() for path in Path().glob("a*/*")}
    before |= {path: path.read_bytes() for path in Path().glob("a.*")}
    assert call(command) == 2
    assert "is one of the files that are read" in (error := capsys.readouterr().err), error
    assert all(path.read_bytes() == content for path, content in before.items())


def test_logits_do_not_replace_the_tokens(inputs, capsys):
    content = Path("ids.npy").read_bytes()
    for out in ("ids.npy", "same.npy"):
        if out == "same.npy":
            Path(out).symlink_to("ids.npy")
        words = f"--checkpoint ck --tokens ids.npy --out {out}"
        assert logits.main(words.split()) == 2
        assert "is one of the files that are read" in capsys.readouterr().err
    assert Path("ids.npy").read_bytes() == content

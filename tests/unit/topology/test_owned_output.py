"""An output has one writer at a time, and an interrupted one leaves what the next can finish."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from megatron5d.topology import lock_file, owned_output
from megatron5d.topology.owned_output import STAGING, check_not_read, owned, staged

FORK = multiprocessing.get_context("fork")
FILES = {"config.json": "{}", "model.safetensors": "1", "tokenizer.json": "[]", "release/x": "2"}


def check_vacant(folder: Path) -> None:
    if present := sorted(path.name for path in folder.glob("*") if path.name != STAGING):
        raise ValueError(f"{folder} holds {present}")


def write(out: Path, content: str = "") -> None:
    with staged(out, check_vacant) as staging:
        for name, text in FILES.items():
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text(text + content)


def files_of(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_an_output_has_one_writer_under_any_name(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to("out")
    monkeypatch.chdir(tmp_path)
    with owned("out", is_folder=True):
        assert sorted(os.listdir()) == ["link", "out.lock"], "nothing is in the folder"
        for name in ("out", tmp_path / "out", "link", "sub/../out"):
            with pytest.raises(OSError, match=f"--out {name} belongs to .* process {os.getpid()}"):
                with owned(name):
                    pass
    with owned("link"), owned("other", checkpoints=True):
        assert os.listdir("other") == ["run.lock"]
    assert os.listdir() == ["link"], "empty folders are removed"


def test_several_outputs_are_owned_together(tmp_path):
    with owned(tmp_path / "a"):
        with pytest.raises(OSError, match="/a belongs to"), owned(tmp_path / "b", tmp_path / "a"):
            pass
        with owned(tmp_path / "b"):
            pass


def test_a_folder_whose_parent_is_read_only_is_locked_within(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (tmp_path / "out").mkdir()
    with owned(tmp_path / "out"):
        assert [path.name for path in tmp_path.rglob("*")] == ["out", ".lock"]


@pytest.mark.parametrize("options", [{"is_folder": True}, {"checkpoints": True}, {}])
@pytest.mark.parametrize("below", ["", "/sub", "/sub/sub"])
def test_a_file_in_place_of_a_folder_is_named(tmp_path, options, below):
    (tmp_path / "file").write_text("content")
    if not (options or below):
        return  # the output may be a file
    with pytest.raises(ValueError, match=r"requires a folder \(got .*/file, which is a file\)"):
        with owned(f"{tmp_path}/file{below}", **options):
            pass
    assert files_of(tmp_path) == {"file": "content"}


def test_a_killed_owner_is_known_at_once_and_its_files_go(tmp_path, monkeypatch):
    monkeypatch.delattr(lock_file.LockFile, "_is_touched_within_watch")
    out = tmp_path / "out"

    def hold(ready):
        with staged(out, check_vacant) as staging:
            (staging / "half").write_text("x")
            ready.set()
            time.sleep(60)

    ready = FORK.Event()
    child = FORK.Process(target=hold, args=(ready,))
    child.start()
    assert ready.wait(30)
    with pytest.raises(OSError, match=f"process {child.pid} on"):
        write(out)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    write(out)
    assert files_of(tmp_path) == {f"out/{name}": text for name, text in FILES.items()}


@pytest.mark.parametrize("moves", range(len(FILES) + 1))
@pytest.mark.parametrize("is_killed", [True, False])
def test_an_interrupted_writer_leaves_nothing_that_stops_the_next(
    tmp_path, monkeypatch, moves, is_killed
):
    out, rename, count = tmp_path / "out", Path.rename, [moves]

    def rename_some(path, target):
        if path.parent.name == STAGING and not path.name.endswith(".part"):
            if not count[0]:
                raise OSError("interrupted")
            count[0] -= 1
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_some)
        if is_killed:  # nothing is cleaned up
            patch.setattr(owned_output, "_remove_unfinished", lambda out: None)
        if moves == len(FILES):
            write(out)
        else:
            with pytest.raises(OSError, match="interrupted"):
                write(out)
            assert is_killed or not out.exists()
    if moves == len(FILES):
        with pytest.raises(ValueError, match="holds"):
            write(out, "of the next")
    else:
        write(out, "of the next")
    added = "" if moves == len(FILES) else "of the next"
    assert files_of(out) == {name: text + added for name, text in FILES.items()}


def test_files_that_appear_meanwhile_are_kept(tmp_path):
    with pytest.raises(ValueError, match=r"holds \['mine'\]"):
        with staged(tmp_path / "out", check_vacant) as staging:
            (staging / "mine").write_text("new")
            (tmp_path / "out" / "mine").write_text("old")
    assert files_of(tmp_path) == {"out/mine": "old"}


def test_files_that_are_read_are_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x").write_text("")
    Path("link").symlink_to("x")
    for name in ("x", "link", "./x", tmp_path / "x"):
        with pytest.raises(ValueError, match="--out x is one of the files that are read"):
            check_not_read(["y", "x"], ["z", name])
    check_not_read(["x"], ["y", "z"])

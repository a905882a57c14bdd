"""One run at a time holds a lock: a living one keeps it, a dead one is recognised, nobody has to
clean up."""

import json
import multiprocessing
import os
import signal
import time
from dataclasses import asdict, replace

import pytest

from megatron5d.topology import lock_file
from megatron5d.topology.lock_file import LockFile, Owner, is_alive, this_process

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "checkpoints" / "run.lock"


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in {"HEARTBEAT_S": 0.05, "STALE_S": 0.3, "POLL_S": 0.02}.items():
        monkeypatch.setattr(lock_file, name, seconds)


def leave(file, owner):
    """What a run that was killed leaves behind."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(owner)))


def elsewhere(monkeypatch):
    """From here on this process is on another machine."""
    monkeypatch.setattr(lock_file, "_system", lambda: "another kernel")


def test_a_living_run_keeps_its_lock_and_releases_it(file):
    first = LockFile(file, "checkpoint.dir = here")
    said = rf"here belongs to a run that is still going: process {os.getpid()} on .*since 2.*run.lock need not"
    with pytest.raises(OSError, match=said):
        LockFile(file, "checkpoint.dir = here")
    first.check()
    first.release()
    assert list(file.parent.iterdir()) == []
    LockFile(file, "checkpoint.dir = here").release()


def test_a_killed_run_is_recognised_at_once(file):
    """Also while it is still a zombie, its parent being busy."""

    def hold(ready):
        LockFile(file, "target")
        ready.set()
        time.sleep(60)

    for reaped in (True, False):
        ready = FORK.Event()
        child = FORK.Process(target=hold, args=(ready,))
        child.start()
        assert ready.wait(30)
        with pytest.raises(OSError, match=f"process {child.pid} on"):
            LockFile(file, "target")
        os.kill(child.pid, signal.SIGKILL)
        if reaped:
            child.join()
        else:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        begun = time.monotonic()
        LockFile(file, "target").release()
        assert time.monotonic() - begun < lock_file.STALE_S / 2
        child.join()


def test_what_is_known_of_an_owner():
    here = this_process()
    assert is_alive(here, here)
    assert is_alive(replace(here, started="1"), here) is False, "its pid is now another process's"
    other = replace(here, system="another kernel", job="77", restarts=1)
    assert is_alive(other, here) is None
    assert is_alive(other, replace(here, job="77", restarts=2)) is False, (
        "SLURM has requeued the job"
    )
    assert is_alive(other, replace(here, job="77", restarts=1)) is None, "another step of the job"
    assert is_alive(other, replace(here, job="78", restarts=2)) is None


def test_slurms_numbers_are_those_of_the_job(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    owner = this_process()
    assert (owner.job, owner.restarts) == ("4711", 3) and "SLURM job 4711" in str(owner)


def test_on_another_machine_the_living_are_seen_and_the_silent_give_way(
    file, quick, monkeypatch, capsys
):
    first = LockFile(file, "target")
    elsewhere(monkeypatch)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="still going"):
        patch.setattr(lock_file, "STALE_S", 60)  # a busy machine may delay the heartbeat
        LockFile(file, "target")
    assert "watching for up to 60 s" in capsys.readouterr().err
    first._released.set()  # killed: no heartbeat, and the file stays
    first._thread.join()
    begun = time.monotonic()
    second = LockFile(file, "target")
    assert time.monotonic() - begun >= lock_file.STALE_S
    with pytest.raises(
        OSError, match=r"taken over by another run, process \d+ on .* no sign of life for 0.3 s"
    ):
        first.check()
    first.release()
    second.check()
    second.release()
    assert not file.exists()


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
def test_an_unreadable_file_belongs_to_an_unknown_run(file, quick, monkeypatch, content):
    file.parent.mkdir()
    file.write_text(content)
    held = LockFile(file, "target")
    held.check()
    held.release()
    file.write_text(content)
    os.utime(file, (1, 1))
    monkeypatch.setattr(lock_file, "STALE_S", 1000)  # silent for years: it is not watched
    LockFile(file, "target").release()


def test_a_file_that_somebody_removed_is_made_again(file):
    held = LockFile(file, "target")
    file.unlink()
    file.parent.rmdir()
    held.check()
    with pytest.raises(OSError, match="still going"):
        LockFile(file, "target")
    held.release()


def test_of_many_that_find_a_dead_run_at_once_one_gets_the_lock(file):
    leave(file, replace(this_process(), started="1"))
    start, done, queue = FORK.Event(), FORK.Event(), FORK.Queue()

    def begin():
        start.wait()
        try:
            held = LockFile(file, "target")
        except OSError:
            queue.put(False)
            return
        queue.put(True)
        done.wait(30)
        held.release()

    children = [FORK.Process(target=begin) for _ in range(4)]
    for child in children:
        child.start()
    start.set()
    assert sorted(queue.get(timeout=30) for _ in children) == [False, False, False, True]
    done.set()
    for child in children:
        child.join()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, said in (("file/inside", "Not a directory"), ("file", "File exists")):
        with pytest.raises(OSError, match=rf"checkpoint\.dir = there cannot be locked: .*{said}"):
            LockFile(tmp_path / folder / "run.lock", "checkpoint.dir = there")


def test_an_owner_without_a_number_is_unknown():
    assert str(Owner()) == "an unknown process"

"""One run at a time holds a lock: a living one keeps it, a dead one is recognized without a manual
clean-up."""

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


def test_a_living_run_keeps_its_lock_and_releases_it(file):
    first = LockFile(file, "checkpoint.dir = here")
    message = (
        rf"here belongs to a run that is still going: process {os.getpid()} on .*since 2.*"
        "run.lock need not"
    )
    with pytest.raises(OSError, match=message):
        LockFile(file, "checkpoint.dir = here")
    first.check()
    first.release()
    assert list(file.parent.iterdir()) == []
    LockFile(file, "checkpoint.dir = here").release()


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_run_is_recognized_at_once(file, reaped, monkeypatch):
    """Also while it is still a zombie, its parent being busy."""

    def hold(ready):
        LockFile(file, "target")
        ready.set()
        time.sleep(60)

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
    # it is not watched: pytest's time limit is shorter
    monkeypatch.setattr(lock_file, "STALE_S", 1000)
    LockFile(file, "target").release()
    child.join()


def test_whether_an_owner_is_alive(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    observer = this_process()
    assert (observer.job, observer.restarts) == ("77", 2)
    assert "SLURM job 77" in str(observer)
    assert is_alive(observer, observer)
    assert is_alive(replace(observer, started="1"), observer) is False, "its pid was reused"
    owner = replace(observer, system="another kernel", restarts=1)
    assert is_alive(owner, observer) is False, "SLURM has requeued the job"
    assert is_alive(owner, replace(observer, restarts=1)) is None, "another step of the job"
    assert is_alive(owner, replace(observer, job="78")) is None
    assert is_alive(owner, replace(observer, job="", restarts=0)) is None
    assert str(Owner()) == "an unknown process"


def test_on_another_machine_the_living_are_seen_and_the_silent_replaced(
    file, quick, monkeypatch, capsys
):
    first = LockFile(file, "target")
    monkeypatch.setattr(lock_file, "_system", lambda: "another kernel")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="still going"):
        patch.setattr(lock_file, "STALE_S", 60)  # a busy machine may delay the heartbeat
        LockFile(file, "target")
    assert "watching for up to 60 s" in capsys.readouterr().err
    first._released.set()  # as if killed: no heartbeat, and the file stays
    first._thread.join()
    start = time.monotonic()
    second = LockFile(file, "target")
    assert time.monotonic() - start >= lock_file.STALE_S
    message = r"taken over by another run, process \d+ on .* no sign of life for 0.3 s"
    with pytest.raises(OSError, match=message):
        first.check()
    first.release()
    second.check()
    second.release()
    assert not file.exists()


@pytest.mark.parametrize("content", ["", "{", "{}", "[1]"])
def test_an_unreadable_file_belongs_to_an_unknown_run(file, quick, monkeypatch, content):
    file.parent.mkdir()
    file.write_text(content)
    lock = LockFile(file, "target")
    lock.check()
    lock.release()
    file.write_text(content)
    os.utime(file, (1, 1))
    monkeypatch.setattr(lock_file, "STALE_S", 1000)  # untouched for years, it is not watched
    LockFile(file, "target").release()


def test_a_removed_file_is_made_again(file):
    lock = LockFile(file, "target")
    file.unlink()
    file.parent.rmdir()
    lock.check()
    with pytest.raises(OSError, match="still going"):
        LockFile(file, "target")
    lock.release()


def test_of_several_runs_that_find_a_dead_one_a_single_run_gets_the_lock(file):
    file.parent.mkdir()
    file.write_text(json.dumps(asdict(replace(this_process(), started="1"))))
    start, done, results = FORK.Event(), FORK.Event(), FORK.Queue()

    def compete():
        start.wait()
        try:
            lock = LockFile(file, "target")
        except OSError:
            results.put(False)
            return
        results.put(True)
        done.wait(30)
        lock.release()

    children = [FORK.Process(target=compete) for _ in range(4)]
    for child in children:
        child.start()
    start.set()
    assert sorted(results.get(timeout=30) for _ in children) == [False, False, False, True]
    done.set()
    for child in children:
        child.join()


@pytest.mark.parametrize(
    ("folder", "cause"), [("file/inside", "Not a directory"), ("file", "File exists")]
)
def test_a_folder_that_cannot_be_made_is_named(tmp_path, folder, cause):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=rf"checkpoint\.dir = there cannot be locked: .*{cause}"):
        LockFile(tmp_path / folder / "run.lock", "checkpoint.dir = there")

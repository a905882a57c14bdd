"""Preprocessing that was killed at any moment ends with the same bytes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preprocessing import ROOT, TEXTS, tool

from megatron5d.data import preprocess
from megatron5d.data.documents import Recipe
from megatron5d.data.indexed_dataset import finish_partial

pytest.importorskip("sentencepiece")
KILLER = """
import os, signal, sys
from pathlib import Path
from megatron5d.data import corpus, preprocess
from megatron5d.data.preprocess import Journal
from megatron5d.data.documents import Recipe
if __name__ == "__main__":
    corpus.UNIT_BYTES = 1500
    files, tokenizer, out, kill_after, save_every_s, workers = sys.argv[1:]
    seen = []
    def progress(done_bytes, state):
        seen.append(done_bytes)
        if len(seen) == int(kill_after):
            os.kill(os.getpid(), signal.SIGKILL)
    job = preprocess.Job((Path(files),), out, Recipe(tokenizer, append_eod=True), valid_fraction=0.1)
    summary = preprocess.preprocess(job, int(workers), preprocess.Reporting(progress), save_every_s=float(save_every_s))
    print(len(seen), summary["resumed_documents"])
"""


def run_until(script, corpus_file, tokenizer_file, out, kill_after, save_every_s, workers):
    arguments = [corpus_file, tokenizer_file, out, kill_after, save_every_s, workers]
    return subprocess.run(
        [sys.executable, script, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )


@pytest.mark.parametrize(("save_every_s", "workers"), [(0, 1), (0.003, 1), (0, 2)])
def test_killed_runs_go_on_and_end_with_the_same_bytes(
    tmp_path, tokenizer_file, corpus_file, save_every_s, workers
):
    script = tmp_path / "killer.py"
    script.write_text(KILLER)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run_until(script, corpus_file, tokenizer_file, tmp_path / "whole" / "o", 0, 9, 1)
    num_units = int(whole.stdout.split()[0])
    assert num_units > 30
    resumed = 0
    for kill_after in (7, 1, 9) if workers == 1 else (12,):
        killed = run_until(
            script,
            corpus_file,
            tokenizer_file,
            tmp_path / "killed" / "o",
            kill_after,
            save_every_s,
            workers,
        )
        assert killed.returncode == -9, killed.stderr
        assert not list((tmp_path / "killed").glob("*.idx"))
        with (tmp_path / "killed" / "o_train.bin.partial").open("ab") as file:
            file.write(b"half a write")
    last = run_until(
        script, corpus_file, tokenizer_file, tmp_path / "killed" / "o", 0, save_every_s, workers
    )
    assert last.returncode == 0, last.stderr
    units_left, resumed = map(int, last.stdout.split())
    if save_every_s == 0:
        assert units_left == num_units - (17 if workers == 1 else 12) and resumed > 0
    for suffix in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx"):
        assert (tmp_path / "killed" / f"o{suffix}").read_bytes() == (
            tmp_path / "whole" / f"o{suffix}"
        ).read_bytes()
    assert not list((tmp_path / "killed").glob("*.partial*"))


def processes_marked(mark):
    """Ids of the processes that have `mark` in their environment, which children inherit."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find processes")
def test_killed_parents_leave_no_processes(tmp_path, tokenizer_file, corpus_file):
    script, mark = tmp_path / "killer.py", f"KILLED_RUN={tmp_path}"
    script.write_text(KILLER)
    arguments = map(str, [script, corpus_file, tokenizer_file, tmp_path / "o", 5, 0, 2])
    environment = {**os.environ, "KILLED_RUN": str(tmp_path)}
    # output to nowhere: a pipe would be held open by orphans, and waiting for its end would wait
    # for them
    parent = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL
    )
    most = 0
    while parent.poll() is None:
        most = max(most, len(processes_marked(mark)))
        time.sleep(0.02)
    assert parent.returncode == -9 and most >= 3  # the parent and two workers were seen at work
    deadline = time.monotonic() + 20
    while processes_marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_marked(mark) == []


@pytest.mark.parametrize("at", [0, 1])
def test_a_kill_while_the_files_get_their_names_is_finished(
    tmp_path, tokenizer_file, corpus_file, monkeypatch, at
):
    def job(out):
        return preprocess.Job(
            (corpus_file,), str(tmp_path / out), Recipe(str(tokenizer_file)), valid_fraction=0.1
        )

    preprocess.preprocess(job("whole"), 1)
    calls = []

    def killed(prefix, dtype):
        calls.append(prefix)
        if len(calls) > at:
            raise KeyboardInterrupt
        finish_partial(prefix, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "finish_partial", killed)
        with pytest.raises(KeyboardInterrupt):
            preprocess.preprocess(job("o"), 1)
    assert preprocess.preprocess(job("o"), 1)["documents"] == len(TEXTS)
    for suffix in ("_train.bin", "_train.idx", "_valid.bin", "_valid.idx"):
        assert (tmp_path / f"o{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


def test_an_unfinished_run_of_another_job_is_not_mixed_in(tmp_path, tokenizer_file, corpus_file):
    (tmp_path / "killer.py").write_text(KILLER)
    run_until(tmp_path / "killer.py", corpus_file, tokenizer_file, tmp_path / "o", 5, 0, 1)
    refused = tool(
        "--input",
        corpus_file,
        "--tokenizer",
        tokenizer_file,
        "--out",
        tmp_path / "o",
        "--valid-fraction",
        0.1,
    )
    assert (
        refused.returncode == 2 and "unfinished run with other inputs or settings" in refused.stderr
    )

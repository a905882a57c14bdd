"""What breaks during a run ends it with one message: the rank, the file, and what can be done."""

import errno
import os
import re
import resource
from pathlib import Path

import pytest
from ranks import RankFailure, run_ranks
from runs import write_corpus

from megatron5d.checkpoint.folder import saved_steps, step_folder
from megatron5d.checkpoint.tensor_file import write_rank_file
from megatron5d.topology.lock_file import LockFile
from megatron5d.train.guard import crash_message
from pretrain import main

EXPERIMENT = [
    "model=tiny",
    "model.vocab_size=97",
    "train.gbs=4",
    "train.seq_len=16",
    "train.steps=2",
    "parallel.zero=1",
    "log.progress=false",
    "log.memory_check=off",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data.train=[{write_corpus(tmp_path_factory.mktemp('corpus') / 'toy', vocab_size=97)}]"


def train(*overrides):
    """Exit codes of two ranks."""
    return run_ranks(lambda rank, world: main([*EXPERIMENT, *overrides]), 2)


def message_of(*overrides):
    """The message with which a run of two ranks ends."""
    with pytest.raises(RankFailure) as failure:
        train(*overrides)
    pattern = r"SystemExit: (rank \d of 2 stops the run: .*\n.*log\.traceback=true.*)"
    match = re.search(pattern, str(failure.value))
    assert match, failure.value
    return match[1]


def test_a_damaged_checkpoint_a_full_disk_and_a_wrong_token_are_named(tmp_path, data, monkeypatch):
    folder = tmp_path / "checkpoints"
    saving = [data, f"checkpoint.dir={folder}", "checkpoint.every=1"]
    train(*saving)
    assert saved_steps(folder) == [1, 2]

    file = step_folder(folder, 2) / "__1_0.distcp"
    content = file.read_bytes()
    damaged = bytearray(content)
    damaged[len(content) // 2] ^= 1
    file.write_bytes(damaged)
    message = message_of(*saving, "train.steps=3")
    assert f"{file} is damaged: bytes " in message
    assert f"checkpoint.resume={step_folder(folder, 1)}" in message
    file.write_bytes(content)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, limits[1]))
    try:
        message = message_of(*saving, "train.steps=3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the checkpoint of step 3 could not be written" in message
    assert "GB left" in message
    # torch hides it behind an error of its archive
    assert "OSError: [Errno 27] File too large" in message
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["latest", "step-00000001", "step-00000002"]

    # as if the samples before training did not show the token
    monkeypatch.setattr("megatron5d.train.preflight.data.SAMPLE_TOKENS", 0)
    message = message_of(data, "model.vocab_size=90")
    assert re.search(r"data\.train: .*toy.*requires ids below model\.vocab_size", message)
    assert "model.vocab_size" in message


def test_nodes_that_do_not_share_the_checkpoint_folder_are_refused_at_the_start(
    tmp_path, data, monkeypatch
):
    """Each would save its own ranks' shards, and the folder with the manifest would pass for
    complete."""
    monkeypatch.setattr("megatron5d.checkpoint.save.VISIBLE_S", 0.3)

    def on_node(rank, _, nodes):
        os.chdir(tmp_path / nodes[rank])
        return main([*EXPERIMENT, data, "train.steps=1", "checkpoint.dir=own"])

    for node in "ab":
        (tmp_path / node).mkdir()
    message = r"rank 1 on .* does not find in own what rank 0 writes there"
    with pytest.raises(RankFailure, match=message):
        run_ranks(on_node, 2, "ab")
    assert run_ranks(on_node, 1, "a") == [0]
    message = r"rank 0 continues from own/step-00000001, but on .* rank 1 finds none"
    with pytest.raises(RankFailure, match=message):
        run_ranks(on_node, 2, "ab")


def test_a_second_run_in_the_same_folder_ends_and_changes_nothing(tmp_path, data):
    """Every rank ends before a file is written; the files of the first run stay as they are."""
    folder, log = tmp_path / "run" / "checkpoints", tmp_path / "run" / "log.jsonl"
    outputs = [f"checkpoint.dir={folder}", f"log.jsonl={log}", f"log.dir={tmp_path / 'run'}"]
    train(data, *outputs)
    # the first run continues, and is about to save
    (folder / "step-00000003.tmp").mkdir()

    def files():
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    for target, file in {
        f"checkpoint.dir = {folder}": folder / "run.lock",
        f"log.jsonl = {log}": log.with_name("log.jsonl.lock"),
    }.items():
        lock = LockFile(file, target)
        before = files()
        message = message_of(data, *outputs, "train.steps=4")
        assert (
            f"{target} belongs to a run that is still going: process {os.getpid()} on " in message
        )
        assert files() == before
        assert (folder / "step-00000003.tmp").exists() == (file.parent == folder)
        lock.release()
    assert saved_steps(folder) == [2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: int("x"), None),  # a ValueError of a library
        (lambda: {}["x"], None),
        (Path("/nowhere/x").read_text, "No such file"),
    ],
)
def test_only_errors_of_the_user_become_a_message(call, message):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of several kinds
        call()
    text = crash_message(raised.value, 0, 1)
    assert text is None if message is None else message in text


@pytest.mark.parametrize("background", [False, True])
def test_training_continues_after_a_failed_save(tmp_path, data, background, capfd, monkeypatch):
    """A disk that is full for a while costs a checkpoint, not the run; a run whose last step is not
    saved does not end well."""
    failing_step, folder = 2, tmp_path / "checkpoints"

    def write_on_a_full_disk(folder, tensors, rank, save):
        if rank == 1 and save.step == failing_step:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "__1_0.distcp"))
        return write_rank_file(folder, tensors, rank, save)

    monkeypatch.setattr("megatron5d.checkpoint.save.write_rank_file", write_on_a_full_disk)
    saving = [data, f"checkpoint.dir={folder}", "checkpoint.every=1", "checkpoint.keep=0"]
    saving.append(f"checkpoint.async={str(background).lower()}")
    assert train(*saving, "train.steps=4") == [0, 0]
    assert saved_steps(folder) == [1, 3, 4]
    assert not list(folder.glob("*.tmp"))
    output = "".join(capfd.readouterr())
    cause = "rank 1: OSError: [Errno 28] No space left"
    assert f"warning: the checkpoint of step 2 could not be written: {cause}" in output
    for words in ("__1_0.distcp", "GB left", "Training continues"):
        assert words in output
    failing_step = 6
    message = message_of(*saving, "train.steps=6")
    assert "the checkpoint of step 6 could not be written" in message
    assert saved_steps(folder) == [1, 3, 4, 5]

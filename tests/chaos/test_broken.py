"""What breaks when a run is under way ends it with one message: which rank, which file, and what
can be done."""

import errno
import os
import re
import resource
from pathlib import Path

import pytest
from ranks import RankFailure, run_ranks
from runs import write_corpus

from megatron5d.checkpoint.folder import saved_steps, step_folder
from megatron5d.checkpoint.storage import write_rank_file
from megatron5d.topology.lock_file import LockFile
from megatron5d.train.guard import crash_message
from pretrain import main

EXPERIMENT = [
    *(
        "model=tiny",
        "model.vocab_size=97",
        "train.gbs=4",
        "train.seq_len=16",
        "train.steps=2",
        "parallel.zero=1",
    ),
    *("log.progress=false", "log.memory_check=off"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


def message_of(arguments, prepare=lambda: None):
    """What a run of two ranks ends with."""

    def one(rank, world):
        prepare()
        return main([*EXPERIMENT, *arguments])

    with pytest.raises(RankFailure) as failure:
        run_ranks(one, 2)
    found = re.search(
        r"SystemExit: (rank \d of 2 stops the run: .*\n.*log\.traceback=true.*)", str(failure.value)
    )
    assert found, failure.value
    return found[1]


def test_a_damaged_checkpoint_a_full_disk_and_a_wrong_token_are_named(
    tmp_path, corpus, monkeypatch
):
    data, place = f"data.train=[{corpus}]", tmp_path / "checkpoints"
    saving = [data, f"checkpoint.dir={place}", "checkpoint.every=1"]
    run_ranks(lambda rank, world: main([*EXPERIMENT, *saving]), 2)
    assert saved_steps(place) == [1, 2]

    file = step_folder(place, 2) / "__1_0.distcp"
    whole = file.read_bytes()
    middle = len(whole) // 2
    file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    told_damage = message_of([*saving, "train.steps=3"])
    assert (
        f"{file} is damaged: bytes " in told_damage
        and f"checkpoint.resume={step_folder(place, 1)}" in told_damage
    )
    file.write_bytes(whole)

    small = file.stat().st_size // 2
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (small, small))  # noqa: E731
    told_disk = message_of([*saving, "train.steps=3"], limited)
    assert "the checkpoint of step 3 could not be written" in told_disk and "GB left" in told_disk
    assert "OSError: [Errno 27] File too large" in told_disk, (
        "which torch hides behind an error of its archive"
    )
    assert sorted(path.name for path in place.iterdir()) == [
        "latest",
        "step-00000001",
        "step-00000002",
    ]

    # as if it were seen in none
    monkeypatch.setattr("megatron5d.train.preflight.data.STRETCH_TOKENS", 0)
    told_token = message_of([data, "model.vocab_size=90"])
    assert (
        re.search(rf"data\.train: {corpus}.*token id \d+", told_token)
        and "model.vocab_size" in told_token
    )


def test_nodes_with_checkpoint_folders_of_their_own_are_told_at_the_start(
    tmp_path, corpus, monkeypatch
):
    """Each would save what its ranks hold, and the folder with the manifest would pass for
    whole."""
    monkeypatch.setattr("megatron5d.checkpoint.save.VISIBLE_S", 0.3)

    def on_node(rank, _, nodes):
        os.chdir(tmp_path / nodes[rank])
        return main([*EXPERIMENT, f"data.train=[{corpus}]", "train.steps=1", "checkpoint.dir=own"])

    for node in "ab":
        (tmp_path / node).mkdir()
    with pytest.raises(
        RankFailure, match=r"rank 1 on .* does not find in own what rank 0 writes there"
    ):
        run_ranks(on_node, 2, "ab")
    assert run_ranks(on_node, 1, "a") == [0]
    with pytest.raises(
        RankFailure, match=r"rank 0 continues from own/step-00000001, and on .* rank 1 finds none"
    ):
        run_ranks(on_node, 2, "ab")


def test_a_second_run_in_the_same_place_is_told_and_changes_nothing(tmp_path, corpus):
    """Every rank ends, before a file is written; what the first run has written stays as it is."""
    place, log = tmp_path / "run" / "checkpoints", tmp_path / "run" / "log.jsonl"
    saving = [
        f"data.train=[{corpus}]",
        f"checkpoint.dir={place}",
        f"log.jsonl={log}",
        f"log.dir={tmp_path / 'run'}",
    ]
    run_ranks(lambda rank, world: main([*EXPERIMENT, *saving]), 2)
    (place / "step-00000003.tmp").mkdir()  # the first run continues, and is about to save

    def files():
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    for knob, file in {
        f"checkpoint.dir = {place}": place / "run.lock",
        f"log.jsonl = {log}": log.with_name("log.jsonl.lock"),
    }.items():
        first = LockFile(file, knob)
        before = files()
        said = message_of([*saving, "train.steps=4"])
        assert f"{knob} belongs to a run that is still going: process {os.getpid()} on " in said
        assert files() == before and (place / "step-00000003.tmp").exists() == (
            file.parent == place
        )
        first.release()
    assert saved_steps(place) == [2]


def test_what_is_our_mistake_keeps_its_calls():
    """A ValueError out of a library, or any error but those of files and numbers."""

    def raised(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001
            return crash_message(error, 0, 1)

    assert raised(lambda: int("x")) is None
    assert raised(lambda: {}["x"]) is None
    assert "No such file" in raised(Path("/nowhere/x").read_text)


@pytest.mark.parametrize("background", [False, True])
def test_training_goes_on_after_a_save_that_failed(
    tmp_path, corpus, background, capfd, monkeypatch
):
    """A disk that is full for a while costs a checkpoint, not the run; a run does not end well on
    an unsaved step."""
    full, place = [2], tmp_path / "checkpoints"

    def write_on_a_full_disk(folder, tensors, rank, save):
        if rank == 1 and save.step in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "__1_0.distcp"))
        return write_rank_file(folder, tensors, rank, save)

    monkeypatch.setattr("megatron5d.checkpoint.save.write_rank_file", write_on_a_full_disk)
    arguments = [
        *EXPERIMENT,
        f"data.train=[{corpus}]",
        f"checkpoint.dir={place}",
        "checkpoint.every=1",
    ]
    arguments += [
        "train.steps=4",
        "checkpoint.keep=0",
        f"checkpoint.async={str(background).lower()}",
    ]
    assert run_ranks(lambda rank, world: main(arguments), 2) == [0, 0]
    assert saved_steps(place) == [1, 3, 4] and not list(place.glob("*.tmp"))
    said = "".join(capfd.readouterr())
    assert (
        "warning: the checkpoint of step 2 could not be written: rank 1: OSError: [Errno 28] No space left"
        in said
    )
    assert "__1_0.distcp" in said and "GB left" in said and "Training continues" in said
    full[:] = [6]
    told = message_of([*arguments[len(EXPERIMENT) :], "train.steps=6"])
    assert "the checkpoint of step 6 could not be written" in told and saved_steps(place) == [
        1,
        3,
        4,
        5,
    ]

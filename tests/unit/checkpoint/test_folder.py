"""When a folder is a checkpoint, which one is the newest, which may go."""

import errno
import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
from ranks import run_ranks

from megatron5d.checkpoint.folder import (
    Keep,
    checkpoint_error,
    commit,
    errors_of_newer,
    newest_checkpoint,
    read_run,
    recover,
    saved_after,
    saved_steps,
    step_folder,
)
from megatron5d.checkpoint.load import agree_on_checkpoint, find_checkpoint, resolve_checkpoint
from megatron5d.checkpoint.save import Saver
from megatron5d.planning.planned_config import model_from_checkpoint


def save(directory, step, keep=0):
    (temporary := step_folder(directory, step).with_suffix(".tmp")).mkdir(parents=True)
    (temporary / "run.json").write_text('{"progress": {}}')
    (temporary / "__0_0.distcp").write_bytes(b"x" * 100)
    return commit(temporary, Keep(keep))


def test_saved_folders_are_whole_and_the_newest_is_found(tmp_path):
    for step in (5, 10, 123456789):
        save(tmp_path, step)
    assert saved_steps(tmp_path) == [5, 10, 123456789]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-123456789"
    assert (tmp_path / "latest").read_text() == "step-123456789\n"
    assert read_run(tmp_path / "step-00000005") == {"progress": {}}


def test_exports_leave_with_their_checkpoints(tmp_path):
    """And get their suffix; so do exports whose checkpoints are gone."""
    exports = tmp_path / "hf"
    for step in (50, 100, 200):
        save(tmp_path, step)
    for name in ("step-00000050", "step-00000100", "step-00000150", "step-00000200.left", "mine"):
        (exports / name).mkdir(parents=True)
    save(tmp_path, 75)
    names = ["step-00000100.left", "step-00000200.left2", "step-00000050", "step-00000075"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["hf", "latest", *names])
    left = ["step-00000100.left", "step-00000150.left", "step-00000200.left"]
    names = sorted(path.name for path in exports.iterdir())
    assert names == ["mine", "step-00000050", *left]


def test_a_place_that_cannot_be_made_is_refused_before_anything_is_saved(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="no checkpoint can be saved in .*file/inside"):
        Saver(tmp_path / "file" / "inside", keep=0)


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 5)
    save(tmp_path, 5)
    assert saved_steps(tmp_path) == [5]


def test_keep_removes_the_oldest_whole_ones(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert saved_steps(tmp_path) == [3, 4]


def test_the_one_that_the_command_line_names_stays(tmp_path):
    """A job that is requeued before it has saved anything begins there again."""
    for step in (5, 10):
        save(tmp_path, step)
    for step in (15, 20):
        temporary = step_folder(tmp_path, step).with_suffix(".tmp")
        temporary.mkdir()
        (temporary / "run.json").write_text("{}")
        commit(temporary, Keep(1), pinned=tmp_path / "." / "step-00000005")
    assert saved_steps(tmp_path) == [5, 20]


def test_a_job_that_is_started_again_goes_on_from_what_it_has_saved(tmp_path):
    """Its command line is the same; it would begin at the same step after every time limit, and
    never end."""
    first, own = save(tmp_path, 5), str(tmp_path)
    assert find_checkpoint(own, str(first), job="77") == first, "nothing of its own is there yet"
    assert find_checkpoint(own, "none", job="77") is None
    temporary = step_folder(tmp_path, 9).with_suffix(".tmp")
    temporary.mkdir()
    (temporary / "run.json").write_text(json.dumps({"job": "77"}))
    ninth = commit(temporary, Keep())
    assert (
        find_checkpoint(own, str(first), job="77")
        == find_checkpoint(own, "none", job="77")
        == ninth
    )
    assert find_checkpoint(own, str(first), job="78") == find_checkpoint(own, str(first)) == first
    assert find_checkpoint(own, "none", job="78") is None and find_checkpoint(own, "none") is None
    assert find_checkpoint(None, "none", job="77") is None


def test_a_run_that_went_back_keeps_what_it_saves_and_goes_on_from_it(tmp_path):
    """By step the abandoned ones are the newest: counted, they would cost the new one its place,
    and auto its way."""
    for step in (100, 200, 300):
        save(tmp_path, step)
    assert save(tmp_path, 150, keep=2) == newest_checkpoint(tmp_path)
    assert saved_steps(tmp_path) == [100, 150]
    save(tmp_path, 200, keep=2)
    assert find_checkpoint(str(tmp_path), "auto") == tmp_path / "step-00000200"
    assert saved_steps(tmp_path) == [150, 200]
    save(tmp_path, 50)
    left = ["step-00000150.left", "step-00000200.left", "step-00000200.left2", "step-00000300.left"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000050", *left]


@pytest.mark.parametrize("keep", [0, 1])
def test_what_a_run_went_back_behind_is_neither_replaced_nor_counted(tmp_path, keep):
    """Its first save may be of a later step than those, or of the same."""
    for step in (10, 15, 20):
        save(tmp_path, step)
    (tmp_path / "step-00000020" / "mine").write_text("of the first run")
    saver = Saver(tmp_path, keep=keep, pinned=tmp_path / "step-00000010", start_step=10)
    saver.save(20, {}, {})
    saver.save(30, {}, {})
    assert saved_steps(tmp_path) == ([10, 30] if keep else [10, 20, 30])
    assert checkpoint_error(tmp_path / "step-00000015.left") is None
    assert (tmp_path / "step-00000020.left" / "mine").read_text() == "of the first run"


def test_old_ones_that_cannot_be_removed_do_not_end_the_run(tmp_path, monkeypatch):
    """One that was moved elsewhere, a link being in its place, is left alone there."""
    save(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / "step-00000001").symlink_to(tmp_path / "elsewhere")
    save(tmp_path, 2, keep=1)
    assert saved_steps(tmp_path) == [2] and checkpoint_error(tmp_path / "elsewhere") is None
    assert not (tmp_path / "step-00000001").is_symlink()

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="step-00000002.removed cannot be removed"):
        save(tmp_path, 3, keep=1)
    assert saved_steps(tmp_path) == [3]


def test_none_goes_before_the_new_one_is_on_disk(tmp_path, monkeypatch):
    save(tmp_path, 1)
    events, fsync, rmtree = [], os.fsync, shutil.rmtree

    def noted_fsync(handle):
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def noted_rmtree(path):
        events.append(f"{path.name} removed")
        rmtree(path)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(shutil, "rmtree", noted_rmtree)
    save(tmp_path, 2, keep=1)
    assert sorted(events[:2]) == ["files.json", "run.json"]
    assert events[2:] == ["step-00000002.tmp", tmp_path.name, "step-00000001.removed removed"]


def test_file_systems_that_wait_for_files_alone(tmp_path, monkeypatch):
    def refuse(*, folders):
        def fsync(handle):
            if stat.S_ISDIR(os.fstat(handle).st_mode) == folders:
                raise OSError(errno.EINVAL, "Invalid argument")

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(folders=True))
    assert checkpoint_error(save(tmp_path, 1)) is None
    monkeypatch.setattr(os, "fsync", refuse(folders=False))
    with pytest.raises(OSError, match="Invalid argument"):
        save(tmp_path, 2)
    assert saved_steps(tmp_path) == [1]


class PowerCut(BaseException):
    """What no handler catches."""


def save_until(monkeypatch, directory, step, renames):
    """A save that ends after so many of its renames."""
    left = iter(range(renames))
    rename = Path.rename

    def cut(path, target):
        if next(left, None) is None:
            raise PowerCut
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(PowerCut):
        patch.setattr(Path, "rename", cut)
        save(directory, step)


def test_a_crash_between_two_names_loses_no_checkpoint(tmp_path, monkeypatch):
    """Saving step 5 again: the old one has given its name up, and the new one does not have it
    yet."""
    (save(tmp_path, 5) / "mine").write_text("old")
    save_until(monkeypatch, tmp_path, 5, renames=1)
    names = ["latest", "step-00000005.replaced", "step-00000005.tmp"]
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == names
        and newest_checkpoint(tmp_path) is None
    )
    new = tmp_path / "step-00000005.tmp"
    (new / "files.json").rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path, tmp_path.with_name("torn"))
    (tmp_path / "elsewhere").rename(new / "files.json")

    [told] = recover(tmp_path)
    assert "step-00000005 was complete and only lacked its name" in told
    assert (
        newest_checkpoint(tmp_path) == tmp_path / "step-00000005"
        and not (newest_checkpoint(tmp_path) / "mine").exists()
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000005"]

    torn = tmp_path.with_name("torn")  # the new one is not whole
    told = recover(torn)
    assert "step-00000005.tmp is removed" in told[0] and "step-00000005 is the old one" in told[1]
    assert (newest_checkpoint(torn) / "mine").read_text() == "old" and recover(torn) == []

    newest_checkpoint(torn).rename(torn / "step-00000005.replaced")
    (torn / "step-00000005.replaced" / "files.json").unlink()
    assert recover(torn) == [] and not (torn / "step-00000005").exists()  # nor is the old one whole
    assert (torn / "step-00000005.replaced").exists(), "what is left of the only one is removed"


def test_one_that_was_written_to_its_end_is_taken_unless_the_run_has_gone_on(tmp_path, monkeypatch):
    save(tmp_path, 4)
    save_until(monkeypatch, tmp_path, 5, renames=0)
    shutil.copytree(tmp_path, tmp_path.with_name("later"))
    assert len(recover(tmp_path)) == 1 and saved_steps(tmp_path) == [4, 5]
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
    later = tmp_path.with_name("later")
    (later / "step-00000005.tmp").rename(tmp_path / "aside")
    save(later, 6)
    (tmp_path / "aside").rename(later / "step-00000005.tmp")
    assert "step-00000005.tmp is removed" in recover(later)[0] and saved_steps(later) == [4, 6]


def test_what_interrupted_saves_left_is_removed_and_nothing_else(tmp_path, monkeypatch):
    save(tmp_path, 5)
    # both names are right, the old one is still there
    save_until(monkeypatch, tmp_path, 5, renames=2)
    save(tmp_path, 9)
    save(tmp_path, 7)
    (tmp_path / "step-00000008.tmp").mkdir()
    (tmp_path / "step-mine.tmp").mkdir()
    assert recover(tmp_path) == [
        f"{tmp_path / 'step-00000008.tmp'} is removed: its save did not finish"
    ]
    kept = ["step-00000005", "step-00000007", "step-00000009.left", "step-mine.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", *kept]


def test_a_save_begins_with_an_empty_folder(tmp_path):
    left = tmp_path / "step-00000004.tmp"
    left.mkdir()
    (left / "__7_0.distcp").touch()
    Saver(tmp_path, keep=0).save(4, {}, {})
    assert (
        checkpoint_error(step_folder(tmp_path, 4)) is None
        and not (step_folder(tmp_path, 4) / "__7_0.distcp").exists()
    )


def test_who_has_lost_the_place_touches_nothing_there(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "step-00000006.tmp").mkdir()  # the other run is writing it
    before = sorted(tmp_path.rglob("*"))

    class Lost:
        def check(self):
            raise OSError("taken over")

    with pytest.raises(OSError, match="^taken over"):
        Saver(tmp_path, keep=1, lock=Lost()).save(6, {}, {})
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "files.json").unlink(), "no files.json"),
        (lambda f: (f / "files.json").write_text(""), "files.json is damaged: Expecting value"),
        (
            lambda f: (f / "files.json").write_text("[]"),
            "files.json is damaged: it holds list where",
        ),
        (
            lambda f: (f / "files.json").write_text("[" * 200_000),
            "files.json is damaged: its brackets are nested",
        ),
        (
            lambda f: (f / "files.json").write_text("{}"),
            "files.json is damaged: it does not list run.json",
        ),
        (
            lambda f: (f / "files.json").write_text('{"run.json": null}'),
            "16 bytes where None bytes were saved",
        ),
        (
            lambda f: (f / "__0_0.distcp").write_bytes(b"x" * 99),
            "99 bytes where 100 bytes were saved",
        ),
        (lambda f: (f / "run.json").unlink(), "no file where 16 bytes were saved"),
        (lambda f: f.rename(f.with_suffix(".tmp")), "is not a folder"),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(tmp_path, damage, said):
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    damage(last)
    assert said in checkpoint_error(last)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    with pytest.raises(ValueError, match="checkpoint.resume"):
        find_checkpoint(None, str(last))


def test_of_a_directory_without_a_whole_one_the_newest_is_blamed(tmp_path):
    for step in (1, 2):
        (save(tmp_path, step) / "__0_0.distcp").write_bytes(b"x")
    newest_first = [checkpoint_error(step_folder(tmp_path, step)) for step in (2, 1)]
    assert errors_of_newer(tmp_path) == newest_first and "1 bytes where 100" in newest_first[0]
    with pytest.raises(ValueError, match="step-00000002/__0_0.distcp has 1 bytes"):
        find_checkpoint(None, str(tmp_path))
    with pytest.raises(
        ValueError, match=r"step-00000002.* has 1 bytes .*checkpoint.resume=none starts a new run"
    ):
        find_checkpoint(str(tmp_path), "auto")
    assert find_checkpoint(str(tmp_path), "none") is None
    save(tmp_path, 1)
    assert errors_of_newer(tmp_path) == newest_first[:1]


def test_of_a_runs_folder_the_one_with_its_checkpoints_is_named(tmp_path):
    save(tmp_path / "checkpoints", 1)
    with pytest.raises(ValueError, match=f"or of several: {tmp_path}/checkpoints\\?"):
        resolve_checkpoint(tmp_path, "--checkpoint")


def test_where_a_run_starts(tmp_path):
    assert find_checkpoint(str(tmp_path), "auto") is None
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert find_checkpoint(str(tmp_path), "auto") == second
    assert find_checkpoint(str(tmp_path), "none") is None
    assert find_checkpoint(None, "auto") is None
    assert find_checkpoint(None, str(first)) == first
    assert find_checkpoint(None, str(tmp_path)) == second, (
        "a directory of checkpoints means its newest"
    )


def test_all_ranks_start_where_rank_0_does_or_none_starts(tmp_path):
    """Whether one is whole is for rank 0 to say, and to all: who raises alone leaves the others
    waiting."""
    save(tmp_path / "whole", 1)
    (tmp_path / "empty").mkdir()

    def told(rank, *places):
        try:
            return agree_on_checkpoint(*places[rank])
        except ValueError as error:
            return str(error)

    whole, empty = (str(tmp_path / "whole"), "auto"), (str(tmp_path / "empty"), "auto")
    # no file system has a name so long
    named, closed = (None, str(tmp_path / "empty")), ("n" * 300, "auto")
    cases = [(whole, whole), (empty, empty), (empty, whole), (named, whole), (empty, closed)]
    ranks = run_ranks(lambda rank, world: [told(rank, *places) for places in cases], 2)
    (at_0, none_0, seen_0, torn_0, shut_0), (at_1, none_1, other, torn_1, shut_1) = ranks
    assert at_0 == at_1 == tmp_path / "whole" / "step-00000001"
    assert none_0 is none_1 is None and seen_0 == other
    assert (
        "rank 0 continues from no checkpoint" in other
        and "rank 1 finds" in other
        and "step-00000001" in other
    )
    assert torn_1 == f"rank 0: {torn_0}" and "empty has no files.json" in torn_0
    assert (
        shut_0 == shut_1
        and "rank 1 cannot look there: " in shut_1
        and "File name too long" in shut_1
    )


@pytest.mark.parametrize("restarted", [0, 1])
def test_ranks_that_torchrun_counts_as_restarted_on_one_node_alone_agree(tmp_path, restarted):
    """An agent counts restarts for a crash of its own ranks, and none where it only joins those of
    another node."""
    first = save(tmp_path, 5)
    temporary = step_folder(tmp_path, 9).with_suffix(".tmp")
    temporary.mkdir()
    (temporary / "run.json").write_text(json.dumps({"job": "77"}))
    ninth = commit(temporary, Keep())

    def found(rank, world):
        job = "77" if rank == restarted else ""
        return [agree_on_checkpoint(str(tmp_path), resume, job) for resume in ("none", str(first))]

    assert run_ranks(found, 2) == [[ninth, ninth]] * 2


def test_one_rank_asks_for_all_files(tmp_path, monkeypatch):
    """Of thousands of ranks that each ask for the files of thousands, no file system recovers."""
    save(tmp_path, 1)
    (tmp_path / "other").mkdir()
    other = save(tmp_path / "other", 1)

    def looked(rank, world):
        asked = []
        monkeypatch.setattr(
            "megatron5d.checkpoint.folder.checkpoint_error",
            lambda folder: asked.append(folder.name),
        )
        found = agree_on_checkpoint(str(tmp_path), "auto")
        return found, asked, read_run(found)

    ranks = run_ranks(looked, 2)
    folder, run = tmp_path / "step-00000001", {"progress": {}}
    assert ranks == [(folder, ["step-00000001"], run), (folder, [], run)]
    (other / "run.json").write_text('{"progress": 12}')  # as many bytes

    def seen(rank, world):
        monkeypatch.setattr(
            "megatron5d.checkpoint.load.MANIFEST", "files.json" if rank == 0 else "run.json"
        )
        with pytest.raises(
            ValueError, match="rank 0 continues from .*step-00000001, but on .* rank 1 finds none"
        ):
            agree_on_checkpoint(str(tmp_path), "auto")

    run_ranks(seen, 2)
    with pytest.raises(ValueError, match="run.json is damaged"):
        read_run(other)


def test_no_older_checkpoint_is_looked_through_for_the_newest(tmp_path, monkeypatch):
    """Every rank looks, at a file of every rank: of thousands of ranks and some checkpoints,
    billions of questions."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    asked = []
    monkeypatch.setattr(
        "megatron5d.checkpoint.folder.checkpoint_error", lambda folder: asked.append(folder.name)
    )
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000003" and saved_after(
        tmp_path, 2
    ) == [3]
    assert asked == ["step-00000003"] * 2 and saved_after(tmp_path, 3) == []


def test_what_is_no_tensor_and_cannot_be_written_is_told_like_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megatron5d.checkpoint.folder.write_manifest", full)
    with pytest.raises(
        OSError, match="the checkpoint of step 4 could not be written: .*No space left on device"
    ):
        Saver(tmp_path, keep=1).save(4, {}, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("inside", "advice"), [("checkpoints/x", "run/checkpoints?"), ("config.json", "from_hf")]
)
def test_the_folder_that_was_meant_is_named(tmp_path, inside, advice):
    (tmp_path / "run" / inside).parent.mkdir(parents=True)
    (tmp_path / "run" / inside).touch()
    for read in (model_from_checkpoint, lambda folder: resolve_checkpoint(folder, "PATH")):
        with pytest.raises(ValueError, match=re.escape(advice)):
            read(str(tmp_path / "run"))

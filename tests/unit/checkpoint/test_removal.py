"""Which checkpoints stay; what an interrupted removal of an old one leaves is finished, and told
before."""

import shutil

import pytest

from megatron5d.checkpoint.folder import Keep, errors_of_older, recover, saved_steps
from megatron5d.checkpoint.save import Saver
from megatron5d.config.schema import CheckpointConfig, Config
from megatron5d.train.preflight.warnings import broken_checkpoints


def test_a_removal_that_was_interrupted_is_finished(tmp_path, monkeypatch):
    """One of this version at the next start; one of an earlier version, or by hand, with the next
    that are removed."""

    def save(step, keep=0):
        Saver(tmp_path, keep).save(step, {}, {})

    for step in (1, 2, 3):
        save(step)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            save(4, keep=3)
    assert saved_steps(tmp_path) == [2, 3, 4] and (tmp_path / "step-00000001.removed").is_dir()
    assert [note.split(": ")[1] for note in recover(tmp_path)] == ["its removal was interrupted"]
    (tmp_path / "step-00000002" / "index.json").unlink()
    for keep, end in ((2, "a later save removes it"), (0, "no save removes it")):
        config = Config(checkpoint=CheckpointConfig(dir=str(tmp_path), keep=str(keep)))
        (note,) = broken_checkpoints(config)
        assert (
            note.startswith("incomplete: ")
            and "step-00000002/index.json has no file" in note
            and note.endswith(end)
        )
    save(5, keep=4)
    assert errors_of_older(tmp_path), "three are whole: there is room"
    save(6, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest",
        "step-00000005",
        "step-00000006",
    ]


@pytest.mark.parametrize(
    ("policy", "stay"),
    [
        ("0", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("3", [6, 7, 8]),
        ("last:3", [6, 7, 8]),
        ("every:3", [3, 6, 8]),  # the newest always stays
        ("best:2", [2, 5, 8]),
        ("last:2+every:4+best:1", [4, 5, 7, 8]),
    ],
)
def test_policies_of_keeping_combine(tmp_path, policy, stay):
    losses = [3.0, 1.0, None, float("nan"), 0.5, 2.0, None, 1.5]
    saver = Saver(tmp_path, Keep.of(policy))
    for step, loss in enumerate(losses, 1):
        saver.save(step, {}, {"valid_loss": loss})
    assert saved_steps(tmp_path) == stay

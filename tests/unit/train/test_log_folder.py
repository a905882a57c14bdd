"""A run does not replace the configuration of another one in its log.dir."""

from dataclasses import replace

import pytest

from megatron5d.config.load import load_config, to_yaml
from megatron5d.train.loop import locked_outputs
from megatron5d.train.preflight.log_folder import log_folder_faults


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [
        ([], [], False),
        ([], ["train.steps=9", "optim.lr=1"], False),
        ([], ["log.jsonl=null", "checkpoint.dir=null"], True),
        ([], ["checkpoint.dir={root}/elsewhere"], True),
        (["checkpoint.dir={root}/elsewhere"], ["checkpoint.dir={root}/x/../elsewhere"], False),
        (["checkpoint.dir={root}/elsewhere"], [], True),
        (["checkpoint.dir=null"], ["checkpoint.dir=null"], False),
        (["checkpoint.dir=null"], ["checkpoint.dir=null", "train.steps=9"], True),
    ],
)
def test_another_run_is_refused(tmp_path, before, now, is_refused):
    def config_of(words):
        words = [word.format(root=tmp_path) for word in words]
        return load_config([f"log.dir={tmp_path}/r", *words])

    (tmp_path / "r").mkdir()
    assert not log_folder_faults(config_of(now), 1), "an empty folder"
    (tmp_path / "r/config.yaml").write_text(to_yaml(config_of(before)))
    faults = log_folder_faults(config_of(now), 1)
    assert bool(faults) == is_refused
    if faults:
        assert f"log.dir={tmp_path}/r-2" in faults[0].fix
        has, got = faults[0].reason.split(" = ")[1].removesuffix(")").split(" (got ")
        assert has != got, "the message names what differs"


def test_a_run_without_a_step_leaves_the_configuration_of_the_finished_one(tmp_path):
    finished = load_config([f"log.dir={tmp_path}", "train.steps=2"])
    step = tmp_path / "checkpoints/step-00000002"
    step.mkdir(parents=True)
    (step / "run.json").write_text('{"progress": {"step": 2}}')
    file = tmp_path / "config.yaml"
    for words, is_written in ((["train.steps=2"], False), (["train.steps=3"], True)):
        file.write_text(to_yaml(finished))
        config = load_config([f"log.dir={tmp_path}", "optim.lr=1", *words])
        with locked_outputs(config):
            pass
        assert (file.read_text() == to_yaml(config)) == is_written


def test_a_moved_folder_is_still_that_of_the_run(tmp_path):
    config = load_config([f"log.dir={tmp_path}/r"])
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/config.yaml").write_text(to_yaml(config))
    assert not log_folder_faults(load_config([f"log.dir={tmp_path}/moved"]), 1)
    (tmp_path / "moved/config.yaml").write_text("damaged: [")
    assert not log_folder_faults(replace(config, log=replace(config.log, dir="moved")), 1)

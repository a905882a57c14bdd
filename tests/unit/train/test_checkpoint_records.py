"""run.json written by hand, and weights that are not finite: refused with file and key, or tensor
and row."""

import json

import pytest
import torch

from megatron5d.checkpoint.folder import saved_config, write_manifest
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.config.convert import to_dict
from megatron5d.config.errors import Refused
from megatron5d.config.schema import Config
from megatron5d.train.state import Progress, nonfinite_weight, read_record, run_record


@pytest.fixture
def folder(tmp_path):
    def written(change=lambda record: None):
        record = json.loads(json.dumps(run_record(Progress(step=3), to_dict(Config()))))
        changed = change(record)
        text = changed if isinstance(changed, str) else json.dumps(record)
        (tmp_path / "run.json").write_text(text)
        write_manifest(tmp_path)
        return tmp_path

    return written


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.pop("format") and None, "format = None"),
        (lambda r: r.update(format="1"), "format = '1'"),
        (lambda r: r.update(format=99), "has format 99"),
        (lambda r: r.pop("progress") and None, "progress = None"),
        (lambda r: r["progress"].update(step="3"), "progress.step = '3'"),
        (lambda r: r["progress"].update(tokens=10**40), "progress.tokens = 1000"),
        (
            lambda r: r["progress"].update(step=-1, tokens=True),
            "progress.step = -1 .*; progress.tokens = True",
        ),
        (lambda r: r["progress"].update(consumed_samples=1.5), "progress.consumed_samples = 1.5"),
        (lambda r: r["progress"].update(wandb_id=7), "progress.wandb_id = 7"),
        (lambda r: r["progress"].update(steps=7), "progress.steps is none of step, skipped"),
        (lambda r: r.pop("config") and None, "config is no object"),
        (lambda r: r.update(config=[]), "config is no object"),
        (lambda r: r["config"].update(optim=3), "config is no object of groups"),
        (lambda r: r["config"]["optim"].update(name=None), "optim.name must be a string"),
        (
            lambda r: r["config"]["model"].update(num_layers="two"),
            "model.num_layers must be an integer",
        ),
        (
            lambda r: r["config"]["model"].update(num_layers=-2, norm="x"),
            r"model.num_layers must be above 0 \(got -2\); model.norm must be",
        ),
        (
            lambda r: r["config"]["model"].update(num_layers=10**12),
            "model.num_layers = 1000000000000 is above",
        ),
        (lambda r: r["config"]["moe"].update(balance=5), "moe.balance must be a list"),
        (
            lambda r: r["config"]["model"].update(rope_scaling=[1]),
            "model.rope_scaling is a group of keys",
        ),
        (lambda r: "[" * 200_000, "nested deeper"),
        (lambda r: "{", "is damaged"),
        (lambda r: "[]", "list where an object"),
    ],
)
def test_a_record_written_by_hand_is_refused_with_file_and_key(folder, change, told):
    with pytest.raises(Refused, match=rf"(?s){told}") as error:
        read_record(folder(change))
    assert str(folder()) in str(error.value)
    if "config" in told or "model." in told:
        with pytest.raises(ValueError, match=rf"(?s)run\.json.*{told}"):
            saved_config(folder(change))


def test_what_another_version_wrote_is_read(folder):
    def change(record):
        record["config"]["model"]["of_an_older_version"] = 1
        record["config"]["of_an_older_version"] = {"a": {}}
        record["progress"].pop("wandb_id")

    assert read_record(folder(change))["progress"]["step"] == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_row(value):
    matrix, vector, moment = (
        torch.ones(4, 3),
        torch.ones(5, dtype=torch.bfloat16),
        torch.full((2,), value),
    )
    tensors = {
        "model.w": ShardedTensor(
            (10, 3), [((0, 0), torch.ones(2, 3)), ((6, 0), matrix)], matrix.dtype
        ),
        "model.v": ShardedTensor((9,), [((4,), vector)], vector.dtype),
        "optim.exp_avg.v": ShardedTensor((2,), [((0,), moment)], moment.dtype),
        "model.empty": ShardedTensor((2,), [((0,), torch.ones(0))], moment.dtype),
    }
    assert nonfinite_weight(tensors) is None, "a moment is no weight"
    vector[1] = value
    assert nonfinite_weight(tensors) == f"model.v holds {value} in row 5"
    matrix[3, 1] = value
    assert nonfinite_weight(tensors) == f"model.w holds {value} in row 9"

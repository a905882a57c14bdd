"""What a run tells of its steps: bubble and bytes, measured beside predicted; evaluations count for
neither."""

import re

import pytest
import torch
from runs import records, train_on_ranks, write_corpus

from megatron5d.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoeConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import idle_fractions, simulate
from megatron5d.planning.schedule_search.auto_schedule import (
    agreed_layout,
    best_named_programs,
    layout_of,
)
from megatron5d.planning.schedule_search.stage_costs import run_costs
from megatron5d.planning.time.predict import expected_bubble, prediction_of
from megatron5d.topology.process import Process

STEPS, EVAL_EVERY = 4, 2


def test_bubble_and_bytes_stand_beside_their_predictions(tmp_path, capfd):
    config = Config(
        model=ModelConfig(num_layers=4, vocab_size=64, hidden_size=64, ffn_hidden_size=128),
        parallel=ParallelConfig(pp=2, tp=2, sp=True, zero=1),
        pipeline=PipelineConfig("1f1b", costs="F=1,I=1,W=1"),
        train=TrainConfig(steps=STEPS, gbs=8, seq_len=32, eval_every=EVAL_EVERY, eval_batches=2),
        data=DataConfig(
            train=[write_corpus(tmp_path / "toy", vocab_size=64)], split="9,1", prefetch=0
        ),
        log=LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False),
    )
    assert train_on_ranks(config, 8) == [0] * 8
    told = "".join(capfd.readouterr())
    step, lines = (
        records(tmp_path / "log.jsonl"),
        told[told.index("step 3, measured (predicted):") :].splitlines(),
    )

    shares = idle_fractions(
        program := build_program("1f1b", 2, 4), simulate(program, run_costs(config))
    )
    # the last rank waits for its first forward alone
    assert shares == pytest.approx([1 - 12 / 15, 1 - 12 / 13])
    assert all(
        record["bubble_predicted"] == shares[0] and 0 < record["bubble"] < 1 for record in step
    )
    assert re.findall(r"\((\d+\.\d)%\)", lines[2]) == [f"{100 * share:.1f}" for share in shares]

    axes = re.findall(r"(\w+) ([\d.]+ k?B) \(([\d.]+ k?B)\)", lines[1])
    assert {axis for axis, _, _ in axes} == {"tp", "pp", "dp_shard_cp"}
    for axis, measured, predicted in axes:
        assert _bytes(measured) == pytest.approx(_bytes(predicted), rel=0.02)
        assert _bytes(measured) == pytest.approx(step[2][f"comm_{axis}_bytes"], rel=0.01)
        assert {record[f"comm_{axis}_bytes"] for record in step[1:]} == {
            step[1][f"comm_{axis}_bytes"]
        }
    assert [("valid_loss" in record) for record in step] == [False, True, False, True]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_two_copies_of_everything_send_is_predicted(zero, tmp_path, capfd):
    """DualPipe's mirrored ranks reduce together what both hold."""
    config = Config(
        model=ModelConfig(num_layers=2, vocab_size=64, hidden_size=64, ffn_hidden_size=128),
        parallel=ParallelConfig(pp=2, zero=zero),
        pipeline=PipelineConfig("dualpipe"),
        train=TrainConfig(steps=3, gbs=8, seq_len=32),
        data=DataConfig(train=[write_corpus(tmp_path / "toy", vocab_size=64)], prefetch=0),
        log=LogConfig(progress=False),
    )
    assert train_on_ranks(config, 4) == [0] * 4
    axes = re.findall(r"(\w+) ([\d.]+ [kM]?B) \(([\d.]+ [kM]?B)\)", "".join(capfd.readouterr()))
    assert "pp" in (names := {axis for axis, _, _ in axes}) and any(
        name.endswith("_pair") for name in names
    )
    for _, measured, predicted in axes:
        assert _bytes(measured) == pytest.approx(_bytes(predicted), rel=0.02)


def test_the_bubble_is_that_of_the_split_that_auto_has_found():
    """The head is as dear as many layers: the first and the last stage get none."""
    config = Config(
        model=ModelConfig(num_layers=12, vocab_size=4096, hidden_size=64, ffn_hidden_size=128),
        parallel=ParallelConfig(pp=4),
        pipeline=PipelineConfig("auto", flops_per_byte=0),
        train=TrainConfig(gbs=8, seq_len=32),
    )
    found = best_named_programs(config, [8])
    plan = layout_of(found, 4)
    assert plan.layers == (0, 2, 2, 2, 2, 2, 2, 0) and found.config.pipeline.split == "cost"
    costs = run_costs(found.config).of(plan.placement)
    shares = idle_fractions(program := plan.program_of(8), simulate(program, costs))
    assert expected_bubble(config, plan, program) == pytest.approx(shares)


@pytest.mark.parametrize(
    "pipeline, is_predicted",
    [
        ({}, False),
        ({"flops_per_byte": 20.0}, True),
        ({"costs": "F=1,I=1,W=1"}, True),
    ],
)
def test_no_bubble_of_a_gpu_is_predicted_on_a_cpu(pipeline, is_predicted):
    """Unless the user sets the costs; the default is a GPU's."""
    config = Config(
        model=ModelConfig(num_layers=4, vocab_size=64),
        parallel=ParallelConfig(pp=2),
        pipeline=PipelineConfig("1f1b", **pipeline),
        train=TrainConfig(gbs=8, seq_len=32),
    )
    process = Process(0, 4, 0, torch.device("cpu"))
    layout = agreed_layout(config, process)
    assert ("predicted bubble" in layout.note) == is_predicted
    prediction = prediction_of(config, process, layout)
    assert bool(prediction.bubble) == is_predicted
    assert ("bubble_predicted" in prediction.record(0)) == is_predicted


def _bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


def test_the_first_and_the_last_step_are_recorded_whatever_log_every_says(tmp_path):
    """Also where `stop_after` makes it the last."""
    config = Config(
        model=ModelConfig(num_layers=1, vocab_size=64),
        train=TrainConfig(steps=9, stop_after=5, gbs=1, seq_len=16),
        data=DataConfig(train=[write_corpus(tmp_path / "toy", vocab_size=64)], prefetch=0),
        log=LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False, every=3),
    )
    assert train_on_ranks(config, 1) == [0]
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1, 3, 5]


def test_what_routers_did_is_recorded_whatever_log_every_says(tmp_path):
    config = Config(
        model=ModelConfig(
            num_layers=1, vocab_size=64, num_experts=4, top_k=2, moe_ffn_hidden_size=32
        ),
        moe=MoeConfig(log_every=2),
        train=TrainConfig(steps=5, gbs=2, seq_len=16),
        data=DataConfig(train=[write_corpus(tmp_path / "toy", vocab_size=64)], prefetch=0),
        parallel=ParallelConfig(ep=2),
        log=LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False, every=100),
    )
    assert train_on_ranks(config, 2) == [0] * 2
    watched = {
        record["step"]: "moe/layer_0/load" in record for record in records(tmp_path / "log.jsonl")
    }
    assert watched == {1: True, 2: True, 4: True, 5: False}

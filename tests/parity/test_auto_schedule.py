"""Searched schedules equal one process in fp64 to 1e-10, and all ranks run one stored Program."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from layouts import assert_parity
from pipeline_configs import tiny_config
from ranks import run_ranks
from runs import curve, train_on_ranks, write_corpus

from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ParallelConfig,
    PipelineConfig,
)
from megatron5d.model.partition import layers_per_stage
from megatron5d.pipeline_parallel.program import loop_placement
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.schedule_search import auto_schedule
from megatron5d.planning.schedule_search.auto_schedule import (
    agreed_layout,
    best_named_programs,
    layout_of,
    pipeline_faults,
    prediction,
    search_programs,
)
from megatron5d.planning.schedule_search.named_schedules import (
    best_named_program,
    default_placements,
)
from megatron5d.planning.schedule_search.stage_costs import run_costs
from megatron5d.topology.process import Process
from megatron5d.train.pipeline_layout import micro_batch_counts

EXPERTS = "F=1,I=1,W=1,a2aF=0.5,a2aB=0.5,comm=0.05"
THREE_CHUNKS = {"pp": 2, "vpp": 3, "tp": 2, "sp": True, "zero": 1}
# ranks, micro-batches, pipeline, parallel; few evaluations, because results need not be good
CASES = {
    "by FLOPs": (2, 5, {"memory": 1.25, "flops_per_byte": 10.0}, {"pp": 2}),
    "overlapped": (4, 6, {"memory": 1.25, "costs": EXPERTS}, {"pp": 4}),
    "both directions": (4, 9, {"memory": 1.5, "copies": 2, "costs": EXPERTS}, {"pp": 4, "vpp": 1}),
    "three chunks": (8, 4, {"memory": 1.5, "costs": EXPERTS}, THREE_CHUNKS),
}


def config_of(folder, case, **sections) -> Config:
    world, m, pipeline, parallel = CASES[case]
    num_layers, vocab_size = {"both directions": (4, 61), "by FLOPs": (7, 997)}.get(case, (16, 61))
    tied = case == "both directions"
    return tiny_config(
        {"num_layers": num_layers, "vocab_size": vocab_size, "tie_embeddings": tied},
        PipelineConfig("auto", evaluations=150, **pipeline),
        m,
        dp=world // parallel["pp"] // parallel.get("tp", 1),
        parallel=ParallelConfig(**parallel),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints")),
        **sections,
    )


def with_pipeline(config, **fields) -> Config:
    return replace(config, pipeline=replace(config.pipeline, **fields))


@pytest.mark.parametrize("case", CASES)
def test_searched_programs_train_like_one_process(tmp_path, case):
    config, world = config_of(tmp_path, case), CASES[case][0]
    assert pipeline_faults(config, world) == []
    counts = micro_batch_counts(config, world)
    result = search_programs(config, counts).results[counts[-1]]
    named = best_named_programs(config, counts).programs[counts[-1]]
    assert result.named is not None and result.named[0] == named.name
    assert result.simulation.makespan <= result.named[1] + 1e-9
    assert result.program.name == "auto"
    if case != "by FLOPs":
        assert any(len(slot) == 2 for line in result.program.ranks for slot in line)
    if case == "both directions":
        assert result.program.copies == 2
    stored = list((tmp_path / "checkpoints" / "schedules").iterdir())
    assert_parity(config, world, ignored=0.3)
    assert stored == list((tmp_path / "checkpoints" / "schedules").iterdir()), (
        "some rank searched again"
    )


def test_the_search_chooses_how_layers_are_divided(tmp_path):
    """Unless the user does: under one cap, never slower than the best named schedule with any
    split."""
    config = config_of(tmp_path, "by FLOPs")
    auto = search_programs(config, [5])
    layout = layout_of(auto, 2)
    assert (
        list(layout.layers)
        == layers_per_stage(auto.config, layout.placement)
        != layers_per_stage(config, layout.placement)
    )
    of_1f1b = simulate(
        build_program("1f1b", 2, 5), run_costs(config).of(loop_placement(2))
    ).peak_activations
    cap, fits = np.full(2, 1.25 * of_1f1b.max()), []
    for split in ("even", "cost"):
        # with ends of no weight, even ranks are even stages
        for balance in ("stages", "ranks"):
            fixed = with_pipeline(config, split=split, balance=balance)
            named = best_named_program(2, 5, run_costs(fixed), cap, default_placements(2, 1))
            if named is not None:
                fits.append(simulate(named, run_costs(fixed).of(named.placement)).makespan)
            assert search_programs(fixed, [5]).config == fixed
    assert len(fits) >= 2 and auto.results[5].simulation.makespan <= min(fits) + 1e-9
    fixed = with_pipeline(config, layout=[3, 4])
    assert layout_of(search_programs(fixed, [5]), 2).layers == (3, 4)


def test_with_two_copies_the_middle_ranks_may_get_fewer_layers(tmp_path):
    """A head as heavy as seven of 30 layers; the log has the chosen split."""
    config = config_of(tmp_path, "by FLOPs")
    config = replace(
        with_pipeline(config, split="cost", copies=2),
        model=replace(config.model, num_layers=30),
        parallel=ParallelConfig(pp=8),
        train=replace(config.train, gbs=32),
    )
    auto = search_programs(config, [32])
    assert auto.config.pipeline.balance == "late" and auto.programs[32].copies == 2
    assert list(layout_of(auto, 8).layers) == [3, 4, 4, 4, 5, 5, 5, 0]
    note = prediction(auto.config, auto.programs[32], auto.results[32])
    assert "pipeline.balance=late" in note


def test_every_rank_runs_the_program_of_rank_0(tmp_path, monkeypatch):
    """With its split of the layers; only rank 0 searches and has a note for the log."""
    config = config_of(tmp_path, "by FLOPs")

    def on_rank(rank, world):
        if rank > 0:
            monkeypatch.setattr(auto_schedule, "search_programs", None)
        layout = agreed_layout(config, Process(rank, world, rank, torch.device("cpu")))
        return layout.program_of(5), layout.layers, layout.note

    (program, layers, note), *other_ranks = run_ranks(on_rank, 2)
    assert all(other == (program, layers, "") for other in other_ranks)
    assert "predicted bubble" in note and "schedules tried" in note and "pipeline.balance=" in note


def test_a_resumed_run_keeps_its_schedule(tmp_path, capfd):
    """The curve continues bit for bit, and the search does not run again."""
    corpus = write_corpus(tmp_path / "toy", vocab_size=61)

    def run(name, stop_after=0):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = LogConfig(jsonl=str(folder / "log.jsonl"), progress=False)
        train = {"steps": 4, "stop_after": stop_after}
        data = DataConfig(train=[corpus], prefetch=0)
        config = config_of(folder, "overlapped", train=train, data=data, log=log)
        assert train_on_ranks(config, 4) == [0] * 4
        (stored,) = (folder / "checkpoints" / "schedules").iterdir()
        return curve(folder / "log.jsonl"), stored.stat().st_mtime_ns

    straight, _ = run("straight")
    _, written = run("stopped", stop_after=2)
    assert run("stopped") == (straight, written)
    assert capfd.readouterr().err.count("6 micro-batches: predicted bubble") == 3


def test_unreadable_costs_are_rejected(tmp_path):
    config = with_pipeline(config_of(tmp_path, "overlapped"), schedule="1f1b", costs="F=1,G=2")
    (fault,) = pipeline_faults(config, 4)
    assert "pipeline.costs: unknown key 'G'" in fault.reason and fault.knobs == ("pipeline.costs",)
    with pytest.raises(ValueError, match="pipeline.costs"):
        run_costs(config)

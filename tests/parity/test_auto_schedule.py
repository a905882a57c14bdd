"""What the search finds trains: one process's numbers in fp64 to 1e-10, one Program on all ranks,
kept for a resume."""

from dataclasses import replace

import numpy as np
import pytest
from layouts import assert_parity
from ranks import run_ranks
from runs import curve, train_on_ranks, write_corpus

from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
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
# name: (ranks, micro-batches, pipeline, parallel); evaluations are few, for what is found need not
# be good here
CASES = {
    "by FLOPs": (2, 5, {"memory": 1.25, "flops_per_byte": 10.0}, {"pp": 2}),
    "overlapped": (4, 6, {"memory": 1.25, "costs": EXPERTS}, {"pp": 4}),
    "both directions": (4, 9, {"memory": 1.5, "copies": 2, "costs": EXPERTS}, {"pp": 4, "vpp": 1}),
    "three chunks": (
        8,
        4,
        {"memory": 1.5, "costs": EXPERTS},
        {"pp": 2, "vpp": 3, "tp": 2, "sp": True, "zero": 1},
    ),
}


def config_of(folder, case, **more) -> Config:
    world, m, pipeline, parallel = CASES[case]
    dp = world // parallel["pp"] // parallel.get("tp", 1)
    num_layers, vocab_size = {"both directions": (4, 61), "by FLOPs": (7, 997)}.get(case, (16, 61))
    return Config(
        model=ModelConfig(
            num_layers=num_layers,
            hidden_size=16,
            ffn_hidden_size=24,
            num_heads=2,
            num_kv_heads=2,
            head_dim=8,
            vocab_size=vocab_size,
            tie_embeddings=case == "both directions",
        ),
        parallel=ParallelConfig(**parallel),
        pipeline=PipelineConfig("auto", evaluations=150, **pipeline),
        train=TrainConfig(steps=4, gbs=m * dp, mbs=1, seq_len=8, **more),
        optim=OptimConfig(lr=1e-2, warmup_steps=2, clip=0.5),
        precision=PrecisionConfig(dtype="fp64"),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints")),
    )


@pytest.mark.parametrize("case", CASES)
def test_what_is_found_trains_like_one_process(tmp_path, case):
    config, world = config_of(tmp_path, case), CASES[case][0]
    assert pipeline_faults(config, world) == []
    counts = micro_batch_counts(config, world)
    found = search_programs(config, counts).results[counts[-1]]
    named = best_named_programs(config, counts).programs[counts[-1]]
    assert found.named is not None and found.named[0] == named.name
    assert found.simulation.makespan <= found.named[1] + 1e-9
    assert found.program.name == "auto"
    if case != "by FLOPs":
        assert any(len(slot) == 2 for line in found.program.ranks for slot in line)
    if case == "both directions":
        assert found.program.copies == 2
    kept = list((tmp_path / "checkpoints" / "schedules").iterdir())
    assert_parity(config, world, ignored=0.3)
    assert kept == list((tmp_path / "checkpoints" / "schedules").iterdir()), (
        "some rank searched again"
    )


def test_the_search_chooses_how_layers_are_dealt(tmp_path):
    """Unless the user does: under one cap, never slower than the best named schedule with any of
    the splits."""
    config = config_of(tmp_path, "by FLOPs")
    found = search_programs(config, [5])
    plan = layout_of(found, 2)
    assert (
        list(plan.layers)
        == layers_per_stage(found.config, plan.placement)
        != layers_per_stage(config, plan.placement)
    )
    of_1f1b = simulate(
        build_program("1f1b", 2, 5), run_costs(config).of(loop_placement(2))
    ).peak_activations
    cap, fits = np.full(2, 1.25 * of_1f1b.max()), []
    for split in ("even", "cost"):
        # with nothing said of the ends, even ranks are even stages
        for balance in ("stages", "ranks"):
            told = replace(config, pipeline=replace(config.pipeline, split=split, balance=balance))
            named = best_named_program(2, 5, run_costs(told), cap, default_placements(2, 1))
            if named is not None:
                fits.append(simulate(named, run_costs(told).of(named.placement)).makespan)
            assert search_programs(told, [5]).config == told
    assert len(fits) >= 2 and found.results[5].simulation.makespan <= min(fits) + 1e-9
    told = replace(config, pipeline=replace(config.pipeline, layout=[3, 4]))
    assert layout_of(search_programs(told, [5]), 2).layers == (3, 4)


def test_with_two_copies_the_middle_ranks_may_get_fewer_layers(tmp_path):
    """A head as heavy as seven of 30 layers; the log says which split was chosen, and a plan for
    the run has it."""
    config = config_of(tmp_path, "by FLOPs")
    config = replace(
        config,
        model=replace(config.model, num_layers=30),
        parallel=ParallelConfig(pp=8),
        pipeline=replace(config.pipeline, split="cost", copies=2),
        train=replace(config.train, gbs=32),
    )
    found = search_programs(config, [32])
    assert found.config.pipeline.balance == "late" and found.programs[32].copies == 2
    plan = layout_of(found, 8)
    assert list(plan.layers) == [3, 4, 4, 4, 5, 5, 5, 0]
    said = prediction(found.config, found.programs[32], found.results[32])
    assert "pipeline.balance=late" in said


def test_every_rank_runs_the_program_of_rank_0(tmp_path, monkeypatch):
    """With its split of the layers. It alone searches, and rank 0 alone has something to say about
    it."""
    config = config_of(tmp_path, "by FLOPs")

    def plan(rank, world):
        if rank > 0:
            monkeypatch.setattr(auto_schedule, "search_programs", None)
        found = agreed_layout(config, Process(rank, world, rank, "cpu"))
        return found.program_of(5), found.layers, found.note

    (program, layout, note), *others = run_ranks(plan, 2)
    assert all(other == (program, layout, "") for other in others)
    assert "predicted bubble" in note and "schedules tried" in note and "pipeline.balance=" in note


def test_a_resumed_run_keeps_its_schedule(tmp_path, capfd):
    """The curve continues bit for bit, and the search is not done again."""
    corpus = write_corpus(tmp_path / "toy", vocab_size=61)

    def run(name, stop_after=0):
        config = config_of(tmp_path / name, "overlapped", stop_after=stop_after)
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = LogConfig(jsonl=str(folder / "log.jsonl"), progress=False)
        config = Config(
            **{**vars(config), "data": DataConfig(train=[corpus], prefetch=0), "log": log}
        )
        assert train_on_ranks(config, 4) == [0] * 4
        (kept,) = (folder / "checkpoints" / "schedules").iterdir()
        return curve(folder / "log.jsonl"), kept

    straight, _ = run("straight")
    _, kept = run("stopped", stop_after=2)
    written = kept.stat().st_mtime_ns
    resumed, kept = run("stopped")
    assert resumed == straight
    assert kept.stat().st_mtime_ns == written
    assert capfd.readouterr().err.count("6 micro-batches: predicted bubble") == 3


def test_costs_that_cannot_be_read_are_refused(tmp_path):
    config = config_of(tmp_path, "overlapped")
    config = Config(**{**vars(config), "pipeline": PipelineConfig("1f1b", costs="F=1,G=2")})
    (fault,) = pipeline_faults(config, 4)
    assert "pipeline.costs: unknown key 'G'" in fault.reason and fault.knobs == ("pipeline.costs",)
    with pytest.raises(ValueError, match="pipeline.costs"):
        run_costs(config)

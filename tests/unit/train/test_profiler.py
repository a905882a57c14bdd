"""log.profile: every phase of a step is on the clock once a pass, the laps fill the step, and no
number changes."""

import gzip
import json
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from runs import curve, records, train_on_ranks, write_corpus
from torch.profiler import profile

from megatron5d.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.topology.process import Process
from megatron5d.train.monitoring.profiler import Profiler
from megatron5d.train.state import Progress

pytestmark = pytest.mark.patches
STEPS, LAYERS, MICRO_BATCHES = 5, 4, 4
SLOW_S, EXPORT = 3.0, profile.export_chrome_trace


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """The folder of a run under ZeRO-3, with I and W apart and everything recomputed, and its
    configuration."""
    folder = tmp_path_factory.mktemp("profiled")
    config = Config(
        model=ModelConfig(num_layers=LAYERS, vocab_size=64),
        parallel=ParallelConfig(pp=2, zero=3),
        pipeline=PipelineConfig("zb_h1"),
        recompute=RecomputeConfig("full"),
        train=TrainConfig(steps=STEPS, gbs=2 * MICRO_BATCHES, seq_len=16),
        data=DataConfig(train=[write_corpus(folder / "toy", vocab_size=64)], prefetch=0),
        log=LogConfig(
            jsonl=str(folder / "log.jsonl"),
            progress=False,
            profile=str(folder / "profile"),
            profile_step=3,
            profile_ranks=[0, 2],
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "export_chrome_trace", _written_slowly)
        assert train_on_ranks(config, 4) == [0] * 4
    return folder, config


def _written_slowly(recorded, path: str) -> None:
    time.sleep(SLOW_S)
    return EXPORT(recorded, path)


def test_the_ranks_that_were_named_write_both_steps(profiled):
    names = {path.name for path in (profiled[0] / "profile").iterdir()}
    assert names == {
        f"rank{rank}_step{what}" for rank in (0, 2) for what in ("3_phases.json", "4_trace.json.gz")
    }


def laps_of(folder):
    return json.loads((folder / "profile" / "rank0_step3_phases.json").read_text())


@pytest.mark.timing
def test_laps_fill_the_step(profiled):
    folder, _ = profiled
    step_s = records(folder / "log.jsonl")[2]["step_time_s"]  # with the wait for data
    assert 0.5 * step_s < sum(lap["seconds"] for lap in laps_of(folder)) < 1.5 * step_s


def test_every_phase_of_every_pass_has_a_lap(profiled):
    laps = laps_of(profiled[0])
    passes = {(lap["what"], lap["pass"]) for lap in laps if lap["pass"]}
    layer = ("forward", "recompute", "backward", "wgrad")
    ends = {("Embedding", "forward"), ("Embedding", "backward"), ("Embedding", "wgrad")}
    assert passes == {(kind, each) for kind in ("SelfAttention", "MLP") for each in layer} | ends
    assert all(lap["seconds"] > 0 for lap in laps if lap["pass"])


@pytest.mark.timing
def test_writing_a_trace_is_not_the_step_s_time(profiled):
    assert records(profiled[0] / "log.jsonl")[3]["step_time_s"] < SLOW_S


def test_a_trace_has_a_range_for_every_phase_of_every_pass(profiled):
    folder, _ = profiled
    with gzip.open(folder / "profile" / "rank2_step4_trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    counts = Counter(event["name"] for event in events if event.get("cat") == "user_annotation")
    expected = {
        f"layers.{layer}.{phase} {kind} {each}": MICRO_BATCHES
        for layer in range(LAYERS // 2, LAYERS)
        for phase, kind in (("attention", "SelfAttention"), ("mlp", "MLP"))
        for each in ("forward", "recompute", "backward", "wgrad")
    } | {f"head Head {each}": MICRO_BATCHES for each in ("forward", "backward", "wgrad")}
    assert {name: count for name, count in counts.items() if name in expected} == expected
    assert not [
        name
        for name in counts
        if name.startswith(("layers.", "head ", "embedding ")) and name not in expected
    ]


def test_no_number_changes(profiled, tmp_path):
    folder, config = profiled
    log = LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False)
    assert train_on_ranks(replace(config, log=log), 4) == [0] * 4
    assert curve(tmp_path / "log.jsonl") == curve(folder / "log.jsonl")


def test_a_run_that_goes_on_for_too_few_steps_says_so(profiled):
    said: list[str] = []
    run = SimpleNamespace(
        config=profiled[1],
        progress=Progress(step=STEPS - 3),
        process=Process(0, 1, 0, torch.device("cpu")),
        model=SimpleNamespace(phases=[], named_modules=list),
    )
    Profiler(run, said.append)
    assert said == ["log.profile_step = 3 requires more steps than remain (got 3)"]

"""A pipeline's checkpoint holds every tensor once, and any layout continues from it; evaluation is
the same too."""

from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import curve, records, train_on_ranks, whole_tensors, write_corpus

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
from megatron5d.train import data as train_data

STEPS, STOP = 4, 2
# name: (ranks, schedule, parallel, layers per stage if not even)
LAYOUTS = {
    "one process": (1, "1f1b", {}),
    "loop, tied ends apart": (4, "1f1b", {"pp": 2, "zero": 1}),
    "loop of two chunks": (2, "interleaved", {"pp": 2}),
    "V": (4, "zb_v", {"pp": 2, "tp": 2, "sp": True}),
    "loop with stages that hold nothing": (
        2,
        "interleaved_zb",
        {"pp": 2, "vpp": 3, "zero": 1},
        [2, 0, 0, 3, 0, 0],
    ),
    "both directions": (4, "dualpipe", {"pp": 2, "zero": 1}),
    "both directions, nothing sharded": (4, "dualpipe", {"pp": 2}),
    "four stages": (4, "1f1b", {"pp": 4}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder / "toy_other", vocab_size=43, seed=7)
    return write_corpus(folder / "toy", vocab_size=43)


def run(folder, corpus, layout, stop_after=0):
    world, schedule, parallel, *layers = LAYOUTS[layout]
    # four micro-batches on every layout
    mbs = 1 + (world == parallel.get("pp", 1) * parallel.get("tp", 1))
    sets = [f"again {corpus}", f"other 2 {corpus}_other", f"other {corpus}"]
    config = Config(
        model=ModelConfig(
            num_layers=5,
            vocab_size=43,
            num_heads=2,
            num_kv_heads=2,
            hidden_size=16,
            ffn_hidden_size=24,
            head_dim=8,
            tie_embeddings=True,
        ),
        parallel=ParallelConfig(**parallel),
        pipeline=PipelineConfig(schedule, *layers),
        train=TrainConfig(
            steps=STEPS,
            gbs=8,
            mbs=mbs,
            seq_len=8,
            eval_every=2,
            eval_batches=2,
            stop_after=stop_after,
        ),
        optim=OptimConfig(lr=1e-2, warmup_steps=2),
        precision=PrecisionConfig(dtype="fp64"),
        data=DataConfig(train=[corpus], split="9,1", prefetch=0, valid_sets=sets),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0"),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )
    folder.mkdir(exist_ok=True)
    assert train_on_ranks(config, world) == [0] * world
    return folder


def step_folder(folder, step=STEPS):
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory, corpus):
    return run(tmp_path_factory.mktemp("runs") / "straight", corpus, "one process")


def assert_each_element_is_written_once(folder):
    metadata = dcp.FileSystemReader(step_folder(folder)).read_metadata().state_dict_metadata
    for key, entry in metadata.items():
        cells = [
            set(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
            for chunk in entry.chunks
        ]
        assert sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.size), key
        assert set().union(*cells) == set(range(entry.size[0])), key


def assert_same_run(folder, reference):
    for mine, theirs in zip(
        records(folder / "log.jsonl"), records(reference / "log.jsonl"), strict=True
    ):
        evaluated = {
            f"{when}valid_loss{which}"
            for when in ("initial_", "")
            for which in ("", "/again", "/other")
        }
        for key in {"step", "loss", "grad_norm", "lr", "tokens"} | evaluated:
            assert (key in mine) == (key in theirs), key
            if key in mine:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-10), (mine["step"], key)
    saved, expected = whole_tensors(step_folder(folder)), whole_tensors(step_folder(reference))
    assert saved.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(
            saved[key], values, rtol=1e-7, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_a_pipeline_trains_evaluates_and_saves_what_one_process_does(
    tmp_path, corpus, straight, layout
):
    folder = run(tmp_path / "piped", corpus, layout)
    assert_same_run(folder, straight)
    assert_each_element_is_written_once(folder)
    first, *_, last = records(folder / "log.jsonl")
    for record, name in ((first, "initial_valid_loss"), (last, "valid_loss")):
        assert (
            record[f"{name}/again"] != record[name]
            and record[f"{name}/again"] != record[f"{name}/other"]
        )


def test_one_process_writes_each_element_once(straight):
    assert_each_element_is_written_once(straight)


@pytest.mark.parametrize(
    ("saved_on", "resumed_on"),
    [
        ("loop, tied ends apart", "both directions"),
        ("both directions", "V"),
        ("V", "one process"),
        ("one process", "loop, tied ends apart"),
        ("both directions, nothing sharded", "loop of two chunks"),
    ],
)
def test_another_pipeline_goes_on(tmp_path, corpus, straight, saved_on, resumed_on):
    folder = run(tmp_path / "moved", corpus, saved_on, stop_after=STOP)
    run(folder, corpus, resumed_on)
    assert [step for step, *_ in curve(folder / "log.jsonl")] == list(range(1, STEPS + 1))
    assert_same_run(folder, straight)


def test_only_the_ends_read_data(tmp_path, corpus, monkeypatch):
    """Four stages: the loader of a middle one opens no file."""
    opened = tmp_path / "opened"
    opened.mkdir()
    open_samples = train_data.open_samples

    def noted(*args, **kwargs):
        (opened / str(torch.distributed.get_rank())).touch()
        return open_samples(*args, **kwargs)

    monkeypatch.setattr(train_data, "open_samples", noted)
    run(tmp_path / "four", corpus, "four stages", stop_after=1)
    assert sorted(path.name for path in opened.iterdir()) == ["0", "3"]

"""A resumed run is the run that never stopped: bit for bit on its layout, exactly placed on
another."""

import dataclasses
import functools
import os
import shutil
import signal

import pytest
import torch
from ranks import run_ranks
from runs import curve, train_on_ranks, whole_tensors, write_corpus

from megatron5d.checkpoint.folder import newest_checkpoint
from megatron5d.checkpoint.layout import slices
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)
from megatron5d.parity.run import owned_slices
from megatron5d.topology.process import Process
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train import loop
from megatron5d.train.build import build_run
from megatron5d.train.pipeline_layout import pipeline_layout
from megatron5d.train.preflight.warnings import broken_checkpoints
from megatron5d.train.signals import REQUEUE
from megatron5d.train.step import Trainer
from pretrain import plan_and_train

STEPS, STOP = 4, 2
SAVED_ON = {"tp": 2, "sp": True, "zero": 1}  # of 4 ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


def config_of(
    folder,
    corpus,
    *,
    parallel=None,
    dtype="fp32",
    stop_after=0,
    offload=False,
    name="adamw",
    **checkpoint,
):
    return Config(
        model=ModelConfig(
            vocab_size=97, num_kv_heads=2, hidden_size=32, ffn_hidden_size=48, head_dim=8
        ),
        parallel=ParallelConfig(**(SAVED_ON if parallel is None else parallel)),
        train=TrainConfig(steps=STEPS, gbs=8, mbs=2, seq_len=16, stop_after=stop_after),
        optim=OptimConfig(name=name, lr=1e-2, warmup_steps=2, offload=offload),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(train=[corpus]),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints"), keep="0", **checkpoint),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )


def run(folder, corpus, world=4, **kwargs):
    folder.mkdir(exist_ok=True)
    assert train_on_ranks(config_of(folder, corpus, **kwargs), world) == [0] * world
    return folder


def last(folder, step=STEPS):
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus):
    """A run to its end, and one that was stopped half-way, by the optimiser's name: made once, not
    to be changed."""

    @functools.cache
    def of(name="adamw"):
        folder = tmp_path_factory.mktemp(name)
        return run(folder / "straight", corpus, name=name), run(
            folder / "stopped", corpus, stop_after=STOP, name=name
        )

    return of


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for key in left:
        assert torch.equal(left[key], right[key]), (
            f"{key} differs by {(left[key] - right[key]).abs().max()}"
        )


@pytest.mark.parametrize(
    ("dtype", "zero", "offload", "name"),
    [("fp32", 1, True, "adamw"), ("bf16", 3, False, "adamw"), ("bf16", 1, True, "muon")],
)
def test_the_same_layout_goes_on_bit_for_bit(tmp_path, corpus, dtype, zero, offload, name):
    """With what the optimiser keeps on the host too: in fp32 its masters are saved as the weights
    alone."""
    kind = {"dtype": dtype, "parallel": SAVED_ON | {"zero": zero}, "offload": offload, "name": name}
    straight = run(tmp_path / "straight", corpus, **kind)
    broken = run(tmp_path / "broken", corpus, stop_after=STOP, **kind)
    run(tmp_path / "broken", corpus, **kind)
    assert curve(broken / "log.jsonl") == curve(straight / "log.jsonl")
    tensors = whole_tensors(last(straight))
    assert_equal(whole_tensors(last(broken)), tensors)
    kinds = {
        key.split(".")[1]
        for key in tensors
        if key.startswith("optim.") and key.endswith(".mlp.up.weight")
    }
    moments = {"momentum"} if name == "muon" else {"exp_avg", "exp_avg_sq"}
    assert kinds == moments | ({"master"} if dtype == "bf16" else set())


OTHERS = {
    "one process": (1, {}, "adamw"),
    "more tensor parallel": (4, {"tp": 4, "sp": True}, "muon"),
    "data parallel alone, whole": (4, {"zero": 0}, "adamw"),
    "data parallel alone, sharded": (2, {"zero": 2}, "muon"),
    "hybrid sharded": (8, {"tp": 2, "zero": 3, "dp_replicate": 2}, "adamw"),
}


def _held_after_loading(rank, world, config):
    loaded = build_run(
        config, Process(rank, world, rank, torch.device("cpu")), pipeline_layout(config, world)
    )
    moments = []
    for kind, flat, state in loaded.optimizer.tensors():
        for segment in state.segments:
            moments.append(
                (f"optim.{kind}.{segment.spec.name}", flat[slice(*segment.owned)].clone())
            )
    with loaded.sync.weights.gathered():
        whole = [
            (spec_of(p).name, piece, p.detach().clone())
            for p in loaded.model.parameters()
            for piece in spec_of(p).pieces
        ]
    return loaded.progress.step, owned_slices(loaded.sync, "weight_slice"), moments, whole


@pytest.mark.parametrize("layout", OTHERS)
def test_another_layout_gets_every_element_and_continues_the_curve(
    tmp_path, corpus, finished, layout
):
    world, parallel, optimiser = OTHERS[layout]
    straight, stopped = finished(optimiser)
    moved = shutil.copytree(stopped, tmp_path / "moved")
    saved = whole_tensors(last(moved, STOP))

    config = config_of(moved, corpus, parallel=parallel, name=optimiser)
    for step, rectangles, moments, whole in run_ranks(_held_after_loading, world, config):
        assert step == STOP
        for name, offset, values in rectangles:
            index = slices(offset, values.shape)
            assert torch.equal(values, saved[f"model.{name}"][index])
        for name, piece, local in whole:  # what the forward will use: gathered from all owners
            index = slices(piece.offset, piece.shape)
            assert torch.equal(
                local[piece.row : piece.row + piece.shape[0]], saved[f"model.{name}"][index]
            )
        for name, values in moments:
            assert torch.isin(values, torch.cat([saved[name].flatten(), torch.zeros(1)])).all(), (
                name
            )

    run(tmp_path / "moved", corpus, world=world, parallel=parallel, name=optimiser)
    for mine, reference in zip(
        curve(moved / "log.jsonl"), curve(straight / "log.jsonl"), strict=True
    ):
        assert mine == pytest.approx(reference, rel=2e-5)
    for key, values in whole_tensors(last(straight)).items():
        torch.testing.assert_close(whole_tensors(last(moved))[key], values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("saved_in", "dtype"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_precision_takes_weights_as_exact_as_they_were_saved(
    tmp_path, corpus, saved_in, dtype
):
    """Weights in fp32 become the masters of bf16, and masters the weights in fp32."""
    folder = run(tmp_path, corpus, stop_after=1, dtype=saved_in)
    saved = whole_tensors(last(folder, 1))
    exact = {
        key.removeprefix("model."): value
        for key, value in saved.items()
        if key.startswith("model.")
    }
    exact |= {
        key.removeprefix("optim.master."): value
        for key, value in saved.items()
        if ".master." in key
    }
    assert all(each.dtype == torch.float32 for each in exact.values())
    config = config_of(folder, corpus, parallel={"zero": 1}, dtype=dtype)
    for _, rectangles, moments, _ in run_ranks(_held_after_loading, 2, config):
        for name, offset, values in rectangles:
            index = slices(offset, values.shape)
            assert torch.equal(values, exact[name][index].to(values.dtype)), name
        masters = [
            (name.removeprefix("optim.master."), values)
            for name, values in moments
            if ".master." in name
        ]
        assert (masters != []) == (dtype == "bf16")
        for name, values in masters:
            padded = torch.cat([exact[name].flatten(), torch.zeros(1)])
            assert torch.isin(values, padded).all(), name


def test_background_saves_hold_the_same(tmp_path, corpus):
    ours = run(tmp_path / "now", corpus, every=2)
    behind = run(tmp_path / "behind", corpus, every=2, async_save=True)
    for step in (2, 4):
        assert_equal(whole_tensors(last(behind, step)), whole_tensors(last(ours, step)))


def test_a_torn_or_truncated_checkpoint_is_never_resumed(tmp_path, corpus, finished):
    straight, _ = finished()
    torn = run(tmp_path / "torn", corpus, every=1, stop_after=3)
    data = next(last(torn, 3).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])  # a copy cut short
    # a save that was killed
    shutil.copytree(last(torn, 2), last(torn, 2).with_name("step-00000005.tmp"))
    shutil.copytree(last(torn, 2), last(torn, 6))
    (last(torn, 6) / "files.json").unlink()
    told = broken_checkpoints(config_of(torn, corpus))
    assert [last(torn, step).name in text for step, text in zip((6, 3), told, strict=True)] == [
        True,
        True,
    ]
    run(tmp_path / "torn", corpus)
    assert curve(torn / "log.jsonl") == curve(straight / "log.jsonl")


def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(tmp_path, corpus, monkeypatch):
    """It comes in the middle of the second step; the third one tells everybody, and is saved."""
    step = Trainer.step

    def struck(self, *args, **kwargs):
        if self.mesh["world"].rank == 1 and self.optimizer.step_count == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", struck)
    assert train_on_ranks(config_of(tmp_path, corpus, parallel={}), 2, timeout=60) == [
        REQUEUE,
        REQUEUE,
    ]
    assert newest_checkpoint(tmp_path / "checkpoints") == last(tmp_path, 3)


def test_a_signal_before_the_first_step_stops_all_ranks_as_well(tmp_path, corpus, monkeypatch):
    """Weights are made or loaded meanwhile, for minutes where they are large: a job told to stop is
    to be requeued."""

    def struck(config, process, layout):
        if process.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return build_run(config, process, layout)

    monkeypatch.setattr(loop, "build_run", struck)
    assert train_on_ranks(config_of(tmp_path, corpus, parallel={}), 2, timeout=60) == [
        REQUEUE,
        REQUEUE,
    ]
    assert newest_checkpoint(tmp_path / "checkpoints") is None
    assert not (tmp_path / "log.jsonl").read_text()


def test_a_finished_run_says_that_nothing_is_left(tmp_path, corpus, capsys):
    config = config_of(tmp_path, corpus, parallel={})
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, progress=True))
    for _ in range(2):
        assert plan_and_train(config, Process(0, 1, 0, torch.device("cpu"))) == 0
    told = capsys.readouterr()
    told = told.out + told.err
    assert told.count(f"nothing to train: step {STEPS} is saved, and train.steps = {STEPS}") == 1


def test_only_the_newest_are_kept(tmp_path, corpus):
    folder = tmp_path / "kept"
    config = config_of(folder, corpus, every=1)
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, keep="2")
    )
    folder.mkdir()
    train_on_ranks(config, 2)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "latest",
        "step-00000003",
        "step-00000004",
    ]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000004\n"


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(corpus, finished):
    folder, _ = finished()
    config = config_of(folder, corpus, parallel={}, resume=str(last(folder)))
    whole = config.model
    for other, told in (
        (
            {"ffn_hidden_size": 64, "qk_norm": True},
            "ffn_hidden_size = 64, saved with 48; model.qk_norm = True, saved",
        ),
        ({"num_layers": 1}, "num_layers = 1, saved with 2"),
        (
            {"num_heads": 3, "num_kv_heads": 3},
            (
                r"num_heads = 3, saved with 4.*that was saved\n.*attention.out.weight: saved \(32, "
                r"32\)"
            ),
        ),
    ):  # the last has as many weights, of other shapes
        with pytest.raises(AssertionError, match=f"(?s)Refused: .*model.{told}"):
            train_on_ranks(
                dataclasses.replace(config, model=dataclasses.replace(whole, **other)), 1
            )
    with pytest.raises(
        AssertionError, match=r"optim.name = muon, saved with adamw(?s:.*)init.from_checkpoint"
    ):
        train_on_ranks(config_of(folder, corpus, parallel={}, name="muon"), 1)

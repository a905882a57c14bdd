"""What becomes of a step that is not finite, or whose gradient is too large, on several ranks at
once."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from ranks import RankFailure, run_ranks
from runs import records, write_corpus

from megatron5d.checkpoint.folder import step_folder
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.topology.process import Process
from megatron5d.train.step import Trainer
from pretrain import plan_and_train

WORLD, POISONED = 4, 2  # pp 2 × dp 2: rank 2 is the second stage of dp 0


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


def config_of(folder, corpus, zero=1, **optim):
    return Config(
        model=ModelConfig(
            vocab_size=97, num_kv_heads=2, hidden_size=32, ffn_hidden_size=48, head_dim=8
        ),
        parallel=ParallelConfig(pp=2, zero=zero),
        train=TrainConfig(steps=4, gbs=4, mbs=1, seq_len=16),
        optim=OptimConfig(lr=1e-2, **optim),
        data=DataConfig(train=[corpus]),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False, memory_check="off"),
    )


def poisoned_run(rank, world, config, steps):
    """A run in whose given steps one rank's loss is not a number; returns what the weights were
    after each step."""
    accumulate, step, seen = Trainer.accumulate, Trainer.step, []

    def with_nan(self, *args):
        share = accumulate(self, *args)
        if rank == POISONED and len(seen) + 1 in steps:
            share[0] = torch.nan
        return share

    def watched(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        self.sync.finish_gather()
        seen.append((result.skipped, [bucket.weight_slice.clone() for bucket in self.sync.buckets]))
        return result

    Trainer.accumulate, Trainer.step = with_nan, watched
    assert plan_and_train(config, Process(rank, world, rank, torch.device("cpu"))) == 0
    return seen


def test_a_run_stops_and_names_where_it_first_was_not_finite(tmp_path, corpus):
    with pytest.raises(RankFailure) as stopped:
        run_ranks(poisoned_run, WORLD, config_of(tmp_path, corpus), {2})
    for text in (
        "FloatingPointError: loss = nan, grad_norm = ",
        (
            "the loss of 1 of 4 ranks is not finite, first on rank 2 (pp 1, dp_replicate 0, dp_shard "
            "0, cp 0, tp 0)"
        ),
        "The weights are those before this step",
        ", in step 2 (samples 4 to 7). ",
        "data.skip_steps=[2]",
        "optim.on_nonfinite=skip",
    ):
        assert text in str(stopped.value)
    assert [record["step"] for record in records(tmp_path / "log.jsonl")] == [1]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_skipped_step_changes_no_weight_and_the_run_goes_on(tmp_path, corpus, zero):
    """A resumed one too, to the same bits: bias correction counts updates, not steps."""
    saved = CheckpointConfig(dir=str(tmp_path / "checkpoints"), every=2, keep="0")
    config = config_of(tmp_path, corpus, zero, on_nonfinite="skip", max_skipped=1)
    config = dataclasses.replace(config, checkpoint=saved)
    straight = run_ranks(poisoned_run, WORLD, config, {2, 4})  # never two in a row
    for seen in straight:
        assert [skipped is not None for skipped, _ in seen] == [False, True, False, True]
        weights = [slices for _, slices in seen]
        equal = [all(map(torch.equal, *pair)) for pair in zip(weights, weights[1:])]
        assert equal == [True, False, True]
    log = records(tmp_path / "log.jsonl")
    assert [record["update_skipped"] for record in log] == [False, True, False, True]
    assert log[1]["loss"] is None and log[1]["grad_norm"] > 0
    targets = config.train.gbs * config.train.seq_len
    assert [r["tokens_per_s_per_gpu"] * WORLD * r["step_time_s"] for r in log] == pytest.approx(
        [targets] * 4
    )
    second = dataclasses.replace(saved, resume=str(step_folder(tmp_path / "checkpoints", 2)))
    resumed = run_ranks(poisoned_run, WORLD, dataclasses.replace(config, checkpoint=second), {2})
    for seen, again in zip(straight, resumed, strict=True):
        for (_, weights), (_, found) in zip(seen[2:], again, strict=True):
            assert all(map(torch.equal, weights, found))


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path, corpus):
    config = config_of(tmp_path, corpus, on_nonfinite="skip", max_skipped=1)
    with pytest.raises(
        RankFailure, match=r"2 steps in a row made no update \(optim\.max_skipped = 1\)"
    ):
        run_ranks(poisoned_run, WORLD, config, {2, 3})


def poisoned_gradient(rank, world, config):
    """A run whose gradients are not finite in one parameter of the second stage."""
    accumulate = Trainer.accumulate

    def with_inf(self, *args):
        share = accumulate(self, *args)
        self.sync.finish_reduce()
        for bucket in self.sync.buckets:
            for segment in bucket.segments():
                if segment.spec.name == "layers.1.mlp.down.weight":
                    bucket.grad_slice[segment.owned[0]] = torch.inf
        self.sync.finish_reduce = lambda: None
        return share

    Trainer.accumulate = with_inf
    return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))


def test_the_first_parameter_that_is_not_finite_is_named(tmp_path, corpus):
    place = (
        r"on 1 rank are not finite, first that of layers\.1\.mlp\.down\.weight on rank 3 \(pp 1, "
    )
    with pytest.raises(RankFailure, match=place):
        run_ranks(poisoned_gradient, WORLD, config_of(tmp_path, corpus))


def test_a_gradient_above_the_threshold_is_left_out(tmp_path, corpus):
    """Between the norms of the first steps, so that some are made and some are not."""
    config = config_of(tmp_path, corpus)
    run_ranks(poisoned_run, WORLD, config, set())
    norms = [record["grad_norm"] for record in records(tmp_path / "log.jsonl")]
    threshold = (norms[0] + min(norms)) / 2
    optim = dataclasses.replace(config.optim, skip_norm=threshold)
    run_ranks(poisoned_run, WORLD, dataclasses.replace(config, optim=optim), set())
    log = records(tmp_path / "log.jsonl")
    assert [record["update_skipped"] for record in log] == [
        record["grad_norm"] > threshold for record in log
    ]
    assert any(record["update_skipped"] for record in log)


def masked_corpus(folder, seq_len=16):
    """Rows of a sequence each; those of the steps 2 and 3 (gbs 4) are end-of-document tokens
    alone."""
    rows = np.random.default_rng(0).integers(1, 97, (24, seq_len))
    rows[4:12] = 0
    writer = IndexedWriter(folder / "masked", np.int32)
    writer.add_document(rows.flatten())
    writer.finalize()
    return str(folder / "masked")


def masked_config(folder, **optim):
    config = config_of(folder, masked_corpus(folder), zero=3, **optim)
    model = dataclasses.replace(config.model, num_experts=4, top_k=2, moe_ffn_hidden_size=16)
    moe = MoeConfig(balance=["aux", "bias"], aux_coef=0.1, z_coef=0.1, bias_rate=0.1)
    data = dataclasses.replace(config.data, order="sequential", eod=0, eod_mask_loss=True)
    return dataclasses.replace(config, data=data, model=model, moe=moe)


def weights_of_run(rank, world, config):
    step, seen = Trainer.step, []

    def watched(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        self.sync.finish_gather()
        moved = [bucket.weight_slice for bucket in self.sync.buckets]
        moved += [*(self.balancer.biases.values())] + [
            tensor for _, tensor, _ in self.optimizer.tensors()
        ]
        seen.append([tensor.clone() for tensor in moved])
        return result

    Trainer.step = watched
    assert plan_and_train(config, Process(rank, world, rank, torch.device("cpu"))) == 0
    return seen


def test_a_batch_without_a_target_moves_nothing(tmp_path):
    """Though the auxiliary losses have gradients there. To leave the same steps out by number gives
    the same bits, also where their tokens could not be read."""
    config = masked_config(tmp_path, on_nonfinite="skip")
    by_guard = run_ranks(weights_of_run, WORLD, config)
    log = records(tmp_path / "log.jsonl")
    assert [record["update_skipped"] for record in log] == [False, True, True, False]
    assert [record["loss"] is None for record in log] == [False, True, True, False]
    assert [record["consumed_samples"] for record in log] == [4, 8, 12, 16]
    for seen in by_guard:
        assert all(map(torch.equal, seen[0], seen[1])) and all(map(torch.equal, seen[0], seen[2]))
        assert not all(map(torch.equal, seen[0], seen[3]))
    data = dataclasses.replace(config.data, skip_steps=["2-3"])
    ids = np.fromfile(tmp_path / "masked.bin", np.int32).reshape(-1, 16)
    ids[5:12] = 10**6  # row 4 begins with the last label of step 1
    ids.tofile(tmp_path / "masked.bin")
    by_number = run_ranks(weights_of_run, WORLD, dataclasses.replace(config, data=data))
    for seen, again in zip(by_guard, by_number, strict=True):
        assert all(map(torch.equal, seen[2], again[2])) and all(map(torch.equal, seen[3], again[3]))


@pytest.mark.parametrize("masked", [True, False])
def test_a_batch_without_a_target_is_named(tmp_path, masked):
    config = masked_config(tmp_path)
    if not masked:
        bin_file = np.fromfile(tmp_path / "masked.bin", np.int32)
        np.where(bin_file == 0, -100, bin_file).tofile(tmp_path / "masked.bin")
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, eod_mask_loss=False)
        )
    with pytest.raises(RankFailure) as stopped:
        run_ranks(weights_of_run, WORLD, config)
    for text in (
        "no target",
        "step 2 (samples 4 to 7)",
        "padding (-100)",
        "data.skip_steps=[2]",
        "on_nonfinite=skip",
    ):
        assert text in str(stopped.value)
    assert ("data.eod_mask_loss" in str(stopped.value)) == masked


def test_skipped_steps_are_counted_over_a_restart(tmp_path):
    saved = CheckpointConfig(dir=str(tmp_path / "checkpoints"), every=1, keep="0")
    config = dataclasses.replace(
        masked_config(tmp_path, on_nonfinite="skip", max_skipped=1), checkpoint=saved
    )
    for _ in range(2):
        with pytest.raises(
            RankFailure, match=r"in step 3 .*2 steps in a row made no update"
        ) as stopped:
            run_ranks(weights_of_run, WORLD, config)
        assert "lower optim.lr" not in str(stopped.value), "no rate gives a batch a target"
    run_file = step_folder(tmp_path / "checkpoints", 2) / "run.json"
    assert json.loads(run_file.read_text())["progress"]["skipped_in_a_row"] == 1


def test_a_run_without_any_loss_says_so(tmp_path, capfd):
    config = masked_config(tmp_path)
    data = dataclasses.replace(config.data, skip_steps=["1-4"])
    run_ranks(weights_of_run, WORLD, dataclasses.replace(config, data=data))
    told = capfd.readouterr().err
    assert "finished step 4: no step had a finite loss" in told and "measured of" not in told

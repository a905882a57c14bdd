"""Context parallelism with everything else: pipelines, accumulation over unlike documents,
evaluation, whole runs."""

import dataclasses

import pytest
import reference_gpt
import tiers
import torch
from layouts import assert_parity, make_rows, micro_batch, perturb, reference_run
from parity_configs import config_of
from ranks import run_ranks
from runs import records, train_on_ranks, whole_tensors, write_corpus

from megatron5d.config.schema import (
    CheckpointConfig,
    DataConfig,
    InitConfig,
    LogConfig,
    PipelineConfig,
    RopeScaling,
)
from megatron5d.data.batch import SequenceSharding, make_micro_batch
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.model.gpt import GPT
from megatron5d.model.rope import inverse_frequencies
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout

FULL = tiers.NIGHTLY
PACKED = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)


def packed(config, **changes):
    """Few kinds of tokens, one of which ends a document: micro-batches differ in their
    documents."""
    model = dataclasses.replace(config.model, vocab_size=9)
    return dataclasses.replace(config, model=model, data=PACKED, **changes)


PIPELINES = [
    ("1f1b", "ring", "llama_gqa", 1),
    ("zb_h1", "ulysses", "mla", 1),
    ("interleaved", "allgather", "llama_gqa", 2),
    ("dualpipe", "ring", "mla", 1),
    ("zb_v", "ring", "mla", 1),
]


@pytest.mark.parametrize(
    ("schedule", "method", "model", "vpp"), PIPELINES if FULL else PIPELINES[:4]
)
def test_with_pipelines(schedule, method, model, vpp):
    """Micro-batches in flight have plans of their own; a schedule that splits backwards keeps the
    gradients right."""
    config = config_of(
        model, gbs=4, cp=2, pp=2, vpp=vpp, cp_method=method, cp_compress_kv=schedule == "dualpipe"
    )
    layers = dataclasses.replace(config.model, num_layers=4)
    assert_parity(
        packed(dataclasses.replace(config, model=layers), pipeline=PipelineConfig(schedule)),
        world=4,
        steps=2,
    )


def test_accumulation_over_documents_of_unlike_length():
    """Eight micro-batches of two data-parallel ranks, each with its own documents and number of
    targets."""
    assert_parity(
        packed(config_of("llama_gqa", gbs=8, mbs=1, cp=2, zero=1)), world=4, ignored=0.8, steps=2
    )


def evaluated_on_rank(rank: int, world: int, config, rows):
    plan = pipeline_layout(config, world)
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads)
    model = GPT(config, mesh)
    model.initialize(config.train.seed)
    perturb(model.parameters())
    _, _, trainer = build_trainer(config, mesh, model, plan)
    share = rows.chunk(mesh["dp"].size)[mesh["dp"].rank]
    return trainer.evaluate(
        [SequenceSharding(config, mesh)(micro_batch(config, row[None])) for row in share]
    )


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_evaluation_is_the_same_mean(method):
    """The loss before the first update is what the first step of the reference reports."""
    config = packed(config_of("mla", gbs=4, cp=2, cp_method=method))
    rows = make_rows(config, 1, ignored=0.8)
    shares = run_ranks(evaluated_on_rank, 4, config, rows)
    loss, *_, targets = sum(shares).tolist()
    assert loss / targets == pytest.approx(reference_run(config, rows, 1).losses[0], rel=1e-12)


def run_config(folder, corpus, **changes):
    config = config_of("llama_gqa", gbs=4, mbs=1)
    stop_after = changes.pop("stop_after", 0)
    model = dataclasses.replace(config.model, vocab_size=97, **changes.pop("model", {}))
    return dataclasses.replace(
        config,
        model=model,
        parallel=dataclasses.replace(config.parallel, **changes),
        data=DataConfig(train=[corpus], document_mask=True, eod=0, order="sequential"),
        train=dataclasses.replace(config.train, steps=4, seq_len=32, stop_after=stop_after),
        checkpoint=CheckpointConfig(dir=str(folder / "checkpoints")),
        log=LogConfig(jsonl=str(folder / "log.jsonl"), progress=False),
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=97)


def test_the_log_says_how_even_the_work_was(tmp_path, corpus):
    """Against a count of visible pairs over the very tokens, one by one; two micro-batches on each
    of two dp ranks."""
    assert train_on_ranks(run_config(tmp_path, corpus, cp=2), 4) == [0] * 4
    dataset = IndexedDataset(corpus)
    stream = dataset.tokens(0, dataset.num_tokens).tolist()
    for step, record in enumerate(records(tmp_path / "log.jsonl")):
        per_dp = []
        for dp in (0, 1):
            busiest = even = 0
            for sample in (4 * step + dp, 4 * step + dp + 2):
                row = stream[32 * sample : 32 * sample + 32]
                seen = [
                    next((i - j for j in range(i - 1, -1, -1) if row[j] == 0), i + 1)
                    for i in range(32)
                ]
                chunks = [sum(seen[i : i + 8]) for i in range(0, 32, 8)]
                # the three ways to deal out two each
                with_first = [chunks[0] + each for each in chunks[1:]]
                busiest += min(max(pairs, sum(seen) - pairs) for pairs in with_first)
                even += sum(seen) / 2
            per_dp.append(busiest / even)
        assert record["cp_balance"] == pytest.approx(sum(per_dp) / 2, rel=1e-12)


def test_without_context_parallelism_nothing_is_said(tmp_path, corpus):
    assert train_on_ranks(run_config(tmp_path, corpus), 1) == [0]
    assert all("cp_balance" not in record for record in records(tmp_path / "log.jsonl"))


def test_a_run_goes_on_over_more_ranks_and_with_stretched_positions(tmp_path, corpus):
    """As a context is extended: the second half of the run has another cp, method and rope
    scaling."""
    stretched = {"rope_scaling": RopeScaling("llama3", 4.0, 16)}
    for folder, second in (("one", {}), ("many", {"cp": 4, "cp_method": "ring"})):
        (tmp_path / folder).mkdir()
        first = run_config(tmp_path / folder, corpus, stop_after=2)
        assert train_on_ranks(first, 1) == [0]
        config = run_config(tmp_path / folder, corpus, model=stretched, **second)
        world = config.parallel.cp
        assert train_on_ranks(config, world) == [0] * world
    one, many = (records(tmp_path / folder / "log.jsonl") for folder in ("one", "many"))
    assert [r["step"] for r in many] == [1, 2, 3, 4]
    losses, again = ([r["loss"] for r in run] for run in (one, many))
    assert again == pytest.approx(losses, rel=1e-10, abs=0)
    plain = run_config(tmp_path / "plain", corpus)
    (tmp_path / "plain").mkdir()
    assert train_on_ranks(plain, 1) == [0]
    unstretched = records(tmp_path / "plain" / "log.jsonl")
    assert abs(unstretched[2]["loss"] - one[2]["loss"]) > 1e-8, "the stretching changed nothing"


def test_another_run_gives_its_weights_alone(tmp_path, corpus):
    """The context recipe: a new run of longer sequences, cp and stretched positions, from another
    run's weights."""
    for folder in ("short", "long"):
        (tmp_path / folder).mkdir()
    assert train_on_ranks(run_config(tmp_path / "short", corpus), 1) == [0]
    long = run_config(
        tmp_path / "long", corpus, cp=4, model={"rope_scaling": RopeScaling("llama3", 4.0, 32)}
    )
    long = dataclasses.replace(
        long,
        init=InitConfig(from_checkpoint=str(tmp_path / "short" / "checkpoints")),
        train=dataclasses.replace(long.train, seq_len=128, gbs=1),
    )
    assert train_on_ranks(long, 4) == [0] * 4
    first = records(tmp_path / "long" / "log.jsonl")[0]
    assert (first["step"], first["consumed_samples"], first["lr"]) == (1, 1, long.optim.lr / 2)
    saved = whole_tensors(tmp_path / "short" / "checkpoints" / "step-00000004")
    weights = {
        key.removeprefix("model."): value
        for key, value in saved.items()
        if key.startswith("model.")
    }
    row = IndexedDataset(corpus).tokens(0, 129).astype("int64")
    batch = make_micro_batch(torch.from_numpy(row)[None], document_mask=True, eod=0)
    inverse = inverse_frequencies(8, long.model.rope_theta, long.model.rope_scaling, torch.float64)
    expected = stretched_loss(weights, long.model, batch, inverse)
    assert first["loss"] == pytest.approx(expected, rel=1e-10)


def stretched_loss(weights, model, batch, inverse):
    """The reference with frequencies that tests/unit/model hold to transformers' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reference_gpt, "rotate", lambda x, positions, *_: turned(x, positions, inverse)
        )
        return reference_gpt.losses(weights, model, batch)[0].item()


def turned(x, positions, inverse):
    """Half-split pairs as complex numbers times a phase."""
    pairs = torch.complex(*x.chunk(2, -1)) * torch.exp(1j * positions[:, None, :, None] * inverse)
    return torch.cat((pairs.real, pairs.imag), -1)

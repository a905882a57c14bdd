"""What an evaluation reads: the held-out documents, in the order of the file, the same at every
evaluation."""

import os
import shutil
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import records, write_corpus

from megatron5d.config.checks import run_checks
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    TrainConfig,
)
from megatron5d.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.process import Process
from megatron5d.train import data as data_module
from megatron5d.train.build import sizes_of
from megatron5d.train.data import train_loader, valid_loader, validation_sets
from megatron5d.train.preflight.data import data_faults
from megatron5d.train.preflight.warnings import (
    epochs,
    repeated_validation,
    small_vocabulary,
    unmarked_documents,
)
from megatron5d.train.state import run_record
from pretrain import plan_and_train

DOCUMENTS, SEQ = 60, 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(
        tmp_path_factory.mktemp("corpus") / "toy", vocab_size=43, documents=DOCUMENTS
    )


@pytest.mark.parametrize(
    ("data", "first"),
    [
        ({"split": "9,1"}, 54),
        ({"split": "8,1,1"}, 48),
        ({"split": "9,1", "valid": True}, 0),
        ({"valid": True}, 0),
    ],
)
def test_an_evaluation_reads_its_own_part_from_the_beginning(corpus, data, first):
    """The part of data.split, or all of data.valid where it is named."""
    data = {**data, "valid": [corpus] if "valid" in data else []}
    config = Config(
        model=ModelConfig(vocab_size=43),
        train=TrainConfig(gbs=2, mbs=2, seq_len=SEQ, eval_batches=1),
        data=DataConfig(train=[corpus], **data),
    )
    dataset, mesh = IndexedDataset(corpus), build_mesh(sizes_of(config, 1))
    stream = torch.from_numpy(
        dataset.tokens(dataset.document_start(first), 2 * SEQ + 1).astype("int64")
    )
    for _ in range(2):
        loader = valid_loader(config, mesh, validation_sets(config)[""])
        (batch,) = next(loader)
        assert torch.equal(batch.tokens, stream[:-1].view(2, SEQ)) and torch.equal(
            batch.labels, stream[1:].view(2, SEQ)
        )


def test_without_valid_data_there_is_no_evaluation(corpus):
    config = Config(data=DataConfig(train=[corpus], split="1,0"))
    assert validation_sets(config) == {}


@pytest.mark.parametrize(
    "data", [{"train": ["0 {}"]}, {"train": ["nan {}", "{}"]}, {"split": "1e3"}]
)
def test_illegal_weights_and_splits_are_told_once_and_open_nothing(corpus, data):
    """Files are judged although the configuration is refused already: their faults shall stand
    beside the others."""
    train = [entry.format(corpus) for entry in data.pop("train", ["{}"])]
    config = Config(data=DataConfig(train, **data))
    assert len(run_checks(config, 1)) == 1 and data_faults(config, 1) == []


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
def test_a_part_without_documents_is_found_before_the_start(corpus, order):
    (fault,) = data_faults(Config(data=DataConfig([corpus], split="999,1", order=order)), 1)
    assert (
        fault.id == "data-split-part" and f"gives valid 0 of {DOCUMENTS} documents" in fault.reason
    )


def test_each_set_has_its_name_and_entries_of_one_name_are_mixed():
    sets = ["web a b/web", "code 0.7 c", "code 0.3 py"]
    found = validation_sets(Config(data=DataConfig(train=["t"], split="9,1", valid_sets=sets)))
    assert found == {
        "": ("data.train", ["t"], "9,1"),
        "/web": ("data.valid_sets", ["a b/web"], None),
        "/code": ("data.valid_sets", ["0.7 c", "0.3 py"], None),
    }
    assert list(validation_sets(Config(data=DataConfig(train=["t"], valid_sets=sets)))) == [
        "/web",
        "/code",
    ]


def test_a_broken_set_is_told_before_the_run(corpus, tmp_path):
    short = write_corpus(tmp_path / "short", vocab_size=43, documents=1)
    config = Config(
        train=TrainConfig(seq_len=100),
        data=DataConfig(train=[corpus], valid_sets=[f"code {short}"]),
    )
    (fault,) = data_faults(config, 1)
    assert fault.id == "data-too-short" and "data.valid_sets: " in fault.reason


def test_sets_beside_data_valid_change_none_of_its_numbers(corpus, tmp_path):
    """And the set that names the same files has the same loss."""
    found = []
    valid = write_corpus(tmp_path / "valid", vocab_size=43, seed=3)
    for sets in ([], [f"other {corpus}", f"same {valid}"]):
        config = Config(
            model=ModelConfig(
                vocab_size=43,
                num_layers=1,
                hidden_size=16,
                ffn_hidden_size=24,
                num_heads=2,
                num_kv_heads=2,
            ),
            train=TrainConfig(steps=2, gbs=2, seq_len=SEQ, eval_batches=2, eval_every=1),
            data=DataConfig(train=[corpus], valid=[valid], valid_sets=sets),
            log=LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False, memory_check="off"),
        )
        assert plan_and_train(config, Process(0, 1, 0, torch.device("cpu"))) == 0
        found.append(records(tmp_path / "log.jsonl"))
    for alone, beside in zip(*found, strict=True):
        for key in ("loss", "grad_norm", "initial_valid_loss", "valid_loss"):
            assert alone.get(key) == beside.get(key)
        assert beside["valid_loss"] == beside["valid_loss/same"] != beside["valid_loss/other"]
    assert found[1][0]["initial_valid_loss"] == found[1][0]["initial_valid_loss/same"]


def test_what_an_evaluation_found_is_written_at_its_step(corpus, tmp_path):
    config = Config(
        model=ModelConfig(
            num_layers=1,
            vocab_size=43,
            hidden_size=16,
            ffn_hidden_size=24,
            num_heads=2,
            num_kv_heads=2,
        ),
        train=TrainConfig(steps=4, gbs=1, mbs=1, seq_len=8, eval_every=3, eval_batches=1),
        data=DataConfig([corpus], split="8,2", prefetch=0),
        log=LogConfig(
            every=100, jsonl=str(tmp_path / "log.jsonl"), progress=False, memory_check="off"
        ),
    )
    assert plan_and_train(config, Process(0, 1, 0, torch.device("cpu"))) == 0
    found = {record["step"]: "valid_loss" in record for record in records(tmp_path / "log.jsonl")}
    assert found == {1: False, 3: True, 4: True}  # the first and the last in any case


@pytest.mark.parametrize("knob", ["valid", "valid_sets"])
def test_held_out_data_without_a_target_is_refused_before_the_first_step(
    corpus, tmp_path, knob, capsys
):
    with closing(IndexedWriter(tmp_path / "padding", np.int32)) as writer:
        writer.add_document([0] * 200)
        writer.finalize()
    np.full(200, -100, np.int32).tofile(tmp_path / "padding.bin")
    config = Config(
        model=ModelConfig(
            num_layers=1,
            vocab_size=43,
            hidden_size=16,
            ffn_hidden_size=24,
            num_heads=2,
            num_kv_heads=2,
        ),
        train=TrainConfig(steps=1, gbs=1, mbs=1, seq_len=8, eval_batches=1),
        data=DataConfig(
            [corpus],
            prefetch=0,
            **{knob: [f"{'pad ' * (knob == 'valid_sets')}{tmp_path / 'padding'}"]},
        ),
        log=LogConfig(progress=False, memory_check="off"),
    )
    with pytest.raises(
        ValueError,
        match=rf"data.{knob}: the 1 samples of an evaluation from {tmp_path}/padding have no target token",
    ):
        plan_and_train(config, Process(0, 1, 0, torch.device("cpu")))
    assert "step 0" not in capsys.readouterr().err


def test_what_an_evaluation_takes_more_than_once_is_told(corpus):
    tokens = IndexedDataset(corpus).num_tokens
    samples = (tokens - 1) // SEQ
    for batches, told in ((samples // 2, False), (samples, True)):
        train = TrainConfig(gbs=2, seq_len=SEQ, eval_batches=batches)
        notes = repeated_validation(Config(train=train, data=DataConfig([corpus], valid=[corpus])))
        assert [f"holds {samples} samples, but an evaluation" in note for note in notes] == [
            True
        ] * told


def test_files_that_cannot_be_read_are_refused(corpus, tmp_path, monkeypatch):
    for ending in (".bin", ".idx"):
        shutil.copy(corpus + ending, tmp_path / f"copy{ending}")
    config = Config(data=DataConfig([str(tmp_path / "copy")]))
    with (tmp_path / "copy.idx").open("r+b") as index:
        index.seek(-8, os.SEEK_END)
        index.write((-1_000_000).to_bytes(8, "little", signed=True))
    (fault,) = data_faults(config, 1)
    assert (
        fault.id == "data-broken"
        and "copy.idx: document 60 begins at sequence -1000000" in fault.reason
    )

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "copy.idx")

    monkeypatch.setattr("megatron5d.train.preflight.data.IndexedDataset", refuse)
    monkeypatch.setattr("megatron5d.train.preflight.data.end_of_document", refuse)
    tokenizer = replace(config, data=replace(config.data, tokenizer=__file__))
    assert [fault.id for fault in data_faults(tokenizer, 1)] == [
        "data-broken",
        "data-tokenizer-kind",
    ]


def test_ids_that_the_model_lacks_are_refused_before_the_start(tmp_path):
    with closing(IndexedWriter(tmp_path / "x", "u2")) as writer:
        writer.add_document([*[1] * 99_999, 50])
        writer.finalize()
    for size, ids in ((50, ["data-vocabulary"]), (51, [])):
        config = Config(model=ModelConfig(vocab_size=size), data=DataConfig([str(tmp_path / "x")]))
        faults = data_faults(config, 1)
        assert [fault.id for fault in faults] == ids
    config = Config(
        model=ModelConfig(vocab_size=50), data=DataConfig(["a"], valid=[str(tmp_path / "x")])
    )
    (fault,) = data_faults(config, 1)
    assert (
        "data.valid: " in fault.reason and "requires model.vocab_size > 50 (got 50)" in fault.reason
    )
    assert fault.fix.startswith("model.vocab_size=51 ")


def test_a_fault_of_a_file_that_is_split_is_told_once(tmp_path, monkeypatch):
    """Whose parts for training and validation are both read."""
    with closing(IndexedWriter(tmp_path / "x", "u2")) as writer:
        for _ in range(10):
            writer.add_document([*[1] * 9_999, 50])
        writer.finalize()
    split = DataConfig([str(tmp_path / "x")], split="5,5", tokenizer=str(tmp_path / "none"))
    config = Config(model=ModelConfig(vocab_size=50), data=split)
    assert [fault.id for fault in data_faults(config, 1)] == ["data-vocabulary"]

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied", "copy.idx")

    monkeypatch.setattr("megatron5d.train.preflight.data._vocabulary_faults", lambda *_: [])
    monkeypatch.setattr("megatron5d.train.preflight.data.IndexedDataset", refuse)
    assert [fault.id for fault in data_faults(config, 1)] == ["data-broken"]


def test_more_files_than_a_process_may_open_are_refused(corpus, monkeypatch):
    limits = {"now": (100, 300)}
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda kind, both: limits.update(now=both))
    assert data_faults(Config(data=DataConfig([corpus] * 110)), 1) == [] and limits["now"] == (
        300,
        300,
    )
    (fault,) = data_faults(Config(data=DataConfig([corpus] * 110, valid=[corpus] * 10)), 1)
    assert (
        "120 pairs" in fault.reason
        and "240 open files" in fault.reason
        and "allows a process 236" in fault.reason
    )
    assert [fault.id for fault in data_faults(Config(data=DataConfig([corpus] * 110)), 8)] == [
        "data-open-files"
    ]


def test_the_epochs_of_each_dataset_are_told(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", vocab_size=43, documents=30)
    sizes = [IndexedDataset(prefix).num_tokens for prefix in (corpus, other)]
    train = TrainConfig(steps=100, gbs=2, seq_len=SEQ)
    (told,) = epochs(Config(train=train, data=DataConfig([corpus, other])))
    each = 100 * 2 * SEQ / sum(sizes)
    assert told.startswith(f"data.train: {200 * SEQ:,} tokens are {each:.3g} epochs of {corpus} (")
    assert f"; {each:.3g} epochs of {other} (" in told and f"{sizes[1]:,} tokens)" in told
    # saved with half the gbs
    (tmp_path / "run.json").write_text('{"progress": {"step": 90, "consumed_samples": 45}}')
    resumed = CheckpointConfig(dir=str(tmp_path))
    assert epochs(Config(train=train, data=DataConfig([corpus]), checkpoint=resumed))[0].startswith(
        f"data.train: {65 * SEQ:,} tokens are"
    )
    (told,) = epochs(Config(train=train, data=DataConfig([corpus, other], weights="equal")))
    assert f"; {100 * SEQ / sizes[1]:.3g} epochs of {other} (50.0% of" in told


def test_a_resumed_run_keeps_the_mixture_with_which_it_began(corpus, tmp_path, monkeypatch):
    """Checkpoints from before data.weights mix a list without weights in equal shares."""
    other = write_corpus(tmp_path / "other", vocab_size=43, documents=9, seed=5)

    def losses(folder, weights, steps):
        config = Config(
            model=ModelConfig(
                num_layers=1,
                vocab_size=43,
                hidden_size=16,
                ffn_hidden_size=24,
                num_heads=2,
                num_kv_heads=2,
            ),
            train=TrainConfig(steps=8, stop_after=steps, gbs=2, seq_len=SEQ),
            data=DataConfig([corpus, other], weights=weights),
            checkpoint=CheckpointConfig(dir=str(tmp_path / folder), every=4),
            log=LogConfig(
                jsonl=str(tmp_path / f"{folder}.jsonl"), progress=False, memory_check="off"
            ),
        )
        assert plan_and_train(config, Process(0, 1, 0, torch.device("cpu"))) == 0
        return [record["loss"] for record in records(tmp_path / f"{folder}.jsonl")]

    whole = {weights: losses(weights, weights, 8) for weights in ("equal", "size")}
    assert whole["equal"] != whole["size"]

    def older(progress, config, commit, **more):
        del config["data"]["weights"]
        return run_record(progress, config, commit, **more)

    with monkeypatch.context() as patch:
        patch.setattr("megatron5d.train.loop.run_record", older)
        losses("old", "equal", 4)
    for steps in (6, 8):  # the second time as the first one saved it
        assert losses("old", "size", steps) == whole["equal"][:steps]


def test_a_run_reads_its_tokenizer_once(corpus, tmp_path, monkeypatch):
    """Not at every evaluation of every set."""
    opened = []
    monkeypatch.setattr(
        "megatron5d.data.tokenizer.load_tokenizer",
        lambda path: opened.append(path) or SimpleNamespace(eod=len(opened), vocab_size=43),
    )
    data = DataConfig(
        [corpus], tokenizer=str(tmp_path / "tokenizer"), valid_sets=[f"a {corpus}", f"b {corpus}"]
    )
    config = Config(
        model=ModelConfig(vocab_size=43), train=TrainConfig(gbs=1, seq_len=SEQ), data=data
    )
    mesh = build_mesh(sizes_of(config, 1))
    for part in [*validation_sets(config).values()] * 2:
        next(valid_loader(config, mesh, part))
    assert opened == [data.tokenizer] and data_module.end_of_document(config) == 1


def test_documents_without_the_token_that_shall_end_them_are_noticed(corpus):
    """Tokens were written without --append-eod, and then a tokenizer is named: its token is what is
    looked for."""
    for data, noticed in [
        (DataConfig([corpus], document_mask=True, eod=0), False),
        (DataConfig([corpus], document_mask=True), False),
        (DataConfig([corpus], eod=42_000), False),
        (DataConfig([corpus], document_mask=True, eod=42_000), True),
        (DataConfig([corpus], eod_mask_loss=True, eod=42_000), True),
    ]:
        notes = unmarked_documents(Config(data=data))
        assert len(notes) == noticed and all(corpus in note for note in notes)
        assert all(
            f"its first {DOCUMENTS} documents hold no token 42000, the end of a document by "
            "data.eod" in note
            for note in notes
        )


def test_a_file_of_one_document_needs_no_ends(tmp_path):
    whole = write_corpus(tmp_path / "one", vocab_size=43, documents=1)
    assert (
        unmarked_documents(Config(data=DataConfig([whole], document_mask=True, eod=42_000))) == []
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_noticed(tmp_path, monkeypatch):
    """Its rarest tokens may come up after weeks."""
    monkeypatch.setattr(
        "megatron5d.data.tokenizer.load_tokenizer",
        lambda path: SimpleNamespace(eod=0, vocab_size=44),
    )
    data = DataConfig(["corpus"], tokenizer=str(tmp_path / "tokenizer"))
    (note,) = small_vocabulary(Config(model=ModelConfig(vocab_size=43), data=data))
    assert "has 44 tokens, but model.vocab_size = 43" in note
    assert small_vocabulary(Config(model=ModelConfig(vocab_size=44), data=data)) == []
    assert small_vocabulary(Config(data=DataConfig(["corpus"]))) == []


def test_a_tokenizer_that_names_no_end_of_documents_is_refused_where_losses_depend_on_it(
    corpus, tmp_path
):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    file.write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    data = DataConfig([corpus], tokenizer=str(file))
    assert data_faults(Config(data=data), 1) == []
    (fault,) = data_faults(Config(data=replace(data, eod_mask_loss=True)), 1)
    assert (
        fault.id == "data-tokenizer-eod"
        and data_faults(Config(data=replace(data, eod_mask_loss=True, eod=3)), 1) == []
    )


def test_an_order_that_would_end_before_the_run_is_told_when_it_resumes(corpus, tmp_path):
    """A batch that is smaller than before makes Megatron's order shorter, though more has been
    taken from it."""
    config = Config(
        train=TrainConfig(steps=10, gbs=2, seq_len=SEQ),
        data=DataConfig([f"1 {corpus}", f"2 {corpus}"], order="megatron", cache_dir=str(tmp_path)),
    )
    mesh = build_mesh(sizes_of(config, 1))
    for consumed, num_steps in ((0, 10), (12, 4), (24, 0)):
        train_loader(config, mesh, consumed, num_steps=num_steps)
    with pytest.raises(
        ValueError,
        match="2[01] samples .*; 24 are consumed, and 4 more steps require 8: resume",
    ):
        train_loader(config, mesh, 24, num_steps=4)


def test_plans_of_attention_lie_on_this_ranks_own_gpu(corpus, monkeypatch):
    """The thread that reads ahead makes them, and "cuda" is the first GPU of the node to it."""
    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        data_module, "SequenceSharding", lambda config, mesh, device: asked.append(device)
    )
    config = Config(
        model=ModelConfig(vocab_size=43),
        train=TrainConfig(seq_len=SEQ),
        data=DataConfig(valid=[corpus]),
    )
    valid_loader(config, build_mesh(sizes_of(config, 1)), validation_sets(config)[""])
    assert [torch.device(device) for device in asked] == [torch.device("cuda", 3)]

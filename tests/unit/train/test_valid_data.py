"""What an evaluation reads: the held-out documents, in the order of the file, the same at every evaluation."""

import pytest
import torch
from runs import write_corpus

from megatron5d.config.laws import broken_laws
from megatron5d.config.schema import Config, DataConfig, ModelConfig, TrainConfig
from megatron5d.data.indexed import IndexedDataset
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of
from megatron5d.train.data import data_faults, valid_loader

DOCUMENTS, SEQ = 60, 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=43, documents=DOCUMENTS)


@pytest.mark.parametrize(
    ("data", "first"),
    [({"split": "9,1"}, 54), ({"split": "8,1,1"}, 48), ({"split": "9,1", "valid": True}, 0), ({"valid": True}, 0)],
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
    stream = torch.from_numpy(dataset.tokens(dataset.document_start(first), 2 * SEQ + 1).astype("int64"))
    for _ in range(2):
        loader = valid_loader(config, mesh)
        assert loader is not None
        (batch,) = next(loader)
        assert torch.equal(batch.tokens, stream[:-1].view(2, SEQ)) and torch.equal(
            batch.labels, stream[1:].view(2, SEQ)
        )


def test_without_valid_data_there_is_no_evaluation(corpus):
    config = Config(data=DataConfig(train=[corpus], split="1,0"))
    assert valid_loader(config, build_mesh(sizes_of(config, 1))) is None


@pytest.mark.parametrize("data", [{"train": ["0 {}"]}, {"train": ["nan {}", "{}"]}, {"split": "1e3"}])
def test_illegal_weights_and_splits_are_told_once_and_open_nothing(corpus, data):
    """Files are judged although the configuration is refused already: their faults shall stand beside the others."""
    train = [entry.format(corpus) for entry in data.pop("train", ["{}"])]
    config = Config(data=DataConfig(train, **data))
    assert len(broken_laws(config, 1)) == 1 and data_faults(config, 1) == []


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
def test_a_part_without_documents_is_found_before_the_start(corpus, order):
    (fault,) = data_faults(Config(data=DataConfig([corpus], split="999,1", order=order)), 1)
    assert fault.id == "data-split-part" and f"gives valid 0 of {DOCUMENTS} documents" in fault.reason

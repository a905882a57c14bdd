"""tools/parity.py does around a step what training does, names what it leaves out, and calls no
correct layout different."""

import json

import numpy as np
import pytest
from runs import write_corpus

from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.parity import run
from megatron5d.tools.parity import main
from megatron5d.train.step import next_step

TINY = ["model=tiny", "model.vocab_size=64"]


def checked(capsys, world, *arguments):
    """Exit code, record and text to stderr."""
    code = main(["--world", str(world), *arguments, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out or "null"), err


@pytest.fixture
def third_batch_empty(tmp_path):
    """Tokens of which the third batch of 4 rows of 16 holds ends of documents only."""
    tokens = np.random.default_rng(0).integers(1, 64, 16 * 16 + 1)
    tokens[8 * 16 : 12 * 16] = 0
    writer = IndexedWriter(tmp_path / "tokens", dtype_for_vocab(64))
    writer.add_document(tokens)
    writer.finalize()
    masked = ["data.eod=0", "data.eod_mask_loss=true", "data.order=sequential"]
    sizes = ["train.seq_len=16", "train.gbs=4", "parallel.cp=2"]
    return ["--data", "--steps", "4", f"data.train=[{tmp_path}/tokens]", *TINY, *masked, *sizes]


def test_a_skipped_step_of_the_data(capsys, third_batch_empty):
    code, record, err = checked(capsys, 4, *third_batch_empty)
    assert code == 1 and record is None and "skip it with data.skip_steps=[3]" in err
    assert "Traceback" not in err and len(err.splitlines()) == 2
    code, record, _ = checked(capsys, 4, *third_batch_empty, "data.skip_steps=[3]")
    assert (code, record["verdict"]) == (0, "equal")
    assert record["untried"] == ["data.skip_steps skips step 3 (samples 8 to 11)"]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_skipped_steps_of_random_data(capsys, precision):
    arguments = ["--precision", precision, *TINY, "parallel.tp=2"]
    code, record, _ = checked(capsys, 2, *arguments, "data.skip_steps=[1-2,5]")
    assert code == 0 and record["steps"] == (6 if precision == "fp64" else 3)
    assert "data.skip_steps skips step 1 (samples 0 to" in record["untried"][0]
    code, record, _ = checked(capsys, 2, *arguments, "data.skip_steps=[50]")
    assert code == 0 and any("[50] skips none of the" in note for note in record["untried"])
    code, _, err = checked(capsys, 2, *arguments, "--steps", "2", "data.skip_steps=[1-2]")
    assert code == 2 and "data.skip_steps skips all 2 steps" in err


RAMP = ["train.gbs=32", "train.gbs_ramp=[8,8,1000]", "optim.schedule_by=samples"]


def test_a_ramp_and_its_rate(monkeypatch, capsys):
    layout = [*TINY, *RAMP, "parallel.pp=2"]
    code, record, _ = checked(capsys, 4, *layout)
    assert (code, record["untried"]) == (0, [])
    _, ramp = record["changed"]["train.gbs_ramp"]
    assert ramp == ["0:8", "1steps:8", "2steps:12"]

    def by_steps(config, loader, progress):
        step = next_step(config, loader, progress)
        rate = learning_rate(config.optim, progress.step + 1, config.train.steps)
        return step if config.parallel.pp == 1 else step._replace(lr=rate)

    monkeypatch.setattr(run, "next_step", by_steps)
    code, record, _ = checked(capsys, 4, *layout)
    assert code == 1 and "look at the update" in record["advice"]


def test_what_the_loop_does_besides_is_named(tmp_path, capsys):
    files = [f"init.from_hf={tmp_path}", "data.train=[corpus]", "data.split='99,1'"]
    code, record, _ = checked(capsys, 2, *TINY, *files, f"checkpoint.dir={tmp_path}/ck")
    assert code == 0 and record["left_out"] == ["evaluations", "checkpoints"]
    assert record["changed"]["data.train"] == [["corpus"], []]
    assert record["changed"]["init.from_hf"] == [str(tmp_path), None]


def test_documents_of_the_index_and_samples_shorter_than_a_sequence(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "corpus", vocab_size=64)
    data = [f"data.train=[{prefix}]", "data.document_mask=true", "train.seq_len=32"]
    code, record, _ = checked(
        capsys, 2, "--data", *TINY, *data, "data.sample_len=30", "parallel.cp=2"
    )
    assert (code, record["verdict"], record["untried"]) == (0, "equal", [])


MOE = ["model=tiny_moe", "parallel.tp=2"]
MUON = ["optim.name=muon", "optim.ns_steps=10", "optim.muon_exclude=[*embedding.*]"]
SOUND = {
    "router without a gradient": [*MOE, *MUON, "model.top_k=1", "model.init_std=0.1"],
    "rate that multiplies rounding": [*MOE, "optim.lr=0.1", "optim.clip=0"],
    "capped scores of normalized queries": [
        *("model=tiny", "parallel.tp=2", "parallel.sp=true", "optim.lr=0.1", "optim.clip=0"),
        *("model.qk_norm=true", "model.attention_softcap=3", "model.embedding_scale=3"),
    ],
    "experts beside attention": [*MOE, "model.parallel_block=two_norms"],
    "experts beside attention, one norm": [*MOE, "model.parallel_block=one_norm"],
}


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("case", SOUND)
def test_no_false_alarm(capsys, case, precision):
    rates = ["optim.lr=0.01", "optim.schedule=constant"]
    code, record, _ = checked(capsys, 2, "--precision", precision, *rates, *SOUND[case])
    assert (code, record["verdict"]) == (0, "equal"), record["advice"]

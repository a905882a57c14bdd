"""tools/parity.py finds planted faults: it names the parameter that differs first, and the
dimension that it needs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from runs import write_corpus

from megatron5d.comm.collectives import start_all_reduce
from megatron5d.data import batch
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.data_parallel import bucketing
from megatron5d.data_parallel.bucketing import data_axes
from megatron5d.model import moe as moe_phases
from megatron5d.model import norm
from megatron5d.parity import certificate, run
from megatron5d.parity import certificate as report
from megatron5d.tools.parity import main
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train import data as train_data
from megatron5d.train import step

MODEL = ["model=tiny", "train.gbs=8", "optim.lr=1e-2"]


def told(capsys, *arguments):
    """Exit code and record."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def found(capsys, world, *overrides):
    """(name of the first tensor that differs, of the last one of its kind, what makes it equal)
    after a bisection."""
    code, record = told(
        capsys, "--world", str(world), "--steps", "2", "--bisect", *MODEL, *overrides
    )
    assert (code, record["verdict"]) == (1, "different")
    gradients = [each["name"] for each in record["tensors"] if each["quantity"] == "gradient"]
    return (
        gradients,
        {change for change, verdict in record["without"].items() if verdict == "equal"},
        record,
    )


def test_a_norm_whose_gradient_is_not_summed_over_tp(monkeypatch, capsys):
    original = norm.replicated_parameter

    def forgetful(shape, name, tp, *, partial_grad, **factory):
        return original(
            shape,
            name,
            tp,
            partial_grad=partial_grad and name != "layers.1.mlp.norm.weight",
            **factory,
        )

    monkeypatch.setattr(norm, "replicated_parameter", forgetful)
    gradients, equal, record = found(capsys, 4, "parallel.tp=2", "parallel.sp=true")
    assert gradients == ["layers.1.mlp.norm.weight"]
    assert equal == {"parallel.tp=1", "parallel.sp=false"}
    assert record["tensors"][0]["ranks"] == [0, 1, 2, 3] and record["tensors"][0][
        "summed_over"
    ] == ["dp_cp"]
    assert record["first_step"] == ["grad_norm"]
    assert "look at a backward, or a sum over ranks" in report.report_text(record)


def test_a_loss_that_is_divided_by_the_targets_of_one_cp_rank(monkeypatch, capsys):
    def count(self, batches, mesh):
        targets = sum(batch.target_counts for batch in batches)
        self._counting = start_all_reduce(targets, mesh["dp"])

    monkeypatch.setattr(step._SummedLoss, "start_counting", count)
    gradients, equal, record = found(capsys, 4, "parallel.cp=2", "parallel.tp=2")
    assert (gradients[0], gradients[-1]) == ("embedding.weight", "head.weight")
    assert equal == {"parallel.cp=1"} and record["without"]["parallel.tp=1"] == "different"


def test_a_weight_that_mirrored_ranks_do_not_share(monkeypatch, capsys):
    original, lost = bucketing.bucket_kind, "layers.1.mlp.down.weight"

    def kind(parameter, gather_format):
        found = original(parameter, gather_format)
        return ("", *found[1:]) if spec_of(parameter).name == lost else found

    monkeypatch.setattr(bucketing, "bucket_kind", kind)
    gradients, equal, record = found(
        capsys, 2, "parallel.pp=2", "pipeline.schedule=dualpipe", "recompute.mode=full"
    )
    assert gradients == [lost] and "the replica's rank" in record["tensors"][0]["summed_over"]
    assert equal == {"parallel.pp=1", "pipeline.schedule=1f1b"}


def test_an_embedding_that_a_stage_before_the_head_does_not_share(monkeypatch, capsys):
    """Prediction blocks are on the second of three stages: no sum over the two ranks that hold the
    embedding."""
    monkeypatch.setattr(
        bucketing, "data_axes", lambda mesh, zero, shared, expert: data_axes(mesh, zero, "", expert)
    )
    layout = [
        "parallel.pp=3",
        "model.num_layers=3",
        "model.num_mtp_layers=1",
        "pipeline.layout=[2,2,0]",
    ]
    gradients, equal, _ = found(capsys, 3, *layout)
    assert gradients == ["embedding.weight"] and "parallel.pp=1" in equal


def test_a_rank_that_reads_the_samples_of_another(monkeypatch, capsys):
    original = batch.micro_batch_samples
    monkeypatch.setattr(
        batch, "micro_batch_samples", lambda *sizes: original(*sizes[:3], 0, sizes[4])
    )
    gradients, equal, record = found(capsys, 4, "parallel.tp=2")
    assert record["quantities"]["loss"]["ranks"] == [0, 1, 2, 3] and "embedding.weight" in gradients
    assert "loss" in record[
        "first_step"
    ] and "look at how dp divides the batch" in report.report_text(record)
    assert equal == {"dp=1"}


BF16 = ["--precision", "bf16", "precision.dtype=bf16"]


def test_in_16_bits_a_layout_is_as_near_to_fp64_as_one_process(capsys):
    layout = ["parallel.ep=2", "parallel.tp=2", "parallel.sp=true", "parallel.zero=2"]
    code, record = told(capsys, "--world", "4", *BF16, "model=tiny_moe", *layout)
    assert (code, record["verdict"], record["tolerance"]) == (0, "equal", 2.0)
    gradient = record["quantities"]["gradient"]
    assert {"weight", "master", "exp_avg_sq"} <= set(record["quantities"])
    # both are rounded, and about alike
    assert 1e-4 < gradient["expected"] < 0.05 and 0.8 < gradient["relative"] < 2


def test_gradients_that_are_added_up_in_16_bits(monkeypatch, capsys):
    """On ranks alone, of 128 micro-batches each."""
    original = run.build_trainer

    def narrow(config, mesh, *rest):
        if mesh["dp"].size > 1:
            config = replace(config, precision=replace(config.precision, grad_dtype="bf16"))
        return original(config, mesh, *rest)

    monkeypatch.setattr(run, "build_trainer", narrow)
    sizes = ["model=tiny", "model.num_layers=1", "train.seq_len=16", "train.gbs=256"]
    code, record = told(capsys, "--world", "2", "--no-shrink", *BF16, *sizes)
    assert (code, record["verdict"]) == (1, "different") and record["first_step"] == []
    worst = max(
        (record["quantities"][kind] for kind in ("gradient", "exp_avg")),
        key=lambda each: each["relative"],
    )
    assert worst["relative"] > 2 and worst["name"] in {each["name"] for each in record["tensors"]}
    text = report.report_text(record)
    assert (
        "DIFFERENT by more than rounding" in text
        and "look at a backward, or a sum over ranks" in text
    )


def test_a_rank_that_fails_is_told(monkeypatch, capsys):
    original = batch.micro_batch_samples
    monkeypatch.setattr(
        batch, "micro_batch_samples", lambda *sizes: original(*sizes)[0 : 9 // (2 - sizes[4])]
    )
    code, record = told(capsys, "--world", "2", *MODEL)
    assert (code, record["verdict"]) == (1, "failed") and "ZeroDivisionError" in record["failure"]
    assert main(["--world", "2", *MODEL]) == 1 and "FAILED" in capsys.readouterr().out


def test_a_process_that_fails_by_itself_is_told(monkeypatch, capsys):
    monkeypatch.setattr(train_data, "SequenceSharding", None)
    assert (
        main(["--world", "2", *MODEL]) == 1
        and "the run in one process fails" in capsys.readouterr().err
    )


def test_the_configured_data(tmp_path, capsys):
    """Its own documents, told apart by their own end; vocabulary and batch as configured."""
    prefix = write_corpus(tmp_path / "corpus", vocab_size=256)
    data = [f"data.train=[{prefix}]", "data.document_mask=true", "data.eod=0", "train.seq_len=32"]
    code, record = told(
        capsys, "--world", "2", "--data", "--steps", "2", *MODEL, *data, "parallel.cp=2"
    )
    assert (code, record["verdict"]) == (0, "equal") and "model.vocab_size" not in record["changed"]
    assert main(["--world", "2", "--data", *MODEL, *data, "model.vocab_size=100"]) == 2
    assert (
        "data.train requires ids below model.vocab_size = 100 (got 255)" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["--world", "2", "--data", *MODEL])
    assert "data.train" in capsys.readouterr().err


def test_choices_among_equal_tokens_are_compared_in_fp64(tmp_path, capsys, monkeypatch):
    """Layouts that drop the earlier of two equal tokens; bf16 runs repeat what fp64 kept."""
    writer = IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16))
    for document in np.random.default_rng(0).integers(2, 64, (200, 4)):
        writer.add_document(np.array([1, *document, 0]))  # all begin alike
    writer.finalize()
    data = [f"data.train=[{tmp_path / 'corpus'}]", "data.document_mask=true", "data.eod=0"]
    sizes = ["model=tiny_moe", "model.vocab_size=64", "train.seq_len=32", "train.mbs=2"]
    moe = ["--data", "--world", "2", *data, *sizes, "moe.capacity_factor=0.5", "parallel.cp=2"]
    assert told(capsys, *moe)[1]["verdict"] == "equal"
    original = moe_phases.within_capacity

    def later_first(experts, weights, order, *rest):
        return original(experts, weights, order if rest[-1].size == 1 else -order, *rest)

    monkeypatch.setattr(moe_phases, "within_capacity", later_first)
    assert told(capsys, *moe)[1]["verdict"] == "different"
    untried = told(capsys, *moe, *BF16)[1]["untried"]
    assert any("repeat the choices and drops of fp64" in note for note in untried)


ALL = [
    "experiment=quickstart",
    "model.num_layers=3",
    "pipeline.schedule=zb_h1",
    "recompute.mode=selective",
    "model.num_mtp_layers=1",
    "parallel.zero=3",
    "model.attention_window=40",
]


def test_all_dimensions_are_equal_and_the_certificate_is_valid(monkeypatch, capsys, tmp_path):
    """All dimensions at once, on the layout of the quickstart."""
    file = tmp_path / "parity.json"
    assert main(["--world", "16", "--steps", "2", "--certificate", str(file), *ALL]) == 0
    out = capsys.readouterr().out
    assert "EQUAL" in out and "model.hidden_size 128 -> 32" in out
    record = json.loads(file.read_text())
    assert record["verdict"] == "equal" and record["overrides"] == ALL
    assert {
        "loss",
        "mtp_loss",
        "seq_aux_loss",
        "grad_norm",
        "routers",
        "gradient",
        "weight",
        "exp_avg",
    } <= set(record["quantities"])
    assert all(
        each["relative"] <= record["tolerance"] == 1e-10 for each in record["quantities"].values()
    )
    check = ["--check", str(file)]
    assert main(check) == main([*check, *ALL, "log.dir=elsewhere", "data.train=[other]"]) == 0
    assert "valid for this code" in capsys.readouterr().out
    assert (
        main([*check, *ALL, "parallel.zero=2"]) == 1
        and "the configuration differs" in capsys.readouterr().out
    )
    assert (
        main([*check, "--world", "8"]) == 1
        and "made on 16 ranks (got 8)" in capsys.readouterr().out
    )
    monkeypatch.setattr(certificate, "source_hash", lambda: "other")
    code, answer = told(capsys, *check)
    assert (
        code == 1
        and answer["belongs"] is False
        and "the code differs from the one" in answer["faults"][0]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--world", "6", "parallel.tp=4", "train.stepz=3"],
            "the configuration is refused: 2 faults",
        ),
        (["--world", "0"], "at least 1 rank"),
        (["--world", "2", "--steps", "0"], "--steps requires at least 1 (got 0)"),
        (["--world", "2", "--tolerance", "nan"], "a finite number (got nan)"),
        (["--world", "2", "--tolerance", "-1"], "a number >= 0 (got -1.0)"),
        (["--world", "2", "--timeout", "inf"], "a finite number (got inf)"),
        (["--world", "2", "--timeout", "0"], "seconds > 0 (got 0.0)"),
        (
            ["--world", "2", "--certificate", "."],
            "--certificate requires a file (got the folder .)",
        ),
        ([], "--world N"),
        (
            ["model=tiny", "--world", "2", "train.gbs=3", "--json"],
            "train.gbs must be a multiple",
        ),
        (
            ["model=tiny", "--world", "2", "optim.freeze=[nosuch.*]"],
            "nosuch.* matches no parameter",
        ),
        (
            ["--world", "2", "--certificate", "nowhere/parity.json"],
            "--certificate nowhere/parity.json: its folder is not writable",
        ),
        (
            ["--check", "nowhere.json"],
            "--check nowhere.json cannot be read: No such file or directory",
        ),
    ],
)
def test_invalid_options_are_rejected(arguments, said, capsys):
    try:
        code = main(arguments)
    except SystemExit as leave:
        code = leave.code
    assert code == 2 and said in capsys.readouterr().err


def test_what_is_no_certificate_is_refused(tmp_path, capsys):
    for text in ("{}", "[1]", "no json", '{"overrides": [], "world": 1}'):
        (tmp_path / "file.json").write_text(text)
        assert main(["--check", str(tmp_path / "file.json")]) == 2
        told = capsys.readouterr().err
        assert "parity.py: error" in told and "file.json" in told

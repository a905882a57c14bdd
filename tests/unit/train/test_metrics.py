"""Records on disk and in Weights & Biases, read back from their files."""

import json
import os
import shutil
import struct
import time

import pytest
import torch
import wandb

from megatron5d.config.schema import LogConfig, ModelConfig, WandbConfig
from megatron5d.model.flops import flops_per_token, parameter_count
from megatron5d.train.monitoring import writers as metrics
from megatron5d.train.monitoring.writers import JsonLines, ProgressDisplay, Wandb


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_takes_back_the_steps_it_will_do_again(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    first = JsonLines(path, done=0)
    for step in range(1, 6):
        first.write({"step": step, "life": 1})
    first.close()
    with path.open("a") as torn:
        torn.write('{"step": 6, "li')  # a kill in the middle of a write
    second = JsonLines(path, done=3)
    second.write({"step": 4, "life": 2})
    second.close()
    assert [(r["step"], r["life"]) for r in lines(path)] == [(1, 1), (2, 1), (3, 1), (4, 2)]


def test_a_new_run_keeps_the_log_that_it_finds(tmp_path):
    path = tmp_path / "log.jsonl"
    for life in range(3):
        log = JsonLines(path, done=0)
        log.write({"step": 1, "life": life})
        log.close()
    kept = [tmp_path / name for name in ("log.jsonl.left", "log.jsonl.left2", "log.jsonl")]
    assert [record["life"] for each in kept for record in lines(each)] == [0, 1, 2]


def test_a_log_that_is_removed_under_way_is_written_again(tmp_path, capsys):
    path = tmp_path / "run" / "log.jsonl"
    log = JsonLines(path, done=0)
    log.write({"step": 1})
    shutil.rmtree(path.parent)
    log.write({"step": 2})
    assert [record["step"] for record in lines(path)] == [1, 2]
    os.replace(shutil.copy(path, tmp_path / "edited"), path)  # as editors save
    log.write({"step": 3})
    log.close()
    assert [record["step"] for record in lines(path)] == [1, 2, 3]
    assert capsys.readouterr().err == f"{path} was removed under way\n{path} was replaced under way\n"


def test_what_a_loss_of_power_leaves_is_no_record(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"\0" * 40 + b'{"step": 2}\n{"epoch": 1}\n\xff\xfe}\n{"step": 3}\n')
    JsonLines(path, done=3).close()
    assert [record["step"] for record in lines(path)] == [1, 3]


def test_a_file_that_is_no_log_is_set_aside_by_a_resumed_run_too(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "precious"}\n{"step": null}\n')
    JsonLines(path, done=3).close()
    assert path.read_text() == "" and "precious" in (tmp_path / "corpus.jsonl.left").read_text()
    assert f"what was there is {path}.left" in capsys.readouterr().err


def test_in_a_file_progress_is_a_line_now_and_then(capsys, monkeypatch):
    clock = iter([60, *range(64, 120, 4)])  # seconds: the first step takes long
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))
    display = ProgressDisplay(total=19, done=1, enabled=True)
    for step in range(2, 10):  # and stops there
        display.update(loss=1 / step, grad_norm=2.0, tokens_per_s=1234.0)
    display.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "step 2/19: loss 0.5000, grad norm 2.000, 1,234 tokens/s"
    assert shown[1] == "step 5/19: loss 0.2000, grad norm 2.000, 1,234 tokens/s, 00:56 left"
    assert [line.split(":")[0] for line in shown] == ["step 2/19", "step 5/19", "step 8/19", "step 9/19"]


def test_without_progress_what_is_said_is_still_shown(capsys):
    display = ProgressDisplay(total=2, done=0, enabled=False)
    display.update(1.0, 1.0, 1.0)
    display.say("resumed")
    display.close()
    assert capsys.readouterr().err == "resumed\n"


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    path = tmp_path / "log.jsonl"
    for life in (1, 2):
        log = JsonLines(path, done=0)
        log.write({"step": 1, "life": life})
        log.close()
    assert lines(path) == [{"step": 1, "life": 2}]


def wandb_records(folder):
    """Yields the protobuf records of offline runs: LevelDB framing, 32 KiB blocks, parts joined by their type."""
    from wandb.proto import wandb_internal_pb2 as pb

    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):  # their names begin with the second
        data, at, joined = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            left = 32768 - at % 32768
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            if left < 7 or kind == 0:
                at += left
                continue
            part, at = data[at + 7 : at + 7 + length], at + 7 + length
            joined = part if kind in (1, 2) else joined + part
            if kind in (1, 4):
                record = pb.Record()
                record.ParseFromString(joined)
                yield record


def items(entries):
    return {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in entries}


def test_what_keeps_wandb_from_starting_is_one_message(tmp_path, monkeypatch):
    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"log.wandb.mode = online: No API key configured.*log.wandb.mode=offline"):
        Wandb(LogConfig(dir=str(tmp_path), wandb=WandbConfig(mode="online")), {}, None)


def test_wandb_offline_holds_what_the_log_holds_and_a_resumed_run_keeps_its_id(tmp_path):
    log = LogConfig(dir=str(tmp_path), wandb=WandbConfig(mode="offline", project="p", name="n"))
    config = {"train": {"steps": 3, "betas": [0.9, 0.95]}, "name": "tiny"}
    run_id, rows = None, list[dict]()
    jsonl = JsonLines(tmp_path / "log.jsonl", done=0)
    for life in ((1, 2), (3,)):
        run = Wandb(log, config, run_id)
        for step in life:
            record = {"step": step, "loss": 1.5 / step, "mfu": None, "aux_loss": 1e-30, "tokens": 2**40 + step}
            jsonl.write(record)
            run.write(record)
        run.close()
        assert run_id in (None, run.run_id)
        run_id = run.run_id
        time.sleep(1)  # the second is part of the file's name
    jsonl.close()
    deadline = time.monotonic() + 30  # W&B's own process writes the file a moment after the run is closed
    while len(rows) < 3 and time.monotonic() < deadline:
        found = list(wandb_records(tmp_path))
        rows = [items(r.history.item) for r in found if r.WhichOneof("record_type") == "history"]
    assert [row["_step"] for row in rows] == [1, 2, 3]
    logged = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert logged == [{k: v for k, v in line.items() if v is not None} for line in lines(tmp_path / "log.jsonl")]
    runs = [r.run for r in found if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {run_id}
    for run in runs:
        assert {k: v for k, v in items(run.config.update).items() if k != "_wandb"} == config


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA GB200", 2500), ("NVIDIA B200", 2250), ("NVIDIA GH200 480GB", 989), ("NVIDIA H100 80GB HBM3", 989),
     ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA A100-SXM4-80GB", 312), ("Tesla T4", None)],
)  # fmt: skip
def test_the_peak_of_a_device_is_that_of_its_longest_name(name, peak, monkeypatch):
    """B200 is in GB200's name, and H100 in those of the slower H100s."""
    monkeypatch.setattr(metrics.torch.cuda, "get_device_name", lambda device: name)
    assert metrics.peak_tflops(LogConfig(), torch.device("cuda")) == peak
    assert metrics.peak_tflops(LogConfig(peak_tflops=7.0), torch.device("cuda")) == 7
    assert metrics.peak_tflops(LogConfig(), torch.device("cpu")) is None


def test_flops_by_hand():
    """One layer, h 4, f 8, 2 heads of 2 dims, 1 KV head, vocab 10, 3 tokens: products counted one by one."""
    model = ModelConfig(
        num_layers=1, hidden_size=4, ffn_hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=2, vocab_size=10
    )
    qkv, out, up, down, head = 4 * 8, 4 * 4, 4 * 16, 8 * 4, 4 * 10
    attention = 2 * 2 * 2 * (1 + 2 + 3) / 3  # scores and values: heads · dims · twice · mean length
    assert flops_per_token(model, 3) == pytest.approx(6 * (qkv + out + up + down + head + attention))
    assert parameter_count(model) == qkv + out + up + down + 2 * head + 3 * 4


def test_a_window_attends_to_no_more_than_it_sees():
    narrow = ModelConfig(num_layers=1, attention_window=2)
    lengths = [min(i, 2) for i in range(1, 9)]
    extra = flops_per_token(narrow, 8) - flops_per_token(ModelConfig(num_layers=1), 8)
    assert extra == pytest.approx(6 * 2 * 4 * 16 * (sum(lengths) / 8 - 4.5))

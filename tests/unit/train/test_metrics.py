"""Records on disk and in Weights & Biases, read back from their files."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time

import pytest
import torch

from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config, LogConfig, ModelConfig, WandbConfig
from megatron5d.model.flops import flops_per_token, parameter_count
from megatron5d.planning.time.predict import peak_tflops
from megatron5d.train.monitoring import writers as metrics
from megatron5d.train.monitoring.trackers import TensorBoard, Wandb
from megatron5d.train.monitoring.writers import JsonLines, ProgressDisplay, Writers, round_steps
from megatron5d.train.provenance import commit


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
    assert (
        capsys.readouterr().err
        == f"{path} was removed during the run\n{path} was replaced during the run\n"
    )


def test_what_a_loss_of_power_leaves_is_no_record(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        b'{"step": 1}\n' + b"\0" * 40 + b'{"step": 2}\n{"epoch": 1}\n\xff\xfe}\n{"step": 3}\n'
    )
    JsonLines(path, done=3).close()
    assert [record["step"] for record in lines(path)] == [1, 3]


def test_a_file_that_is_no_log_is_set_aside_by_a_resumed_run_too(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "precious"}\n{"step": null}\n')
    JsonLines(path, done=3).close()
    assert path.read_text() == "" and "precious" in (tmp_path / "corpus.jsonl.left").read_text()
    assert f"the old one is {path}.left" in capsys.readouterr().err


def test_in_a_file_progress_is_a_line_at_round_steps(capsys, monkeypatch):
    # seconds: the first step takes long; a line in 10 s is one in 3 steps
    clock = iter([60, *range(64, 120, 4)])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: float(next(clock)))
    display = ProgressDisplay(total=19, done=1, enabled=True)
    for step in range(2, 12):  # and stops there
        display.update(loss=1 / step, grad_norm=2.0, tokens_per_s=1234.0)
    display.close()
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "step 2/19: loss 0.5000, grad norm 2.000, 1,234 tokens/s"
    assert shown[1] == "step 5/19: loss 0.2000, grad norm 2.000, 1,234 tokens/s, 00:56 left"
    assert [line.split(":")[0] for line in shown] == [f"step {step}/19" for step in (2, 5, 10, 11)]
    assert [round_steps(x) for x in (0.1, 1, 1.1, 2.5, 10, 11, 51, 200.5)] == [
        1,
        1,
        2,
        5,
        10,
        20,
        100,
        500,
    ]


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
    """Yields the protobuf records of offline runs: LevelDB framing, 32 KiB blocks, parts joined by
    their type."""
    from wandb.proto import wandb_internal_pb2 as pb

    # their names begin with the second
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
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


def wandb_of(folder, kinds, enough):
    """Records of each kind, once W&B's own process has written them, which it does a moment after
    the run is closed."""
    deadline, found = time.monotonic() + 30, {}
    while not enough(found) and time.monotonic() < deadline:
        found = {kind: [] for kind in kinds}
        for record in wandb_records(folder):
            if (kind := record.WhichOneof("record_type")) in kinds:
                found[kind].append(getattr(record, kind))
    return found


def test_wandb_offline_holds_what_the_log_holds_and_no_step_twice_after_a_resume(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # no checkout: the code's commit is told all the same
    config = Config(
        log=LogConfig(
            dir=str(tmp_path / "runs" / "seven"), wandb=WandbConfig(mode="offline", project="p")
        )
    )
    facts = {"world": 4, "dp": 2, "tp": 2, "pp": 1, "commit": "abc"}
    folder, run_id, seen = tmp_path / "runs" / "seven", None, list[int]()
    jsonl = JsonLines(tmp_path / "log.jsonl", done=0)
    for life, code in (((1, 2), 75), ((2, 3), 1)):  # the second one does a step again
        run = Wandb(config, "offline", run_id, facts)
        seen.append(run.last)
        for step in life:
            record = {
                "step": step,
                "loss": 1.5 / step,
                "mfu": None,
                "valid_loss": 1e-30,
                "tokens": 2**40 + step,
            }
            if step > run.last:
                jsonl.write(record)
            run.write(record)
        run.close(code)
        assert run_id in (None, run.run_id)
        run_id = run.run_id
        time.sleep(1)  # the second is part of the file's name
    jsonl.close()
    kinds = ("history", "run", "exit", "metric", "preempting")
    found = wandb_of(folder, kinds, lambda found: len(found.get("exit", ())) == 2)
    rows = [items(each.item) for each in found["history"]]
    assert [row["_step"] for row in rows] == [1, 2, 3] and seen == [0, 2]
    logged = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
    assert logged == [
        {k: v for k, v in line.items() if v is not None} for line in lines(tmp_path / "log.jsonl")
    ]
    assert [each.exit_code for each in found["exit"]] == [75, 1] and len(found["preempting"]) == 1
    assert {run.git.commit for run in found["run"]} == {(commit() or "").removesuffix("-dirty")}
    for run in found["run"]:
        said = {k: v for k, v in items(run.config.update).items() if k != "_wandb"}
        assert said == json.loads(json.dumps(to_dict(config))) | {"run": facts}
        assert (run.run_id, run.display_name, run.run_group) == (run_id, "seven", config.model.name)
        assert list(run.tags) == ["fp32", "dp2", "tp2"]
    axes = {each.name or each.glob_name: each for each in found["metric"]}
    assert axes["valid_loss*"].summary.min and {"loss", "valid_loss*"} <= {
        name
        for name, each in axes.items()
        if each.step_metric == "tokens" or each.step_metric_index
    }


def test_a_resumed_run_sends_what_a_killed_process_had_not_written(tmp_path):
    """W&B's process writes block by block, and leaves with the run's."""
    config = Config(log=LogConfig(dir=str(tmp_path)))
    run = Wandb(config, "offline", None, {})
    for step in range(1, 200):  # more than a block
        run.write({"step": step, "text": "x" * 700})
    run.close(0)
    file = next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + 30
    sizes = [0]
    # it still writes
    while (sizes[-1] < 150_000 or sizes[-6:-1] != sizes[-5:]) and time.monotonic() < deadline:
        sizes.append(file.stat().st_size)
        time.sleep(0.1)
    file.write_bytes(file.read_bytes()[:65536])  # what a kill leaves
    kept = [items(record.history.item).get("_step", 0) for record in wandb_records(tmp_path)]
    resumed = Wandb(config, "offline", run.run_id, {})
    resumed.close(0)
    assert 0 < resumed.last == max(kept) < 199


class Broken:
    """A tracker whose process is dead."""

    left = False

    def write(self, record):
        raise ConnectionResetError("Connection lost")

    def abandon(self):
        self.left = True


def test_a_tracker_that_fails_is_named_once_and_ends_nothing(tmp_path):
    said, broken, sound = [], Broken(), JsonLines(tmp_path / "log.jsonl", done=0)
    writers = Writers(said.append)
    writers.add("log.wandb.mode = online (Weights & Biases)", broken)
    writers.add("log.jsonl = x", sound)
    for step in (1, 2, 3):
        writers.write({"step": step})
    writers.close(0)
    (told,) = said
    assert (
        "Weights & Biases), step 1: ConnectionResetError: Connection lost; training continues"
        in told
    )
    assert broken.left and [record["step"] for record in lines(tmp_path / "log.jsonl")] == [1, 2, 3]


def test_wandb_whose_process_was_killed_keeps_no_run_from_ending(tmp_path):
    """Neither the training nor the exit of the process waits for it, nor prints call stacks."""
    program = f"""
import os, signal, subprocess, sys
from megatron5d.config.schema import Config, LogConfig
from megatron5d.train.monitoring.trackers import Wandb
from megatron5d.train.monitoring.writers import Writers
writers = Writers(lambda text: print(text, flush=True))
writers.add("log.wandb", Wandb(Config(log=LogConfig(dir={str(tmp_path)!r})), "offline", None, {{}}))
writers.write({{"step": 1}})
mine = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "pid=,comm="], capture_output=True, text=True).stdout
(core,) = [int(line.split()[0]) for line in mine.splitlines() if "wandb" in line]
os.kill(core, signal.SIGKILL)
for step in range(2, 2000):
    writers.write({{"step": step}})
writers.close(0)
"""
    # not the process of these tests
    own = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=own
    )
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert ended.stdout.count("\n") == 1 and ended.stdout.startswith("WARNING: log.wandb, step ")


@pytest.fixture
def small_disk(monkeypatch):
    """Room for so many bytes, after which a write takes what fits and the next one fails, as on a
    full disk."""
    room = [0]
    opened = JsonLines._open

    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            if not (fits := data[: room[0]]):
                raise OSError(28, "No space left on device")
            room[0] -= len(fits)
            return self.file.write(fits)

    monkeypatch.setattr(JsonLines, "_open", lambda self: Full(opened(self)))
    return room


def test_a_full_disk_costs_no_line_once_there_is_room_again(tmp_path, small_disk):
    said, path = [], tmp_path / "log.jsonl"
    writers = Writers(said.append)
    writers.add(f"log.jsonl = {path}", JsonLines(path, done=0))
    small_disk[0] = 40
    for step in range(1, 7):
        writers.write({"step": step})
        assert path.read_bytes().endswith(b"}\n")  # whole lines alone
    assert [record["step"] for record in lines(path)] == [1, 2, 3] and len(said) == 1
    assert (
        f"log.jsonl = {path}, step 4: OSError: [Errno 28]" in said[0]
        and "training continues" in said[0]
    )
    small_disk[0] = 10**6
    writers.write({"step": 7})
    assert [record["step"] for record in lines(path)] == [
        *range(1, 8)
    ] and "is written again" in said[1]
    small_disk[0] = 0
    writers.write({"step": 8})
    writers.close(0)
    assert "is incomplete" in said[-1] and len(lines(path)) == 7


def test_a_console_that_is_gone_ends_nothing(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.stderr, "write", full)
    display = ProgressDisplay(total=1, done=0, enabled=True)
    display.update(1.0, 1.0, 1.0)
    display.say("hello")
    display.close()


def test_tensorboard_shows_every_number_and_no_step_twice(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = Config(log=LogConfig(tensorboard=str(tmp_path)))
    for done, life in ((0, (1, 2, 3)), (1, (2,))):
        board = TensorBoard(config, done)
        for step in life:
            board.write({"step": step, "loss": step / 4 + done, "mfu": None})
        board.close(0)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 1.5)]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_longest_name(name, peak, monkeypatch):
    """B200 is in GB200's name, and H100 in those of the slower H100s."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(LogConfig(), torch.device("cuda")) == peak
    assert peak_tflops(LogConfig(peak_tflops=7.0), torch.device("cuda")) == 7
    assert peak_tflops(LogConfig(), torch.device("cpu")) is None


def test_flops_by_hand():
    """One layer, h 4, f 8, 2 heads of 2 dims, 1 KV head, vocab 10, 3 tokens: GEMMs counted one by
    one."""
    model = ModelConfig(
        num_layers=1,
        hidden_size=4,
        ffn_hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=2,
        vocab_size=10,
    )
    qkv, out, up, down, head = 4 * 8, 4 * 4, 4 * 16, 8 * 4, 4 * 10
    attention = 2 * 2 * 2 * (1 + 2 + 3) / 3  # scores and values: heads · dims · twice · mean length
    assert flops_per_token(model, 3) == pytest.approx(
        6 * (qkv + out + up + down + head + attention)
    )
    assert parameter_count(model) == qkv + out + up + down + 2 * head + 3 * 4


def test_a_window_attends_to_no_more_than_it_sees():
    narrow = ModelConfig(num_layers=1, attention_window=2)
    lengths = [min(i, 2) for i in range(1, 9)]
    extra = flops_per_token(narrow, 8) - flops_per_token(ModelConfig(num_layers=1), 8)
    assert extra == pytest.approx(6 * 2 * 4 * 16 * (sum(lengths) / 8 - 4.5))

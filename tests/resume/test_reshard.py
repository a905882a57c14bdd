"""tools/convert.py reshard: what it writes is what the ranks of the other layout would have
written, and continues."""

import dataclasses
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from random_configs import another_layout, numbers, random_config
from ranks import run_ranks
from resharding import DENSE, SPARSE, config_of, moved, reshard
from runs import curve, train_on_ranks, whole_tensors, write_corpus

from megatron5d.checkpoint.folder import (
    checkpoint_error,
    read_run,
    recover,
    saved_config,
    step_folder,
)
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import SavedTensors
from megatron5d.config.schema import (
    CheckpointConfig,
    LogConfig,
    ParallelConfig,
    PipelineConfig,
)
from megatron5d.parity.variants import faults_of
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools import convert
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.topology.lock_file import LockFile
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.state import run_tensors

STOP = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "toy", vocab_size=96, documents=300)


def _loaded(rank, world, config):
    """What a rank holds after it has resumed, which files of tensors it has opened, and what it
    would write."""
    opened = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    run = build_run(
        config, Process(rank, world, rank, torch.device("cpu")), searched_layout(config, world)
    )
    files = {Path(name).name for name in opened if name.endswith(".distcp")}
    held, owned = (
        {
            (key, offset): view.clone()
            for key, tensor in run_tensors(
                run.sync, run.optimizer, run.model.weights(), writing=writing
            ).items()
            for offset, view in tensor.shards.items()
        }
        for writing in (False, True)
    )
    return run.progress, held, set(owned), files


def is_inside(offset, extent, at, shape):
    """Whether one rectangle is within another."""
    return all(b <= a and a + m <= b + n for a, m, b, n in zip(offset, extent, at, shape))


def assert_loads_without_resharding(config, world, online):
    """Each rank holds the same bits as when it reshards itself, and reads whole items, its own from
    its own file."""
    folder = step_folder(Path(config.checkpoint.dir), STOP)
    files = SavedTensors(folder).files().items()
    items = {(key, item.offset): (file, item.extent) for file, each in files for key, item in each}
    before = run_ranks(_loaded, world, online)
    owners = {}
    for rank, (progress, held, owned, opened) in enumerate(run_ranks(_loaded, world, config)):
        assert progress == before[rank][0] and held.keys() == before[rank][1].keys()
        needed = set()
        for (key, at), values in held.items():
            assert torch.equal(values, before[rank][1][key, at]), key
            inside = [
                part
                for part in items
                if part[0] == key and is_inside(part[1], items[part][1], at, values.shape)
            ]
            assert sum(math.prod(items[part][1]) for part in inside) == values.numel(), (
                f"{key}: a slice of an item is read"
            )
            needed |= {items[part][0] for part in inside}
        assert {items[part][0] for part in owned} <= {f"__{rank}_0.distcp"}
        assert opened <= needed  # replicas share what they read
        owners |= dict.fromkeys(owned, rank)
    assert owners.keys() == items.keys(), "every item is written by one rank"


LAYOUTS = {
    "tensor and sequence, zero 1": (DENSE, 4, "1f1b", {"tp": 2, "sp": True, "zero": 1}),
    "zero 3, hybrid": (DENSE, 4, "1f1b", {"zero": 3, "dp_replicate": 2}),
    "context and pipeline": (DENSE, 8, "interleaved", {"cp": 2, "pp": 2, "vpp": 2, "zero": 2}),
    "dualpipe": (DENSE, 4, "dualpipe", {"pp": 2, "zero": 1}),
    "one process": (DENSE, 1, "1f1b", {}),
    "experts over dp": (SPARSE, 4, "1f1b", {"ep": 4, "zero": 1}),
    "ep × etp, tp and pp": (SPARSE, 8, "zb_v", {"tp": 2, "pp": 2, "ep": 2, "etp": 2, "zero": 0}),
    "dualpipe with experts": (SPARSE, 8, "dualpipe", {"pp": 2, "ep": 2, "cp": 2, "zero": 3}),
}
PAIRS = [
    ("tensor and sequence, zero 1", "zero 3, hybrid"),
    ("zero 3, hybrid", "context and pipeline"),
    ("context and pipeline", "dualpipe"),
    ("dualpipe", "one process"),
    ("experts over dp", "ep × etp, tp and pp"),
    ("ep × etp, tp and pp", "dualpipe with experts"),
]


_CURVES: dict[str, list] = {}  # of runs that nobody stopped, on one process, by what they train


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda name: name.replace(" ", "-"))
def test_offline_is_online(tmp_path, corpus, one, other):
    (model, world, schedule, parallel), (_, ranks, schedule_2, parallel_2) = (
        LAYOUTS[one],
        LAYOUTS[other],
    )
    balance = ["bias"] if model is SPARSE else ["none"]
    optim = "muon" if one.startswith("zero") else "adamw"
    saved = config_of(
        tmp_path, corpus, model, stop_after=STOP, schedule=schedule, optim=optim, **parallel
    )
    saved = dataclasses.replace(saved, moe=dataclasses.replace(saved.moe, balance=balance))
    assert train_on_ranks(saved, world) == [0] * world
    train = dataclasses.replace(saved.train, stop_after=0)
    config = dataclasses.replace(
        saved,
        parallel=ParallelConfig(**parallel_2),
        pipeline=PipelineConfig(schedule=schedule_2),
        train=train,
    )
    offline = moved(config, tmp_path / "offline")
    assert (
        reshard(
            tmp_path / "checkpoints", offline.checkpoint.dir, config, ranks, saved, "--workers", "2"
        )
        == 0
    )
    assert_loads_without_resharding(offline, ranks, config)
    assert train_on_ranks(offline, ranks) == [0] * ranks
    if (key := repr((config.model, config.optim, config.moe))) not in _CURVES:
        alone = dataclasses.replace(config, parallel=ParallelConfig(), pipeline=PipelineConfig())
        assert train_on_ranks(moved(alone, tmp_path / "straight"), 1) == [0]
        _CURVES[key] = curve(tmp_path / "straight" / "log.jsonl")
    for got, expected in zip(
        curve(tmp_path / "offline" / "log.jsonl"), _CURVES[key][STOP:], strict=True
    ):
        assert got == pytest.approx(expected, rel=1e-10), one


@pytest.mark.parametrize("number", numbers("0:4"))
def test_random_pairs(tmp_path, number):
    """Bit for bit what was saved, in the parts that the ranks of the target would write, whatever
    the two layouts."""
    dice = random.Random(number)
    config, world, _ = random_config(number)
    data = dataclasses.replace(
        config.data, train=[write_corpus(tmp_path / "a", vocab_size=config.model.vocab_size)]
    )
    saving = CheckpointConfig(dir=str(tmp_path / "checkpoints"), keep="0")
    log = LogConfig(jsonl=str(tmp_path / "log.jsonl"), progress=False, memory_check="off")
    config = dataclasses.replace(
        config,
        data=data,
        checkpoint=saving,
        log=log,
        train=dataclasses.replace(config.train, steps=4, stop_after=STOP),
    )
    assert train_on_ranks(config, world) == [0] * world
    other, ranks = another_layout(config, dice.randrange(10**6))
    other = dataclasses.replace(other, optim=config.optim)
    assert not faults_of(other, ranks)
    offline = moved(other, tmp_path / "offline")
    assert reshard(tmp_path / "checkpoints", offline.checkpoint.dir, other, ranks, config) == 0
    assert_loads_without_resharding(offline, ranks, other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, corpus):
    """A run of two steps, each of them saved; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    config = config_of(folder, corpus, dtype="bf16", stop_after=STOP, tp=2, zero=1)
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, every=1))
    assert train_on_ranks(config, 4) == [0] * 4
    return folder / "checkpoints"


TARGET = ["--world", "4", "--workers", "1", "parallel.tp=1", "parallel.pp=2", "parallel.zero=2"]


def contents(directory):
    return {
        path.relative_to(directory): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def assert_equal(folder, expected):
    found = whole_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[key]) for key, values in found.items())


def killed_at(number, source, out):
    """Runs reshard in a process that is killed at the n-th change of a file; returns how many it
    made, if it ended."""
    (counted, write), changes = os.pipe(), iter(range(1, 10**9))

    def strike(event, args):
        changing = (
            event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) or event.startswith("os.re")
        )
        if changing and str(out) in str(args[0]) and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        sys.addaudithook(strike)
        code = convert.main(["reshard", str(source), str(out), *TARGET])
        os.write(write, str(next(changes) - 1).encode())
        os._exit(code)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(counted) as pipe:
        count = pipe.read()
    # the number of changes is not quite the same each time
    assert status in ((signal.SIGKILL, 0) if number else (0,))
    return int(count or 0)


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_when_it_is_run_again(saved, tmp_path):
    """What was finished is kept, what was not is written anew, and no half checkpoint has a whole
    one's name."""
    before, expected = contents(saved), whole_tensors(step_folder(saved, STOP))
    total = killed_at(0, saved, tmp_path / "whole")
    assert total > 15
    for number in (*range(1, total, 5), *range(total - 8, total + 1)):
        out = tmp_path / str(number)
        killed_at(number, saved, out)
        final, records_of = step_folder(out, STOP), step_folder(out, STOP).with_suffix(".reshard")
        had_name = checkpoint_error(final) is None
        done = [
            path.name.removeprefix("rank-") for path in records_of.glob("rank-*") if not path.suffix
        ]
        kept = {f"__{rank}_0.distcp": 0 for rank in done} if not had_name else {}
        kept = {name: final.with_suffix(".tmp").joinpath(name).stat().st_ino for name in kept}
        assert convert.main(["reshard", str(saved), str(out), *TARGET]) == 0
        left = {path.name for path in out.iterdir() if not path.name.startswith("run.lock.")}
        assert left == {final.name, "latest"}, number
        assert {name: (final / name).stat().st_ino for name in kept} == kept
        assert checkpoint_error(final) is None and recover(out) == []
        assert_equal(final, expected)
    assert contents(saved) == before


def test_a_finished_file_that_was_damaged_since_is_written_anew(saved, tmp_path):
    total = killed_at(0, saved, tmp_path / "whole")
    for number in range(total // 2, total):
        out = tmp_path / str(number)
        killed_at(number, saved, out)
        files = sorted(step_folder(out, STOP).with_suffix(".tmp").glob("*.distcp"))
        if len(files) == 4 and (step_folder(out, STOP).with_suffix(".reshard") / "rank-3").exists():
            break
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 1
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].unlink()
    assert convert.main(["reshard", str(saved), str(out), *TARGET]) == 0
    assert_equal(step_folder(out, STOP), whole_tensors(step_folder(saved, STOP)))


def test_another_layout_begins_anew_where_one_was_interrupted(saved, tmp_path):
    killed_at(12, saved, tmp_path / "out")
    assert (
        convert.main(
            ["reshard", str(saved), str(tmp_path / "out"), "--world", "2", "parallel.zero=3"]
        )
        == 0
    )
    assert read_run(step_folder(tmp_path / "out", STOP))["config"]["parallel"]["zero"] == 3
    assert_equal(step_folder(tmp_path / "out", STOP), whole_tensors(step_folder(saved, STOP)))


def test_processes_die_with_the_one_that_was_killed(saved, tmp_path):
    words = ["reshard", str(saved), str(tmp_path / "out"), *TARGET, "--workers", "4"]
    slow = "import sys, time; from tools import convert; from tools.conversion import reshard as r; w = r.RankWriter\n"
    slow += "r.RankWriter = lambda *args: (time.sleep(60), w(*args))[1]\nsys.exit(convert.main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", slow, *words], start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(pids := children.read_text().split()) < 4:
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 20
    while any(
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text()
        for pid in pids
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert convert.main(["reshard", str(saved), str(tmp_path / "out"), *TARGET]) == 0


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def values_at(folder, key):
    """The file of a part of a tensor, and where its values begin."""
    tensors = SavedTensors(folder)
    item = next(iter(tensors.tensors[key].items.values()))
    values = (
        tensors.read(key, item.offset, item.extent).view(-1)[:4].view(torch.uint8).numpy().tobytes()
    )
    return folder / item.file, (folder / item.file).read_bytes().index(values)


KEY = "optim.exp_avg.layers.0.mlp.up.weight"
DAMAGE = {
    "a flipped bit": (
        lambda folder: flip(*values_at(folder, KEY)),
        rf"__\d_0.distcp is damaged: .* shard of {KEY},",
    ),
    "a flipped bit of the header": (
        lambda folder: flip(folder / "__1_0.distcp", 20),
        "__1_0.distcp is of another",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "__2_0.distcp", 1000),
        "__2_0.distcp has 1000 bytes where",
    ),
    "a lost file": (
        lambda folder: (folder / "__3_0.distcp").unlink(),
        "__3_0.distcp has no file where",
    ),
    "an index that changed": (
        lambda folder: flip(folder / "index.json", 500),
        "index.json is damaged",
    ),
    "a file that does not belong": (
        lambda folder: (folder / "x.pt").touch(),
        "x.pt is not a file of this checkpoint",
    ),
    "mixed": (
        lambda folder: shutil.copy(step_folder(folder.parent, 1) / "__1_0.distcp", folder),
        "__1_0.distcp (is of another|has )",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_source_is_refused_with_the_file_and_the_tensor(saved, tmp_path, capsys, kind):
    damage, reason = DAMAGE[kind]
    source = shutil.copytree(saved, tmp_path / "source")
    damage(step_folder(source, STOP))
    before = contents(source)
    assert (
        convert.main(["reshard", str(step_folder(source, STOP)), str(tmp_path / "out"), *TARGET])
        == 2
    )
    assert re.search(reason, capsys.readouterr().err)
    assert contents(source) == before and not list((tmp_path / "out").glob("step-*[0-9]"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["parallel.tp=3"], "model.num_heads"),
        (["model.hidden_size=64"], "model.hidden_size is not a key of the layout"),
        (["optim.name=muon"], "optim.name is not a key of the layout"),
        (["parallel.ptp=2"], "did you mean|nearest"),
        (["--world", "3", "parallel.pp=2"], "fix: use 4 ranks"),
        (["parallel.pp=2", "pipeline.schedule=zigzag"], "zigzag"),
    ],
)
def test_what_no_run_could_be_is_refused(saved, tmp_path, capsys, words, reason):
    assert convert.main(["reshard", str(saved), str(tmp_path / "out"), *words]) == 2
    assert re.search(reason, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_places_that_are_taken_or_hold_nothing_are_refused(saved, tmp_path, capsys):
    assert convert.main(["reshard", str(tmp_path), str(tmp_path / "out"), *TARGET]) == 2
    assert f"SRC = {tmp_path}: {tmp_path} has no files.json" in capsys.readouterr().err
    assert convert.main(["reshard", str(saved), str(saved), *TARGET]) == 2
    assert "already holds the checkpoint of step 2" in capsys.readouterr().err
    lock = LockFile(tmp_path / "out" / "run.lock", "checkpoint.dir")
    assert convert.main(["reshard", str(saved), str(tmp_path / "out"), *TARGET]) == 2
    lock.release()
    assert "belongs to a run that is still going" in capsys.readouterr().err


def test_without_a_world_the_fewest_ranks_are_taken(saved, tmp_path, capsys):
    assert (
        convert.main(
            ["reshard", str(step_folder(saved, 1)), str(tmp_path / "out"), "parallel.pp=2"]
        )
        == 0
    )
    written, command = capsys.readouterr().out.splitlines()
    assert written == f"wrote {step_folder(tmp_path / 'out', 1)} for 4 ranks"
    assert command.endswith(f"on 4 ranks with checkpoint.dir={tmp_path / 'out'}")


def test_weights_alone_are_resharded_too(saved, tmp_path):
    """What from-hf, upcycle and average write has no optimiser state."""
    folder = tmp_path / "weights"
    config = saved_config(step_folder(saved, STOP))
    weights = {
        key: ShardedTensor(values.shape, [((0,) * values.dim(), values)], values.dtype)
        for key, values in whole_tensors(step_folder(saved, STOP)).items()
        if key.startswith("model.")
    }
    save_weights(folder, weights, config)
    assert convert.main(["reshard", str(folder), str(tmp_path / "out"), *TARGET]) == 0
    assert_equal(step_folder(tmp_path / "out", 0), whole_tensors(step_folder(folder, 0)))

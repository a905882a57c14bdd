"""A rank that is slow is named, with its host; those that wait for it are not."""

import gc
import os
import re
import socket
import subprocess
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from runs import records, write_corpus

from megatron5d.comm.ledger import Exposure, Ledger
from megatron5d.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.phases.stage import Stage
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import dense_grid, expert_grid, resolve
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.process import Process
from megatron5d.train.monitoring import stragglers as slow_ranks
from megatron5d.train.monitoring.stragglers import RECORDS, SlowRanks, peers
from megatron5d.train.state import Progress
from pretrain import plan_and_train

WORLD, SLOW = 4, 1
SLEEP_S, LONGER_S = 0.1, 0.5  # of every rank's forward of a micro-batch, and of the slow one's
# more records than it takes: other work on this machine may disturb some
SLOW_STEPS, STEPS = range(2, 7), 14
MODEL = ModelConfig(vocab_size=97, num_kv_heads=2, hidden_size=32, ffn_hidden_size=48, head_dim=8)


@pytest.mark.timing
@pytest.mark.parametrize(
    "parallel", [{"tp": 2, "sp": True, "zero": 3}, {"pp": 2}], ids=["tp2-dp2", "pp2-dp2"]
)
def test_the_slow_rank_is_named_and_not_those_that_wait_for_it(tmp_path, capfd, parallel):
    """Neither its neighbors on tp nor the other stages, though their steps take as long.
    Evaluations do not count."""
    corpus = write_corpus(tmp_path / "toy", vocab_size=97)
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(**parallel),
        train=TrainConfig(steps=STEPS, gbs=4, mbs=1, seq_len=16, eval_every=3, eval_batches=1),
        data=DataConfig(train=[corpus], split="9,1"),
        log=LogConfig(
            jsonl=str(tmp_path / "log.jsonl"), progress=False, memory_check="off", slow_rank=2
        ),
    )

    def one(rank, world):
        begin, start, begun = Stage.begin, GradSync.start_step, []

        def asleep(self, op, *args):
            if op == "F":
                time.sleep(LONGER_S if rank == SLOW and len(begun) in SLOW_STEPS else SLEEP_S)
            return begin(self, op, *args)

        def counted(self, *args, **kwargs):
            begun.append(None)
            return start(self, *args, **kwargs)

        Stage.begin, GradSync.start_step = asleep, counted
        code = plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))
        assert not gc.callbacks
        return code

    assert run_ranks(one, WORLD, timeout=120) == [0] * WORLD
    found, said = records(tmp_path / "log.jsonl"), capfd.readouterr().err.splitlines()
    assert not any("slowest_rank" in record for record in found[:2])  # the first step is no measure
    slow, told = (
        [record for record in found if record["step"] - late in SLOW_STEPS] for late in (0, 1)
    )
    assert (
        sum(
            record["slowest_rank"] == SLOW and 2 < record["slowest_rank_ratio"] < 6
            for record in told
        )
        >= RECORDS
    )
    # rank 0 waits as long as it takes
    assert all(record["step_time_s"] > 2 * LONGER_S for record in slow)
    assert all(
        sum(v for k, v in record.items() if k.endswith("_exposed_s")) > 0.3 for record in slow
    )
    (named,) = [line for line in said if "slow rank" in line]
    (healed,) = [line for line in said if "no longer slow" in line]
    assert re.findall(r"rank (\d) \(", named + healed) == [str(SLOW)] * 2
    assert f"on {socket.gethostname()} (cpu)" in named and "log.slow_rank = 2" in named


@pytest.fixture
def judge(monkeypatch):
    """Of two pipeline stages of four ranks."""
    monkeypatch.setattr(slow_ranks, "broadcast_text", lambda source, *_: f"host{source}")
    mesh = Mesh(resolve(8, pp=2), {"world": Axis("world", tuple(range(8)))})
    process = Process(0, 8, 0, torch.device("cpu"))
    config = Config(log=LogConfig(slow_rank=1.2))
    judge = SlowRanks(
        SimpleNamespace(config=config, process=process, mesh=mesh, progress=Progress())
    )
    yield judge
    judge.close()


@pytest.fixture
def judged(judge):
    """What is told when the work of the ranks takes the given seconds."""

    def judged(*seconds, longest=(1,) * 8, step=(7,) * 8):
        return judge.judge(
            *(torch.tensor(each, dtype=torch.float64) for each in (seconds, longest, step))
        )

    return judged


EVEN, UNEVEN = (1, 1, 1, 1, 3, 3, 3, 3), (1, 1.1, 1, 1, 3, 3, 3.9, 3)


def test_a_rank_is_compared_with_those_that_have_as_much_to_do(judged):
    """Stages of a pipeline are not: the second one's layers take three times as long."""
    assert judged(*EVEN)[0]["slowest_rank_ratio"] == 1
    assert judged(*UNEVEN)[0] == {"slowest_rank": 6, "slowest_rank_ratio": pytest.approx(1.3)}


def test_noise_is_not_told_and_what_lasts_is_told_once(judged):
    for seconds in (UNEVEN, UNEVEN, EVEN, UNEVEN, UNEVEN):
        assert judged(*seconds)[1] == []
    (named,) = judged(*UNEVEN)[1]
    assert (
        "rank 6 (pp 1, " in named
        and "on host6 works 1.30 times as long as its peers, in 3 records" in named
    )
    for seconds in (UNEVEN, EVEN, EVEN, UNEVEN, EVEN, EVEN):
        assert judged(*seconds)[1] == []
    (healed,) = judged(*EVEN)[1]
    assert "no longer slow" in healed and "rank 6" in healed


def test_turns_on_a_cpu_core_make_no_rank_slow(judged):
    for _ in range(RECORDS + 1):
        assert judged(*(second / 20 for second in (4, 1, 1, 1, 3, 3, 3, 3)))[1] == []


def test_several_ranks_of_a_slow_node_are_named_together(judged):
    node = (1, 1, 1.5, 1.5, 3, 3, 3, 3)
    assert (judged(*node)[1], judged(*node)[1]) == ([], [])
    (named,) = judged(*node)[1]
    assert re.findall(r"rank (\d) \(", named) == ["2", "3"]


def test_one_long_stop_is_told_at_once(judged):
    stop, short = (1, 1, 16, 1, 3, 3, 3, 3), (1, 1, 5, 1, 3, 3, 3, 3)
    (named,) = judged(*EVEN, longest=stop)[1]
    assert (
        named.startswith("stalled: rank 2 (pp 0, ")
        and "on host2 took 16.0 s for step 7, its peers 1.0 s" in named
    )
    assert judged(*EVEN, longest=short)[1] == judged(*EVEN)[1] == []


@pytest.mark.timing
def test_a_process_that_is_stopped_is_named_and_not_those_that_wait_for_it(
    tmp_path, capfd, monkeypatch
):
    """Whatever it waited for itself when it was stopped."""
    monkeypatch.setattr(slow_ranks, "STALL_S", 2.0)
    corpus = write_corpus(tmp_path / "toy", vocab_size=97)
    config = Config(
        model=MODEL,
        parallel=ParallelConfig(tp=2, sp=True),
        train=TrainConfig(steps=8, gbs=4, mbs=1, seq_len=16),
        data=DataConfig(train=[corpus]),
        log=LogConfig(progress=False, memory_check="off", slow_rank=2),
    )
    marker = tmp_path / "stopped"

    def one(rank, world):
        start, begun = GradSync.start_step, []
        if rank == SLOW:  # a shell that is there by the time it is needed
            script = "read; sleep 0.2; kill -STOP $1; touch $2; sleep $3; kill -CONT $1"
            values = map(str, (os.getpid(), marker, 2 * slow_ranks.STALL_S))
            shell = subprocess.Popen(
                ["bash", "-c", script, "stop", *values], bufsize=0, stdin=subprocess.PIPE
            )

        def counted(self, *args, **kwargs):
            begun.append(None)
            if len(begun) == 4 and rank == SLOW:
                shell.stdin.write(b"\n")
            while len(begun) == 4 and rank != SLOW and not marker.exists():
                # until then the slow one waits for us, and is stopped while it does
                time.sleep(0.01)
            return start(self, *args, **kwargs)

        GradSync.start_step = counted
        return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))

    assert run_ranks(one, WORLD, timeout=120) == [0] * WORLD
    (named,) = [
        line
        for line in capfd.readouterr().err.splitlines()
        if "stalled" in line or "slow rank" in line
    ]
    assert re.findall(r"rank (\d) \(.* for step (\d)", named) == [(str(SLOW), "4")]


def test_fused_gemms_wait_for_their_neighbors_unseen(judge, judged):
    judge._run.config = Config(parallel=ParallelConfig(tp=2, sp=True, tp_overlap="fused"))
    messages = [judged(*UNEVEN)[1] for _ in range(RECORDS)]
    assert messages[-1][0].endswith(
        "; with parallel.tp_overlap=fused the slow rank may be a tp neighbor"
    )


def test_garbage_collection_counts_in_no_step_and_outside_of_steps_not_at_all(monkeypatch):
    """Not as a second less of work in the step after an evaluation, in which it happened."""
    now, compared = [0.0], []
    monkeypatch.setattr(slow_ranks.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(slow_ranks, "all_reduce", lambda work, _: compared.append(work) or work)
    mesh = Mesh(resolve(2), {"world": Axis("world", (0, 1))})
    process = Process(0, 2, 0, torch.device("cpu"))
    run = SimpleNamespace(
        config=Config(log=LogConfig(slow_rank=1.2)), process=process, mesh=mesh, progress=Progress()
    )
    ranks = SlowRanks(run)

    def collect(seconds):
        ranks._time_collection("start", {})
        now[0] += seconds
        ranks._time_collection("stop", {})

    for _ in range(3):
        ranks.start()
        collect(0.25)
        ranks.step(2.0, {"tp": 0.5})
        run.progress.step += 1
        collect(1.0)
    ranks.compare()
    ranks.close()
    assert compared[0].tolist() == [[1.25, 0.0], [1.25, 0.0], [2.0, 0.0]]


@pytest.mark.parametrize(
    ("experts", "ep", "etp"), [(0, 1, None), (8, 4, 1), (8, 2, 2), (8, 4, 2), (8, 8, 1)]
)
def test_peers_hold_the_same_layers_and_experts(experts, ep, etp):
    """Where two ranks of a stage have the same experts; else the same layers are enough."""
    sizes = resolve(16, pp=2, tp=2, ep=ep, etp=etp)
    dense = dense_grid(sizes)
    grid = expert_grid(sizes, dense)
    layers = [dense.coordinate(rank, "pp") for rank in range(16)]
    both = [(stage, grid.coordinate(rank, "ep")) for rank, stage in enumerate(layers)]
    work = both if experts and len(set(both)) < 16 else layers
    expected = {frozenset(rank for rank in range(16) if work[rank] == one) for one in work}
    assert {
        *map(frozenset, peers(sizes, Config(model=ModelConfig(num_experts=experts))))
    } == expected


@pytest.mark.parametrize("slow_rank", [0, 2])
def test_what_it_costs(tmp_path, slow_rank):
    """Two readings of the clock for a wait of every collective; and one small collective more, at a
    record alone."""
    corpus = write_corpus(tmp_path / "toy", vocab_size=97)
    config = Config(
        model=MODEL,
        train=TrainConfig(steps=5, gbs=4, mbs=1, seq_len=16),
        data=DataConfig(train=[corpus]),
        log=LogConfig(every=2, progress=False, memory_check="off", slow_rank=slow_rank),
    )

    def one(rank, world):
        counts = Counter()

        def counting(owner, name, what):
            before = getattr(owner, name)
            setattr(owner, name, lambda *args: (counts.update([what]), before(*args))[1])

        counting(slow_ranks, "all_reduce", "compared")
        counting(Exposure, "time_call", "timed")
        counting(Ledger, "record", "sent")
        plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))
        return counts

    for counts in run_ranks(one, 2, timeout=120):
        records_compared = 3  # of steps 2, 4 and 5
        assert counts["compared"] == (records_compared if slow_rank else 0)
        # before the first step the ranks agree that no signal has come
        untimed = records_compared + 1
        assert counts["timed"] == (counts["sent"] - untimed if slow_rank else 0)

"""launch/slurm.sbatch on a real SLURM: eight ranks on four nodes give the loss of one process; runs
stop when told."""

import fcntl
import json
import sys
import tempfile
from pathlib import Path

import pytest
from ranks import run_ranks
from runs import curve, write_corpus
from slurm_cluster import slurm_cluster, until, why_not

from pretrain import main

ROOT = Path(__file__).resolve().parents[2]
EIGHT = ("--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=30")
FOUR = ("--nodes=2", *EIGHT[1:])
EXPERIMENT = [
    *(
        "model=tiny",
        "model.vocab_size=97",
        "precision.dtype=fp64",
        "train.gbs=8",
        "train.seq_len=16",
    ),
    *("optim.lr=1e-2", "log.progress=false"),
]

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster():
    with open(__file__) as one, tempfile.TemporaryDirectory(prefix="slurm") as folder:
        fcntl.flock(
            one, fcntl.LOCK_EX
        )  # two clusters would number their jobs alike, and jobs meet at a port so numbered
        with slurm_cluster(Path(folder), 4) as cluster:
            yield cluster


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus", vocab_size=97)


def submit(cluster, folder, arguments, size=FOUR):
    cluster.environment["PYTHON"] = sys.executable
    out = f"--output={folder}/job.out"
    return cluster.submit(*size, out, "launch/slurm.sbatch", *EXPERIMENT, *arguments, cwd=ROOT)


def finished(cluster, number, folder, exit_code, timeout=400):
    job = cluster.wait(number, timeout)
    assert job["ExitCode"] == f"{exit_code}:0", (folder / "job.out").read_text()


def test_eight_ranks_on_four_nodes_give_the_loss_of_one_process(cluster, corpus, tmp_path):
    run = [f"data.train=[{corpus}]", "train.steps=4"]
    layout = [
        "parallel.tp=2",
        "parallel.sp=true",
        "parallel.zero=1",
        f"log.jsonl={tmp_path}/eight.jsonl",
    ]
    finished(cluster, submit(cluster, tmp_path, [*run, *layout], EIGHT), tmp_path, 0)
    assert run_ranks(
        lambda rank, world: main([*EXPERIMENT, *run, f"log.jsonl={tmp_path}/one.jsonl"]), 1
    ) == [0]

    eight, one = curve(tmp_path / "eight.jsonl"), curve(tmp_path / "one.jsonl")
    assert len(eight) == 4
    assert one[-1][1] < one[0][1]
    for left, right in zip(eight, one, strict=True):
        assert left == pytest.approx(right, rel=1e-10)
    assert "8 ranks on node[1-4]" in (tmp_path / "job.out").read_text()


def test_a_refused_configuration_is_the_jobs_exit_code(cluster, corpus, tmp_path):
    number = submit(cluster, tmp_path, [f"data.train=[{corpus}]", "parallel.tp=3"])
    finished(cluster, number, tmp_path, 2)
    assert (tmp_path / "job.out").read_text().count("the configuration is refused") == 1


def test_a_signal_to_the_step_saves_and_stops_every_rank(cluster, corpus, tmp_path):
    log = tmp_path / "log.jsonl"
    places = [f"log.jsonl={log}", f"checkpoint.dir={tmp_path}/checkpoints"]
    number = submit(cluster, tmp_path, [f"data.train=[{corpus}]", "train.steps=100000", *places])
    until(lambda: log.exists() and log.read_text().count("\n") >= 2, 300, "two steps are made")
    cluster.run("scancel", "--signal=USR1", str(number))
    finished(cluster, number, tmp_path, 75)
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert (tmp_path / "checkpoints" / f"step-{last:08d}").is_dir()

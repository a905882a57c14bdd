"""launch/slurm.sbatch on a real SLURM: eight ranks on four nodes give the loss of one process, and
runs stop on a signal."""

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
EIGHT_RANKS = ("--nodes=4", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=30")
FOUR_RANKS = ("--nodes=2", *EIGHT_RANKS[1:])
EXPERIMENT = [
    "model=tiny",
    "model.vocab_size=97",
    "precision.dtype=fp64",
    "train.gbs=8",
    "train.seq_len=16",
    "optim.lr=1e-2",
    "log.progress=false",
]

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def cluster():
    with open(__file__) as lock, tempfile.TemporaryDirectory(prefix="slurm") as folder:
        # two clusters would number their jobs alike, and a job's number determines its port
        fcntl.flock(lock, fcntl.LOCK_EX)
        with slurm_cluster(Path(folder), 4) as cluster:
            cluster.environment["PYTHON"] = sys.executable
            yield cluster


class Job:
    """Jobs of one test."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        corpus = write_corpus(folder / "corpus", vocab_size=97)
        self.experiment = [*EXPERIMENT, f"data.train=[{corpus}]"]

    def submit(self, *overrides, size=FOUR_RANKS):
        self.number = self.cluster.submit(
            *size,
            f"--output={self.folder}/job.out",
            "launch/slurm.sbatch",
            *self.experiment,
            *overrides,
            cwd=ROOT,
        )

    def assert_ends_with(self, code):
        end = self.cluster.wait(self.number, 400)
        assert end["ExitCode"] == f"{code}:0", self.output()

    def output(self):
        return (self.folder / "job.out").read_text()


@pytest.fixture
def job(cluster, tmp_path):
    return Job(cluster, tmp_path)


def test_eight_ranks_on_four_nodes_give_the_loss_of_one_process(job, tmp_path):
    layout = ["parallel.tp=2", "parallel.sp=true", "parallel.zero=1"]
    eight, one = tmp_path / "eight.jsonl", tmp_path / "one.jsonl"
    job.submit(*layout, "train.steps=4", f"log.jsonl={eight}", size=EIGHT_RANKS)
    job.assert_ends_with(0)
    overrides = [*job.experiment, "train.steps=4", f"log.jsonl={one}"]
    assert run_ranks(lambda rank, world: main(overrides), 1) == [0]

    losses, reference = curve(eight), curve(one)
    assert len(losses) == 4
    assert reference[-1][1] < reference[0][1]
    for loss, expected in zip(losses, reference, strict=True):
        assert loss == pytest.approx(expected, rel=1e-10)
    assert "8 ranks on node[1-4]" in job.output()


@pytest.mark.slow
def test_a_refused_configuration_is_the_jobs_exit_code(job):
    job.submit("parallel.tp=3")
    job.assert_ends_with(2)
    assert job.output().count("the configuration is refused") == 1


def test_a_signal_to_the_step_saves_and_stops_every_rank(job, tmp_path):
    log, checkpoints = tmp_path / "log.jsonl", tmp_path / "checkpoints"
    job.submit("train.steps=100000", f"log.jsonl={log}", f"checkpoint.dir={checkpoints}")
    until(lambda: log.exists() and log.read_text().count("\n") >= 2, 300, "two steps are made")
    job.cluster.run("scancel", "--signal=USR1", str(job.number))
    job.assert_ends_with(75)
    last = json.loads(log.read_text().splitlines()[-1])["step"]
    assert (checkpoints / f"step-{last:08d}").is_dir()

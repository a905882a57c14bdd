"""pretrain.py rejects a configuration: exit code 2 and one message from one rank.

It does so before ranks meet and before anything is written.
"""

import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from forks import Fork
from runs import write_corpus

from megatron5d.checkpoint.folder import write_manifest
from megatron5d.config.load import load_config
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.train.state import checkpoint_faults
from pretrain import main

ROOT = Path(__file__).parents[3]


def environment(rank: int, world: int, port: str) -> dict[str, str]:
    """Variables of a rank under torchrun, instead of those of the tests' own launcher."""
    launchers = ("SLURM_", "TORCHELASTIC")
    env = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    if world > 1:
        env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return env


def pretrain(
    folder: Path, *argv: str, rank: int = 0, world: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs one rank; nobody listens at its rendezvous, so that meeting others would fail."""
    env = environment(rank, world, "9") | {"PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "pretrain.py"), *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture()
def folder(tmp_path):
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"\0\0")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "world", "words"),
    [
        ("train.gbss=16 model=lama3_8b", 1, ["did you mean train.gbs?", "model=llama3_8b"]),
        (
            "parallel.tp=3 optim.lr=-1 train.steps=ten",
            8,
            ["parallel.tp=", "optim.lr=", "train.steps=100"],
        ),
        (
            "log.dir=run log.jsonl=run/log.jsonl checkpoint.dir=run/c parallel.zero=4",
            2,
            ["parallel.zero=3"],
        ),
        (
            "pipeline.schedule=1f1p parallel.pp=3",
            4,
            ["pipeline.schedule=1f1b", "parallel.pp="],
        ),
        (
            "data.valid=[a] parallel.pp=2 pipeline.schedule=dualpipe train.gbs=2",
            2,
            ["a.bin", "train.gbs=4"],
        ),
        ("model.from_hf=.", 1, ["model.from_hf", "config.json"]),
    ],
)
def test_rejected_before_anything_happens(argv, world, words, folder):
    files = files_below(folder)
    ended = pretrain(folder, "data.train=[corpus]", *argv.split(), world=world)
    assert ended.returncode == 2, ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr
    assert ended.stdout == "" and "Traceback" not in ended.stderr
    assert files_below(folder) == files


def test_files_without_a_sample_are_rejected(folder):
    """Before the ranks start, which takes minutes in a large run."""
    write_corpus(folder / "short", vocab_size=97, documents=3)
    tokens = IndexedDataset(folder / "short").num_tokens
    (folder / "cut.idx").write_bytes((folder / "short.idx").read_bytes())
    (folder / "cut.bin").write_bytes(b"\0\0")
    (folder / "words.txt").write_text("no tokenizer")
    run = ["model=tiny", "data.tokenizer=words.txt", f"train.seq_len={tokens}", "train.gbs=2"]
    ended = pretrain(folder, "data.train=[short,cut]", "data.valid=[corpus]", *run)
    assert ended.returncode == 2 and "4 faults" in ended.stderr, ended.stderr
    for words in (
        f"data.train: a sample requires train.seq_len + 1 = {tokens + 1} tokens (short has {tokens})",
        f"train.seq_len={tokens - 1} or less",
        "data.train: cut.bin: byte 2: the file has 2 bytes",
        "data.valid: corpus.idx: byte 0: ",
        "data.tokenizer: words.txt: not a sentencepiece model",
    ):
        assert words in ended.stderr, ended.stderr


def test_folders_without_a_checkpoint_are_rejected(folder):
    """Not by rank 0 alone, minutes later and with exit code 1."""
    write_corpus(folder / "long", vocab_size=97)
    (folder / "empty").mkdir()
    run = ["model=tiny", "data.train=[long]", "train.gbs=2", "checkpoint.resume=empty"]
    ended = pretrain(folder, *run)
    assert ended.returncode == 2 and "1 fault" in ended.stderr, ended.stderr
    assert "checkpoint.resume = empty: empty has no files.json" in ended.stderr


def test_initial_weights_that_are_missing_are_a_fault_unless_the_run_resumes(folder):
    torn, own = folder / "torn" / "step-00000007", folder / "own" / "step-00000002"
    torn.mkdir(parents=True)
    own.mkdir(parents=True)
    words = [f"init.from_checkpoint={torn.parent}", f"checkpoint.dir={own.parent}"]
    config = load_config(words)
    (fault,) = checkpoint_faults(config, world=1)
    reason = f"init.from_checkpoint = {torn.parent}: {torn} has no files.json"
    assert fault.reason.startswith(reason) and fault.local
    # it may be complete: rank 0 checks that when all ranks have met
    (own / "files.json").write_text("{}")
    assert checkpoint_faults(config, world=1) == []


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK must be a whole number (got 'a')"),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "9"},
            "rank 2 of a world of 2",
        ),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"},
            "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set",
        ),
    ],
)
def test_wrong_variables_of_a_launcher_are_rejected(variables, reason, monkeypatch, capsys):
    launcher = ("SLURM_", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MEGATRON5D_MEETING")
    for name in [name for name in os.environ if name.startswith(launcher)]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["model=tiny"]) == 2
    message = capsys.readouterr().err
    assert "the launcher's variables are wrong" in message and reason in message
    assert len(message.splitlines()) == 1


@pytest.mark.slow
def test_the_other_ranks_are_silent(folder):
    ended = pretrain(folder, "data.train=[corpus]", "train.gbs=3", rank=1, world=2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def two_ranks(
    folder: Path, argv: list[str], second: list[str], lr: str | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two ranks.

    Args:
        second: further words of rank 1, as on a node with another configuration.
        lr: variable LR of rank 1, which is 0.002 on rank 0; None = not set.
    """
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    first_env = environment(0, 2, port) | {"LR": "0.002"}
    second_env = environment(1, 2, port) | ({} if lr is None else {"LR": lr})
    ranks = [
        Fork(partial(main, argv), folder, first_env),
        Fork(partial(main, [*argv, *second]), folder, second_env),
    ]
    results = [rank.wait() for rank in ranks]
    return [(result.returncode, result.stdout, result.stderr) for result in results]


TINY = ["model=tiny", "model.vocab_size=97", "data.train=[whole]"]
TINY += ["train.steps=1", "train.gbs=2", "train.seq_len=16"]


@pytest.mark.parametrize(
    ("argv", "second", "words"),
    [
        ([], ["data.train=[scratch/corpus]"], "there is no scratch/corpus.bin"),
        ([], ["train.stepz=2"], "did you mean train.steps?"),
        (["optim.lr=${oc.env:LR}"], [], "Environment variable 'LR' not found"),
    ],
)
def test_a_fault_of_one_node_is_printed_once_and_ends_all(argv, second, words, folder):
    """Rank 0 has no fault, and would wait for a rank that left without a message."""
    write_corpus(folder / "whole", vocab_size=97)
    files = files_below(folder)
    (code, _, message), (other_code, _, other) = two_ranks(folder, [*TINY, *argv], second)
    assert (code, other_code, other) == (2, 2, ""), other
    prefix = f"rank 1 on {socket.gethostname()}: the configuration is refused"
    assert message.startswith(prefix) and words in message
    assert message.count("the configuration is refused") == 1 and files_below(folder) == files


def test_a_fault_of_rank_0_ends_the_others_in_order(folder):
    """It has no configuration with which they could compare theirs."""
    write_corpus(folder / "whole", vocab_size=97)
    argv = [*TINY, "data.train=[scratch/corpus]"]
    (code, _, message), other = two_ranks(folder, argv, ["data.train=[whole]"])
    assert (code, *other) == (2, 2, "", ""), other
    assert message.startswith("the configuration is refused") and "waits for" not in message


def test_every_rank_takes_the_configuration_of_rank_0(folder):
    """Otherwise each would save in its own folder, or train with its own learning rate."""
    write_corpus(folder / "whole", vocab_size=97)
    outputs = ["optim.lr=${oc.env:LR}", "checkpoint.dir=${now:%H%M%S%f}/ck", "checkpoint.every=1"]
    (code, _, log), (other_code, _, other) = two_ranks(folder, [*TINY, *outputs], [], lr="0.001")
    assert (code, other_code, other) == (0, 0, ""), log + other
    assert "not the same on all ranks: optim.lr = 0.002, 0.001 on rank 1" in log
    assert "checkpoint.dir = " in log
    (saved,) = folder.glob("*/ck/step-00000001")
    assert '"lr":0.002' in (saved / "run.json").read_text().replace(" ", "")


@pytest.mark.parametrize(
    "change", [{"progress": {"step": "3"}}, {"format": 99}, {"config": "[" * 200_000}]
)
def test_a_damaged_record_is_rejected_like_a_configuration(change, folder):
    write_corpus(folder / "whole", vocab_size=97)
    argv = [*TINY, "checkpoint.dir=ck"]
    assert pretrain(folder, *argv).returncode == 0
    run = folder / "ck" / "step-00000001" / "run.json"
    text = json.dumps(json.loads(run.read_text()) | change)
    run.write_text(text.replace('"[[', "[[").replace('[["', "[["))
    write_manifest(run.parent)
    ended = pretrain(folder, *argv)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert str(Path("ck", run.parent.name)) in ended.stderr


def test_cfg_and_help_end_well(folder):
    ended = pretrain(folder, "--cfg", "job", "experiment=quickstart")
    assert ended.returncode == 0 and "seq_len: 128" in ended.stdout and ended.stderr == ""
    ended = pretrain(folder, "--help")
    assert ended.returncode == 0 and "[sequences] global batch" in ended.stdout
    assert files_below(folder) == ["corpus.bin", "corpus.idx"]

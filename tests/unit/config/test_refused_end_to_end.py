"""pretrain.py itself refuses: exit code 2, one message from one rank, before anybody is met and
anything is written."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from forks import Fork
from runs import write_corpus

from megatron5d.checkpoint.folder import write_manifest
from megatron5d.config.checks import run_checks
from megatron5d.config.schema import (
    CheckpointConfig,
    Config,
    InitConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    TrainConfig,
)
from megatron5d.data.indexed_dataset import IndexedDataset
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.schedule_csv import write_program
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults
from megatron5d.train import pipeline_layout
from megatron5d.train.state import checkpoint_faults
from pretrain import main

ROOT = Path(__file__).parents[3]


def pretrain(
    folder: Path, *argv: str, rank: int = 0, world: int = 1
) -> subprocess.CompletedProcess[str]:
    """Runs one rank; its meeting point is an address where nobody listens, so meeting anybody would
    fail or hang."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC"))
    }
    launcher = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    env = {**kept, **(launcher if world > 1 else {}), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "pretrain.py"), *argv]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture()
def folder(tmp_path):
    for name in ("corpus.bin", "corpus.idx"):
        (tmp_path / name).write_bytes(b"\0\0")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "world", "words"),
    [
        (["train.gbss=16", "model=lama3_8b"], 1, ["did you mean train.gbs?", "model=llama3_8b"]),
        (
            ["parallel.tp=3", "optim.lr=-1", "train.steps=ten"],
            8,
            ["parallel.tp=", "optim.lr=", "train.steps=100"],
        ),
        (
            ["log.dir=run", "log.jsonl=run/log.jsonl", "checkpoint.dir=run/c", "parallel.zero=4"],
            2,
            ["parallel.zero=3"],
        ),
        (
            ["pipeline.schedule=1f1p", "parallel.pp=3"],
            4,
            ["pipeline.schedule=1f1b", "parallel.pp="],
        ),
        (
            ["data.valid=[a]", "parallel.pp=2", "pipeline.schedule=dualpipe", "train.gbs=2"],
            2,
            ["a.bin", "train.gbs=4"],
        ),
        (["model.from_hf=."], 1, ["model.from_hf", "config.json"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_refused_before_anything_happens(argv, world, words, folder):
    before = everything_below(folder)
    ended = pretrain(folder, "data.train=[corpus]", *argv, world=world)
    assert ended.returncode == 2, ended.stderr
    for word in words:
        assert word in ended.stderr, ended.stderr
    assert ended.stdout == "" and "Traceback" not in ended.stderr
    assert everything_below(folder) == before


def test_files_of_which_no_sample_can_be_made_are_refused(folder):
    """Before the first step, whose ranks a large run takes minutes to start."""
    write_corpus(folder / "short", vocab_size=97, documents=3)
    tokens = IndexedDataset(folder / "short").num_tokens
    (folder / "cut.idx").write_bytes((folder / "short.idx").read_bytes())
    (folder / "cut.bin").write_bytes(b"\0\0")
    (folder / "words.txt").write_text("no tokenizer")
    run = ["model=tiny", "data.tokenizer=words.txt", f"train.seq_len={tokens}", "train.gbs=2"]
    ended = pretrain(folder, "data.train=[short,cut]", "data.valid=[corpus]", *run)
    assert ended.returncode == 2 and "4 faults" in ended.stderr, ended.stderr
    for words in (
        f"data.train: short holds {tokens} tokens, and one sample takes train.seq_len + 1 = {tokens + 1}",
        f"train.seq_len={tokens - 1} or less",
        "data.train: cut.bin: byte 2: the file has 2 bytes",
        "data.valid: corpus.idx: byte 0: ",
        "data.tokenizer: words.txt: not a sentencepiece model",
    ):
        assert words in ended.stderr, ended.stderr


def test_folders_without_a_checkpoint_are_refused(folder):
    """Rank 0 would tell the same after minutes, and end with code 1; of what may be whole it alone
    asks for all."""
    write_corpus(folder / "long", vocab_size=97)
    (folder / "empty").mkdir()
    run = ["model=tiny", "data.train=[long]", "train.gbs=2", "checkpoint.resume=empty"]
    ended = pretrain(folder, *run)
    assert ended.returncode == 2 and "1 fault" in ended.stderr, ended.stderr
    assert "checkpoint.resume = empty: empty has no files.json" in ended.stderr


def test_first_weights_from_nowhere_are_a_fault_unless_the_run_goes_on(folder):
    torn, own = folder / "torn" / "step-00000007", folder / "own" / "step-00000002"
    torn.mkdir(parents=True)
    own.mkdir(parents=True)
    config = Config(
        init=InitConfig(from_checkpoint=str(torn.parent)),
        checkpoint=CheckpointConfig(str(own.parent)),
    )
    (fault,) = checkpoint_faults(config, world=1)
    assert (
        fault.reason.startswith(f"init.from_checkpoint = {torn.parent}: {torn} has no files.json")
        and fault.local
    )
    (own / "files.json").write_text("{}")  # it may be whole: rank 0 looks when all have met
    assert checkpoint_faults(config, world=1) == []


@pytest.mark.parametrize(
    ("variables", "said"),
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
def test_wrong_variables_of_a_launcher_are_refused(variables, said, monkeypatch, capsys):
    for name in os.environ:
        if name.startswith("SLURM_") or name in (
            "RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MEGATRON5D_MEETING",
        ):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["model=tiny"]) == 2
    told = capsys.readouterr().err
    assert (
        "the launcher's variables are wrong" in told
        and said in told
        and len(told.splitlines()) == 1
    )


def test_the_other_ranks_are_silent(folder):
    ended = pretrain(folder, "data.train=[corpus]", "train.gbs=3", rank=1, world=2)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def two_ranks(
    folder: Path, argv: list[str], second: list[str], lr: str | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of two ranks whose command lines and variables differ, as those
    of two nodes may."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SLURM_", "TORCHELASTIC"))
    }
    variables = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "LR": "0.002",
    }
    started = []
    for rank, more in enumerate(([], second)):
        env = {**kept, **variables, "RANK": str(rank)}
        if rank:
            env = {key: value for key, value in {**env, "LR": lr}.items() if value is not None}
        started.append(Fork(partial(main, [*argv, *more]), folder, env))
    ended = [each.wait() for each in started]
    return [(each.returncode, each.stdout, each.stderr) for each in ended]


TINY = [
    "model=tiny",
    "model.vocab_size=97",
    "data.train=[whole]",
    "train.steps=1",
    "train.gbs=2",
    "train.seq_len=16",
]


@pytest.mark.parametrize(
    ("argv", "second", "words"),
    [
        ([], ["data.train=[scratch/corpus]"], "there is no scratch/corpus.bin"),
        ([], ["train.stepz=2"], "did you mean train.steps?"),
        (["optim.lr=${oc.env:LR}"], [], "Environment variable 'LR' not found"),
    ],
)
def test_what_is_wrong_on_one_node_alone_is_told_once_and_ends_all(argv, second, words, folder):
    """Rank 0 finds nothing wrong, and would wait for a rank that has left without a word."""
    write_corpus(folder / "whole", vocab_size=97)
    before = everything_below(folder)
    (code, _, told), (other_code, _, silent) = two_ranks(folder, [*TINY, *argv], second)
    assert (code, other_code, silent) == (2, 2, ""), silent
    assert (
        told.startswith(f"rank 1 on {socket.gethostname()}: the configuration is refused")
        and words in told
    )
    assert told.count("the configuration is refused") == 1 and everything_below(folder) == before


def test_what_is_wrong_on_rank_0_alone_ends_the_others_in_order(folder):
    """It has no configuration that they could compare theirs with."""
    write_corpus(folder / "whole", vocab_size=97)
    (code, _, told), other = two_ranks(
        folder, [*TINY, "data.train=[scratch/corpus]"], ["data.train=[whole]"]
    )
    assert (code, *other) == (2, 2, "", ""), other
    assert told.startswith("the configuration is refused") and "waits for" not in told


def test_every_rank_takes_the_configuration_of_rank_0(folder):
    """Each would save in a folder of its own, or train at a rate of its own."""
    write_corpus(folder / "whole", vocab_size=97)
    outputs = ["optim.lr=${oc.env:LR}", "checkpoint.dir=${now:%H%M%S%f}/ck", "checkpoint.every=1"]
    (code, _, told), (other_code, _, silent) = two_ranks(folder, [*TINY, *outputs], [], lr="0.001")
    assert (code, other_code, silent) == (0, 0, ""), told + silent
    assert (
        "not the same on all ranks: optim.lr = 0.002, 0.001 on rank 1" in told
        and "checkpoint.dir = " in told
    )
    (saved,) = folder.glob("*/ck/step-00000001")
    assert '"lr":0.002' in (saved / "run.json").read_text().replace(" ", "")


@pytest.mark.parametrize(
    "change", [{"progress": {"step": "3"}}, {"format": 99}, {"config": "[" * 200_000}]
)
def test_a_record_written_by_hand_is_refused_as_a_configuration_is(change, folder):
    write_corpus(folder / "whole", vocab_size=97)
    saved = [*TINY, "checkpoint.dir=ck"]
    assert pretrain(folder, *saved).returncode == 0
    run = folder / "ck" / "step-00000001" / "run.json"
    run.write_text(
        json.dumps(json.loads(run.read_text()) | change).replace('"[[', "[[").replace('[["', "[[")
    )
    write_manifest(run.parent)
    ended = pretrain(folder, *saved)
    assert (
        ended.returncode == 2
        and "Traceback" not in ended.stderr
        and str(Path("ck", run.parent.name)) in ended.stderr
    )


def test_cfg_and_help_end_well(folder):
    shown = pretrain(folder, "--cfg", "job", "experiment=quickstart")
    assert shown.returncode == 0 and "seq_len: 128" in shown.stdout and shown.stderr == ""
    helped = pretrain(folder, "--help")
    assert helped.returncode == 0 and "[sequences] global batch" in helped.stdout
    assert everything_below(folder) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize(
    ("world", "gbs", "layers", "change"),
    [
        (6, 12, 6, {"parallel": {"pp": 2}}),  # not 4, which does not divide 6
        (6, 16, 6, {"parallel": {"pp": 6}}),  # under 2, dp = 3 would not divide 16
        (3, 12, 6, {"pipeline": {"schedule": "dualpipe_v"}}),
        (3, 12, 3, {"pipeline": {"schedule": "1f1b"}}),  # too few layers for two chunks a rank
    ],
)
def test_an_odd_number_of_ranks_that_shall_be_mirrored_gets_a_fix_that_stands(
    world, gbs, layers, change
):
    config = Config(
        model=ModelConfig(num_layers=layers),
        parallel=ParallelConfig(pp=3),
        pipeline=PipelineConfig(schedule="dualpipe"),
        train=TrainConfig(gbs=gbs, mbs=1),
    )
    (fault,) = pipeline_faults(config, world)
    ((group, field),) = change.items()
    ((name, value),) = field.items()
    assert "is odd" in fault.reason and fault.fix == f"{group}.{name}={value}"
    mended = replace(config, **{group: replace(getattr(config, group), **field)})
    assert run_checks(mended, world, files=False) == [] and pipeline_faults(mended, world) == []


@pytest.mark.parametrize(
    ("gbs", "old", "new", "reason", "fix"),
    [
        (8, "1F5,", "", "rank 1, position 9: 1F5 is missing", "pipeline.schedule=1f1b, or file:"),
        (9, "~", "", "0F8 is missing", "train.gbs=8"),
        (
            6,
            "~",
            "",
            "0F6 is beyond num_microbatches=6 = train.gbs / (train.mbs·dp) = 6 / 1",
            "train.gbs=8",
        ),
        (8, "\n1F0", "\n1F0\n1F0", "has 3 rows, one per rank, but pp=2", "parallel.pp=3"),
    ],
)
def test_a_file_that_is_no_schedule_of_this_run_gets_a_fix_of_its_own(
    tmp_path, gbs, old, new, reason, fix
):
    path = tmp_path / "mine.csv"
    path.write_text(write_program(build_program("1f1b", 2, 8)).replace(old, new))
    config = Config(
        model=ModelConfig(num_layers=2),
        parallel=ParallelConfig(pp=2),
        pipeline=PipelineConfig(schedule=f"file:{path}"),
        train=TrainConfig(gbs=gbs, mbs=1),
    )
    (fault,) = pipeline_faults(config, 2)
    assert fault.reason.startswith(f"pipeline.schedule = file:{path}") and reason in fault.reason
    assert fault.fix.startswith(fix)


def test_other_chunks_than_those_of_the_schedules_file_are_refused(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(write_program(build_program("interleaved", 2, 8, 2)))
    config = Config(
        model=ModelConfig(num_layers=4),
        parallel=ParallelConfig(pp=2, vpp=3),
        pipeline=PipelineConfig(schedule=f"file:{path}"),
        train=TrainConfig(gbs=8, mbs=1),
    )
    (fault,) = pipeline_faults(config, 2)
    assert fault.reason.endswith("needs parallel.vpp=2 (got 3)")
    assert fault.fix == "parallel.vpp=2"
    for vpp in (1, 2):  # 1, the default, leaves it to the file
        assert pipeline_faults(replace(config, parallel=ParallelConfig(pp=2, vpp=vpp)), 2) == []


def test_a_small_batch_of_a_ramp_is_named_and_not_the_last_one():
    config = Config(
        model=ModelConfig(num_layers=2),
        parallel=ParallelConfig(pp=2),
        pipeline=PipelineConfig(schedule="dualpipe"),
        train=TrainConfig(gbs=8, mbs=1, gbs_ramp=[3, 5, 6]),
    )
    (fault,) = pipeline_faults(config, 2)
    assert "num_microbatches=3 = train.gbs_ramp / (train.mbs·dp) = 3 / 1" in fault.reason
    assert fault.fix == "train.gbs_ramp=null" and "train.gbs_ramp" in fault.knobs
    assert pipeline_faults(replace(config, train=replace(config.train, gbs_ramp=None)), 2) == []


def test_costs_that_cannot_be_read_are_no_fault_of_the_schedules_file(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(write_program(build_program("1f1b", 2, 8)))
    config = Config(
        model=ModelConfig(num_layers=2),
        parallel=ParallelConfig(pp=2),
        pipeline=PipelineConfig(schedule=f"file:{path}", costs="F=1,F=2"),
        train=TrainConfig(gbs=8, mbs=1),
    )
    (fault,) = pipeline_faults(config, 2)
    assert (fault.reason, fault.fix) == ("pipeline.costs: F is given twice", "pipeline.costs=null")


@pytest.mark.parametrize(
    ("name", "fix"), [("1f1b", "pipeline.schedule=gpipe"), ("gpipe", "pipeline.schedule=1f1b")]
)
def test_a_wrong_order_of_our_own_is_no_file_and_no_fault_of_costs(monkeypatch, name, fix):
    original = pipeline_layout.build_program

    def wrong(schedule, *sizes):
        program = original(schedule, *sizes)
        return (
            program
            if schedule != name
            else replace(program, ranks=(program.ranks[0][::-1], *program.ranks[1:]))
        )

    monkeypatch.setattr(pipeline_layout, "build_program", wrong)
    schedule = PipelineConfig(schedule=name)
    config = Config(
        model=ModelConfig(num_layers=2), parallel=ParallelConfig(pp=2), pipeline=schedule
    )
    (fault,) = pipeline_faults(config, 2)
    assert fault.reason.startswith(f"pipeline.schedule = {name}: rank 0") and fault.fix == fix

"""What fails on one rank alone while a run starts ends it on all ranks at once, with the rank and
the fault in words.

The faults are planted one after another in the same processes: whoever had left the others in a
collective, or had taken a step that they have not, would break the next start.
"""

import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from ranks import run_ranks
from runs import write_corpus

from megatron5d.config.load import load_config
from megatron5d.tools.convert import main
from megatron5d.topology.process import Process
from pretrain import plan_and_train

EXPERIMENT = [
    *(
        "model=tiny",
        "model.vocab_size=98",
        "train.gbs=4",
        "train.mbs=1",
        "train.seq_len=16",
        "train.steps=1",
    ),
    *("log.progress=false", "log.memory_check=off", "checkpoint.every=1"),
]
DENIED = PermissionError(13, "Permission denied", "/a/file")


def method_fails(name, of, error=DENIED):
    """A method of Path raises for files of some name."""
    real = getattr(Path, name)

    def planted(self, *args, **kwargs):
        if of in self.name:
            raise error
        return real(self, *args, **kwargs)

    return patch.object(Path, name, planted)


@contextmanager
def truncated(file):
    """The file ends early, and nothing in its folder tells of its checksum."""
    real = Path.read_bytes
    cut = lambda self, *args, **kw: real(self, *args, **kw)[: 40 if self.name == file else None]  # noqa: E731
    with (
        patch.object(Path, "read_bytes", cut),
        patch("megatron5d.checkpoint.folder.checksum_error", lambda *_: None),
    ):
        yield


def raises(target, error=DENIED):
    def planted(*_, **__):
        raise error

    return patch(target, planted)


SAVED, LOG, HF = "{folder}/saved", "log.jsonl={folder}/log.jsonl", "init.from_hf={folder}/hf"
OTHER = f"init.from_checkpoint={SAVED}"
# what fails: the rank, its fault, overrides, and what is told of it
PLANTS = {
    "looking at what rank 0 writes": (1, lambda: method_fails("exists", ".seen"), [], "/a/file"),
    "writing what others look at": (0, lambda: method_fails("touch", ".seen"), [], "/a/file"),
    "reading run.json": (
        0,
        lambda: method_fails("read_bytes", "run.json"),
        [f"checkpoint.dir={SAVED}"],
        "/a/file",
    ),
    "run.json, which ends early": (
        0,
        lambda: truncated("run.json"),
        [f"checkpoint.dir={SAVED}"],
        "run.json is damaged: ",
    ),
    "listing checkpoints": (
        0,
        lambda: raises("megatron5d.train.preflight.warnings.saved_after"),
        [],
        "/a/file",
    ),
    "looking at documents": (
        *(0, lambda: raises("megatron5d.train.preflight.warnings.IndexedDataset")),
        *(["data.document_mask=true", "data.eod=0"], "/a/file"),
    ),
    "opening the log": (
        0,
        lambda: raises("megatron5d.train.monitoring.report.JsonLines"),
        [LOG],
        "/a/file",
    ),
    "a mistake of ours": (
        *(0, lambda: raises("megatron5d.train.monitoring.report.JsonLines", KeyError("ours"))),
        *([LOG], "in planted(?s:.)*KeyError: 'ours'"),
    ),
    "predicting": (
        0,
        lambda: raises("megatron5d.planning.time.predict.expected_bubble"),
        ["parallel.pp=2"],
        "/a/file",
    ),
    "opening data": (1, lambda: raises("megatron5d.train.data.open_samples"), [], "/a/file"),
    "reading a Hugging Face file": (
        1,
        lambda: raises("megatron5d.checkpoint.hf.safetensors_folder.safe_open"),
        [HF],
        "/a/file",
    ),
    "reading another run's record": (
        0,
        lambda: method_fails("read_bytes", "run.json"),
        [OTHER],
        "/a/file",
    ),
    "searching a schedule": (
        *(0, lambda: raises("megatron5d.planning.schedule_search.auto_schedule.search_programs")),
        *(["parallel.pp=2", "pipeline.schedule=auto"], "/a/file"),
    ),
}


def test_a_fault_of_one_rank_at_the_start_ends_all_ranks_in_step(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron5d.checkpoint.save.VISIBLE_S", 0.3)
    data = write_corpus(tmp_path / "toy", vocab_size=97)

    def config_of(overrides, place, world=2):
        overrides = [f"data.train=[{data}]", f"checkpoint.dir={place}", *overrides]
        return load_config(
            [each.format(folder=tmp_path) for each in [*EXPERIMENT, *overrides]], world=world
        )

    assert plan_and_train(config_of([], SAVED, 1), Process(0, 1, 0, torch.device("cpu"))) == 0
    assert (
        main(["to-hf", "--checkpoint", str(tmp_path / "saved"), "--out", str(tmp_path / "hf")]) == 0
    )
    configs = [config_of(plant[2], f"{{folder}}/{i}") for i, plant in enumerate(PLANTS.values())]

    def one(rank, world):
        process, told = Process(rank, world, rank, torch.device("cpu")), []
        for config, (victim, fault, *_) in zip(configs, PLANTS.values(), strict=True):
            with fault() if rank == victim else nullcontext():
                try:
                    told.append(f"ended with {plan_and_train(config, process)}")
                except Exception as error:  # noqa: BLE001 - told below
                    told.append(f"{type(error).__name__}: {error}")
        return told

    for (name, (victim, *_, text)), *said in zip(PLANTS.items(), *run_ranks(one, 2), strict=True):
        assert re.match("((OS|Permission|Value|Key)Error|Refused): ", said[victim]), (name, said)
        other = rf"((OS|Value|Runtime)Error|Refused): rank {victim}[: ](?s:.)*{text}"
        assert re.match(other, said[1 - victim]), (name, said)

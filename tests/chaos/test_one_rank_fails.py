"""An error of one rank while a run starts ends it on all ranks at once, and every rank names the
rank and the error.

All errors are planted one after another in the same processes: a rank that had left the others in a
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
    "model=tiny",
    "model.vocab_size=98",
    "train.gbs=4",
    "train.mbs=1",
    "train.seq_len=16",
    "train.steps=1",
    "log.progress=false",
    "log.memory_check=off",
    "checkpoint.every=1",
]
DENIED = PermissionError(13, "Permission denied", "/a/file")


@contextmanager
def file_method_fails(name, file):
    """A method of Path raises for files whose name contains `file`."""
    method = getattr(Path, name)

    def planted(self, *args, **kwargs):
        if file in self.name:
            raise DENIED
        return method(self, *args, **kwargs)

    with patch.object(Path, name, planted):
        yield


@contextmanager
def truncated_run_json():
    """run.json ends early, and no checksum shows it."""
    read = Path.read_bytes

    def cut(self):
        return read(self)[: 40 if self.name == "run.json" else None]

    checksum = patch("megatron5d.checkpoint.folder.checksum_error", lambda *_: None)
    with patch.object(Path, "read_bytes", cut), checksum:
        yield


@contextmanager
def raises(target, error=DENIED):
    def planted(*_, **__):
        raise error

    with patch(target, planted):
        yield


SAVED, LOG, HF = "{folder}/saved", "log.jsonl={folder}/log.jsonl", "init.from_hf={folder}/hf"
RESUME, OTHER = f"checkpoint.dir={SAVED}", f"init.from_checkpoint={SAVED}"
# (rank, error, arguments of the error, overrides), and the text if it is not that of DENIED
PLANTS = [
    (1, file_method_fails, ("exists", ".seen"), []),
    (0, file_method_fails, ("touch", ".seen"), []),
    (0, file_method_fails, ("read_bytes", "run.json"), [RESUME]),
    (0, file_method_fails, ("read_bytes", "run.json"), [OTHER]),
    (0, truncated_run_json, (), [RESUME], "run.json is damaged: "),
    (0, raises, ("megatron5d.train.preflight.warnings.saved_after",), []),
    (
        *(0, raises, ("megatron5d.train.preflight.warnings.IndexedDataset",)),
        ["data.document_mask=true", "data.eod=0"],
    ),
    (0, raises, ("megatron5d.train.monitoring.report.JsonLines",), [LOG]),
    (
        *(0, raises, ("megatron5d.train.monitoring.report.JsonLines", KeyError("a bug")), [LOG]),
        "in planted(?s:.)*KeyError: 'a bug'",
    ),
    (
        *(0, raises, ("megatron5d.planning.time.predict.expected_bubble",)),
        ["parallel.pp=2", "pipeline.flops_per_byte=20"],
    ),
    (1, raises, ("megatron5d.train.data.open_samples",), []),
    (1, raises, ("megatron5d.checkpoint.hf.safetensors_folder.safe_open",), [HF]),
    (
        *(0, raises, ("megatron5d.planning.schedule_search.auto_schedule.search_programs",)),
        ["parallel.pp=2", "pipeline.schedule=auto"],
    ),
]


def test_an_error_of_one_rank_at_the_start_ends_all_ranks_in_step(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron5d.checkpoint.save.VISIBLE_S", 0.3)
    data = write_corpus(tmp_path / "toy", vocab_size=97)

    def config_of(overrides, folder, world=2):
        overrides = [f"data.train=[{data}]", f"checkpoint.dir={folder}", *overrides]
        texts = [text.format(folder=tmp_path) for text in [*EXPERIMENT, *overrides]]
        return load_config(texts, world=world)

    process = Process(0, 1, 0, torch.device("cpu"))
    assert plan_and_train(config_of([], SAVED, 1), process) == 0
    export = ["--checkpoint", str(tmp_path / "saved"), "--out", str(tmp_path / "hf")]
    assert main(["to-hf", *export]) == 0
    configs = [config_of(plant[3], f"{{folder}}/{i}") for i, plant in enumerate(PLANTS)]

    def on_rank(rank, world):
        process, outcomes = Process(rank, world, rank, torch.device("cpu")), []
        for config, (victim, plant, arguments, *_) in zip(configs, PLANTS):
            with plant(*arguments) if rank == victim else nullcontext():
                try:
                    outcomes.append(f"ended with {plan_and_train(config, process)}")
                except Exception as error:  # noqa: BLE001 - compared below
                    outcomes.append(f"{type(error).__name__}: {error}")
        return outcomes

    for (victim, _, arguments, _, *texts), *outcomes in zip(PLANTS, *run_ranks(on_rank, 2)):
        text = texts[0] if texts else "/a/file"
        outcome, peer_outcome = outcomes[victim], outcomes[1 - victim]
        assert re.match("((OS|Permission|Value|Key)Error|Refused): ", outcome), (
            arguments,
            outcomes,
        )
        message = rf"((OS|Value|Runtime)Error|Refused): rank {victim}[: ](?s:.)*{text}"
        assert re.match(message, peer_outcome), (arguments, outcomes)

"""Checks of files: what the run reads exists, what it writes can be created. Nothing is opened or
created here."""

import os
import re
from collections.abc import Callable
from functools import partial

# unlike pathlib's, they do not raise in closed folders
from os.path import exists, isdir, isfile, islink, realpath
from pathlib import Path

from megatron5d.config.checks.check import Check, Faults, check_id, fault
from megatron5d.config.checks.check import check as any_check
from megatron5d.config.convert import value_of
from megatron5d.config.derived import named_entries, resumed_progress, source_of, split_shares
from megatron5d.config.errors import alternatives
from megatron5d.config.schema import Config

check = partial(any_check, local=True)


def _missing_files(entries: list[str]) -> list[str]:
    """Returns the .bin and .idx files of entries that do not exist."""
    sources = [source for source in map(source_of, entries) if source.is_legal]
    names = [source.prefix + ending for source in sources for ending in (".bin", ".idx")]
    return [name for name in names if not isfile(name)]


def _prefix_meant(missing: list[str]) -> str:
    """Returns the end of a fix: the prefix of a file that was written with its ending, or what a
    prefix is."""
    for file in (name[: -len(".bin")] for name in missing):
        if file.endswith((".bin", ".idx")) and isfile(file):
            return f"{file[: -len('.bin')]}]"
    return "PREFIX] where PREFIX.bin and PREFIX.idx exist, as tools/preprocess.py writes them"


def _empty_files(entries: list[str]) -> list[str]:
    """Returns the .bin files of entries that are empty: a small corpus, for example, has no
    document to hold out."""
    names = [source.prefix + ".bin" for source in map(source_of, entries) if source.is_legal]
    return [name for name in names if isfile(name) and Path(name).stat().st_size == 0]


def _shell_list(entries: list[str]) -> str:
    """Returns a list as a shell argument."""
    text = f"[{','.join(entries)}]"
    return f"'{text}'" if " " in text else text


def _shares(split: str | None) -> list[float] | None:
    """Returns what `split_shares` does; None of what is no split."""
    try:
        return split_shares(split)
    except ValueError:
        return None


def _abbreviated(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _blend_checks(
    knob: str,
    prefix: str = "",
    read: Callable[[list[str]], list[str]] = list,
    needs: tuple[str, ...] = (),
) -> tuple[Check, ...]:
    """Makes the checks of a list of data: weights are numbers above 0, files exist and are not
    empty."""

    @check(knob, id=check_id(knob, "-weights"), needs=needs)
    def weights(c: Config, world: int) -> Faults:
        if bad := [repr(text) for text in read(value_of(c, knob)) if not source_of(text).is_legal]:
            yield fault(
                f"{knob}: {_abbreviated(bad)} is no 'weight prefix' with a finite weight above 0, and no 'prefix'",
                f"{knob}='[{prefix}0.7 DIR/web, {prefix}0.3 DIR/code]'; leave out what shall weigh nothing",
            )

    @check(knob, id=check_id(knob, "-files"), needs=needs)
    def files(c: Config, world: int) -> Faults:
        if missing := _missing_files(read(value_of(c, knob))):
            yield fault(
                f"{knob}: there is no {_abbreviated(missing)} (seen from {Path.cwd()})",
                f"{knob}=[{prefix}{_prefix_meant(missing)}",
            )

    @check(knob, id=check_id(knob, "-tokens"), needs=needs)
    def tokens(c: Config, world: int) -> Faults:
        written = value_of(c, knob)
        entries = read(written)
        if empty := _empty_files(entries):
            kept = [
                text
                for text, entry in zip(written, entries)
                if source_of(entry).prefix + ".bin" not in empty
            ]
            larger = "[PREFIX of documents, from tools/preprocess.py with more of them or a larger --valid-fraction]"
            yield fault(
                f"{knob}: {_abbreviated(empty)} holds no token",
                f"{knob}={_shell_list(kept) if kept or knob != 'data.train' else larger}",
            )

    return weights, files, tokens


@check("data.train")
def data_train_given(c: Config, world: int) -> Faults:
    if not c.data.train:
        yield fault(
            "data.train = [] names nothing to train on",
            "data.train=[PREFIX] where PREFIX.bin and PREFIX.idx exist, as tools/preprocess.py writes them",
        )


BLEND_CHECKS = (*_blend_checks("data.train"), *_blend_checks("data.valid"))


@check("data.valid_sets")
def data_valid_sets_names(c: Config, world: int) -> Faults:
    entries = zip(c.data.valid_sets, named_entries(c.data.valid_sets))
    nameless = [
        text
        for text, (name, entry) in entries
        if not entry or not re.fullmatch(r"[A-Za-z][\w.-]*", name)
    ]
    if nameless:
        yield fault(
            f"data.valid_sets: {_abbreviated(list(map(repr, nameless)))} is no 'name prefix' or 'name weight prefix' "
            "whose name is a letter and then letters, digits, '.', '_' or '-'",
            "data.valid_sets='[web DIR/web, code 0.7 DIR/c, code 0.3 DIR/py]'",
        )


@check("data.valid_sets", needs=["data-valid-sets-names"])
def data_valid_sets_once(c: Config, world: int) -> Faults:
    entries = c.data.valid_sets
    read = [f"{name} {source_of(entry).prefix}" for name, entry in named_entries(entries)]
    if repeated := sorted({repr(text) for text in read if read.count(text) > 1}):
        firsts = [text for i, text in enumerate(entries) if read[i] not in read[:i]]
        yield fault(
            f"data.valid_sets: {_abbreviated(repeated)} is there more than once; entries of one name are mixed, and a "
            "prefix has one weight in a mixture",
            f"data.valid_sets={_shell_list(firsts)}",
        )


VALID_SETS_CHECKS = _blend_checks(
    "data.valid_sets",
    "NAME ",
    lambda texts: [entry for _, entry in named_entries(texts)],
    ("data-valid-sets-names",),
)
_SPLIT = "data.split='\"969,30,1\"'"


@check("data.split")
def data_split_numbers(c: Config, world: int) -> Faults:
    if _shares(c.data.split) is None:
        yield fault(
            f"data.split = {c.data.split!r} is not one to three numbers 'train,valid,test' of positive sum",
            f"{_SPLIT}, or null",
        )


@check("data.split", "data.train")
def data_split_trains(c: Config, world: int) -> Faults:
    if (_shares(c.data.split) or [1.0])[0] == 0:
        yield fault(
            f"data.split = {c.data.split!r} leaves nothing of data.train to train on",
            f"{_SPLIT}, or null",
        )


@check("train.eval_every", "data.valid", "data.valid_sets", "data.split")
def eval_needs_valid(c: Config, world: int) -> Faults:
    given = c.data.valid or c.data.valid_sets or (_shares(c.data.split) or [1.0, 0.0])[1]
    if c.train.eval_every > 0 and not given:
        yield fault(
            f"train.eval_every = {c.train.eval_every}, and neither data.valid nor data.valid_sets nor data.split = "
            f"{c.data.split!r} gives it anything to evaluate on",
            f"{_SPLIT}, or data.valid=[PREFIX], or train.eval_every=0",
        )


@check("data.eod", "model.vocab_size")
def eod_in_vocabulary(c: Config, world: int) -> Faults:
    if c.data.eod is not None and c.data.eod >= c.model.vocab_size:
        yield fault(
            f"data.eod = {c.data.eod} is no token of model.vocab_size = {c.model.vocab_size}",
            f"data.eod={c.model.vocab_size - 1}, or less",
        )


@check("data.eod_mask_loss", "data.eod", "data.tokenizer")
def eod_known(c: Config, world: int) -> Faults:
    if c.data.eod_mask_loss and c.data.eod is None and c.data.tokenizer is None:
        yield fault(
            "data.eod_mask_loss = true, and neither data.eod nor data.tokenizer says which token ends a document",
            f"data.eod={c.model.vocab_size - 1} (or whichever id it is), or data.tokenizer=FILE",
        )


def _missing_in(folder: str, *patterns: str) -> str | None:
    """Returns what a Hugging Face folder lacks, as text; None = nothing."""
    if not isdir(folder):
        return f"there is no folder {folder}"
    lacking = [pattern for pattern in patterns if not any(Path(folder).glob(pattern))]
    return f"{folder} has no {' and no '.join(lacking)}" if lacking else None


def _huggingface_check(knob: str, pattern: str) -> Check:
    @check(knob, id=check_id(knob, "-folder"))
    def find(c: Config, world: int) -> Faults:
        folder = value_of(c, knob)
        missing = _missing_in(folder, pattern) if folder is not None else None
        # when the run began, which now resumes
        read_already = knob == "init.from_hf" and resumed_progress(c) != {}
        if missing and not read_already:
            yield fault(f"{knob}: {missing}", f"{knob}=DIR with {pattern}, or null")

    return find


HUGGINGFACE_CHECKS = (
    _huggingface_check("model.from_hf", "config.json"),
    _huggingface_check("init.from_hf", "model.safetensors*"),
)


@check("init.from_checkpoint")
def init_from_checkpoint_folder(c: Config, world: int) -> Faults:
    folder = c.init.from_checkpoint
    if folder is not None and not isdir(folder) and resumed_progress(c) == {}:
        yield fault(
            f"init.from_checkpoint = {folder}: there is no such folder",
            "init.from_checkpoint=DIR, a checkpoint or a folder of them, or null",
        )


@check("init.from_checkpoint", "init.from_hf")
def init_has_one_source(c: Config, world: int) -> Faults:
    if c.init.from_checkpoint is not None and c.init.from_hf is not None:
        yield fault(
            "init.from_checkpoint and init.from_hf are both given, and weights come from one of them",
            "init.from_hf=null, or init.from_checkpoint=null",
        )


@check("data.tokenizer")
def data_tokenizer_file(c: Config, world: int) -> Faults:
    if c.data.tokenizer is not None and not exists(c.data.tokenizer):
        yield fault(
            f"data.tokenizer: there is no {c.data.tokenizer} (seen from {Path.cwd()})",
            "data.tokenizer=FILE that exists, or null",
        )


@check("moe.replay")
def moe_replay_file(c: Config, world: int) -> Faults:
    if c.moe.replay is not None and not isfile(c.moe.replay):
        yield fault(
            f"moe.replay: there is no file {c.moe.replay} (seen from {Path.cwd()})",
            "moe.replay=FILE that exists, as moe.record writes it, or null",
        )


def _is_there(path: str | Path) -> bool:
    """Returns whether something has this name, also a link whose target is gone."""
    return exists(path) or islink(path)


def _path_in_the_way(name: str, as_folder: bool) -> str | None:
    """Returns the existing path that prevents `name` from being created or written; None where
    there is none."""
    path = Path(name).absolute()
    if _is_there(path) and not (isdir(path) if as_folder else isfile(path)):
        # also /dev/null: a log is rewritten and renamed, which would replace the device
        return str(path)
    return next(
        (str(parent) for parent in path.parents if _is_there(parent) and not isdir(parent)), None
    )


def _kind(name: str) -> str:
    if islink(name) and not exists(name):
        return f"a link whose target {os.readlink(name)} does not exist"
    return (
        "a folder" if isdir(name) else "a file" if isfile(name) else "neither a file nor a folder"
    )


def _unwritable_folder(name: str) -> str | None:
    """Returns the folder in which `name` would be created, if this user may not write there; else
    None."""
    path = Path(name).absolute()
    there = next(parent for parent in (path, *path.parents) if isdir(parent))
    resolved = there.resolve()
    # root has every permission
    kernels = {"/proc", "/sys"} & set(map(str, (resolved, *resolved.parents)))
    return None if os.access(there, os.W_OK | os.X_OK) and not kernels else str(there)


def _writable_checks(knob: str, kind: str = "folder") -> tuple[Check, Check]:
    @check(knob, id=check_id(knob, "-path"))
    def free(c: Config, world: int) -> Faults:
        name = value_of(c, knob)
        if name is not None and (other := _path_in_the_way(name, kind == "folder")):
            yield fault(
                f"{knob} = {name} shall be a {kind}, but {other} is in its way, {_kind(other)}",
                f"{knob}={other}.new, or null",
            )

    @check(knob, id=check_id(knob, "-allowed"))
    def allowed(c: Config, world: int) -> Faults:
        name = value_of(c, knob)
        if name is not None and (folder := _unwritable_folder(name)):
            yield fault(
                f"{knob} = {name}: this user may not write in {folder}",
                f"{knob}=PATH in a folder that this user may write in, or null",
            )

    return free, allowed


WRITTEN = (
    "checkpoint.dir",
    "log.dir",
    "log.wandb.dir",
    "log.profile",
    "log.memory_snapshot",
    "data.cache_dir",
)
WRITABLE_CHECKS = (
    *_writable_checks("checkpoint.dir"),
    *_writable_checks("log.dir"),
    *_writable_checks("log.wandb.dir"),
    *_writable_checks("log.jsonl", "file"),
    *_writable_checks("log.tensorboard"),
    *_writable_checks("moe.record", "file"),
    *_writable_checks("log.profile"),
    *_writable_checks("log.memory_snapshot"),
    # where it may not be written, each rank builds its own and says so
    _writable_checks("data.cache_dir")[0],
)
_CHECKPOINT = re.compile(r"step-\d{8,}(\.\w+)?")


def _schedule_file(c: Config) -> str | None:
    kind, _, path = c.pipeline.schedule.partition(":")
    return path if kind == "file" else None


def _files_of_run(c: Config) -> dict[str, str]:
    """Returns the files that a run reads, or writes beside its log, by path: what they are."""
    sources = [
        *c.data.train,
        *c.data.valid,
        *(entry for _, entry in named_entries(c.data.valid_sets)),
    ]
    prefixes = [source.prefix for source in map(source_of, sources) if source.is_legal]
    files = {prefix + ending: "the data" for prefix in prefixes for ending in (".bin", ".idx")}
    files |= {
        str(Path(each, "config.json")): "a model"
        for each in (c.model.from_hf, c.init.from_hf)
        if each
    }
    named = {
        c.data.tokenizer: "data.tokenizer",
        _schedule_file(c): "pipeline.schedule",
        c.moe.replay: "moe.replay",
        c.moe.record: "moe.record",
    }
    files |= {name: what for name, what in named.items() if name}
    if c.checkpoint.dir:
        files |= {
            str(Path(c.checkpoint.dir, name)): "checkpoint.dir" for name in ("run.lock", "latest")
        }
    if c.log.dir:
        files[str(Path(c.log.dir, "config.yaml"))] = "log.dir"
    return {realpath(name): what for name, what in files.items()}


@check(*WRITTEN, "log.jsonl")
def paths_apart(c: Config, world: int) -> Faults:
    folders = {knob: Path(realpath(value_of(c, knob))) for knob in WRITTEN if value_of(c, knob)}
    log = Path(realpath(c.log.jsonl)) if c.log.jsonl else None
    for knob, path in {**folders, **({"log.jsonl": log} if log else {})}.items():
        inside = next(
            (each for each in (path, *path.parents) if _CHECKPOINT.fullmatch(each.name)), None
        )
        if inside is not None:
            yield fault(
                f"{knob} = {value_of(c, knob)} lies in {inside}, a checkpoint, which is written and removed as a whole",
                f"{knob}={inside.with_name('after-' + inside.name) / path.relative_to(inside)}",
            )
    for knob, path in folders.items():
        if log is not None and log in (path, *path.parents):
            yield fault(
                f"log.jsonl = {c.log.jsonl} is to be a file, and {knob} = {value_of(c, knob)} a folder there",
                f"log.jsonl={c.log.jsonl}/log.jsonl",
            )
    if log is not None and (what := _files_of_run(c).get(str(log))):
        yield fault(
            f"log.jsonl = {c.log.jsonl} would replace a file of {what}",
            f"log.jsonl={c.log.jsonl}.log.jsonl",
        )


@check("checkpoint.resume")
def checkpoint_resume_folder(c: Config, world: int) -> Faults:
    resume, folder = c.checkpoint.resume, c.checkpoint.dir
    if resume not in ("auto", "none") and not isdir(resume):
        saved = sorted(Path(folder).glob("step-*[0-9]")) if folder and isdir(folder) else []
        yield fault(
            f"checkpoint.resume = {resume} is neither auto nor none nor a folder that exists",
            f"checkpoint.resume={alternatives(['auto', 'none', *saved[-1:]])}",
        )


@check("pipeline.schedule")
def pipeline_schedule_file(c: Config, world: int) -> Faults:
    file = _schedule_file(c)
    if file is not None and not Path(file).is_file():
        yield fault(
            f"pipeline.schedule = {c.pipeline.schedule}: there is no file {Path(file)}",
            "pipeline.schedule=1f1b, or file:PATH of a program that tools/schedule.py wrote",
        )

"""Checks of files: the run's inputs exist, and its outputs can be created.

Nothing is opened or created here.
"""

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
_PREFIX = "[PREFIX] where PREFIX.bin and PREFIX.idx exist, as tools/preprocess.py writes them"
_SPLIT = "data.split='\"969,30,1\"'"


def _data_files(entries: list[str], suffixes: tuple[str, ...] = (".bin", ".idx")) -> list[str]:
    """Files of the legal entries."""
    sources = [source for source in map(source_of, entries) if source.is_legal]
    return [source.prefix + suffix for source in sources for suffix in suffixes]


def _prefix_fix(missing: list[str]) -> str:
    """End of a fix: the prefix of a file that was written with its suffix, those in a folder, how
    a text becomes one, or what a prefix is."""
    for file in (name[: -len(".bin")] for name in missing):
        if file.endswith((".bin", ".idx")) and isfile(file):
            return f"{file[: -len('.bin')]}]"
        if isdir(file) and (prefixes := _prefixes_in(file)):
            return f"{prefixes[0]}]; datasets of that folder: {_abbreviated(prefixes)}"
        if isfile(file):
            return (
                f"PREFIX] after python tools/preprocess.py --input {file} --tokenizer FILE "
                "--append-eod --out PREFIX"
            )
    return _PREFIX.removeprefix("[")


def _prefixes_in(folder: str) -> list[str]:
    """Prefixes of the datasets in a folder."""
    indexes = sorted(Path(folder).glob("*.idx"))
    return [str(path.with_suffix("")) for path in indexes if path.with_suffix(".bin").is_file()]


def _shell_list(entries: list[str]) -> str:
    """List as a shell argument."""
    text = f"[{','.join(entries)}]"
    return f"'{text}'" if " " in text else text


def _shares(split: str | None) -> list[float] | None:
    """`split_shares`; None if the text is no split."""
    try:
        return split_shares(split)
    except ValueError:
        return None


def _abbreviated(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _blend_checks(
    knob: str,
    prefix: str = "",
    entries_of: Callable[[list[str]], list[str]] = list,
    needs: tuple[str, ...] = (),
) -> tuple[Check, ...]:
    """Makes the checks of a list of data: legal weights, files that exist, files with tokens.

    Args:
        prefix: in front of an entry of the list.
        entries_of: list -> its `weight prefix` entries.
    """

    @check(knob, id=check_id(knob, "-weights"), needs=needs)
    def weights(c: Config, world: int) -> Faults:
        illegal = [text for text in entries_of(value_of(c, knob)) if not source_of(text).is_legal]
        if illegal:
            yield fault(
                f"{knob} must list 'prefix' or 'weight prefix' with a finite weight above 0 "
                f"(got {_abbreviated(list(map(repr, illegal)))})",
                f"{knob}='[{prefix}0.7 DIR/web, {prefix}0.3 DIR/code]'; omit datasets of weight 0",
            )

    @check(knob, id=check_id(knob, "-files"), needs=needs)
    def existence(c: Config, world: int) -> Faults:
        files = _data_files(entries_of(value_of(c, knob)))
        if missing := [file for file in files if not isfile(file)]:
            yield fault(
                f"{knob}: there is no {_abbreviated(missing)} (seen from {Path.cwd()})",
                f"{knob}=[{prefix}{_prefix_fix(missing)}",
            )

    @check(knob, id=check_id(knob, "-tokens"), needs=needs)
    def tokens(c: Config, world: int) -> Faults:
        def is_empty(file: str) -> bool:
            return isfile(file) and Path(file).stat().st_size == 0

        # a small corpus, for example, has no document to hold out
        texts = value_of(c, knob)
        entries = entries_of(texts)
        if empty := list(filter(is_empty, _data_files(entries, (".bin",)))):
            nonempty = [
                text
                for text, entry in zip(texts, entries)
                if not is_empty(source_of(entry).prefix + ".bin")
            ]
            larger = (
                "[PREFIX of documents, from tools/preprocess.py with more of them or a larger "
                "--valid-fraction]"
            )
            yield fault(
                f"{knob}: {_abbreviated(empty)} holds no token",
                f"{knob}={_shell_list(nonempty) if nonempty or knob != 'data.train' else larger}",
            )

    return weights, existence, tokens


@check("data.train")
def data_train_given(c: Config, world: int) -> Faults:
    if not c.data.train:
        yield fault("data.train must name data to train on (got [])", f"data.train={_PREFIX}")


BLEND_CHECKS = (*_blend_checks("data.train"), *_blend_checks("data.valid"))


@check("data.valid_sets")
def data_valid_sets_names(c: Config, world: int) -> Faults:
    entries = zip(c.data.valid_sets, named_entries(c.data.valid_sets))
    nameless = [
        repr(text)
        for text, (name, entry) in entries
        if not entry or not re.fullmatch(r"[A-Za-z][\w.-]*", name)
    ]
    if nameless:
        yield fault(
            "data.valid_sets must list 'name prefix' or 'name weight prefix'; a name is a letter "
            f"and then letters, digits, '.', '_' or '-' (got {_abbreviated(nameless)})",
            "data.valid_sets='[web DIR/web, code 0.7 DIR/c, code 0.3 DIR/py]'",
        )


@check("data.valid_sets", needs=["data-valid-sets-names"])
def data_valid_sets_once(c: Config, world: int) -> Faults:
    texts = c.data.valid_sets
    pairs = [f"{name} {source_of(entry).prefix}" for name, entry in named_entries(texts)]
    if repeated := sorted({repr(pair) for pair in pairs if pairs.count(pair) > 1}):
        unique = [text for i, text in enumerate(texts) if pairs[i] not in pairs[:i]]
        yield fault(
            "data.valid_sets mixes the entries of a name, which may have a prefix only once "
            f"(got {_abbreviated(repeated)} again)",
            f"data.valid_sets={_shell_list(unique)}",
        )


VALID_SETS_CHECKS = _blend_checks(
    "data.valid_sets",
    "NAME ",
    lambda texts: [entry for _, entry in named_entries(texts)],
    ("data-valid-sets-names",),
)


@check("data.split")
def data_split_numbers(c: Config, world: int) -> Faults:
    if _shares(c.data.split) is None:
        yield fault(
            "data.split must be one to three numbers 'train,valid,test' of positive sum "
            f"(got {c.data.split!r})",
            f"{_SPLIT}, or null",
        )


@check("data.split", "data.train")
def data_split_trains(c: Config, world: int) -> Faults:
    if (_shares(c.data.split) or [1.0])[0] == 0:
        yield fault(
            f"data.split must leave a share of data.train to train on (got {c.data.split!r})",
            f"{_SPLIT}, or null",
        )


@check("train.eval_every", "data.valid", "data.valid_sets", "data.split")
def eval_needs_valid(c: Config, world: int) -> Faults:
    has_data = c.data.valid or c.data.valid_sets or (_shares(c.data.split) or [1.0, 0.0])[1]
    if c.train.eval_every > 0 and not has_data:
        yield fault(
            f"train.eval_every={c.train.eval_every} requires data.valid, data.valid_sets, or a "
            f"second share of data.split (got {c.data.split!r})",
            f"{_SPLIT}, or data.valid=[PREFIX], or train.eval_every=0",
        )


@check("data.eod_mask_loss", "data.eod", "data.tokenizer")
def eod_known(c: Config, world: int) -> Faults:
    if c.data.eod_mask_loss and c.data.eod is None and c.data.tokenizer is None:
        yield fault(
            "data.eod_mask_loss=true requires data.eod or data.tokenizer (got null)",
            f"data.eod={c.model.vocab_size - 1} (or the token's id), or data.tokenizer=FILE",
        )


def _folder_check(knob: str, pattern: str = "") -> Check:
    """Makes the check of a folder that holds a file of the pattern."""

    @check(knob, id=check_id(knob, "-folder"))
    def find(c: Config, world: int) -> Faults:
        folder = value_of(c, knob)
        # a resumed run has read its initial weights already
        if folder is None or (knob.startswith("init.") and resumed_progress(c) != {}):
            return
        fix = f"{knob}=DIR {f'with {pattern}' if pattern else 'of checkpoints'}, or null"
        if not isdir(folder):
            yield fault(f"{knob}: there is no folder {folder}", fix)
        elif pattern and not any(Path(folder).glob(pattern)):
            yield fault(f"{knob}: {folder} has no {pattern}", fix)

    return find


FOLDER_CHECKS = (
    _folder_check("model.from_hf", "config.json"),
    _folder_check("init.from_hf", "model.safetensors*"),
    _folder_check("init.from_checkpoint"),
)


def _file_check(knob: str, fix: str, is_there: Callable[[str], bool] = exists) -> Check:
    @check(knob, id=check_id(knob, "-file"))
    def find(c: Config, world: int) -> Faults:
        file = value_of(c, knob)
        if file is not None and not is_there(file):
            yield fault(f"{knob}: there is no {file} (seen from {Path.cwd()})", f"{knob}={fix}")

    return find


FILE_CHECKS = (
    _file_check("data.tokenizer", "FILE that exists, or null"),
    _file_check("moe.replay", "FILE that exists, as moe.record writes it, or null", isfile),
)


def _is_taken(path: str | Path) -> bool:
    """Whether the name is in use, also by a link whose target does not exist."""
    return exists(path) or islink(path)


def _obstacle(name: str, as_folder: bool) -> str | None:
    """Existing path that prevents `name` from being created or written; None = nothing does."""
    path = Path(name).absolute()
    # /dev/null is one, too: a log is rewritten and renamed, which would replace the device
    if _is_taken(path) and not (isdir(path) if as_folder else isfile(path)):
        return str(path)
    obstacles = (parent for parent in path.parents if _is_taken(parent) and not isdir(parent))
    return next(map(str, obstacles), None)


def _kind(name: str) -> str:
    if islink(name) and not exists(name):
        return f"a link whose target {os.readlink(name)} does not exist"
    if isdir(name):
        return "a folder"
    return "a file" if isfile(name) else "neither a file nor a folder"


def _unwritable_folder(name: str) -> str | None:
    """Folder in which `name` would be created, if this user may not write there."""
    path = Path(name).absolute()
    folder = next(parent for parent in (path, *path.parents) if isdir(parent))
    resolved = folder.resolve()
    # root has every permission there, but the kernel refuses
    in_kernel = {"/proc", "/sys"} & set(map(str, (resolved, *resolved.parents)))
    return None if os.access(folder, os.W_OK | os.X_OK) and not in_kernel else str(folder)


def _writable_checks(knob: str, kind: str = "folder") -> tuple[Check, Check]:
    """Makes the checks of a file or folder that the run creates."""

    @check(knob, id=check_id(knob, "-path"))
    def unobstructed(c: Config, world: int) -> Faults:
        name = value_of(c, knob)
        if name is not None and (obstacle := _obstacle(name, kind == "folder")):
            yield fault(
                f"{knob}={name} must be a {kind} (got {obstacle}, {_kind(obstacle)})",
                f"{knob}={obstacle}.new, or null",
            )

    @check(knob, id=check_id(knob, "-allowed"))
    def allowed(c: Config, world: int) -> Faults:
        name = value_of(c, knob)
        if name is not None and (folder := _unwritable_folder(name)):
            yield fault(
                f"{knob}={name}: this user may not write in {folder}",
                f"{knob}=PATH in a folder that this user may write in, or null",
            )

    return unobstructed, allowed


WRITTEN_FOLDERS = (
    "checkpoint.dir",
    "log.dir",
    "log.wandb.dir",
    "log.profile",
    "log.memory_snapshot",
)
WRITABLE_CHECKS = (
    *(each for knob in WRITTEN_FOLDERS for each in _writable_checks(knob)),
    *_writable_checks("log.tensorboard"),
    *_writable_checks("log.jsonl", "file"),
    *_writable_checks("moe.record", "file"),
    # where the user may not write it, each rank builds its own index and says so
    _writable_checks("data.cache_dir")[0],
)
_SEPARATE = (*WRITTEN_FOLDERS, "data.cache_dir", "log.jsonl")
_CHECKPOINT = re.compile(r"step-\d{8,}(\.\w+)?")


def _schedule_file(c: Config) -> str | None:
    kind, _, path = c.pipeline.schedule.partition(":")
    return path if kind == "file" else None


def _other_files(c: Config) -> dict[str, str]:
    """Files that a run reads, or writes besides its log, by path: what they belong to."""
    named = [entry for _, entry in named_entries(c.data.valid_sets)]
    files = dict.fromkeys(_data_files([*c.data.train, *c.data.valid, *named]), "the data")
    owners = {
        c.data.tokenizer: "data.tokenizer",
        _schedule_file(c): "pipeline.schedule",
        c.moe.replay: "moe.replay",
        c.moe.record: "moe.record",
    }
    files |= {name: owner for name, owner in owners.items() if name}
    in_folders = [
        (c.model.from_hf, "config.json", "a model"),
        (c.init.from_hf, "config.json", "a model"),
        (c.checkpoint.dir, "run.lock", "checkpoint.dir"),
        (c.checkpoint.dir, "latest", "checkpoint.dir"),
        (c.log.dir, "config.yaml", "log.dir"),
    ]
    files |= {str(Path(folder, name)): owner for folder, name, owner in in_folders if folder}
    return {realpath(name): owner for name, owner in files.items()}


@check(*_SEPARATE)
def paths_apart(c: Config, world: int) -> Faults:
    paths = {knob: Path(realpath(value_of(c, knob))) for knob in _SEPARATE if value_of(c, knob)}
    for knob, path in paths.items():
        parents = (path, *path.parents)
        checkpoint = next((p for p in parents if _CHECKPOINT.fullmatch(p.name)), None)
        if checkpoint is not None:
            beside = checkpoint.with_name("after-" + checkpoint.name)
            yield fault(
                f"{knob}={value_of(c, knob)} lies in {checkpoint}, a checkpoint, which is written "
                "and removed as a whole",
                f"{knob}={beside / path.relative_to(checkpoint)}",
            )
    log = paths.pop("log.jsonl", None)
    if log is None:
        return
    for knob, path in paths.items():
        if log in (path, *path.parents):
            yield fault(
                f"log.jsonl={c.log.jsonl} must be a file (got a folder of {knob}="
                f"{value_of(c, knob)})",
                f"log.jsonl={c.log.jsonl}/log.jsonl",
            )
    if owner := _other_files(c).get(str(log)):
        yield fault(
            f"log.jsonl={c.log.jsonl} would replace a file of {owner}",
            f"log.jsonl={c.log.jsonl}.log.jsonl",
        )


@check("checkpoint.resume")
def checkpoint_resume_folder(c: Config, world: int) -> Faults:
    resume, folder = c.checkpoint.resume, c.checkpoint.dir
    if resume not in ("auto", "none") and not isdir(resume):
        saved = sorted(Path(folder).glob("step-*[0-9]")) if folder and isdir(folder) else []
        yield fault(
            f"checkpoint.resume must be auto, none or a folder that exists (got {resume})",
            f"checkpoint.resume={alternatives(['auto', 'none', *saved[-1:]])}",
        )


@check("pipeline.schedule")
def pipeline_schedule_file(c: Config, world: int) -> Faults:
    file = _schedule_file(c)
    if file is not None and not Path(file).is_file():
        yield fault(
            f"pipeline.schedule={c.pipeline.schedule}: there is no file {Path(file)}",
            "pipeline.schedule=1f1b, or file:PATH of a program that tools/schedule.py wrote",
        )

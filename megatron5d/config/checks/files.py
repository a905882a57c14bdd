"""Laws of files: what the run reads exists, what it writes can be created. Nothing is opened or created here."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from os.path import exists, isdir, isfile, islink, realpath  # unlike pathlib's, they do not raise in closed folders
from pathlib import Path

from megatron5d.config.checks.check import Law
from megatron5d.config.convert import value_of
from megatron5d.config.derived import named_entries, resumed_progress, source_of, split_shares
from megatron5d.config.errors import alternatives
from megatron5d.config.schema import Config


def _bad_weights(entries: list[str]) -> list[str]:
    return [text for text in entries if not source_of(text).is_legal]


def _missing_files(entries: list[str]) -> list[str]:
    """The .bin and .idx files of entries that do not exist."""
    sources = [source for source in map(source_of, entries) if source.is_legal]
    names = [source.prefix + ending for source in sources for ending in (".bin", ".idx")]
    return [name for name in names if not isfile(name)]


def _prefix_meant(missing: list[str]) -> str:
    """The end of a fix: the prefix of a file that was written with its ending, or what a prefix is."""
    for file in (name[: -len(".bin")] for name in missing):
        if file.endswith((".bin", ".idx")) and isfile(file):
            return f"{file[: -len('.bin')]}]"
    return "PREFIX] where PREFIX.bin and PREFIX.idx exist, as tools/preprocess.py writes them"


def _empty_files(entries: list[str]) -> list[str]:
    """The .bin files of entries that are empty: a small corpus, for example, has no document to hold out."""
    names = [source.prefix + ".bin" for source in map(source_of, entries) if source.is_legal]
    return [name for name in names if isfile(name) and Path(name).stat().st_size == 0]


def _without_empty(knob: str, written: list[str], entries: list[str]) -> str:
    """The override without empty files; `entries` are those of `written` without their names."""
    empty = _empty_files(entries)
    kept = [text for text, entry in zip(written, entries) if source_of(entry).prefix + ".bin" not in empty]
    larger = "PREFIX of documents, from tools/preprocess.py with more of them or a larger --valid-fraction"
    return f"{knob}={_shell_list(kept)}" if kept or knob != "data.train" else f"{knob}=[{larger}]"


def _nameless(entries: list[str]) -> list[str]:
    """Entries of data.valid_sets that do not begin with a name."""
    told = zip(entries, named_entries(entries))
    return [text for text, (name, entry) in told if not entry or not re.fullmatch(r"[A-Za-z][\w.-]*", name)]


def _repeated(entries: list[str]) -> list[str]:
    """Prefixes that one set of data.valid_sets names more than once, as `name prefix`."""
    read = [f"{name} {source_of(entry).prefix}" for name, entry in named_entries(entries)]
    return sorted({text for text in read if read.count(text) > 1})


def _each_once(entries: list[str]) -> list[str]:
    """The first entry of each name and prefix."""
    firsts: dict[tuple[str, str], str] = {}
    for text, (name, entry) in zip(entries, named_entries(entries)):
        firsts.setdefault((name, source_of(entry).prefix), text)
    return list(firsts.values())


def _shell_list(entries: list[str]) -> str:
    """A list as a shell argument."""
    text = f"[{','.join(entries)}]"
    return f"'{text}'" if " " in text else text


def _shares(split: str | None) -> list[float] | None:
    """As `split_shares`; None of what is no split."""
    try:
        return split_shares(split)
    except ValueError:
        return None


def _abbreviated(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _blend_laws(knob: str, prefix: str = "", read: Callable[[list[str]], list[str]] = list) -> tuple[Law, ...]:
    """The laws of a list of data: weights are numbers above 0, files exist and are not empty.

    Args:
        knob: such as data.train.
        prefix: what stands before each weight in examples.
        read: the list as written -> its `weight prefix` entries.
    """
    name = knob.replace(".", "-").replace("_", "-")

    def entries(c: Config) -> list[str]:
        return read(value_of(c, knob))

    return (
        Law(
            f"{name}-weights",
            (knob,),
            lambda c, w: _bad_weights(entries(c)) != [],
            lambda c, w: (
                f"{knob}: {_abbreviated([repr(text) for text in _bad_weights(entries(c))])} is no "
                "'weight prefix' with a finite weight above 0, and no 'prefix'"
            ),
            lambda c, w: f"{knob}='[{prefix}0.7 DIR/web, {prefix}0.3 DIR/code]'; leave out what shall weigh nothing",
        ),
        Law(
            f"{name}-files",
            (knob,),
            lambda c, w: _missing_files(entries(c)) != [],
            lambda c, w: f"{knob}: there is no {_abbreviated(_missing_files(entries(c)))} (seen from {Path.cwd()})",
            lambda c, w: f"{knob}=[{prefix}{_prefix_meant(_missing_files(entries(c)))}",
        ),
        Law(
            f"{name}-tokens",
            (knob,),
            lambda c, w: _empty_files(entries(c)) != [],
            lambda c, w: f"{knob}: {_abbreviated(_empty_files(entries(c)))} holds no token",
            lambda c, w: _without_empty(knob, value_of(c, knob), entries(c)),
        ),
    )


DATA_LAWS = (
    Law(
        "data-train-given",
        ("data.train",),
        lambda c, w: not c.data.train,
        lambda c, w: "data.train = [] names nothing to train on",
        lambda c, w: "data.train=[PREFIX] where PREFIX.bin and PREFIX.idx exist, as tools/preprocess.py writes them",
    ),
    *_blend_laws("data.train"),
    *_blend_laws("data.valid"),
    Law(
        "data-valid-sets-names",
        ("data.valid_sets",),
        lambda c, w: _nameless(c.data.valid_sets) != [],
        lambda c, w: f"data.valid_sets: {_abbreviated([repr(text) for text in _nameless(c.data.valid_sets)])} is no "
        "'name prefix' or 'name weight prefix' whose name is a letter and then letters, digits, '.', '_' or '-'",
        lambda c, w: "data.valid_sets='[web DIR/web, code 0.7 DIR/c, code 0.3 DIR/py]'",
    ),
    Law(
        "data-valid-sets-once",
        ("data.valid_sets",),
        lambda c, w: _repeated(c.data.valid_sets) != [],
        lambda c, w: f"data.valid_sets: {_abbreviated([repr(text) for text in _repeated(c.data.valid_sets)])} is there "
        "more than once; entries of one name are mixed, and a prefix has one weight in a mixture",
        lambda c, w: f"data.valid_sets={_shell_list(_each_once(c.data.valid_sets))}",
        needs=("data-valid-sets-names",),
    ),
    *(
        replace(law, needs=("data-valid-sets-names",))
        for law in _blend_laws("data.valid_sets", "NAME ", lambda texts: [entry for _, entry in named_entries(texts)])
    ),
    Law(
        "data-split-numbers",
        ("data.split",),
        lambda c, w: _shares(c.data.split) is None,
        lambda c, w: f"data.split = {c.data.split!r} is not one to three numbers 'train,valid,test' of positive sum",
        lambda c, w: "data.split='\"969,30,1\"', or null",
    ),
    Law(
        "data-split-trains",
        ("data.split", "data.train"),
        lambda c, w: (_shares(c.data.split) or [1.0])[0] == 0,
        lambda c, w: f"data.split = {c.data.split!r} leaves nothing of data.train to train on",
        lambda c, w: "data.split='\"969,30,1\"', or null",
    ),
    Law(
        "eval-needs-valid",
        ("train.eval_every", "data.valid", "data.valid_sets", "data.split"),
        lambda c, w: c.train.eval_every > 0
        and not (c.data.valid or c.data.valid_sets)
        and (_shares(c.data.split) or [1.0, 0.0])[1] == 0,
        lambda c, w: f"train.eval_every = {c.train.eval_every}, and neither data.valid nor data.valid_sets nor "
        f"data.split = {c.data.split!r} gives it anything to evaluate on",
        lambda c, w: "data.split='\"969,30,1\"', or data.valid=[PREFIX], or train.eval_every=0",
    ),
    Law(
        "eod-in-vocabulary",
        ("data.eod", "model.vocab_size"),
        lambda c, w: c.data.eod is not None and c.data.eod >= c.model.vocab_size,
        lambda c, w: f"data.eod = {c.data.eod} is no token of model.vocab_size = {c.model.vocab_size}",
        lambda c, w: f"data.eod={c.model.vocab_size - 1}, or less",
    ),
    Law(
        "eod-known",
        ("data.eod_mask_loss", "data.eod", "data.tokenizer"),
        lambda c, w: c.data.eod_mask_loss and c.data.eod is None and c.data.tokenizer is None,
        lambda c, w: "data.eod_mask_loss = true, and neither data.eod nor data.tokenizer says which token ends "
        "a document",
        lambda c, w: f"data.eod={c.model.vocab_size - 1} (or whichever id it is), or data.tokenizer=FILE",
    ),
)  # fmt: skip


def _missing_in(folder: str | None, *patterns: str) -> str | None:
    """What a Hugging Face folder lacks, as text; None = nothing."""
    if folder is None:
        return None
    if not isdir(folder):
        return f"there is no folder {folder}"
    lacking = [pattern for pattern in patterns if not any(Path(folder).glob(pattern))]
    return f"{folder} has no {' and no '.join(lacking)}" if lacking else None


def _is_behind(c: Config, knob: str) -> bool:
    """Whether a key was read when the run began, and no more now that it resumes."""
    return knob.startswith("init.") and resumed_progress(c) != {}


def _huggingface_law(knob: str, *patterns: str) -> Law:
    return Law(
        knob.replace(".", "-").replace("_", "-") + "-folder",
        (knob,),
        lambda c, w: _missing_in(value_of(c, knob), *patterns) is not None and not _is_behind(c, knob),
        lambda c, w: f"{knob}: {_missing_in(value_of(c, knob), *patterns)}",
        lambda c, w: f"{knob}=DIR with {' and '.join(patterns)}, or null",
    )


def _path_in_the_way(name: str | None, as_folder: bool) -> str | None:
    """The existing path that prevents `name` from being created or written; None where there is none."""
    if name is None:
        return None
    path = Path(name).absolute()
    if _is_there(path) and not (isdir(path) if as_folder else isfile(path)):
        return str(path)  # also /dev/null: a log is rewritten and renamed, which would replace the device
    return next((str(parent) for parent in path.parents if _is_there(parent) and not isdir(parent)), None)


def _is_there(path: str | Path) -> bool:
    """Whether something has this name, also a link whose target is gone."""
    return exists(path) or islink(path)


def _kind(name: str) -> str:
    if islink(name) and not exists(name):
        return f"a link whose target {os.readlink(name)} does not exist"
    return "a folder" if isdir(name) else "a file" if isfile(name) else "neither a file nor a folder"


def _unwritable_folder(name: str | None) -> str | None:
    """The folder in which `name` would be created, if this user may not write there; else None."""
    if name is None:
        return None
    path = Path(name).absolute()
    there = next(parent for parent in (path, *path.parents) if isdir(parent))
    kernels = {"/proc", "/sys"} & set(
        map(str, (there.resolve(), *there.resolve().parents))
    )  # root has every permission
    return None if os.access(there, os.W_OK | os.X_OK) and not kernels else str(there)


def _writable_laws(knob: str, as_folder: bool = True) -> tuple[Law, Law]:
    kind = "folder" if as_folder else "file"
    name = knob.replace(".", "-").replace("_", "-")
    in_the_way = Law(
        f"{name}-path",
        (knob,),
        lambda c, w: _path_in_the_way(value_of(c, knob), as_folder) is not None,
        lambda c, w: (
            f"{knob} = {value_of(c, knob)} shall be a {kind}, but {_path_in_the_way(value_of(c, knob), as_folder)} is "
            f"in its way, {_kind(str(_path_in_the_way(value_of(c, knob), as_folder)))}"
        ),
        lambda c, w: f"{knob}={_path_in_the_way(value_of(c, knob), as_folder)}.new, or null",
    )
    not_allowed = Law(
        f"{name}-allowed",
        (knob,),
        lambda c, w: _unwritable_folder(value_of(c, knob)) is not None,
        lambda c, w: (
            f"{knob} = {value_of(c, knob)}: this user may not write in {_unwritable_folder(value_of(c, knob))}"
        ),
        lambda c, w: f"{knob}=PATH in a folder that this user may write in, or null",
    )
    return in_the_way, not_allowed


WRITTEN = ("checkpoint.dir", "log.dir", "log.wandb.dir", "log.profile", "log.memory_snapshot", "data.cache_dir")
_CHECKPOINT = re.compile(r"step-\d{8,}(\.\w+)?")


def _files_of_run(c: Config) -> dict[str, str]:
    """Files that a run reads, or writes beside its log, by path: what they are."""
    sources = [*c.data.train, *c.data.valid, *(entry for _, entry in named_entries(c.data.valid_sets))]
    prefixes = [source.prefix for source in map(source_of, sources) if source.is_legal]
    files = {prefix + ending: "the data" for prefix in prefixes for ending in (".bin", ".idx")}
    files |= {str(Path(each, "config.json")): "a model" for each in (c.model.from_hf, c.init.from_hf) if each}
    named = {c.data.tokenizer: "data.tokenizer", str(_schedule_file(c)): "pipeline.schedule"}
    files |= {name: what for name, what in named.items() if name}
    if c.checkpoint.dir:
        files |= {str(Path(c.checkpoint.dir, name)): "checkpoint.dir" for name in ("run.lock", "latest")}
    if c.log.dir:
        files[str(Path(c.log.dir, "config.yaml"))] = "log.dir"
    return {realpath(name): what for name, what in files.items()}


def _collision(c: Config) -> tuple[str, str, str, str] | None:
    """The first key whose path is in another one's way: (key, path, why, a path that is not); None where none is."""
    folders = {knob: Path(realpath(value_of(c, knob))) for knob in WRITTEN if value_of(c, knob)}
    log = Path(realpath(c.log.jsonl)) if c.log.jsonl else None
    for knob, path in {**folders, **({"log.jsonl": log} if log else {})}.items():
        inside = next((each for each in (path, *path.parents) if _CHECKPOINT.fullmatch(each.name)), None)
        if inside is not None:
            elsewhere = inside.with_name("after-" + inside.name) / path.relative_to(inside)
            return (
                knob,
                value_of(c, knob),
                f"lies in {inside}, a checkpoint, which is written and removed as a whole",
                str(elsewhere),
            )
    for knob, path in folders.items():
        if log is not None and log in (path, *path.parents):
            why = f"is to be a file, and {knob} = {value_of(c, knob)} a folder there"
            return "log.jsonl", str(c.log.jsonl), why, f"{c.log.jsonl}/log.jsonl"
    if log is not None and (what := _files_of_run(c).get(str(log))):
        return "log.jsonl", str(c.log.jsonl), f"would replace a file of {what}", f"{c.log.jsonl}.log.jsonl"
    return None


def _schedule_file(c: Config) -> Path | None:
    kind, _, path = c.pipeline.schedule.partition(":")
    return Path(path) if kind == "file" else None


def _newest_checkpoints(c: Config) -> str:
    folder = Path(c.checkpoint.dir or "")
    found = sorted(folder.glob("step-*[0-9]")) if c.checkpoint.dir and isdir(folder) else []
    return f"checkpoint.resume={alternatives(['auto', 'none', *found[-1:]])}"


PATH_LAWS = (
    _huggingface_law("model.from_hf", "config.json"),
    _huggingface_law("init.from_hf", "model.safetensors*"),
    Law(
        "init-from-checkpoint-folder",
        ("init.from_checkpoint",),
        lambda c, w: (
            c.init.from_checkpoint is not None
            and not isdir(c.init.from_checkpoint)
            and not _is_behind(c, "init.from_checkpoint")
        ),
        lambda c, w: f"init.from_checkpoint = {c.init.from_checkpoint}: there is no such folder",
        lambda c, w: "init.from_checkpoint=DIR, a checkpoint or a folder of them, or null",
    ),
    Law(
        "init-has-one-source",
        ("init.from_checkpoint", "init.from_hf"),
        lambda c, w: c.init.from_checkpoint is not None and c.init.from_hf is not None,
        lambda c, w: "init.from_checkpoint and init.from_hf are both given, and weights come from one of them",
        lambda c, w: "init.from_hf=null, or init.from_checkpoint=null",
    ),
    Law(
        "data-tokenizer-file",
        ("data.tokenizer",),
        lambda c, w: c.data.tokenizer is not None and not exists(c.data.tokenizer),
        lambda c, w: f"data.tokenizer: there is no {c.data.tokenizer} (seen from {Path.cwd()})",
        lambda c, w: "data.tokenizer=FILE that exists, or null",
    ),
    *_writable_laws("checkpoint.dir"),
    *_writable_laws("log.dir"),
    *_writable_laws("log.wandb.dir"),
    *_writable_laws("log.jsonl", as_folder=False),
    *_writable_laws("log.tensorboard"),
    *_writable_laws("log.profile"),
    *_writable_laws("log.memory_snapshot"),
    _writable_laws("data.cache_dir")[0],  # where it may not be written, each rank builds its own and says so
    Law(
        "paths-apart",
        (*WRITTEN, "log.jsonl"),
        lambda c, w: _collision(c) is not None,
        lambda c, w: "{} = {} {}".format(*_collision(c) or ()),
        lambda c, w: "{0}={3}".format(*_collision(c) or ()),
    ),
    Law(
        "checkpoint-resume-folder",
        ("checkpoint.resume",),
        lambda c, w: c.checkpoint.resume not in ("auto", "none") and not isdir(c.checkpoint.resume),
        lambda c, w: f"checkpoint.resume = {c.checkpoint.resume} is neither auto nor none nor a folder that exists",
        lambda c, w: _newest_checkpoints(c),
    ),
    Law(
        "pipeline-schedule-file",
        ("pipeline.schedule",),
        lambda c, w: _schedule_file(c) is not None and not Path(str(_schedule_file(c))).is_file(),
        lambda c, w: f"pipeline.schedule = {c.pipeline.schedule}: there is no file {_schedule_file(c)}",
        lambda c, w: "pipeline.schedule=1f1b, or file:PATH of a program that tools/schedule.py wrote",
    ),
)

FILE_LAWS = tuple(replace(law, local=True) for law in (*DATA_LAWS, *PATH_LAWS))

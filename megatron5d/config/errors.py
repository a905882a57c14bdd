"""Faults of a configuration, with the key, the numbers and a legal value; and the messages about
them."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import NoReturn

REFUSED = 2  # exit code of a refused configuration

# Keys of other code bases that are not spelled like ours, by ours.
_THEIRS = {
    "parallel.tp": "tensor tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
    "parallel.sp": "sequence_parallel",
    "parallel.cp": "context context_parallel context_parallel_size context_parallel_degree",
    "parallel.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree",
    "parallel.ep": "expert expert_parallel expert_parallel_size expert_parallel_degree expert_model_parallel_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "parallel.zero": "zero_stage",
    "train.gbs": "batch_size global_batch_size",
    "train.mbs": "micro_batch_size",
    "train.gbs_ramp": "rampup_batch_size step_batch_size_schedule",
    "train.seq_len": "seq_length max_seq_len sequence_length",
    "train.steps": "train_iters max_steps",
    "optim.lr": "learning_rate",
    "optim.schedule": "lr_decay_style",
    "optim.warmup_steps": "lr_warmup_iters",
    "optim.clip": "clip_grad max_norm",
    "optim.eps": "adam_eps",
    "data.train": "data_path",
    "checkpoint.every": "save_interval",
    "checkpoint.dir": "save",
    "checkpoint.resume": "load",
    "log.every": "log_interval",
    "model.num_heads": "num_attention_heads",
    "model.num_kv_heads": "num_query_groups num_key_value_heads",
    "model.head_dim": "kv_channels",
    "model.num_layers": "num_hidden_layers",
    "model.ffn_hidden_size": "intermediate_size",
    "model.max_positions": "max_position_embeddings",
    "recompute.mode": "recompute_granularity",
}
ELSEWHERE = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}

# Keys of other code bases for dp, which follows from the number of ranks here.
DATA_PARALLEL = (
    "dp",
    "dp_size",
    "data",
    "data_parallel",
    "data_parallel_size",
    "data_parallel_degree",
)


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a configuration."""

    id: str  # of the check, or of the kind of fault on the command line; kebab-case
    knobs: tuple[str, ...]  # config keys that it concerns
    reason: str  # what is wrong, with the numbers
    fix: str  # the nearest legal value, as an override
    local: bool = False  # about files or devices, so that it may occur on this node only

    def __str__(self) -> str:
        return f"{self.reason}\n    fix: {self.fix}  [{self.id}]"


class ConfigError(ValueError):
    """A configuration that cannot run; `faults` has everything that is wrong with it."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        super().__init__(message(self.faults))

    @property
    def concerns_all_ranks(self) -> bool:
        """Whether every rank finds it, as some fault is not about the files of this node alone."""
        return not all(fault.local for fault in self.faults)


class Refused(ValueError):
    """A file that the configuration names is not what it should be; ends a run that has not begun
    with exit code 2."""


def with_options(faults: Iterable[Fault], ranks: str, **options: str) -> list[Fault]:
    """Returns faults whose fixes are written as a tool takes them, which no launcher starts with
    overrides.

    Args:
        ranks: what stands before their number, such as `--world`.
        options: of the tool, by the name of a key of `parallel`.
    """

    def written(fix: str) -> str:
        fix = re.sub(r"\bstart ((?:\d+ or )?\d+) ranks", rf"{ranks} \1", fix)
        return in_options(fix, {f"parallel.{name}": option for name, option in options.items()})

    return [replace(fault, fix=written(fault.fix)) for fault in faults]


def in_options(text: str, options: Mapping[str, str]) -> str:
    """Returns a message with a tool's options in place of keys: `--pp 4` for `parallel.pp=4` or
    `parallel.pp = 4`.

    Args:
        text: the message.
        options: of the tool, by the words that they stand for.
    """
    keys = "|".join(map(re.escape, options))
    pattern = rf"(?<![\w.])({keys})(?![\w.])( ?= ?)?"
    return (
        re.sub(pattern, lambda key: options[key[1]] + (" " if key[2] else ""), text)
        if keys
        else text
    )


def message(faults: Sequence[Fault]) -> str:
    """Returns all faults as one text, in the order found."""
    count = f"{len(faults)} fault{'' if len(faults) == 1 else 's'}"
    return "\n".join(
        [f"the configuration is refused: {count}", *(f"  - {fault}" for fault in faults)]
    )


def refuse(faults: Sequence[Fault], rank: int = 0) -> NoReturn:
    """Ends the process with exit code 2 (SystemExit); rank 0 prints the faults."""
    if rank == 0:
        print(message(faults), file=sys.stderr, flush=True)
    raise SystemExit(REFUSED)


def names_file(error: Exception, written: object) -> str:
    """Returns the text of an error; to one of the system that names no file (a full disk), it adds
    what was written."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    file = written if error.filename is None else error.filename
    return error.strerror if file is None else f"{file}: {error.strerror}"


@contextmanager
def names_option(option: str, done: str = "read") -> Iterator[None]:
    """Raises ValueError in place of an OSError: it names the option whose file cannot be read, or
    what is `done`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option} cannot be {done}: {error.strerror or error}") from error


def exit_code(
    tool: str, run: Callable[[], int | None], written: object = None, *, quiet: bool = False
) -> int:
    """Runs a tool and returns its exit code: 2 for bad input, which it names unless it is
    `quiet`."""
    try:
        return run() or 0
    except (ValueError, OSError) as error:
        if not quiet:
            print(f"{tool}: {names_file(error, written)}", file=sys.stderr)
        return REFUSED


def closest(written: str, legal: Iterable[str], likeness: float = 0.5) -> str | None:
    """Returns the legal word that was probably meant; None where no similarity (0 to 1) reaches
    `likeness`."""
    folded = {word.lower(): word for word in legal}
    matches = get_close_matches(written.lower(), folded, n=1, cutoff=likeness)
    return folded[matches[0]] if matches else None


def closest_key(written: str, legal: Iterable[str]) -> str | None:
    """Returns the key that was probably meant: another code base's name, the same name in another
    group, or a typo."""
    keys = list(legal)
    name = written.rpartition(".")[2].replace("-", "_")
    if ELSEWHERE.get(name) in keys:
        return ELSEWHERE[name]
    same_name = [key for key in keys if key.rpartition(".")[2] == name]
    if same_name:
        return closest(written, same_name) or same_name[0]
    if "." in written:
        group = written[: written.rindex(".") + 1]
        near = closest(
            name, [key.removeprefix(group) for key in keys if key.startswith(group)], 0.6
        )
        return group + near if near else closest(written, keys, 0.75)
    matched = closest(name, sorted({key.rpartition(".")[2] for key in keys}), 0.6)
    return next((key for key in keys if matched and key.rpartition(".")[2] == matched), None)


def alternatives(words: Iterable[object]) -> str:
    """Returns the words as text: `a, b or c`."""
    *most, last = [str(word) for word in words]
    return f"{', '.join(most)} or {last}" if most else last

"""Arguments of the commands of convert.py; torch is not imported here, so that --help answers at once."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from megatron5d.config.command_line import OptionParser

_DTYPE: dict[str, Any] = {
    "choices": ["fp64", "fp32", "bf16"],
    "help": "of the written weights (default: as they are stored)",
}


def add_from_hf(command: OptionParser) -> None:
    """Adds the arguments of from-hf."""
    add = command.add_argument
    add("--hf", type=Path, required=True, metavar="DIR", help="config.json and safetensors files")
    add("--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet")
    add("--dtype", **_DTYPE)
    add("--mtp", action="store_true", help="DeepSeek-V3: its multi-token prediction layers too")


def add_to_hf(command: OptionParser) -> None:
    """Adds the arguments of to-hf."""
    add = command.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint, or a directory of them")
    add("--out", type=Path, required=True, metavar="DIR", help="without files that transformers reads")
    kinds = [*_DTYPE["choices"], "fp16"]
    add("--dtype", choices=kinds, help=f"{_DTYPE['help']}; of a run in bf16, fp32 writes the masters")
    beside = command.add_mutually_exclusive_group()
    beside.add_argument("--tokenizer", type=Path, metavar="PATH", help="file or folder to put beside the weights "
                        "(default: the run's data.tokenizer, or that of model.from_hf)")  # fmt: skip
    beside.add_argument("--no-tokenizer", action="store_true", help="write none, where it cannot leave with its ids")
    add("--max-shard-gb", type=_amount, default=5.0, metavar="GB", help="10^9 bytes a file (default 5)")


def add_reshard(command: OptionParser) -> None:
    """Adds the arguments of reshard."""
    add = command.add_argument
    add("source", type=Path, metavar="SRC", help="a checkpoint, or a directory of them: its newest whole one")
    add("out", type=Path, metavar="DST", help="directory of checkpoints, without any yet, as checkpoint.dir takes it")
    add("--world", type=_count, metavar="N", help="ranks of the target (default: the fewest that the layout takes)")
    add("--workers", type=_count, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")
    command.add_words("overrides", nargs="*", metavar="key=value", help="of the layout: parallel.*, pipeline.*, ...")


def add_from_megatron(command: OptionParser) -> None:
    """Adds the arguments of from-megatron."""
    add = command.add_argument
    add(
        "--megatron",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkpoint of Megatron-LM, or a directory of them",
    )
    add("--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet")
    add("--dtype", **_DTYPE)
    add("--vocab-size", type=int, metavar="N", help="tokens; rows beyond them are padding (default: as saved)")


def add_to_megatron(command: OptionParser) -> None:
    """Adds the arguments of to-megatron."""
    add = command.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint, or a directory of them")
    add("--out", type=Path, required=True, metavar="DIR", help="directory for Megatron-LM's --load, without any yet")
    add("--dtype", **_DTYPE)
    add("--optimizer", action="store_true", help="Adam's state and the step, too, to continue the run")


def add_inspect(command: OptionParser) -> None:
    """Adds the arguments of inspect."""
    command.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a directory of them")
    command.add_argument("--json", action="store_true", help="for programs, with the size of every file")


def add_verify(command: OptionParser) -> None:
    """Adds the arguments of verify."""
    add = command.add_argument
    add("path", type=Path, metavar="PATH", help="a checkpoint, or a directory of them: its newest whole one")
    add("--workers", type=_count, default=os.cpu_count() or 1, metavar="N", help="processes (default: one per core)")


def add_diff(command: OptionParser) -> None:
    """Adds the arguments of diff."""
    add = command.add_argument
    add("one", type=Path, metavar="A", help="a checkpoint, a directory of them, or a Hugging Face folder")
    add("other", type=Path, metavar="B", help="as A")
    add("--tolerance", type=_noise, default=0.0, metavar="T", help="of a tensor's largest value (default 0: exact)")


def add_average(command: OptionParser) -> None:
    """Adds the arguments of average."""
    add = command.add_argument
    add("path", type=Path, nargs="+", metavar="PATH", help="checkpoints, or directories of them")
    add("--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet")
    add("--last", type=_count, metavar="K", help="the K newest whole ones of one directory")
    add("--weights", type=float, nargs="+", metavar="W", help="one for each checkpoint (default: equal)")


def add_upcycle(command: OptionParser) -> None:
    """Adds the arguments of upcycle."""
    add = command.add_argument
    add("--checkpoint", type=Path, required=True, metavar="DIR", help="a checkpoint, or a directory of them")
    add("--out", type=Path, required=True, metavar="DIR", help="directory of checkpoints, without any yet")
    add("--num-experts", type=int, required=True, metavar="E", help="of every mixture, slices counted one by one")
    add("--top-k", type=int, required=True, metavar="K", help="experts that a token is sent to")
    add("--granularity", type=int, default=1, metavar="G", help="slices that a copy of the MLP is cut into (default 1)")
    add("--first-k-dense", type=int, default=0, metavar="N", help="layers at the bottom that stay dense (default 0)")
    add("--noise", type=_noise, default=0.0, help="added to the experts, in standard deviations of the MLP's weights")
    add("--seed", type=int, default=1234, help="of routers and noise (default 1234)")


def _count(text: str) -> int:
    """Returns a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def _amount(text: str) -> float:
    """Returns a number above 0."""
    amount = float(text)
    if not 0 < amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no amount above 0")
    return amount


def _noise(text: str) -> float:
    """Returns a number that is not below 0."""
    return 0.0 if float(text) == 0 else _amount(text)

"""Options that several tools share. Needs the standard library only, since `--help` imports it."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def whole_number(least: int = 1) -> Callable[[str], int]:
    """Makes the type of an option that takes whole numbers from `least` on."""

    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return int(text)

    return integer


def file_prefix(text: str) -> str:
    """Type of an option that names files by their beginning, which is no folder."""
    if Path(text).name in ("", "..") or text.endswith((os.sep, f"{os.sep}.")):
        raise argparse.ArgumentTypeError(f"{text} does not end in a file name")
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_corpus(parser: argparse.ArgumentParser) -> None:
    """Adds the texts to read: files or folders, and which of their lines and fields."""
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="PATH", help="files, or folders to search"
    )
    for option, text in {
        "--glob": "file names to take from folders ('*.py')",
        "--exclude": "names of files or folders to leave out",
    }.items():
        parser.add_argument(option, nargs="+", default=[], metavar="PATTERN", help=text)
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="fields that hold text, of JSON lines and parquet (metadata.text: within another)",
    )
    parser.add_argument(
        "--skip-bad", action="store_true", help="skip bad lines instead of stopping at the first"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the source of a model for inference, its dtype and its tensor-parallel ranks."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a checkpoint, or a directory of them: its newest complete one",
    )
    source.add_argument(
        "--hf", type=Path, metavar="DIR", help="Hugging Face folder: config.json and safetensors"
    )
    parser.add_argument(
        "--dtype",
        choices=["fp64", "fp32", "bf16"],
        help="of the computation (default: the checkpoint's, or fp32)",
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)"
    )


def add_measurement(parser: argparse.ArgumentParser) -> None:
    """Adds how a benchmark on the CPU measures, where it writes, and what it prints."""
    parser.add_argument(
        "--repeats", type=whole_number(), default=5, help="of each measurement (default 5)"
    )
    parser.add_argument(
        "--dir", type=Path, help="where to write temporary files (default: the system's)"
    )
    add_json(parser)

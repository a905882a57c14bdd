"""Make Megatron token files from texts: jsonl, parquet and text (plain or compressed), folders of
source code.

    python tools/preprocess.py --input corpus.jsonl.zst --tokenizer tok.model --out data/corpus
    --append-eod --workers 8 python tools/preprocess.py --input src/ --glob '*.py' --exclude tests
    --tokenizer tok.model --out data/src

A run that was killed continues when the same command is given again, and ends with the same bytes.
Exit codes: 0 done (or there was nothing to do), 2 refused: bad settings, a bad line, a broken file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.data.corpus import KINDS, list_files
from megatron5d.data.documents import BadLine, Recipe
from megatron5d.data.preprocess import Job, Progress, Reporting, preprocess
from megatron5d.tools.options import add_corpus, add_json, whole_number

SHOWN_BAD_LINES = 10
SHOWN_FILES = 5


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = OptionParser(description=__doc__)
    add_corpus(parser)
    add_json(parser)
    parser.add_argument(
        "--kind", choices=KINDS, help="of all files (default: by each one's name, else its content)"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="a tokenizer's file of any kind, or the folder that holds it",
    )
    parser.add_argument(
        "--out", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--text-per",
        choices=["file", "line"],
        default="file",
        help="what a document of a text file is",
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--eod", metavar="TOKEN", help="that token or its id, where the tokenizer does not name it"
    )
    parser.add_argument(
        "--prepend-bos",
        action="store_true",
        help="begin each document with the begin-of-text token",
    )
    parser.add_argument(
        "--bos", metavar="TOKEN", help="that token or its id, where the tokenizer does not name it"
    )
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        help="hold out this share: PREFIX_train, PREFIX_valid",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(),
        help="processes (default: the cores this process may use)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace what is at PREFIX, finished or not"
    )
    args = parser.parse_args()
    if not 0 <= args.valid_fraction < 1:
        parser.error(f"--valid-fraction {args.valid_fraction}: it is at least 0 and below 1")
    if args.out.endswith((os.sep, ".")):
        parser.error(
            f"--out {args.out} ends in no name; files are called PREFIX.bin and PREFIX.idx"
        )
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error(
            f"--json-keys {' '.join(args.json_keys)}: each makes a dataset of its own, and one is named twice"
        )
    return args


def available_cores() -> int:
    """Returns the cores this process may use, which in a container or a SLURM task are fewer than
    the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(args: argparse.Namespace) -> dict:
    """Preprocesses with a progress bar on stderr."""
    passed_over: list[Path] = []
    files = tuple(list_files(args.input, args.glob, args.exclude, passed_over))
    if passed_over and not args.glob:
        names = ", ".join(map(str, passed_over[:SHOWN_FILES])) + (
            ", ..." if len(passed_over) > SHOWN_FILES else ""
        )
        print(
            f"preprocess: passed over {len(passed_over)} files (--glob takes them): {names}",
            file=sys.stderr,
        )
    keys = tuple(args.json_keys)
    recipe = Recipe(
        args.tokenizer, args.eod, args.append_eod, keys, args.skip_bad, args.bos, args.prepend_bos
    )
    job = Job(files, args.out, recipe, args.text_per, args.valid_fraction, args.kind)
    shown: list[BadLine] = []
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=None) as bar:

        def progress(done_bytes: int, state: Progress) -> None:
            bar.set_postfix(documents=state.documents, bad=state.bad_lines, refresh=False)
            bar.update(done_bytes - bar.n)

        def bad_line(bad: BadLine) -> None:
            shown.append(bad)
            if len(shown) <= SHOWN_BAD_LINES:
                bar.write(f"skipped {bad}", file=sys.stderr)
            elif len(shown) == SHOWN_BAD_LINES + 1:
                bar.write("further bad lines are only counted", file=sys.stderr)

        def warning(text: str) -> None:
            bar.write(f"preprocess: WARNING: {text}", file=sys.stderr)

        reporting = Reporting(progress, bad_line, warning)
        return preprocess(job, args.workers or available_cores(), reporting, args.overwrite)


def main() -> int:
    args = arguments()
    return exit_code("preprocess", lambda: tell(run(args), args), args.out)


def tell(summary: dict, args: argparse.Namespace) -> int:
    """Prints what was done; returns 0."""
    for prefix in (
        prefix for prefix, counts in summary["outputs"].items() if counts["tokens"] == 0
    ):
        print(
            f"preprocess: WARNING: {prefix} holds no token, and nothing can train or evaluate on it",
            file=sys.stderr,
        )
    if args.json:
        print(json.dumps(summary))
        return 0
    for prefix, counts in summary["outputs"].items():
        print(
            f"{prefix}.bin/.idx: {counts['documents']} documents, {counts['tokens']} tokens ({summary['dtype']})"
        )
    appended = "" if args.append_eod else ", not appended (--append-eod does)"
    print(f"end-of-document token: {summary['eod']} {summary.get('eod_token') or ''}{appended}")
    if args.prepend_bos:
        print(f"begin-of-text token: {summary['bos']}")
    was = "already there" if summary["up_to_date"] else f"{summary['seconds']:.1f} s"
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.get("kinds", {}).items())
    print(
        f"{summary['files']} files ({kinds}), {summary['empty']} empty documents, "
        f"{summary['bad_lines']} bad lines skipped; {was}"
    )
    return 0


if __name__ == "__main__":
    print_anywhere("interrupted; the same command continues")
    sys.exit(main())

"""Make Megatron token files from texts: jsonl, parquet and text, plain or compressed; source code.

    python tools/preprocess.py --input web.jsonl.zst --append-eod --tokenizer tok.model --out web
    python tools/preprocess.py --input src/ --glob '*.py' --tokenizer tok.model --out data/src

Several --json-keys make a dataset PREFIX_KEY each. A run that was killed continues when the same
command is given again, and ends with the same bytes. Exit codes: 0 done, or nothing to do; 2 for
bad settings, a bad line or a damaged file.
"""

import json
import os
import sys
from argparse import Namespace
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.data.corpus import KINDS, list_files
from megatron5d.data.documents import BadLine, Recipe
from megatron5d.data.preprocess import Job, Progress, Reporting, preprocess
from megatron5d.tools.options import add_corpus, add_json, file_prefix, whole_number

SHOWN_BAD_LINES = 10
SHOWN_FILES = 5


def arguments() -> Namespace:
    """Parses the command line."""
    parser = OptionParser(description=__doc__)
    add_corpus(parser)
    add_json(parser)
    parser.add_argument(
        "--kind", choices=KINDS, help="of all files (default: by each file's name or content)"
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="tokenizer file of any kind, or its folder",
    )
    parser.add_argument(
        "--out",
        type=file_prefix,
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.bin and PREFIX.idx",
    )
    parser.add_argument(
        "--text-per",
        choices=["file", "line"],
        default="file",
        help="what a document is in text files (default: file)",
    )
    for role, name, action, verb in (
        ("eod", "end-of-document", "--append-eod", "end"),
        ("bos", "begin-of-text", "--prepend-bos", "begin"),
    ):
        parser.add_argument(
            action, action="store_true", help=f"{verb} each document with the {name} token"
        )
        parser.add_argument(
            f"--{role}", metavar="TOKEN", help=f"{name} token or id (default: the tokenizer's)"
        )
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=0.0,
        help="share of documents for PREFIX_valid; the others go to PREFIX_train (default 0)",
    )
    parser.add_argument(
        "--workers",
        type=whole_number(),
        help="processes (default: one for each core this process may use)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the files at PREFIX")
    args = parser.parse_args()
    if not 0 <= args.valid_fraction < 1:
        parser.error(f"--valid-fraction requires 0 <= fraction < 1 (got {args.valid_fraction})")
    if len(set(args.json_keys)) < len(args.json_keys):
        parser.error(f"--json-keys {' '.join(args.json_keys)} names a key twice")
    return args


def available_cores() -> int:
    """Cores that this process may use: fewer than the machine's in a container or SLURM task."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn(text: str) -> None:
    tqdm.write(f"preprocess: {text}", file=sys.stderr)


def run(args: Namespace) -> None:
    """Preprocesses, with a progress bar on stderr, and prints the summary."""
    # files in folders, and a note on those that were not taken
    skipped_files: list[Path] = []
    files = tuple(list_files(args.input, args.glob, args.exclude, skipped_files))
    if skipped_files and not args.glob:
        count, names = len(skipped_files), [str(path) for path in skipped_files[:SHOWN_FILES]]
        names += ["..."] if count > SHOWN_FILES else []
        warn(f"skipped {count} files of other kinds (--glob selects files): {', '.join(names)}")
    keys = tuple(args.json_keys)
    recipe = Recipe(
        args.tokenizer, args.eod, args.append_eod, keys, args.skip_bad, args.bos, args.prepend_bos
    )
    job = Job(files, args.out, recipe, args.text_per, args.valid_fraction, args.kind)
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenizing", disable=None) as bar:
        workers = args.workers or available_cores()
        summary = preprocess(job, workers, reporting_to(bar), args.overwrite)
    print_summary(summary, args)


def reporting_to(bar: tqdm) -> Reporting:
    """Reporting with a progress bar, and with the first bad lines above it."""
    num_bad = 0

    def progress(done_bytes: int, state: Progress) -> None:
        bar.set_postfix(documents=state.documents, bad=state.bad_lines, refresh=False)
        bar.update(done_bytes - bar.n)

    def bad_line(bad: BadLine) -> None:
        nonlocal num_bad
        num_bad += 1
        if num_bad <= SHOWN_BAD_LINES:
            bar.write(f"skipped {bad}", file=sys.stderr)
        elif num_bad == SHOWN_BAD_LINES + 1:
            bar.write("further bad lines are only counted", file=sys.stderr)

    return Reporting(progress, bad_line, lambda text: warn(f"WARNING: {text}"))


def print_summary(summary: dict, args: Namespace) -> None:
    for prefix, counts in summary["outputs"].items():
        if counts["tokens"] == 0:
            warn(f"WARNING: {prefix} has no tokens, so that no run can use it")
    if args.json:
        print(json.dumps(summary))
        return
    for prefix, counts in summary["outputs"].items():
        counted = f"{counts['documents']} documents, {counts['tokens']} tokens"
        print(f"{prefix}.bin/.idx: {counted} ({summary['dtype']})")
    appended = "" if args.append_eod else ", not appended (--append-eod appends it)"
    print(f"end-of-document token: {summary['eod']} {summary.get('eod_token') or ''}{appended}")
    if args.prepend_bos:
        print(f"begin-of-text token: {summary['bos']}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.get("kinds", {}).items())
    seconds = "already there" if summary["up_to_date"] else f"{summary['seconds']:.1f} s"
    print(
        f"{summary['files']} files ({kinds}), {summary['empty']} empty documents, "
        f"{summary['bad_lines']} bad lines skipped; {seconds}"
    )


def main() -> int:
    args = arguments()
    return exit_code("preprocess", lambda: run(args), args.out)


if __name__ == "__main__":
    print_anywhere("interrupted; the same command continues")
    sys.exit(main())

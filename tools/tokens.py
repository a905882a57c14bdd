"""Examine, join, cut and create Megatron token files (prefix.bin and prefix.idx).

    python tools/tokens.py inspect data/web data/code
    python tools/tokens.py decode data/web --tokenizer tok.model --documents 3
    python tools/tokens.py merge data/web-0 data/web-1 --out data/web
    python tools/tokens.py cut data/web --documents 0:1000 --out data/sample
    python tools/tokens.py import ids/*.npy --vocab-size 32000 --out data/ids
    python tools/tokens.py import train.bin --dtype uint16 --eod 50256 --vocab-size 50257 --out gpt2

`merge` joins files of one id type byte for byte, as Megatron's merge_datasets.py does. `cut` takes
documents FIRST:END, or a share of them (`--share 0:0.01`). `import` reads .npy files, columns of
token lists in parquet files, datatrove's .ds with its .ds.index, llm.c's .bin, and ids alone, as
dolma (.npy) and nanoGPT (.bin) write them, with --dtype. A row of a list column or of a
two-dimensional array is a document; a one-dimensional array is one document, or several that end
with the id --eod. Exit code 2 for bad input: a damaged file, different id types, or an id outside
the vocabulary.
"""

import argparse
import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.data.imported_tokens import DTYPES, token_arrays
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import (
    IndexedDataset,
    IndexedWriter,
    check_absent,
    token_files,
    with_suffix,
)
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools.options import add_json, file_prefix, whole_number
from megatron5d.topology.owned_output import check_not_read, owned

CHUNK_TOKENS = 1 << 22  # read or copied at a time
COMPARED_DOCUMENTS = 1000  # whose last tokens `inspect` compares


def arguments() -> Namespace:
    """Parses the command line."""
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="check files; print their type, sizes and ids")
    decode = commands.add_parser("decode", help="print documents or samples as text")
    merge = commands.add_parser("merge", help="join files in the given order")
    cut = commands.add_parser("cut", help="copy a range of documents")
    imported = commands.add_parser("import", help="write arrays of token ids as token files")
    for command in (inspect, merge):
        command.add_argument("prefixes", nargs="+", metavar="PREFIX", help="without .bin and .idx")
    for command in (decode, cut):
        command.add_argument("prefix", metavar="PREFIX", help="without .bin and .idx")
    inspect.add_argument(
        "--no-scan", dest="scan", action="store_false", help="check index and sizes, read no ids"
    )
    _add_decode_options(decode)
    selection = cut.add_mutually_exclusive_group(required=True)
    selection.add_argument(
        "--documents", metavar="FIRST:END", help="such as 0:1000, or 1000: to the last"
    )
    selection.add_argument("--share", metavar="FROM:TO", help="of the documents, such as 0:0.01")
    imported.add_argument("files", nargs="+", metavar="FILE", help=".npy, parquet, .ds, .bin")
    imported.add_argument(
        "--column", default="input_ids", help="of parquet files (default: input_ids)"
    )
    imported.add_argument(
        "--dtype", choices=DTYPES, help="of the ids in files that do not say it (dolma, nanoGPT)"
    )
    imported.add_argument("--eod", type=int, help="last id of each document of a flat array")
    imported.add_argument(
        "--vocab-size", type=int, required=True, help="above all ids; it selects the id type"
    )
    for command in (merge, cut, imported):
        command.add_argument(
            "--out",
            type=file_prefix,
            required=True,
            metavar="PREFIX",
            help="writes PREFIX.bin and PREFIX.idx",
        )
        command.add_argument("--overwrite", action="store_true", help="replace the files at PREFIX")
    for command in (inspect, decode, merge, cut, imported):
        add_json(command)
    return parser.parse_args()


def _add_decode_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="as for tools/preprocess.py"
    )
    parser.add_argument(
        "--documents", type=int, default=3, metavar="N", help="random documents (default 3)"
    )
    parser.add_argument(
        "--first", type=whole_number(0), metavar="I", help="consecutive documents from I on instead"
    )
    parser.add_argument(
        "--sample", type=int, metavar="SEQ_LEN", help="random samples of this length instead"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=200, help="of each document (default 200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choice (default 0)")


def inspect(prefix: str, scan: bool) -> dict[str, Any]:
    """Checks a pair of files, and describes it.

    Args:
        scan: also read all ids.
    """
    data = IndexedDataset(prefix)
    bounds = _sequence_starts(data)[data.index.document_indices]
    lengths = np.diff(bounds)
    description = {
        "prefix": prefix,
        "dtype": data.dtype.name,
        "documents": data.num_documents,
        "sequences": data.num_sequences,
        "tokens": data.num_tokens,
        "empty_documents": int((lengths == 0).sum()),
        "longest_document": int(lengths.max(initial=0)),
        "bytes": data.bin_path.stat().st_size + data.idx_path.stat().st_size,
    }
    if scan and data.num_tokens:
        borders = np.append(np.arange(0, data.num_tokens, CHUNK_TOKENS), data.num_tokens)
        ranges = [(int(ids.min()), int(ids.max())) for ids in _stream(data, borders, "reading")]
        description["smallest_id"] = min(low for low, _ in ranges)
        description["largest_id"] = max(high for _, high in ranges)
        ends = bounds[1:][lengths > 0][:COMPARED_DOCUMENTS]
        last_ids = {int(data.tokens(int(end) - 1, 1)[0]) for end in ends}
        # the end-of-document token, if there is one
        description["documents_end_with"] = last_ids.pop() if len(last_ids) == 1 else None
    return description


def _sequence_starts(data: IndexedDataset) -> np.ndarray:
    """First token of each sequence, and the end, int64 `[num_sequences + 1]`."""
    return np.append(data.index.pointers // data.dtype.itemsize, data.num_tokens)


def _stream(data: IndexedDataset, borders: np.ndarray, description: str) -> Iterator[np.ndarray]:
    """Yields the tokens between neighboring borders, with a progress bar."""
    total = int(borders[-1] - borders[0])
    with tqdm(total=total, unit="tok", unit_scale=True, desc=description, disable=None) as bar:
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist()):
            yield data.tokens(start, end - start)
            bar.update(end - start)


def decode(args: Namespace) -> list[dict[str, Any]]:
    """Some documents or samples as text."""
    data, tokenizer = IndexedDataset(args.prefix), load_tokenizer(args.tokenizer)
    records = []
    for name, ids in _selected(data, args):
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            raise ValueError(
                f"{args.prefix}: {name} has id {ids.max()}, but {args.tokenizer} has only "
                f"{tokenizer.vocab_size}"
            )
        text = tokenizer.decode(ids[: args.sample or args.max_tokens].tolist())
        records.append({"from": name, "tokens": len(ids), "text": text})
    return records


def _selected(data: IndexedDataset, args: Namespace) -> list[tuple[str, np.ndarray]]:
    generator, count = random.Random(args.seed), args.documents
    if args.sample is not None:
        last = data.num_tokens - args.sample
        if args.sample < 1 or last < 0:
            raise ValueError(
                f"--sample requires 1 to {data.num_tokens} tokens of {args.prefix} "
                f"(got {args.sample})"
            )
        starts = [generator.randint(0, last) for _ in range(count)]
        return [(f"token {start}", data.tokens(start, args.sample)) for start in starts]
    numbers: Sequence[int]
    if args.first is not None:
        numbers = range(args.first, min(args.first + count, data.num_documents))
    else:
        numbers = sorted(
            generator.sample(range(data.num_documents), min(count, data.num_documents))
        )
    return [(f"document {i}", data.document(i)) for i in numbers]


Source = tuple[str, int, int | None]
"""Prefix of a pair of files, first document, and end (None: to the last)."""


def copy(sources: Sequence[Source], out: str, overwrite: bool) -> dict[str, Any]:
    """Writes documents of several pairs of files to one, with their sequences unchanged.

    One pair is open at a time: a process may have fewer files open than there are to join.

    Args:
        sources: where the documents come from, in the order in which they are written.
    """
    dtypes = {IndexedDataset(prefix).dtype.name: prefix for prefix, _, _ in sources}
    if len(dtypes) > 1:
        names = " and ".join(f"{name} ({prefix})" for name, prefix in dtypes.items())
        raise ValueError(f"files of one id type are required (got {names})")
    documents, num_sequences = [np.zeros(1, np.int64)], 0  # sequences before each document
    with _writer(out, np.dtype(next(iter(dtypes))), overwrite) as writer:
        # a document may have several sequences, whose borders the copy keeps
        for prefix, first, end in sources:
            data = IndexedDataset(prefix)
            indices = data.index.document_indices[first : None if end is None else end + 1]
            starts = _sequence_starts(data)[indices[0] : indices[-1] + 1]
            inner = np.searchsorted(starts, np.arange(starts[0], starts[-1], CHUNK_TOKENS))
            # borders of groups of complete sequences, of about CHUNK_TOKENS each
            groups = np.unique([0, *inner, len(starts) - 1])
            for k, ids in enumerate(_stream(data, starts[groups], data.prefix)):
                writer.add_documents(ids, np.diff(starts[groups[k] : groups[k + 1] + 1]))
            # a part may have no documents
            documents.append(indices[1:] - indices[0] + num_sequences)
            num_sequences += int(indices[-1] - indices[0])
        writer.finalize(np.concatenate(documents))
    return inspect(out, scan=False)


@contextmanager
def _writer(out: str, dtype: np.dtype, overwrite: bool) -> Iterator[IndexedWriter]:
    """Opens a writer, which owns `out`, and leaves no files where it fails."""
    with owned(out):
        if not overwrite:
            check_absent(out)
        writer = IndexedWriter(out, dtype)
        try:
            yield writer
        except BaseException:
            writer.close()
            for suffix in (".bin.partial", ".lengths.partial"):
                with_suffix(out, suffix).unlink(missing_ok=True)
            raise


def _range(text: str, shares: bool, total: int) -> tuple[int, int]:
    """Parses FROM:TO, in documents or as shares of `total`, to the first document and the end."""
    low, colon, high = text.partition(":")
    try:
        bounds = [float(low or 0), float(high or (1 if shares else total))]
        first, end = (round(bound * total) if shares else int(bound) for bound in bounds)
    except (ValueError, OverflowError):
        colon = ""
    if not colon:
        raise ValueError(f"{text!r} is not FIRST:END, such as {'0:0.01' if shares else '0:1000'}")
    if not 0 <= first < end <= total:
        raise ValueError(f"{text} gives documents {first} to {end} of {total}")
    return first, end


def import_arrays(args: Namespace) -> dict[str, Any]:
    """Writes the documents of all files to one pair."""
    with _writer(args.out, dtype_for_vocab(args.vocab_size), args.overwrite) as writer:
        for name in tqdm(args.files, unit="file", desc="importing", disable=None):
            for number, ids in enumerate(
                token_arrays(Path(name), args.column, args.eod, args.dtype)
            ):
                if not len(ids):
                    continue
                low, high = int(ids.min()), int(ids.max())
                if not 0 <= low <= high < args.vocab_size:
                    raise ValueError(
                        f"{name}: document {number} has id {low if low < 0 else high}; "
                        f"--vocab-size is {args.vocab_size}"
                        + (f", or its ids are not {args.dtype}" if args.dtype else "")
                    )
                if len(ids) >= 2**31 and args.eod is None:
                    raise ValueError(
                        f"{name}: a document of {len(ids)} ids, at most 2^31 - 1; name the id that "
                        "ends a document with --eod"
                    )
                writer.add_document(ids)
        writer.finalize()
    return inspect(args.out, scan=False)


def run(args: Namespace) -> list[dict[str, Any]]:
    """Runs the command; returns one record for each file or text."""
    if args.command == "inspect":
        return [inspect(prefix, args.scan) for prefix in args.prefixes]
    if args.command == "decode":
        return decode(args)
    if args.command == "import":
        check_not_read(token_files(args.out), args.files)
        return [import_arrays(args)]
    sources: list[Source]
    if args.command == "merge":
        sources = [(prefix, 0, None) for prefix in args.prefixes]
    else:
        total = IndexedDataset(args.prefix).num_documents
        bounds = _range(args.documents or args.share, args.share is not None, total)
        sources = [(args.prefix, *bounds)]
    read = (path for prefix, _, _ in sources for path in token_files(prefix))
    check_not_read(token_files(args.out), read)
    return [copy(sources, args.out, args.overwrite)]


def print_records(records: list[dict[str, Any]], args: Namespace) -> None:
    if args.json:
        print(json.dumps(records))
        return
    for record in records:
        if args.command == "decode":
            print(f"--- {record['from']}, {record['tokens']} tokens\n{record['text']}")
        else:
            for name, value in record.items():
                print(f"{name.replace('_', ' ') + ':':18} {value}")


def main() -> int:
    args = arguments()
    return exit_code("tokens", lambda: print_records(run(args), args), getattr(args, "out", None))


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

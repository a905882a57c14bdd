"""Look into token files (prefix.bin and prefix.idx of Megatron), join them, cut them, and make them
of token arrays.

    python tools/tokens.py inspect data/web data/code
    python tools/tokens.py decode data/web --tokenizer tok.model --documents 3
    python tools/tokens.py merge data/web-0 data/web-1 --out data/web
    python tools/tokens.py cut data/web --documents 0:1000 --out data/sample
    python tools/tokens.py import ids/*.npy --vocab-size 32000 --out data/ids

`merge` joins files of one id type byte for byte, as Megatron's merge_datasets.py does. `cut` takes
documents FIRST:END, or shares of them (`--share 0:0.01`). `import` reads .npy (one dim: a document,
or several where --eod says which id ends each; two dims: a document a row) and parquet columns of
token lists (a document a row). Exit codes: 0 done, 2 refused: a broken file, other id types, an id
beyond the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from megatron5d.config.command_line import OptionParser, print_anywhere
from megatron5d.config.errors import exit_code
from megatron5d.data.corpus import open_parquet
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import IndexedDataset, IndexedWriter, with_suffix
from megatron5d.data.tokenizer import load_tokenizer
from megatron5d.tools.options import add_json, whole_number

CHUNK_TOKENS = 1 << 22  # read or copied at a time
LOOKED_AT = 1000  # documents whose last token is compared


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = OptionParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="check files; tell type, sizes and ids")
    decode = commands.add_parser("decode", help="show documents or samples as text")
    merge = commands.add_parser("merge", help="join files, in the order given")
    cut = commands.add_parser("cut", help="copy a range of documents")
    imported = commands.add_parser(
        "import", help="make token files of .npy arrays or parquet columns of token ids"
    )
    for command in (inspect, merge):
        command.add_argument(
            "prefixes", nargs="+", metavar="PREFIX", help="path without .bin and .idx"
        )
    for command in (decode, cut):
        command.add_argument("prefix", metavar="PREFIX", help="path without .bin and .idx")
    inspect.add_argument(
        "--no-scan",
        dest="scan",
        action="store_false",
        help="check the index and sizes, read no ids",
    )
    decode.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="as tools/preprocess.py takes it"
    )
    decode.add_argument(
        "--documents", type=int, default=3, metavar="N", help="number of documents, drawn at random"
    )
    decode.add_argument(
        "--first", type=whole_number(0), metavar="I", help="those from document I on instead"
    )
    decode.add_argument(
        "--sample", type=int, metavar="SEQ_LEN", help="stretches of this many tokens instead"
    )
    decode.add_argument("--max-tokens", type=int, default=200, help="shown of each document")
    decode.add_argument("--seed", type=int, default=0, help="of the drawing")
    part = cut.add_mutually_exclusive_group(required=True)
    part.add_argument(
        "--documents", metavar="FIRST:END", help="such as 0:1000, or 1000: for the rest"
    )
    part.add_argument("--share", metavar="FROM:TO", help="of the documents, such as 0:0.01")
    imported.add_argument("files", nargs="+", metavar="FILE", help=".npy or parquet")
    imported.add_argument("--column", default="input_ids", help="of parquet files")
    imported.add_argument(
        "--eod", type=int, help="id that ends each document of a one-dimensional array"
    )
    imported.add_argument(
        "--vocab-size", type=int, required=True, help="ids must be below it; it chooses the id type"
    )
    for command in (merge, cut, imported):
        command.add_argument(
            "--out", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
        )
        command.add_argument("--overwrite", action="store_true", help="replace what is at PREFIX")
    for command in (inspect, decode, merge, cut, imported):
        add_json(command)
    return parser.parse_args()


def inspect(prefix: str, scan: bool) -> dict:
    """Checks a pair of files, of which every number of the index, and describes it."""
    data = IndexedDataset(prefix)
    bounds = _sequence_starts(data)[data.index.document_indices]
    lengths = np.diff(bounds)
    found = {
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
        pieces = [(int(ids.min()), int(ids.max())) for ids in _stream(data, borders, "reading")]
        found |= {
            "smallest_id": min(low for low, _ in pieces),
            "largest_id": max(high for _, high in pieces),
        }
        last = {int(data.tokens(int(end) - 1, 1)[0]) for end in bounds[1:][lengths > 0][:LOOKED_AT]}
        # the end-of-document token, if any
        found["documents_end_with"] = last.pop() if len(last) == 1 else None
    return found


def _sequence_starts(data: IndexedDataset) -> np.ndarray:
    """Returns the first token of each sequence, and the end, int64 `[num_sequences + 1]`."""
    return np.append(data.index.pointers // data.dtype.itemsize, data.num_tokens)


def _stream(data: IndexedDataset, borders: np.ndarray, what: str) -> Iterator[np.ndarray]:
    """Yields the tokens between each two neighbours of `borders`."""
    with tqdm(
        total=int(borders[-1] - borders[0]), unit="tok", unit_scale=True, desc=what, disable=None
    ) as bar:
        for start, end in zip(borders[:-1].tolist(), borders[1:].tolist()):
            yield data.tokens(start, end - start)
            bar.update(end - start)


def decode(args: argparse.Namespace) -> list[dict]:
    """Returns some documents, or stretches of tokens, as text."""
    data, tokenizer, draw = (
        IndexedDataset(args.prefix),
        load_tokenizer(args.tokenizer),
        random.Random(args.seed),
    )
    if args.sample is not None:
        last = data.num_tokens - args.sample
        if args.sample < 1 or last < 0:
            raise ValueError(
                f"--sample {args.sample}: {args.prefix} holds {data.num_tokens} tokens"
            )
        starts = [draw.randint(0, last) for _ in range(args.documents)]
        rows = [(f"token {at}", data.tokens(at, args.sample)) for at in starts]
    else:
        numbers: Sequence[int] = sorted(
            draw.sample(range(data.num_documents), min(args.documents, data.num_documents))
        )
        if args.first is not None:
            numbers = range(args.first, min(args.first + args.documents, data.num_documents))
        rows = [(f"document {i}", data.document(i)) for i in numbers]
    shown = []
    for name, ids in rows:
        if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
            raise ValueError(
                f"{args.prefix}: {name} has id {ids.max()}, {args.tokenizer} has {tokenizer.vocab_size}"
            )
        text = tokenizer.decode(ids[: args.sample or args.max_tokens].tolist())
        shown.append({"from": name, "tokens": len(ids), "text": text})
    return shown


def copy(parts: Sequence[tuple[str, int, int | None]], out: str, overwrite: bool) -> dict:
    """Writes documents first … end − 1 (None: to the last) of each pair of files to one, with their
    sequences as they are. One pair is open at a time: a process may have fewer files open than
    there are to join."""
    dtypes = {IndexedDataset(prefix).dtype.name: prefix for prefix, _, _ in parts}
    if len(dtypes) > 1:
        raise ValueError(
            f"files of {' and '.join(f'{name} ({prefix})' for name, prefix in dtypes.items())}: one id type"
        )
    documents = [np.zeros(1, np.int64)]  # sequences before each document
    with _writing(out, np.dtype(next(iter(dtypes))), overwrite) as writer:
        for prefix, first, end in parts:
            data = IndexedDataset(prefix)
            indices = data.index.document_indices[first : None if end is None else end + 1]
            starts = _sequence_starts(data)[indices[0] : indices[-1] + 1]
            inner = np.searchsorted(starts, np.arange(starts[0], starts[-1], CHUNK_TOKENS))
            # whole sequences of about CHUNK_TOKENS
            groups = np.unique([0, *inner, len(starts) - 1])
            for k, ids in enumerate(_stream(data, starts[groups], data.prefix)):
                writer.add_documents(ids, np.diff(starts[groups[k] : groups[k + 1] + 1]))
            documents.append(indices[1:] - indices[0] + documents[-1][-1])
        writer.finalize(np.concatenate(documents))
    return inspect(out, scan=False)


@contextmanager
def _writing(out: str, dtype: np.dtype, overwrite: bool) -> Iterator[IndexedWriter]:
    """Opens a writer that leaves nothing behind where it fails."""
    if with_suffix(out, ".idx").exists() and not overwrite:
        raise ValueError(f"{out}.idx is there already; --overwrite replaces it")
    writer = IndexedWriter(out, dtype)
    try:
        yield writer
    except BaseException:
        writer.close()
        for suffix in (".bin.partial", ".lengths.partial"):
            with_suffix(out, suffix).unlink(missing_ok=True)
        raise


def _range(text: str, shares: bool, total: int) -> tuple[int, int]:
    """Returns the first document and end of FROM:TO, in documents or as shares of `total`."""
    low, colon, high = text.partition(":")
    try:
        ends = [float(low or 0), float(high or (1 if shares else total))]
        first, end = (round(each * total) if shares else int(each) for each in ends)
    except (ValueError, OverflowError):
        colon = ""
    if not colon:
        raise ValueError(f"{text!r} is no FIRST:END, such as {'0:0.01' if shares else '0:1000'}")
    if not 0 <= first < end <= total:
        raise ValueError(f"{text} gives documents {first} to {end} of {total}")
    return first, end


def token_arrays(path: Path, column: str, eod: int | None) -> Iterator[np.ndarray]:
    """Yields the documents of a .npy or parquet file, each `[tokens]`."""
    if path.suffix == ".npy":
        array = np.load(path, mmap_mode="r")
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: {array.dtype.name} of {array.ndim} dims; token ids are integers of one or two"
            )
        if array.ndim == 1:
            ends = np.flatnonzero(array == eod) + 1 if eod is not None else np.empty(0, np.int64)
            array = np.split(array, ends[ends < len(array)])
        yield from array
        return
    with open_parquet(path) as parquet:
        if column not in parquet.schema_arrow.names:
            raise ValueError(
                f"{path}: no column {column!r} (--column); it has {', '.join(parquet.schema_arrow.names)}"
            )
        for batch in parquet.iter_batches(1024, columns=[column]):
            for row in batch.column(column):
                values = getattr(row, "values", None) if row.is_valid else ()
                ids = np.asarray(values) if values is not None else np.empty(0)
                if len(ids) and ids.dtype.kind not in "iu" or values is None:
                    raise ValueError(
                        f"{path}: column {column!r} is of {row.type}; a row is a list of integers"
                    )
                yield ids


def import_arrays(args: argparse.Namespace) -> dict:
    """Writes the documents of all files to one pair."""
    with _writing(args.out, dtype_for_vocab(args.vocab_size), args.overwrite) as writer:
        for name in tqdm(args.files, unit="file", desc="importing", disable=None):
            for number, ids in enumerate(token_arrays(Path(name), args.column, args.eod)):
                if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < args.vocab_size:
                    worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
                    raise ValueError(
                        f"{name}: document {number} has id {worst}; --vocab-size is {args.vocab_size}"
                    )
                if len(ids):
                    writer.add_document(ids)
        writer.finalize()
    return inspect(args.out, scan=False)


def run(args: argparse.Namespace) -> list[dict]:
    """Does what the command line says; one record a file, or a piece of text."""
    if args.command == "inspect":
        return [inspect(prefix, args.scan) for prefix in args.prefixes]
    if args.command == "decode":
        return decode(args)
    if args.command == "import":
        return [import_arrays(args)]
    parts: list[tuple[str, int, int | None]]
    if args.command == "merge":
        parts = [(prefix, 0, None) for prefix in args.prefixes]
    else:
        total = IndexedDataset(args.prefix).num_documents
        parts = [
            (args.prefix, *_range(args.documents or args.share, args.share is not None, total))
        ]
    if any(Path(args.out).resolve() == Path(prefix).resolve() for prefix, _, _ in parts):
        raise ValueError(f"--out {args.out} is one of the files that are read")
    return [copy(parts, args.out, args.overwrite)]


def main() -> int:
    args = arguments()
    return exit_code("tokens", lambda: tell(run(args), args), getattr(args, "out", None))


def tell(found: list[dict], args: argparse.Namespace) -> None:
    """Prints records."""
    if args.json:
        print(json.dumps(found))
        return
    for record in found:
        if args.command == "decode":
            print(f"--- {record['from']}, {record['tokens']} tokens\n{record['text']}")
        else:
            print(
                "\n".join(
                    f"{name.replace('_', ' ') + ':':18} {value}" for name, value in record.items()
                )
            )


if __name__ == "__main__":
    print_anywhere()
    sys.exit(main())

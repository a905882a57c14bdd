"""Token files of other programs, as arrays of one document each.

Files that hold ids alone say neither their id type nor where documents end. What stands in a file
or beside it is read: headers of `.npy` and llm.c, the `.index` of datatrove.

Source: allenai/dolma, python/dolma/tokenizer/memmap_writer.py; huggingface/datatrove,
    pipeline/tokens/tokenizer.py; karpathy/nanoGPT, data/openwebtext/prepare.py; karpathy/llm.c,
    dev/data/data_common.py.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron5d.data.corpus import open_parquet
from megatron5d.data.index_format import MAGIC

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int16", "int32", "int64")
CHUNK_TOKENS = 1 << 22  # searched at a time for the ends of documents

_NPY = b"\x93NUMPY"
_LLM_C_HEADER_BYTES = 1024
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic and version -> id type
_LLM_C_EVAL = (20240522, 1)  # examples with their completions
# how a file begins that holds no ids -> what it is
_NO_IDS = {
    b"\x1f\x8b\x08": "compressed: gunzip it first",
    b"\x28\xb5\x2f\xfd": "compressed: unzstd it first",
    b"PK\x03\x04": "an archive: write each array in it as a .npy file",
    b"ARROW1": "an Arrow file: write it as parquet",
    MAGIC: "the index of a Megatron token file: tools/tokens.py merge PREFIX copies such files",
}


def token_arrays(
    path: Path, column: str, eod: int | None, dtype: str | None = None
) -> Iterator[np.ndarray]:
    """Reads the documents of a file.

    Args:
        path: a `.npy` file, parquet, datatrove's `.ds`, llm.c's `.bin`, or ids alone.
        column: of parquet files.
        eod: last id of each document of a flat array; None = the array is one document.
        dtype: id type of files that do not say it.

    Yields:
        Each document, `[tokens]`.

    Raises:
        ValueError: the file is none of these, is damaged, or its id type is unknown or another.
    """
    with path.open("rb") as file:
        head = file.read(_LLM_C_HEADER_BYTES)
    if what := next((what for begin, what in _NO_IDS.items() if head.startswith(begin)), None):
        raise ValueError(f"{path} is {what}")
    if head.startswith(b"PAR1") or path.suffix in (".parquet", ".pq"):
        yield from _column(path, column)
        return
    index = path.with_name(f"{path.name}.index")
    if head.startswith(_NPY):
        array = np.load(path, mmap_mode="r")
        if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: token ids are integers of one or two dims "
                f"(got {array.dtype.name} of {array.ndim})"
            )
        _check_dtype(path, dtype, array.dtype)
        if array.ndim == 2:
            yield from array
            return
    elif (magic := struct.unpack("<2i", head[:8].ljust(8, b"\0"))) in (*_LLM_C, _LLM_C_EVAL):
        array = _llm_c(path, head, magic, dtype)
    elif index.is_file():
        yield from _indexed(path, index, dtype)
        return
    else:
        array = _ids_alone(path, dtype)
    yield from _documents(array, eod)


def _documents(array: np.ndarray, eod: int | None) -> Iterator[np.ndarray]:
    """Yields the documents of a flat array, which is divided after each end-of-document id."""
    start = 0
    for at in range(0, len(array), CHUNK_TOKENS) if eod is not None else ():
        for end in (np.flatnonzero(array[at : at + CHUNK_TOKENS] == eod) + at + 1).tolist():
            yield array[start:end]
            start = end
    if start < len(array):
        yield array[start:]


def _check_dtype(path: Path, dtype: str | None, actual: np.dtype | str) -> None:
    actual = np.dtype(actual).name
    if dtype not in (None, actual):
        raise ValueError(f"{path} holds {actual} (got --dtype {dtype}); leave --dtype out for it")


def _llm_c(path: Path, head: bytes, magic: tuple[int, ...], dtype: str | None) -> np.ndarray:
    """The ids of an llm.c file: a header of 256 int32 (magic, version, number of ids), then ids."""
    if magic == _LLM_C_EVAL:
        raise ValueError(f"{path} is an evaluation file of llm.c, with examples instead of text")
    kind = np.dtype(_LLM_C[magic[0], magic[1]])
    _check_dtype(path, dtype, kind)
    size = path.stat().st_size
    if len(head) == _LLM_C_HEADER_BYTES:
        (count,) = struct.unpack_from("<I", head, 8)
        expected = _LLM_C_HEADER_BYTES + count * kind.itemsize
        if size == expected:
            return _mapped(path, kind, _LLM_C_HEADER_BYTES)
        what = f"its header says {expected} ({count} ids of {kind.name})"
    else:
        what = f"the header of an llm.c file alone has {_LLM_C_HEADER_BYTES}"
    raise ValueError(f"{path} has {size} bytes, and {what}: truncated?")


def _indexed(path: Path, index: Path, dtype: str | None) -> Iterator[np.ndarray]:
    """Yields the documents of datatrove's `.ds`, whose index has their ends, in ids, uint64."""
    size, raw = path.stat().st_size, index.read_bytes()
    ends = np.frombuffer(raw[: len(raw) // 8 * 8], "<u8").astype(np.int64)
    count = int(ends[-1]) if len(ends) else 0
    known = {count * np.dtype(kind).itemsize: kind for kind in ("uint16", "uint32")}
    actual = known.get(size) if count else "uint16"
    if len(raw) % 8 or (np.diff(ends, prepend=0) < 0).any() or not actual or size and not count:
        raise ValueError(
            f"{path} has {size} bytes, and {index.name} ends after {count} ids, of 2 or 4 bytes "
            f"each ({len(raw)} bytes of index, 8 a document): one of them is damaged"
        )
    if not count:
        return
    _check_dtype(path, dtype, actual)
    array, starts = _mapped(path, np.dtype(actual), 0), [0, *ends[:-1].tolist()]
    yield from (array[start:end] for start, end in zip(starts, ends.tolist()))


def _ids_alone(path: Path, dtype: str | None) -> np.ndarray:
    size = path.stat().st_size
    if path.suffix == ".bin" and (idx := path.with_suffix(".idx")).is_file():
        raise ValueError(
            f"{path} is a Megatron token file, as {idx.name} beside it shows: "
            f"tools/tokens.py merge {path.with_suffix('')} copies it"
        )
    if dtype is None:
        known = {".npy": "no .npy header: ids alone, as dolma and OLMo write them"}
        known |= {".bin": "no header of llm.c: ids alone, as nanoGPT writes them"}
        known |= {".ds": f"ids of datatrove without {path.name}.index"}
        what = known.get(path.suffix, "neither .npy nor parquet nor llm.c's .bin: ids alone?")
        raise ValueError(
            f"{path}: {what}; name their type with --dtype (uint16, for vocabularies above 65,536 "
            "uint32), and with --eod the id that ends a document"
        )
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise ValueError(
            f"{path} has {size} bytes, which are no multiple of the {kind.itemsize} of "
            f"--dtype {dtype}: truncated, or of another type"
        )
    return _mapped(path, kind, 0)


def _mapped(path: Path, dtype: np.dtype, offset: int) -> np.ndarray:
    if path.stat().st_size == offset:  # which cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=offset)


def _column(path: Path, column: str) -> Iterator[np.ndarray]:
    """Yields the lists of a parquet column; a missing row is an empty document."""
    with open_parquet(path) as parquet:
        names = parquet.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path}: no column {column!r} (--column); it has {', '.join(names)}")
        for batch in parquet.iter_batches(1024, columns=[column]):
            for row in batch.column(column):
                values = getattr(row, "values", None) if row.is_valid else ()
                ids = np.asarray(values) if values is not None else np.empty(0)
                if len(ids) and ids.dtype.kind not in "iu" or values is None:
                    raise ValueError(
                        f"{path}: column {column!r} requires lists of integers (got {row.type})"
                    )
                yield ids

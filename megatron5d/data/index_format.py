"""The bytes of a Megatron `.idx` file: how one is written, and how one is read without trusting it.

Every error names the file and the byte of the fault. A broken index is nearly always a broken copy,
and the byte tells whether the copy was cut off, mixed up with another file or never an index.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
MAGIC_OF_OLD_FILES = b"TNTIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"], start=1)
}
CHECK_CHUNK = 1 << 15  # entries checked at a time: they stay in the cache


@dataclass(frozen=True)
class Index:
    """A checked `.idx` file; the arrays are views into the memory-mapped file and are not
    aligned."""

    dtype: np.dtype  # of the ids in `.bin`
    lengths: np.ndarray  # [S] int32, tokens of each sequence
    pointers: np.ndarray  # [S] int64, byte offset of each sequence in `.bin`
    # [documents + 1] int64, sequences before each document, and their total
    document_indices: np.ndarray

    @property
    def bin_bytes(self) -> int:
        """Size that `.bin` must have, in bytes."""
        return (
            int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
            if len(self.lengths)
            else 0
        )


def index_header(dtype: np.dtype, num_sequences: int, num_documents: int) -> bytes:
    """34 bytes at the beginning of an `.idx` file.

    Args:
        dtype: of the token ids in `.bin`.
        num_sequences: entries of the lengths and of the byte offsets.
        num_documents: the header stores this plus one.

    Returns:
        34 bytes, little-endian.
    """
    code = next(code for code, known in DTYPES.items() if known == np.dtype(dtype))
    return MAGIC + struct.pack("<QBQQ", VERSION, code, num_sequences, num_documents + 1)


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """Id type Megatron's builder chooses: u16 below 65,500 ids (not 65,536), else
    i32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def file_error(path: Path, byte: int, what: str) -> ValueError:
    """Error to raise about a data file, in the same form for all: file, byte, what is
    wrong."""
    return ValueError(f"{path}: byte {byte}: {what}")


def read_index(path: Path) -> Index:
    """Maps an `.idx` file and checks every number in it.

    Args:
        path: the `.idx` file.

    Returns:
        The checked index.

    Raises:
        ValueError: the file is missing, truncated, foreign or inconsistent; names the file and the
            byte.
    """
    index = map_index(path)
    pointers_at = HEADER_BYTES + index.lengths.nbytes
    _check_sequences(path, index, HEADER_BYTES, pointers_at)
    _check_documents(path, index, pointers_at + index.pointers.nbytes)
    return index


def map_index(path: Path) -> Index:
    """Maps an `.idx` file and checks only its header and size, which takes no time however long the
    index is.

    Returns:
        The index; the numbers after the header are not checked.

    Raises:
        ValueError: the file is missing, truncated or foreign; names the file and the byte.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: no such file (data.train and data.valid name the path without .bin/.idx)"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    dtype, num_sequences, num_boundaries = _read_header(path, head)
    lengths_at = HEADER_BYTES
    pointers_at = lengths_at + 4 * num_sequences
    documents_at = pointers_at + 8 * num_sequences
    end = documents_at + 8 * num_boundaries
    for name, start, stop in [
        (f"{num_sequences} sequence lengths", lengths_at, pointers_at),
        (f"{num_sequences} byte offsets", pointers_at, documents_at),
        (f"{num_boundaries} document indices", documents_at, end),
    ]:
        if size < stop:
            raise file_error(
                path,
                size,
                (
                    f"the file ends, but its {name} (from byte {start}) reach to byte {stop}: "
                    "truncated?"
                ),
            )
    if size == end + num_sequences and num_sequences:
        raise file_error(
            path,
            end,
            f"{num_sequences} bytes of multimodal modes follow; only plain text is supported",
        )
    if size > end:
        raise file_error(path, end, f"the index ends here, but the file has {size} bytes")
    # a plain view, because indexing a memmap is slow
    raw = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    return Index(
        dtype,
        lengths=raw[lengths_at:pointers_at].view("<i4"),
        pointers=raw[pointers_at:documents_at].view("<i8"),
        document_indices=raw[documents_at:end].view("<i8"),
    )


def _read_header(path: Path, head: bytes) -> tuple[np.dtype, int, int]:
    """Id dtype, number of sequences and number of document indices, from the first
    bytes of a file."""
    if head.startswith(MAGIC_OF_OLD_FILES):
        raise file_error(
            path,
            0,
            "this is a TNTIDX file of the old format; write it again with tools/preprocess.py",
        )
    if not MAGIC.startswith(head[: len(MAGIC)]):
        raise file_error(
            path, 0, f"{head[: len(MAGIC)]!r} instead of {MAGIC!r}: not a Megatron index"
        )
    if len(head) < HEADER_BYTES:
        raise file_error(
            path, len(head), f"the file ends inside its header of {HEADER_BYTES} bytes: truncated?"
        )
    version, code, num_sequences, num_boundaries = struct.unpack_from("<QBQQ", head, len(MAGIC))
    if version != VERSION:
        raise file_error(path, 9, f"version {version}, only version {VERSION} is known")
    if code not in DTYPES:
        raise file_error(path, 17, f"dtype code {code} is unknown (1 to {max(DTYPES)})")
    if DTYPES[code].kind == "f":
        raise file_error(
            path, 17, f"dtype code {code} is {DTYPES[code].name}, which holds no token ids"
        )
    if num_boundaries < 1:
        raise file_error(
            path, 26, "0 document indices; there is always one more than there are documents"
        )
    return DTYPES[code], num_sequences, num_boundaries


def _check_sequences(path: Path, index: Index, lengths_at: int, pointers_at: int) -> None:
    """Checks that lengths are not negative and that each sequence starts where the one before it
    ends."""
    expected = 0
    for start in range(0, len(index.lengths), CHECK_CHUNK):
        lengths = index.lengths[start : start + CHECK_CHUNK]
        pointers = index.pointers[start : start + CHECK_CHUNK]
        if lengths.min() < 0:
            i = start + int(np.argmax(lengths < 0))
            raise file_error(
                path, lengths_at + 4 * i, f"sequence {i} has length {index.lengths[i]}"
            )
        sizes = lengths * np.int64(index.dtype.itemsize)
        if pointers[0] != expected or not np.array_equal(np.diff(pointers), sizes[:-1]):
            starts = expected + np.cumsum(sizes) - sizes
            k = int(np.argmax(starts != pointers))
            raise file_error(
                path,
                pointers_at + 8 * (start + k),
                (
                    f"sequence {start + k} is said to start at byte {pointers[k]} of .bin, not "
                    f"{starts[k]}"
                ),
            )
        expected = int(pointers[-1] + sizes[-1])


def _check_documents(path: Path, index: Index, documents_at: int) -> None:
    """Checks that document boundaries rise from 0 to the number of sequences."""
    boundaries, num_sequences = index.document_indices, len(index.lengths)
    if boundaries[0] != 0:
        raise file_error(
            path, documents_at, f"the first document starts at sequence {boundaries[0]}, not 0"
        )
    for start in range(0, len(boundaries) - 1, CHECK_CHUNK):
        falls = np.diff(boundaries[start : start + CHECK_CHUNK + 1]) < 0
        if falls.any():
            i = start + int(np.argmax(falls)) + 1
            raise file_error(
                path,
                documents_at + 8 * i,
                f"document index {boundaries[i]} after {boundaries[i - 1]}: not rising",
            )
    if boundaries[-1] != num_sequences:
        last = documents_at + 8 * (len(boundaries) - 1)
        raise file_error(
            path, last, f"the last document ends at sequence {boundaries[-1]} of {num_sequences}"
        )

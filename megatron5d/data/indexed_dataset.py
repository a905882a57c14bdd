"""Token files in Megatron's format: `prefix.bin` holds the ids of all documents, `prefix.idx` where
each one begins.

Opening a terabyte costs nothing: the index is mapped into memory, and tokens are read where they
are asked for. A file that is cut short meanwhile gives an error that names it, where a memory map
would end the process (SIGBUS). Writing appends to `*.partial` files and renames them at the end, so
a file named `.idx` is always complete.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron5d.data.index_format import DTYPES, file_error, index_header, map_index, read_index


def with_suffix(prefix: str | os.PathLike[str], suffix: str) -> Path:
    """Returns `prefix` with `suffix` appended; unlike Path.with_suffix it keeps what follows a dot
    in the prefix."""
    return Path(f"{os.fspath(prefix)}{suffix}")


def token_files(prefix: str | os.PathLike[str]) -> list[Path]:
    """The two files at a prefix."""
    return [with_suffix(prefix, suffix) for suffix in (".idx", ".bin")]


OPEN_FILES = 2  # descriptors that one dataset holds: of its .bin, and of the mapped .idx


class IndexedDataset:
    """A read-only Megatron token file.

    Args:
        prefix: path without `.bin` and `.idx`.
        checked: check every number of the index, which takes seconds for 10⁹ documents; False where
            only the size of the data is needed.

    Raises:
        ValueError: a file is missing, truncated, foreign or inconsistent; names the file and the
            byte.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, checked: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.idx_path, self.bin_path = with_suffix(prefix, ".idx"), with_suffix(prefix, ".bin")
        self.index = read_index(self.idx_path) if checked else map_index(self.idx_path)
        self.dtype, self._bin_bytes = self.index.dtype, self.index.bin_bytes
        if not self.bin_path.is_file():
            raise ValueError(f"{self.bin_path}: no such file, though {self.idx_path} is there")
        self._check_size(self.bin_path.stat().st_size)
        # no buffer and no position: ranks that were forked share it
        self._file = self.bin_path.open("rb", buffering=0)
        self._idx_bytes = self.idx_path.stat().st_size

    def _check_size(self, size: int) -> None:
        expected = self._bin_bytes
        if size != expected:
            what = "truncated?" if size < expected else "not the .bin of this .idx?"
            raise file_error(
                self.bin_path,
                min(size, expected),
                f"the file has {size} bytes, its .idx says {expected}: {what}",
            )

    @property
    def num_tokens(self) -> int:
        return self._bin_bytes // self.dtype.itemsize

    @property
    def num_sequences(self) -> int:
        """Number of sequences; one per document unless the writer cut documents into sentences."""
        return len(self.index.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.index.document_indices) - 1

    @property
    def sequence_lengths(self) -> np.ndarray:
        """Tokens of each sequence, int32 `[num_sequences]`, mapped and not aligned."""
        return self.index.lengths

    def sequence_start(self, i: int) -> int:
        """Where sequence `i` begins in the concatenated stream, in tokens; num_sequences
        gives the end."""
        return (
            int(self.index.pointers[i]) // self.dtype.itemsize
            if i < self.num_sequences
            else self.num_tokens
        )

    def document_start(self, i: int) -> int:
        """Where document `i` begins in the concatenated stream, in tokens; `i` = num_documents
        gives the end.

        Raises:
            ValueError: the index is damaged.
        """
        first = int(self.index.document_indices[i])
        if not 0 <= first <= self.num_sequences:
            raise ValueError(
                f"{self.prefix}.idx: document {i} begins at sequence {first} of "
                f"{self.num_sequences}"
            )
        return self.sequence_start(first)

    def document(self, i: int) -> np.ndarray:
        """Ids of document `i`.

        Returns:
            `[tokens]` in the file's dtype, read-only.

        Raises:
            IndexError: there is no such document.
            ValueError: the file has become shorter since it was opened.
        """
        if not 0 <= i < self.num_documents:
            raise IndexError(f"{self.prefix}: document {i} of {self.num_documents}")
        start = self.document_start(i)
        return self.tokens(start, self.document_start(i + 1) - start)

    def tokens(self, start: int, count: int) -> np.ndarray:
        """Stretch of the concatenated documents.

        Returns:
            `[count]` in the file's dtype, read-only.

        Raises:
            IndexError: the stretch leaves the file.
            ValueError: the file has become shorter since it was opened.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise IndexError(
                f"{self.prefix}: tokens {start} to {start + count} of {self.num_tokens}"
            )
        offset, end = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        pieces = []  # one, unless it has 2 GiB or more
        while offset < end:
            pieces.append(os.pread(self._file.fileno(), end - offset, offset))
            if not pieces[-1]:
                self._check_size(os.fstat(self._file.fileno()).st_size)
                raise file_error(self.bin_path, offset, "the file ended here while it was read")
            offset += len(pieces[-1])
        return np.frombuffer(b"".join(pieces), self.dtype)

    def check_index(self) -> None:
        """Reads nothing; to be called before the mapped index is read, of which pages that are gone
        end the process.

        Raises:
            ValueError: the `.idx` has become shorter since it was opened.
        """
        if (size := self.idx_path.stat().st_size) < self._idx_bytes:
            raise file_error(
                self.idx_path,
                size,
                f"the file has {size} bytes, and had {self._idx_bytes}: truncated?",
            )

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """Where documents begin inside a stretch of the concatenated documents.

        Returns int64 offsets from `start`, rising, each in 1 … count−1 (the stretch's own beginning
        is not listed).
        """
        self.check_index()
        # bisect touches log2(documents) entries; numpy's searchsorted would copy the whole
        # unaligned array
        first = bisect_right(range(self.num_documents), start, key=self.document_start)
        last = bisect_left(
            range(self.num_documents), start + count, lo=first, key=self.document_start
        )
        starts = np.array(
            [self.document_start(i) - start for i in range(first, last)], dtype=np.int64
        )
        return np.unique(starts)  # an empty document starts where its successor does


class IndexedWriter:
    """Writes a Megatron token file with one sequence per document, byte for byte as Megatron's own
    builder does.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is made where it does not exist.
        dtype: of the ids; `dtype_for_vocab` is the one that Megatron gives a vocabulary.
        resume_at: (documents, tokens) to keep of an earlier, interrupted writer of the same prefix;
            None = start from the beginning.

    Raises:
        ValueError: the format has no such dtype, or less is on disk than `resume_at` wants to keep.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: np.dtype | type | str,
        resume_at: tuple[int, int] | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind == "f" or self.dtype not in DTYPES.values():
            raise ValueError(
                f"IndexedWriter: dtype {self.dtype}; the format has uint8, int8, int16, int32, "
                "int64, uint16"
            )
        self.num_documents, self.num_tokens = resume_at or (0, 0)
        self._max_id = int(np.iinfo(self.dtype).max)
        self._bin_path = with_suffix(prefix, ".bin.partial")
        self._lengths_path = with_suffix(prefix, ".lengths.partial")
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._open(self._bin_path, self.num_tokens * self.dtype.itemsize)
        self._lengths = self._open(self._lengths_path, 4 * self.num_documents)

    @staticmethod
    def _open(path: Path, keep_bytes: int) -> BinaryIO:
        """Opens and locks a partial file, and cuts it off after the bytes to keep."""
        if keep_bytes and (size := path.stat().st_size if path.exists() else 0) < keep_bytes:
            raise file_error(
                path, size, f"the interrupted file ends here, {keep_bytes} bytes were to be kept"
            )
        file = path.open("ab")
        _lock(file, path)
        file.truncate(keep_bytes)
        return file

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends one document.

        Args:
            ids: token ids, `[tokens]`.

        Raises:
            ValueError: an id is negative or too large for the dtype.
        """
        self.add_documents(ids, [len(ids)])

    def add_documents(
        self, ids: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray
    ) -> None:
        """Appends several documents at once.

        Args:
            ids: token ids of all of them back to back, `[sum(lengths)]`.
            lengths: tokens of each document.

        Raises:
            ValueError: an id is negative or too large for the dtype, or a document has 2³¹ tokens
                or more.
        """
        ids, lengths = np.asarray(ids), np.asarray(lengths, dtype=np.int64)
        assert ids.ndim == 1 and len(ids) == lengths.sum(), (ids.shape, lengths.sum())
        assert not len(ids) or ids.dtype.kind in "iu", ids.dtype
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) <= self._max_id:
            worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise ValueError(
                f"{self.prefix}: token id {worst} is outside 0 to {self._max_id} "
                f"({self.dtype.name})"
            )
        if len(lengths) and lengths.max() >= 2**31:
            raise ValueError(
                f"{self.prefix}: a document of {lengths.max()} tokens; the format stops at 2^31 - 1"
            )
        self._bin.write(ids.astype(self.dtype).tobytes())
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.num_documents += len(lengths)
        self.num_tokens += len(ids)

    def flush(self) -> None:
        """Puts on disk what was added so far; (num_documents, num_tokens) may then be another
        writer's `resume_at`."""
        for file in (self._bin, self._lengths):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the partial files as they are; a later writer may resume them."""
        self._bin.close()
        self._lengths.close()

    def finalize(self, document_indices: np.ndarray | None = None) -> None:
        """Writes the index and renames both files to their final names, the `.idx` last.

        Args:
            document_indices: as in `Index`, where what was added are sequences; None = each is a
                document.
        """
        self.flush()
        self.close()
        finish_partial(self.prefix, self.dtype, document_indices)


def _lock(file: BinaryIO, path: Path) -> None:
    """Takes a file lock, which ends with this process.

    Raises:
        ValueError: another process is writing the file.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another process is writing this file") from None
    except (ImportError, OSError):
        pass  # no locks on this system: the user must not write one prefix twice at a time


def check_absent(prefix: str | os.PathLike[str]) -> None:
    """Raises ValueError where a token file would be replaced, other than by finishing it."""
    unfinished = with_suffix(prefix, ".lengths.partial").exists()
    for path in token_files(prefix)[: 1 if unfinished else 2]:
        if path.exists():
            raise ValueError(f"{path} is there already; --overwrite replaces it")


def finish_partial(
    prefix: str | os.PathLike[str], dtype: np.dtype, document_indices: np.ndarray | None = None
) -> None:
    """Turns complete `*.partial` files into `.bin` and `.idx`; can be repeated after a kill at any
    point.

    Args:
        prefix: path without `.bin` and `.idx`.
        dtype: id type of the `.bin`.
        document_indices: as in `IndexedWriter.finalize`.
    """
    bin_partial, lengths_path = (
        with_suffix(prefix, ".bin.partial"),
        with_suffix(prefix, ".lengths.partial"),
    )
    if not lengths_path.exists():
        return
    idx_partial = with_suffix(prefix, ".idx.partial")
    lengths = np.fromfile(lengths_path, dtype="<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    if document_indices is None:
        document_indices = np.arange(len(lengths) + 1)
    with idx_partial.open("wb") as file:
        file.write(index_header(dtype, len(lengths), len(document_indices) - 1))
        lengths.tofile(file)
        (ends - lengths * np.int64(np.dtype(dtype).itemsize)).astype("<i8").tofile(file)
        document_indices.astype("<i8").tofile(file)
        file.flush()
        os.fsync(file.fileno())
    # an old .idx must never be beside the new .bin
    with_suffix(prefix, ".idx").unlink(missing_ok=True)
    if bin_partial.exists():
        os.replace(bin_partial, with_suffix(prefix, ".bin"))
    os.replace(idx_partial, with_suffix(prefix, ".idx"))
    lengths_path.unlink()

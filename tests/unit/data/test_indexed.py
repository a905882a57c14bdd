"""Token files: the exact bytes, the round trip, and one clear refusal per kind of damage."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron5d.data.batch import Loader
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import IndexedDataset, IndexedWriter, finish_partial
from megatron5d.data.samples import open_samples

# two documents [1, 2, 3] and [4, 5] as u16, written by hand from the description of the format
IDX = (
    b"MMIDIDX\x00\x00"
    + bytes([1, 0, 0, 0, 0, 0, 0, 0])
    + bytes([8])
    + bytes([2, 0, 0, 0, 0, 0, 0, 0])
    + bytes([3, 0, 0, 0, 0, 0, 0, 0])
    + bytes([3, 0, 0, 0, 2, 0, 0, 0])
    + bytes([0] * 8 + [6] + [0] * 7)
    + bytes([0] * 8 + [1] + [0] * 7 + [2] + [0] * 7)
)
BIN = bytes([1, 0, 2, 0, 3, 0, 4, 0, 5, 0])


def write_raw(folder: Path, idx: bytes = IDX, bin_: bytes = BIN) -> Path:
    (folder / "x.idx").write_bytes(idx)
    (folder / "x.bin").write_bytes(bin_)
    return folder / "x"


def write(prefix: Path, docs, dtype="u2") -> Path:
    writer = IndexedWriter(prefix, dtype)
    for doc in docs:
        writer.add_document(doc)
    writer.finalize()
    return prefix


def test_writes_the_bytes_of_the_format(tmp_path):
    prefix = write(tmp_path / "a.b", [[1, 2, 3], [4, 5]])
    assert len(IDX) == 82
    assert Path(f"{prefix}.idx").read_bytes() == IDX
    assert Path(f"{prefix}.bin").read_bytes() == BIN
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


def test_reads_the_bytes_of_the_format(tmp_path):
    data = IndexedDataset(write_raw(tmp_path))
    assert (data.num_tokens, data.num_documents, data.num_sequences, data.dtype) == (
        5,
        2,
        2,
        np.uint16,
    )
    assert data.document(0).tolist() == [1, 2, 3] and data.document(1).tolist() == [4, 5]
    assert data.tokens(1, 3).tolist() == [2, 3, 4]
    assert data.document_starts(0, 5).tolist() == [3] and data.document_starts(3, 2).tolist() == []


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(256, "u2"), (65499, "u2"), (65500, "i4"), (128256, "i4")]
)
def test_id_type_follows_the_vocabulary(vocab, dtype):
    assert dtype_for_vocab(vocab) == np.dtype(f"<{dtype}")


@settings(max_examples=40, deadline=None)
@given(
    docs=st.lists(st.lists(st.integers(0, 99), max_size=9), max_size=12),
    dtype=st.sampled_from(["u2", "i4"]),
)
def test_round_trip_with_empty_documents(tmp_path_factory, docs, dtype):
    data = IndexedDataset(write(tmp_path_factory.mktemp("d") / "x", docs, dtype))
    assert [data.document(i).tolist() for i in range(data.num_documents)] == docs
    stream = [token for doc in docs for token in doc]
    assert data.tokens(0, data.num_tokens).tolist() == stream
    begins = {sum(map(len, docs[:i])) for i in range(len(docs))}
    for start in range(len(stream)):
        expected = [p - start for p in range(start + 1, len(stream)) if p in begins]
        assert data.document_starts(start, len(stream) - start).tolist() == expected


def test_several_sequences_in_a_document(tmp_path):
    idx = IDX[:26] + struct.pack("<Q", 2) + IDX[34:58] + struct.pack("<2q", 0, 2)
    data = IndexedDataset(write_raw(tmp_path, idx))
    assert (data.num_sequences, data.num_documents) == (2, 1)
    assert data.document(0).tolist() == [1, 2, 3, 4, 5]


def put(at: int, value: bytes) -> bytes:
    return IDX[:at] + value + IDX[at + len(value) :]


DAMAGE = {
    "empty": (b"", BIN, r"x\.idx: byte 0: .*truncated"),
    "header cut": (IDX[:20], BIN, r"x\.idx: byte 20: .*header of 34 bytes"),
    "lengths cut": (
        IDX[:40],
        BIN,
        r"x\.idx: byte 40: .*2 sequence lengths \(from byte 34\) reach to byte 42",
    ),
    "pointers cut": (
        IDX[:50],
        BIN,
        r"x\.idx: byte 50: .*2 byte offsets \(from byte 42\) reach to byte 58",
    ),
    "documents cut": (
        IDX[:81],
        BIN,
        r"x\.idx: byte 81: .*3 document indices \(from byte 58\) reach to byte 82",
    ),
    "foreign": (b"PAR1" + IDX[4:], BIN, r"x\.idx: byte 0: .*not a Megatron index"),
    "old": (b"TNTIDX\x00\x00" + IDX[8:], BIN, r"x\.idx: byte 0: .*TNTIDX.*preprocess\.py"),
    "version": (put(9, b"\x02"), BIN, r"x\.idx: byte 9: version 2"),
    "dtype": (put(17, b"\x09"), BIN, r"x\.idx: byte 17: dtype code 9 is unknown"),
    "float": (put(17, b"\x07"), BIN, r"x\.idx: byte 17: .*float32"),
    "no documents": (put(26, b"\x00"), BIN, r"x\.idx: byte 26"),
    "huge count": (put(18, b"\xff" * 7), BIN, r"x\.idx: byte 82: .*truncated"),
    "negative length": (
        put(38, b"\xff\xff\xff\xff"),
        BIN,
        r"x\.idx: byte 38: sequence 1 has length -1",
    ),
    "pointer": (put(50, b"\x08"), BIN, r"x\.idx: byte 50: sequence 1 .* byte 8 of \.bin, not 6"),
    "first document": (put(58, b"\x01"), BIN, r"x\.idx: byte 58: the first document"),
    "documents fall": (put(66, b"\x03"), BIN, r"x\.idx: byte 74: document index 2 after 3"),
    "last document": (
        put(74, b"\x01"),
        BIN,
        r"x\.idx: byte 74: the last document ends at sequence 1 of 2",
    ),
    "modes": (IDX + b"\x00\x00", BIN, r"x\.idx: byte 82: .*multimodal"),
    "trailing": (IDX + b"\x00" * 9, BIN, r"x\.idx: byte 82: .*91 bytes"),
    "bin cut": (IDX, BIN[:7], r"x\.bin: byte 7: .*7 bytes.*says 10: truncated"),
    "bin of another": (IDX, BIN + b"\x00\x00", r"x\.bin: byte 10: .*not the \.bin of this \.idx"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_by_file_and_byte(tmp_path, kind):
    idx, bin_, message = DAMAGE[kind]
    with pytest.raises(ValueError, match=message):
        IndexedDataset(write_raw(tmp_path, idx, bin_))


def test_a_file_that_shrinks_under_way_is_not_read_as_zeros(tmp_path):
    data = IndexedDataset(write(tmp_path / "x", [[1, 0], [3, 4]]))
    assert data.tokens(0, 2).tolist() == [1, 0]  # a zero that was written
    os.truncate(tmp_path / "x.bin", 4)
    with pytest.raises(
        ValueError, match=r"x\.bin: byte 4: the file has 4 bytes, its \.idx says 8: truncated"
    ):
        data.tokens(1, 3)


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_a_file_cut_short_under_a_loader_is_an_error_with_its_key(tmp_path, order, ending):
    """Of a mapped file the process would end with SIGBUS."""
    write(tmp_path / "x", [[k] * 9 for k in range(9000)])
    samples = open_samples([str(tmp_path / "x")], seq_len=20, order=order, num_samples=800)
    loader = Loader(
        samples, batches=[(0, 400)], mbs=400, document_mask=True, key="data.valid", prefetch=0
    )
    next(loader)
    os.truncate(f"{tmp_path / 'x'}{ending}", 50)
    with pytest.raises(
        ValueError, match=rf"data\.valid: .*x\{ending}: byte 50: the file has 50 bytes, .*truncated"
    ):
        next(loader)


def test_every_truncation_is_refused(tmp_path):
    for size in range(len(IDX)):
        with pytest.raises(ValueError, match=rf"x\.idx: byte {size}: "):
            IndexedDataset(write_raw(tmp_path, IDX[:size]))


def test_checks_reach_beyond_one_chunk(tmp_path, monkeypatch):
    write(tmp_path / "x", [[1]] * 100)
    raw = bytearray((tmp_path / "x.idx").read_bytes())
    at = 34 + 4 * 100 + 8 * 64  # the first pointer of the last chunk
    raw[at] += 1
    (tmp_path / "x.idx").write_bytes(raw)
    monkeypatch.setattr("megatron5d.data.index_format.CHECK_CHUNK", 64)
    with pytest.raises(ValueError, match=rf"byte {at}: sequence 64 .* byte 129 of \.bin, not 128"):
        IndexedDataset(tmp_path / "x")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"x\.idx: no such file"):
        IndexedDataset(tmp_path / "x")
    write_raw(tmp_path)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(ValueError, match=r"x\.bin: no such file"):
        IndexedDataset(tmp_path / "x")


@pytest.mark.parametrize("ids", [[-1], [65536], [3, 70000]])
def test_ids_that_the_type_cannot_hold_are_refused(tmp_path, ids):
    writer = IndexedWriter(tmp_path / "x", "u2")
    with pytest.raises(ValueError, match=rf"token id {ids[-1]} is outside 0 to 65535"):
        writer.add_document(ids)


@pytest.mark.parametrize("dtype", ["f4", "u4", "u8"])
def test_types_without_a_code_are_refused(tmp_path, dtype):
    with pytest.raises(ValueError, match="the format has"):
        IndexedWriter(tmp_path / "x", dtype)


def test_interrupted_writer_is_resumed_where_it_was_flushed(tmp_path):
    first = IndexedWriter(tmp_path / "x", "u2")
    first.add_document([1, 2, 3])
    first.flush()
    place = first.num_documents, first.num_tokens
    first.add_document([9, 9, 9, 9])  # lost with the process
    first.close()
    assert not (tmp_path / "x.idx").exists()
    second = IndexedWriter(tmp_path / "x", "u2", resume_at=place)
    second.add_document([4, 5])
    second.finalize()
    assert (tmp_path / "x.idx").read_bytes() == IDX and (tmp_path / "x.bin").read_bytes() == BIN


def test_resuming_more_than_is_there_is_refused(tmp_path):
    IndexedWriter(tmp_path / "x", "u2").close()
    with pytest.raises(ValueError, match=r"x\.bin\.partial: byte 0: .*6 bytes"):
        IndexedWriter(tmp_path / "x", "u2", resume_at=(1, 3))


def test_finishing_goes_on_after_a_kill_between_the_renames(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "u2")
    writer.add_documents([1, 2, 3, 4, 5], [3, 2])
    writer.close()
    (tmp_path / "x.bin.partial").rename(tmp_path / "x.bin")
    for _ in range(2):  # the second time there is nothing to do
        finish_partial(tmp_path / "x", writer.dtype)
        assert (tmp_path / "x.idx").read_bytes() == IDX and (tmp_path / "x.bin").read_bytes() == BIN


def test_two_writers_of_one_prefix_are_refused(tmp_path):
    writer = IndexedWriter(tmp_path / "x", "u2")
    writer.add_document([1, 2, 3])
    code = f"from megatron5d.data.indexed_dataset import IndexedWriter; IndexedWriter({str(tmp_path / 'x')!r}, 'u2')"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert other.returncode != 0 and "another process is writing" in other.stderr
    writer.add_document([4, 5])
    writer.finalize()
    assert (tmp_path / "x.bin").read_bytes() == BIN

"""Token files that are looked into, joined, cut and made: byte for byte as the format says, and
refused by name."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron5d.config.errors import names_file
from megatron5d.data.index_format import MAGIC
from megatron5d.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron5d.tools import tokens

ROOT = Path(__file__).resolve().parents[3]


def write_raw(prefix: Path, documents: list[list[list[int]]], code: int = 8) -> str:
    """A pair of files by hand, of documents of sequences of ids."""
    kind = {8: "<u2", 4: "<i4"}[code]
    sequences = [sequence for document in documents for sequence in document]
    ends = np.cumsum([0, *map(len, documents)])
    raw = b"".join(np.array(sequence, kind).tobytes() for sequence in sequences)
    starts = np.cumsum([0, *(len(sequence) * np.dtype(kind).itemsize for sequence in sequences)])[
        :-1
    ]
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    lengths = np.array([*map(len, sequences)], "<i4").tobytes()
    Path(f"{prefix}.idx").write_bytes(
        head + lengths + starts.astype("<i8").tobytes() + ends.astype("<i8").tobytes()
    )
    Path(f"{prefix}.bin").write_bytes(raw)
    return str(prefix)


A = [[[1, 2, 3], [4]], [[5, 6]], [[]]]
B = [[[7], [], [8, 9]], [[10, 11, 12, 13]]]


def tool(*arguments):
    command = [sys.executable, "tools/tokens.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def content(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


@pytest.mark.parametrize("chunk", [1, 3, 1 << 22])
def test_merged_and_cut_files_are_those_of_the_same_documents(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(tokens, "CHUNK_TOKENS", chunk)
    a, b = write_raw(tmp_path / "a", A), write_raw(tmp_path / "b", B)
    whole = write_raw(tmp_path / "whole", A + B + A)
    tokens.copy([(prefix, 0, None) for prefix in (a, b, a)], str(tmp_path / "m"), False)
    assert content(tmp_path / "m") == content(whole)
    everything = A + B + A
    for first, end in ((0, 1), (2, 5), (1, 8), (2, 3)):
        tokens.copy([(whole, first, end)], str(tmp_path / "c"), True)
        assert content(tmp_path / "c") == content(
            write_raw(tmp_path / "part", everything[first:end])
        )


def test_the_command_line_merges_cuts_and_inspects(tmp_path):
    a, b = write_raw(tmp_path / "a", A), write_raw(tmp_path / "b", B)
    done = tool("merge", a, b, "--out", tmp_path / "m")
    assert done.returncode == 0 and content(tmp_path / "m") == content(
        write_raw(tmp_path / "whole", A + B)
    ), done.stderr
    again = tool("merge", a, b, "--out", tmp_path / "m")
    assert again.returncode == 2 and "m.idx is there already; --overwrite" in again.stderr
    assert tool("cut", tmp_path / "m", "--share", "0.4:", "--out", tmp_path / "c").returncode == 0
    assert content(tmp_path / "c") == content(write_raw(tmp_path / "rest", (A + B)[2:]))
    (found,) = json.loads(tool("inspect", tmp_path / "m", "--json").stdout)
    known = {"dtype": "uint16", "documents": 5, "sequences": 8, "tokens": 13, "empty_documents": 1}
    known |= {"longest_document": 4, "smallest_id": 1, "largest_id": 13, "documents_end_with": None}
    assert known.items() <= found.items() and found["bytes"] == sum(
        map(len, content(tmp_path / "m"))
    )


def test_more_files_are_joined_than_a_process_may_have_open(tmp_path):
    """Where a run names too many, it says to merge them."""
    many = [write_raw(tmp_path / f"{i}", A) for i in range(60)]
    words = [sys.executable, "tools/tokens.py", "merge", *many, "--out", str(tmp_path / "m")]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "-", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "m") == content(write_raw(tmp_path / "whole", A * 60))


def test_what_cannot_be_joined_or_read_is_refused_by_name(tmp_path):
    a, wide = write_raw(tmp_path / "a", A), write_raw(tmp_path / "wide", B, code=4)
    Path(f"{tmp_path / 'cut'}.idx").write_bytes(Path(f"{a}.idx").read_bytes())
    Path(f"{tmp_path / 'cut'}.bin").write_bytes(Path(f"{a}.bin").read_bytes()[:-1])
    for arguments, message in [
        (("merge", a, wide, "--out", tmp_path / "o"), "got uint16 .*a.* and int32 .*wide"),
        (("merge", a, a, "--out", a, "--overwrite"), "is one of the files that are read"),
        (("cut", a, "--documents", "2:9", "--out", tmp_path / "o"), "gives documents 2 to 9 of 3"),
        (("cut", a, "--documents", "x", "--out", tmp_path / "o"), "not FIRST:END"),
        (("inspect", tmp_path / "cut"), "cut.bin: byte 11: .*truncated"),
        (("inspect", tmp_path / "none"), "none.idx: no such file"),
    ]:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(sys, "argv", ["tokens.py", *map(str, arguments)])
            tokens.run(tokens.arguments())
    assert not list(tmp_path.glob("o*"))


def test_arrays_and_token_columns_become_documents(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.save(tmp_path / "rows.npy", np.arange(32).reshape(2, 16))
    np.save(tmp_path / "flat.npy", np.array([5, 0, 6, 7, 0, 8], np.uint32))
    lists = [[1, 2], None, [], [3]]
    for kind in (pyarrow.list_(pyarrow.int32()), pyarrow.large_list(pyarrow.uint16())):
        parquet.write_table(
            pyarrow.table({"input_ids": pyarrow.array(lists, kind)}), tmp_path / "t.parquet"
        )
        files = [tmp_path / name for name in ("rows.npy", "flat.npy", "t.parquet")]
        done = tool(
            "import", *files, "--vocab-size", 32, "--eod", 0, "--out", tmp_path / "o", "--overwrite"
        )
        assert done.returncode == 0, done.stderr
        data = IndexedDataset(tmp_path / "o")
        rows = [data.document(i).tolist() for i in range(data.num_documents)]
        assert (
            rows == [[*range(16)], [*range(16, 32)], [5, 0], [6, 7, 0], [8], [1, 2], [3]]
            and data.dtype == np.uint16
        )
    parquet.write_table(pyarrow.table({"text": ["a"], "ids": [[0.5]]}), tmp_path / "t.parquet")
    for arguments, message in [
        (
            (tmp_path / "rows.npy", "--vocab-size", 31),
            "rows.npy: document 1 has id 31; --vocab-size is 31",
        ),
        (
            (tmp_path / "t.parquet", "--vocab-size", 9),
            "no column 'input_ids' (--column); it has text, ids",
        ),
        (
            (tmp_path / "t.parquet", "--vocab-size", 9, "--column", "text"),
            "requires lists of integers (got",
        ),
        (
            (tmp_path / "t.parquet", "--vocab-size", 9, "--column", "ids"),
            "requires lists of integers (got",
        ),
    ]:
        refused = tool("import", *arguments, "--out", tmp_path / "r")
        assert (
            refused.returncode == 2
            and message in refused.stderr
            and "Traceback" not in refused.stderr
        )
    assert not list(tmp_path.glob("r.*"))


def test_documents_and_samples_are_decoded(tmp_path):
    pytest.importorskip("sentencepiece")
    from megatron5d.data.tokenizer import load_tokenizer
    from megatron5d.tools.tokenizer import train_sentencepiece

    texts = [f"alpha {i} beta gamma" for i in range(50)]
    file = train_sentencepiece(texts, 300, tmp_path / "tok")
    tokenizer, writer = load_tokenizer(file), IndexedWriter(tmp_path / "d", "u2")
    for text in texts:
        writer.add_document(tokenizer.encode(text))
    writer.finalize()
    shown = json.loads(
        tool("decode", tmp_path / "d", "--tokenizer", file, "--first", 48, "--json").stdout
    )
    assert [(each["from"], each["text"]) for each in shown] == [
        ("document 48", texts[48]),
        ("document 49", texts[49]),
    ]
    drawn = tool("decode", tmp_path / "d", "--tokenizer", file, "--documents", 4).stdout
    assert drawn.count("--- document ") == 4 and "beta gamma" in drawn
    stretch = tool(
        "decode", tmp_path / "d", "--tokenizer", file, "--sample", 30, "--documents", 1
    ).stdout
    assert "30 tokens" in stretch and "beta" in stretch


def test_a_full_disk_names_what_was_written(monkeypatch, capsys, tmp_path):
    """The system names no file."""

    def full(args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "run", full)
    monkeypatch.setattr(sys, "argv", ["tokens.py", "merge", "a", "b", "--out", f"{tmp_path}/o"])
    assert tokens.main() == 2
    assert capsys.readouterr().err == f"tokens: {tmp_path}/o: No space left on device\n"
    assert (
        names_file(OSError(2, "No such file or directory", "x"), "data/web")
        == "x: No such file or directory"
    )
    assert names_file(ValueError("other"), "data/web") == "other"

"""tools/tokens.py: token files are inspected, joined, cut and created byte for byte as the format
says."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron5d.config.errors import names_file
from megatron5d.data import imported_tokens
from megatron5d.data.index_format import MAGIC
from megatron5d.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron5d.tools import tokens

ROOT = Path(__file__).resolve().parents[3]


def write_raw(prefix: Path, documents: list[list[list[int]]], code: int = 8) -> str:
    """A pair of files written by hand, of documents of sequences of ids."""
    dtype = np.dtype({8: "<u2", 4: "<i4"}[code])
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    starts = (np.cumsum([0, *lengths])[:-1] * dtype.itemsize).astype("<i8")
    ends = np.cumsum([0, *map(len, documents)]).astype("<i8")
    head = MAGIC + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    index = b"".join(array.tobytes() for array in (lengths, starts, ends))
    Path(f"{prefix}.idx").write_bytes(head + index)
    ids = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(ids, dtype).tobytes())
    return str(prefix)


A = [[[1, 2, 3], [4]], [[5, 6]], [[]]]
B = [[[7], [], [8, 9]], [[10, 11, 12, 13]]]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Works in the folder of files `a` and `b`."""
    monkeypatch.chdir(tmp_path)
    return write_raw(Path("a"), A), write_raw(Path("b"), B)


def tool(command, shell="exec "):
    """Runs tools/tokens.py in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"{shell}{sys.executable} {ROOT}/tools/tokens.py {command}"
    return subprocess.run(command, shell=True, capture_output=True, text=True, env=environment)


def content(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()


def expected(documents) -> tuple[bytes, bytes]:
    return content(write_raw(Path("expected"), documents))


@pytest.mark.parametrize("chunk", [1, 3, 1 << 22])
def test_merged_and_cut_files_are_those_of_the_same_documents(pair, monkeypatch, chunk):
    monkeypatch.setattr(tokens, "CHUNK_TOKENS", chunk)
    a, b = pair
    tokens.copy([(prefix, 0, None) for prefix in (a, b, a)], "merged", False)
    assert content("merged") == expected(A + B + A)
    for first, end in ((0, 1), (2, 5), (1, 8), (2, 3)):
        tokens.copy([("merged", first, end)], "cut", True)
        assert content("cut") == expected((A + B + A)[first:end])


def test_the_command_line_merges_cuts_and_inspects(pair):
    merged = tool("merge a b --out m")
    assert merged.returncode == 0 and content("m") == expected(A + B), merged.stderr
    again = tool("merge a b --out m")
    assert again.returncode == 2 and "m.idx is there already; --overwrite" in again.stderr
    assert tool("cut m --share 0.4: --out c").returncode == 0
    assert content("c") == expected((A + B)[2:])
    (description,) = json.loads(tool("inspect m --json").stdout)
    assert description == {
        "prefix": "m",
        "dtype": "uint16",
        "documents": 5,
        "sequences": 8,
        "tokens": 13,
        "empty_documents": 1,
        "longest_document": 4,
        "bytes": sum(map(len, content("m"))),
        "smallest_id": 1,
        "largest_id": 13,
        "documents_end_with": None,
    }


@pytest.mark.parametrize("order", ["none a b", "a none b", "a b none", "none", "none none a none"])
def test_parts_without_documents_are_joined(pair, monkeypatch, order):
    """tools/preprocess.py writes such a part for a shard of empty texts."""
    write_raw(Path("none"), [])
    parts = {"none": [], "a": A, "b": B}
    monkeypatch.setattr(sys, "argv", ["tokens.py", "merge", *order.split(), "--out", "m"])
    assert tokens.main() == 0
    documents = [document for name in order.split() for document in parts[name]]
    assert content("m") == expected(documents)


@pytest.mark.parametrize("out", ["dir/", "dir/.", "..", "dir/.."])
@pytest.mark.parametrize("command", ["merge a b", "cut a --share :1", "import r --vocab-size 9"])
def test_out_ends_in_a_file_name(pair, monkeypatch, capsys, command, out):
    monkeypatch.setattr(sys, "argv", ["tokens.py", *command.split(), "--out", out])
    with pytest.raises(SystemExit) as refused:
        tokens.arguments()
    assert refused.value.code == 2
    assert f"{out} does not end in a file name" in capsys.readouterr().err


def test_more_files_are_joined_than_a_process_may_have_open(pair):
    """A run that names too many files is told to merge them."""
    many = " ".join(write_raw(Path(f"{i}"), A) for i in range(60))
    merged = tool(f"merge {many} --out m", shell="ulimit -n 64; exec ")
    assert merged.returncode == 0, merged.stderr
    assert content("m") == expected(A * 60)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("merge a wide --out o", "got uint16 .*a.* and int32 .*wide"),
        ("merge a a --out a --overwrite", "is one of the files that are read"),
        ("cut a --documents 2:9 --out o", "gives documents 2 to 9 of 3"),
        ("cut a --documents x --out o", "not FIRST:END"),
        ("inspect torn", "torn.bin: byte 11: .*truncated"),
        ("inspect none", "none.idx: no such file"),
    ],
)
def test_what_cannot_be_joined_or_read_is_rejected_by_name(pair, monkeypatch, command, message):
    write_raw(Path("wide"), B, code=4)
    Path("torn.idx").write_bytes(Path("a.idx").read_bytes())
    Path("torn.bin").write_bytes(Path("a.bin").read_bytes()[:-1])
    monkeypatch.setattr(sys, "argv", ["tokens.py", *command.split()])
    with pytest.raises(ValueError, match=message):
        tokens.run(tokens.arguments())
    assert not list(Path().glob("o*"))


@pytest.fixture
def arrays(pair):
    """pyarrow, and a function that writes t.parquet; two .npy files."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    np.save("rows.npy", np.arange(32).reshape(2, 16))
    np.save("flat.npy", np.array([5, 0, 6, 7, 0, 8], np.uint32))
    return pyarrow, lambda columns: parquet.write_table(pyarrow.table(columns), "t.parquet")


@pytest.mark.parametrize("large", [False, True])
def test_arrays_and_token_columns_become_documents(arrays, large):
    pyarrow, write_parquet = arrays
    kind = pyarrow.large_list(pyarrow.uint16()) if large else pyarrow.list_(pyarrow.int32())
    write_parquet({"input_ids": pyarrow.array([[1, 2], None, [], [3]], kind)})
    done = tool("import rows.npy flat.npy t.parquet --vocab-size 32 --eod 0 --out o")
    assert done.returncode == 0, done.stderr
    data = IndexedDataset("o")
    documents = [data.document(i).tolist() for i in range(data.num_documents)]
    flat = [[5, 0], [6, 7, 0], [8]]
    assert documents == [[*range(16)], [*range(16, 32)], *flat, [1, 2], [3]]
    assert data.dtype == np.uint16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("rows.npy --vocab-size 31", "rows.npy: document 1 has id 31; --vocab-size is 31"),
        ("t.parquet --vocab-size 9", "no column 'input_ids' (--column); it has text, ids"),
        ("t.parquet --vocab-size 9 --column text", "requires lists of integers (got string)"),
        ("t.parquet --vocab-size 9 --column ids", "requires lists of integers (got list"),
    ],
)
def test_other_arrays_are_rejected(arrays, options, message):
    _, write_parquet = arrays
    write_parquet({"text": ["a"], "ids": [[0.5]]})
    rejected = tool(f"import {options} --out r")
    assert rejected.returncode == 2
    assert message in rejected.stderr and "Traceback" not in rejected.stderr
    assert not list(Path().glob("r.*"))


FLAT = [[7, 3, 0], [9, 0], [2, 2, 2]]  # documents that end with 0, the last one without it
IDS = [token for document in FLAT for token in document]


def write_foreign(kind, item):
    """A file as another program writes it, of ids of `item` bytes; its name, and its documents."""
    ids = np.array(IDS, f"<u{item}")
    if kind == "dolma":  # numpy.memmap of a fixed size
        name, body = "part-0-00000.npy", ids.tobytes()
    elif kind == "datatrove":
        name, body = "00000_tokens.ds", ids.tobytes()
        Path(f"{name}.index").write_bytes(np.array([3, 3, 5, 8], "<u8").tobytes())
        Path(f"{name}.metadata").write_text("gpt2|2\n8\n8")
    elif kind == "llm.c":
        header = np.zeros(256, "<i4")
        header[:3] = (20240520, 1, len(ids)) if item == 2 else (20240801, 7, len(ids))
        name, body = "val_000000.bin", header.tobytes() + ids.tobytes()
    else:
        name, body = "train.bin", ids.tobytes()  # array.tofile
    Path(name).write_bytes(body)
    return name


def run_tool(monkeypatch, capsys, command):
    monkeypatch.setattr(sys, "argv", ["tokens.py", *command.split()])
    return tokens.main(), capsys.readouterr().err


@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize("kind", ["dolma", "datatrove", "llm.c", "nanoGPT"])
def test_token_files_of_other_programs_become_documents(pair, monkeypatch, capsys, kind, item):
    monkeypatch.setattr(imported_tokens, "CHUNK_TOKENS", 3)
    name = write_foreign(kind, item)
    dtype = "" if kind in ("datatrove", "llm.c") else f"--dtype uint{8 * item}"
    for eod, documents in (("--eod 0", FLAT), ("", FLAT if kind == "datatrove" else [IDS])):
        command = f"import {name} {dtype} {eod} --vocab-size 10 --out o --overwrite"
        assert run_tool(monkeypatch, capsys, command)[0] == 0
        assert content("o") == expected([[document] for document in documents])
    code, error = run_tool(monkeypatch, capsys, f"import {name} {dtype} --vocab-size 9 --out p")
    assert code == 2 and f"{name}: document 0 has id 9; --vocab-size is 9" in error or dtype == ""


@pytest.mark.parametrize(
    ("kind", "damage", "options", "message"),
    [
        ("dolma", None, "", "part-0-00000.npy: no .npy header: ids alone, as dolma .*--dtype"),
        ("nanoGPT", None, "", "train.bin: no header of llm.c: ids alone, as nanoGPT .*--dtype"),
        ("datatrove", "no index", "", r"ids of datatrove without 00000_tokens.ds.index.*--dtype"),
        ("dolma", lambda b: b[:-1], "--dtype uint16", "has 15 bytes.* no multiple of the 2"),
        ("nanoGPT", None, "--dtype uint64 --eod 0", "has id .*or its ids are not uint64"),
        ("datatrove", lambda b: b[:-2], "", "has 14 bytes, and .*index ends after 8 ids"),
        ("datatrove", None, "--dtype uint32", "holds uint16 .got --dtype uint32"),
        ("llm.c", lambda b: b[:-2], "", "has 1038 bytes, and its header says 1040"),
        ("llm.c", lambda b: b[:9], "", "has 9 bytes, and the header of an llm.c file alone"),
        ("llm.c", lambda b: np.int32([20240522, 1]).tobytes(), "", "is an evaluation file"),
        ("nanoGPT", "an index", "", "is a Megatron token file.*tokens.py merge train"),
        ("dolma", lambda b: b"\x1f\x8b\x08\0" + b, "--dtype uint16", "compressed: gunzip it"),
        ("dolma", lambda b: b"PK\3\4" + b, "", "is an archive"),
    ],
)
def test_other_token_files_are_rejected_by_name(
    pair, monkeypatch, capsys, kind, damage, options, message
):
    name = write_foreign(kind, 2)
    if damage == "no index":
        Path(f"{name}.index").unlink()
    elif damage == "an index":
        Path("train.idx").write_bytes(b"")
    elif damage is not None:
        Path(name).write_bytes(damage(Path(name).read_bytes()))
    command = f"import {name} {options} --vocab-size 10 --out o"
    code, error = run_tool(monkeypatch, capsys, command)
    assert code == 2 and re.search(message, error) and error.startswith(f"tokens: {name}"), error
    assert not list(Path().glob("o*"))


def test_documents_and_samples_are_decoded(pair):
    pytest.importorskip("sentencepiece")
    from megatron5d.data.tokenizer import load_tokenizer
    from megatron5d.tools.tokenizer import train_sentencepiece

    texts = [f"alpha {i} beta gamma" for i in range(50)]
    file = train_sentencepiece(texts, 300, "tok")
    tokenizer, writer = load_tokenizer(file), IndexedWriter("d", "u2")
    for text in texts:
        writer.add_document(tokenizer.encode(text))
    writer.finalize()
    decode = f"decode d --tokenizer {file}"
    records = json.loads(tool(f"{decode} --first 48 --json").stdout)
    assert {record["from"]: record["text"] for record in records} == {
        "document 48": texts[48],
        "document 49": texts[49],
    }
    documents = tool(f"{decode} --documents 4").stdout
    assert documents.count("--- document ") == 4 and "beta gamma" in documents
    sample = tool(f"{decode} --sample 30 --documents 1").stdout
    assert "30 tokens" in sample and "beta" in sample


def test_a_full_disk_names_what_was_written(monkeypatch, capsys):
    """The system names no file."""

    def fill_disk(args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "run", fill_disk)
    monkeypatch.setattr(sys, "argv", ["tokens.py", "merge", "a", "b", "--out", "data/o"])
    assert tokens.main() == 2
    assert capsys.readouterr().err == "tokens: data/o: No space left on device\n"
    missing = OSError(2, "No such file or directory", "x")
    assert names_file(missing, "data/web") == "x: No such file or directory"
    assert names_file(ValueError("other"), "data/web") == "other"

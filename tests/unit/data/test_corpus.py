"""Corpora: files in a fixed order, units that can be resumed anywhere, documents or named faults."""

import gzip
import json
import re

import pytest

from megatron5d.data import corpus
from megatron5d.data.corpus import kind_of, list_files, open_stream, units
from megatron5d.data.documents import BadLine, documents

TEXTS = [f"document {i} " + "x" * (i * 7 % 50) + "\nsecond line é中" for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def compress(name: str, data: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data[:1000]) + gzip.compress(data[1000:])  # two members, as pigz and cat make
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        return zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])  # two frames
    return data


def write_parquet(path, columns, row_group_size=7):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


def read(files, keys=("text",), text_per="file", start=None):
    return [d for unit in units(files, text_per, start) for d in documents(unit, keys)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_all_containers_give_the_same_documents(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name.endswith(".parquet"):
        write_parquet(path, {"id": list(range(60)), "text": TEXTS})
    else:
        path.write_bytes(compress(name, LINES))
    assert read([path]) == [(text,) for text in TEXTS]
    monkeypatch.setattr(corpus, "UNIT_BYTES", 100)
    assert read([path]) == [(text,) for text in TEXTS]


def test_last_line_needs_no_line_end_and_blank_lines_are_nothing(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\n{"text": "a"}\r\n   \n{"text": "b"}')
    assert read([tmp_path / "a.jsonl"]) == [("a",), ("b",)]


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """Files of every kind, cut into many small units."""
    monkeypatch.setattr(corpus, "UNIT_BYTES", 300)
    monkeypatch.setattr(corpus, "UNIT_FILES", 3)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(compress(".gz", LINES))
    for i in range(8):
        (tmp_path / f"c{i}.txt").write_text("word " * (i * 20), encoding="utf-8")
    write_parquet(tmp_path / "d.parquet", {"text": TEXTS})
    (tmp_path / "e.txt").write_text("the end")
    return list_files([str(tmp_path)])


@pytest.mark.parametrize("text_per", ["file", "line"])
def test_resuming_after_any_unit_gives_the_rest(mixed, text_per):
    whole = list(units(mixed, text_per))
    assert len(whole) > 20
    for k, unit in enumerate(whole):
        assert list(units(mixed, text_per, unit.after)) == whole[k + 1 :]
    assert [unit.done_bytes for unit in whole] == sorted(unit.done_bytes for unit in whole)
    assert whole[-1].done_bytes == sum(path.stat().st_size for path in mixed)


def test_text_files_are_whole_documents_or_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\r\nthree")
    assert read([tmp_path / "a.txt"]) == [("one\n\ntwo\r\nthree",)]
    assert read([tmp_path / "a.txt"], text_per="line") == [("one",), ("two",), ("three",)]


def test_folders_are_searched_in_order_and_filtered(tmp_path):
    names = ["b/x.py", "a.py", "b/test/y.py", "b/tests_of/z.py", "c.txt", "B.py", "b/x.pyc", "site-packages/q.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    found = list_files([str(tmp_path)], ["*.py"], ["site-packages", "test"])
    assert [f.relative_to(tmp_path).as_posix() for f in found] == ["B.py", "a.py", "b/tests_of/z.py", "b/x.py"]
    assert [f.name for f in list_files([str(tmp_path)])] == ["c.txt"]
    assert [f.name for f in list_files([str(tmp_path)], ["b/*"], ["b/test*"])] == ["x.py", "x.pyc"]
    assert [f.name for f in list_files([str(tmp_path / "a.py"), str(tmp_path / "a.py")])] == ["a.py"]
    with pytest.raises(ValueError, match="no files that match --glob \\*.rs"):
        list_files([str(tmp_path)], ["*.rs"])
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        list_files([str(tmp_path / "nowhere")])


def test_kinds_are_known_by_name(tmp_path):
    kinds = {"a.JSONL": "jsonl", "a.json.gz": "jsonl", "x.parquet": "parquet", "m.py": "text", "README": "text"}
    assert {name: kind_of(tmp_path / name) for name in kinds} == kinds


BAD = {
    "not json": (b'{"text": "a"', r"not JSON: .* at column 13"),
    "not object": (b'["text"]', "a JSON list, not an object"),
    "no field": (b'{"content": "a", "id": 3}', r"no field 'text' \(--json-keys\); it has 'content', 'id'"),
    "not string": (b'{"text": 5}', "field 'text' is a int, not a string"),
    "null": (b'{"text": null}', "field 'text' is a NoneType"),
    "not utf-8": (b'{"text": "\xff"}', "byte 0xff at column 11 is not UTF-8"),
    "surrogate": (b'{"text": "ab\\ud800"}', "half a surrogate pair at character 3"),
    "deep": (b"[" * 100_000, "not readable as JSON|not JSON"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_lines_are_named_by_file_and_line(tmp_path, monkeypatch, kind):
    line, message = BAD[kind]
    monkeypatch.setattr(corpus, "UNIT_BYTES", 20)  # so that line numbers must survive the cutting
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' + line + b'\n{"text": "three"}\n')
    found = read([tmp_path / "a.jsonl"])
    bad = [d for d in found if isinstance(d, BadLine)]
    assert [d for d in found if not isinstance(d, BadLine)] == [("one",), ("two",), ("three",)]
    assert len(bad) == 1 and str(bad[0]).startswith(f"{tmp_path / 'a.jsonl'}:4: ")
    assert re.search(message, bad[0].reason), bad[0].reason


def test_bad_rows_of_parquet_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 10 + [None] + ["b"]})
    found = read([tmp_path / "a.parquet"])
    assert str(found[10]) == f"{tmp_path / 'a.parquet'}:11: field 'text' is a NoneType, not a string"
    with pytest.raises(ValueError, match=r"a\.parquet: no column 'body' \(--json-keys\); it has text"):
        read([tmp_path / "a.parquet"], keys=("body",))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"b\.parquet: not a whole parquet file"):
        read([tmp_path / "b.parquet"])


def test_what_parquet_cannot_give_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: 2 columns are called 'text'"):
        read([tmp_path / "twice.parquet"])
    write_parquet(tmp_path / "torn.parquet", {"text": ["a"] * 100})
    whole = (tmp_path / "torn.parquet").read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:10] + b"\x55" * 20 + whole[30:])
    with pytest.raises(ValueError, match=r"torn\.parquet: row group 0 cannot be read"):
        read([tmp_path / "torn.parquet"])


def test_text_that_is_not_utf8_is_named_by_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nfine\nbr\xe9ve\n")
    [bad] = read([tmp_path / "a.txt"])
    assert str(bad) == f"{tmp_path / 'a.txt'}:3: byte 0xe9 at offset 12 is not UTF-8"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_cut_and_damaged_compression_is_refused(tmp_path, suffix):
    whole = compress(suffix, LINES * 20)
    path = tmp_path / f"a.jsonl{suffix}"
    for data in (whole[:-5], whole[: len(whole) // 2], whole[:300] + b"\x55" * 40 + whole[340:]):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix}: byte \d+: cannot be decompressed"):
            read([path])
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"a\.jsonl\{suffix} is empty"):
        read([path])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_streams_open_anywhere(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compress(suffix, LINES))
    for offset in (0, 1, 999, 1000, 1001, len(LINES)):
        with open_stream(path, offset) as stream:
            assert stream.read_all() == LINES[offset:]


def test_several_keys_give_several_texts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"q": "x", "a": "y"}\n{"q": "only"}\n')
    first, second = read([tmp_path / "a.jsonl"], keys=("q", "a"))
    assert first == ("x", "y") and second.line == 2 and "'a'" in second.reason

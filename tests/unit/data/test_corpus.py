"""Corpora: files in a fixed order, units that can be resumed anywhere, documents or named
faults."""

import bz2
import gzip
import json
import lzma
import os
import re

import numpy as np
import pytest

from megatron5d.data import corpus
from megatron5d.data.corpus import kind_of, kinds_of, list_files, open_stream, units
from megatron5d.data.documents import BadLine, documents

TEXTS = [f"document {i} " + "x" * (i * 7 % 50) + "\nsecond line é中" for i in range(60)]
LINES = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)).encode()


def compress(name: str, data: bytes) -> bytes:
    if name.endswith((".gz", ".gzip")) or name.startswith("gz"):
        # two members, as pigz and cat make
        return gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    if name.endswith((".xz", ".bz2")):
        return (lzma if name.endswith("xz") else bz2).compress(data)
    if name.endswith((".zst", ".zstd")):
        zstandard = pytest.importorskip("zstandard")
        return zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])  # two frames
    return data


def write_parquet(path, columns, row_group_size=7):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)


def read(files, keys=("text",), text_per="file", start=None):
    return [d for unit in units(files, text_per, start) for d in documents(unit, keys)]


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.json", "a.ndjson", "a.jsonlines", "a.jsonl.1", "lines", "a.txt"),
        *("a.parquet", "a.pq", "a", "b.jsonl"),
        *(f"a.jsonl{end}" for end in (".gz", ".gzip", ".zst", ".zstd", ".xz", ".bz2")),
        "a.ndjson.gz",
        "gz.jsonl",
        "gz.2",
    ],
)
def test_all_containers_give_the_same_documents(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name in ("a.parquet", "a.pq", "a", "b.jsonl"):  # its first bytes tell it, too
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
    return list_files([str(tmp_path)], ["*"])


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
    names = [
        "b/x.py",
        "a.py",
        "b/test/y.py",
        "b/tests_of/z.py",
        "c.txt",
        "B.py",
        "b/x.pyc",
        "site-packages/q.py",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    found = list_files([str(tmp_path)], ["*.py"], ["site-packages", "test"])
    assert [f.relative_to(tmp_path).as_posix() for f in found] == [
        "B.py",
        "a.py",
        "b/tests_of/z.py",
        "b/x.py",
    ]
    assert [f.name for f in list_files([str(tmp_path)])] == ["c.txt"]
    assert [f.name for f in list_files([str(tmp_path)], ["b/*"], ["b/test*"])] == ["x.py", "x.pyc"]
    assert [f.name for f in list_files([str(tmp_path / "a.py"), str(tmp_path / "a.py")])] == [
        "a.py"
    ]
    with pytest.raises(ValueError, match="no files that match --glob \\*.rs"):
        list_files([str(tmp_path)], ["*.rs"])
    with pytest.raises(ValueError, match="nowhere: no such file or folder"):
        list_files([str(tmp_path / "nowhere")])


def test_kinds_are_known_by_name_and_else_by_the_first_lines(tmp_path):
    object_, prose = b'{"text": "a"}\n', b"a word\n"
    for name, content, kind in [
        ("a.JSONL", prose, "jsonl"),
        ("a.json.gz", gzip.compress(prose), "jsonl"),
        ("x.parquet", prose, "parquet"),
        ("m.py", prose, "text"),
        ("README", b"", "text"),
        ("part-0", b"\n\xef\xbb\xbf" + object_ * 2, "jsonl"),
        ("a.log", object_ + prose, "text"),
        ("b.txt", b"{\n}\n", "text"),
        ("c.txt.xz", lzma.compress(object_), "jsonl"),
    ]:
        (tmp_path / name).write_bytes(content)
        assert kind_of(tmp_path / name) == kind, name


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz", "a.arrow", "ids.npy", "ids.txt", "a.tar.gz"])
def test_what_is_no_text_is_refused_and_not_read_byte_by_byte(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"x") if name.endswith(".gz") else b"text\na\n")
    if name.startswith("ids"):
        np.save(path.open("wb"), np.arange(9))
    with pytest.raises(ValueError, match=f"{name} is no text .*--kind text"):
        read([path])
    assert kinds_of([path], "text") == ["text"]


def test_named_fields_need_files_that_have_fields(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.rst").write_text("prose")
    assert kinds_of([tmp_path / "a.jsonl", tmp_path / "a.rst"]) == ["jsonl", "text"]
    with pytest.raises(
        ValueError, match=r"a\.rst is text, which has no field that --json-keys q could name"
    ):
        kinds_of([tmp_path / "a.jsonl", tmp_path / "a.rst"], keys=("q",))


def test_every_file_is_taken_once_however_it_is_linked(tmp_path):
    real, corpus_ = tmp_path / "real", tmp_path / "mix"
    for folder in (real / "deep", corpus_ / "own"):
        folder.mkdir(parents=True)
    (real / "deep" / "b.jsonl").write_bytes(LINES)
    (corpus_ / "own" / "a.jsonl").write_bytes(LINES)
    os.link(corpus_ / "own" / "a.jsonl", corpus_ / "hard.jsonl")
    for name, target in {
        "more": "../real",
        "own/up": "..",
        "own/round": "../more/deep",
        "soft.jsonl": "own/a.jsonl",
    }.items():
        (corpus_ / name).symlink_to(target)
    for inputs in ([corpus_], [corpus_, real], [real / "deep" / "b.jsonl", corpus_]):
        found = list_files([str(each) for each in inputs])
        assert sorted(f.resolve().name for f in found) == ["b.jsonl", "hard.jsonl"]
    (corpus_ / "gone.jsonl").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"gone\.jsonl is a link to nothing"):
        list_files([str(corpus_)])
    assert len(list_files([str(corpus_)], excludes=["gone*"])) == 2


def test_files_that_describe_the_data_are_passed_over_and_named(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train.parquet", {"text": TEXTS})
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in (
        "README.md",
        "README_zh.txt",
        "LICENSE.txt",
        "dataset_infos.json",
        "notes.txt",
        "a.csv",
        ".gitattributes",
        "data/._train.parquet",
        ".ipynb_checkpoints/notes-checkpoint.txt",
    ):
        (tmp_path / name).write_text("{}")
    passed_over = []
    assert [f.name for f in list_files([str(tmp_path)], passed_over=passed_over)] == [
        "train.parquet"
    ]
    assert len(passed_over) == 9
    assert [f.name for f in list_files([str(tmp_path)], ["*.md"])] == ["README.md"]
    assert [f.name for f in list_files([str(tmp_path / "README.md")])] == ["README.md"]
    (tmp_path / "data" / "train.parquet").unlink()
    assert [f.name for f in list_files([str(tmp_path)])] == ["notes.txt"]
    with pytest.raises(ValueError, match=r"no files that match --glob \*\.rs"):
        list_files([str(tmp_path)], ["*.md", "*.rs"])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
def test_pages_whose_checksum_does_not_match_are_refused(tmp_path, version, dictionary):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i % 40} " * 9 for i in range(400)]
    settings = {"compression": "none", "use_dictionary": dictionary, "data_page_version": version}
    parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "a.parquet", write_page_checksum=True, **settings
    )
    assert read([tmp_path / "a.parquet"]) == [(text,) for text in texts]
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[3000] ^= 4  # in text: of the dictionary's page, or of the first one of data
    (tmp_path / "a.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.parquet: row group 0 cannot be read"):
        read([tmp_path / "a.parquet"])


def test_a_parquet_string_that_is_not_utf8_is_one_bad_row(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    raw = pyarrow.array([b"one", b"br\xe9ve", b"three"])
    text = pyarrow.Array.from_buffers(pyarrow.string(), 3, raw.buffers())
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    first, bad, last = read([tmp_path / "a.parquet"])
    assert (first, last) == (("one",), ("three",))
    assert (
        str(bad) == f"{tmp_path / 'a.parquet'}:2: field 'text': byte 0xe9 at offset 2 is not UTF-8"
    )


@pytest.mark.parametrize("text_per", ["file", "line"])
def test_a_byte_order_mark_is_no_text(tmp_path, text_per):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read([tmp_path / "a.txt"], text_per=text_per) == [("hello",)]


@pytest.mark.parametrize("line", [b"[", b"{", b'["a", "b"]'])
def test_json_that_is_not_lines_is_told_the_way_out(tmp_path, line):
    (tmp_path / "a.json").write_bytes(line + b"\n")
    assert "a file holds one object a line" in read([tmp_path / "a.json"])[0].reason


BAD = {
    "not json": (b'{"text": "a"', r"not JSON: .* at column 13"),
    "not object": (b'["text"]', "a JSON list, not an object"),
    "no field": (
        b'{"content": "a", "id": 3}',
        r"no field 'text' \(--json-keys\); it has 'content', 'id'",
    ),
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
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "one"}\n\n{"text": "two"}\n' + line + b'\n{"text": "three"}\n'
    )
    found = read([tmp_path / "a.jsonl"])
    bad = [d for d in found if isinstance(d, BadLine)]
    assert [d for d in found if not isinstance(d, BadLine)] == [("one",), ("two",), ("three",)]
    assert len(bad) == 1 and str(bad[0]).startswith(f"{tmp_path / 'a.jsonl'}:4: ")
    assert re.search(message, bad[0].reason), bad[0].reason


def test_bad_rows_of_parquet_are_named(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"text": ["a"] * 10 + [None] + ["b"]})
    found = read([tmp_path / "a.parquet"])
    assert (
        str(found[10]) == f"{tmp_path / 'a.parquet'}:11: field 'text' is a NoneType, not a string"
    )
    with pytest.raises(
        ValueError, match=r"a\.parquet: no column 'body' \(--json-keys\); it has text"
    ):
        read([tmp_path / "a.parquet"], keys=("body",))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(ValueError, match=r"b\.parquet: not a whole parquet file"):
        read([tmp_path / "b.parquet"])


def test_what_parquet_cannot_give_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_arrays(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"]
    )
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


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
def test_cut_and_damaged_compression_is_refused(tmp_path, suffix):
    whole = compress(suffix, LINES * 20)
    path = tmp_path / f"a.jsonl{suffix}"
    for data in (whole[:-5], whole[: len(whole) // 2], whole[:300] + b"\x55" * 40 + whole[340:]):
        path.write_bytes(data)
        with pytest.raises(
            ValueError, match=rf"a\.jsonl\{suffix}: byte \d+: cannot be decompressed"
        ):
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

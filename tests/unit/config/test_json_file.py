"""JSON files of others: too deep, too large or unexpected ones are rejected with their name."""

import pytest

from megatron5d.config.json_file import MAX_DEPTH, parse_json, read_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nested deeper"),
        ('{"a":' * 200_000, "nested deeper"),
        ('{"a":' * (MAX_DEPTH + 1) + "0" + "}" * (MAX_DEPTH + 1), "nested deeper"),
        ("[1, 2]", "list where an object"),
        ("null", "NoneType where an object"),
        ('{"a": 1', "Expecting"),
        (b"\xff\xfe{", "decode"),
        ("", "Expecting"),
        ('{"a": ' + "1" * 5000 + "}", "digits"),
        (
            '{"a": "' + "x" * 2000 + '"}',
            "has 2,009 bytes; files of its kind have at most 2,000",
        ),
    ],
)
def test_rejected_file_is_named(tmp_path, text, reason, monkeypatch):
    if "bytes" in reason:
        monkeypatch.setattr("megatron5d.config.json_file.MAX_BYTES", 2_000)
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=reason) as error:
        read_json(file)
    assert str(file) in str(error.value)


def test_deep_and_other_files_are_read(tmp_path):
    deep = '{"a":' * MAX_DEPTH + "0" + "}" * MAX_DEPTH
    assert str(parse_json(deep)).count("a") == MAX_DEPTH
    file = tmp_path / "record.json"
    file.write_text('{"a": "\u00e9"}', encoding="utf-8")
    assert read_json(file) == {"a": "\u00e9"}
    assert parse_json("[1]", list) == [1]

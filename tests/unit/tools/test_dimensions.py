"""The generated tables and pictures of docs/ match the code."""

import shutil
from pathlib import Path

import pytest

from megatron5d.tools.report.dimensions import fill_blocks, write_docs

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_generated_documentation_is_up_to_date(tmp_path):
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    for file in write_docs(copy):
        name = file.relative_to(copy)
        assert file.read_text() == (DOCS / name).read_text(), (
            f"{name}: run `python tools/visualize.py docs`"
        )


def test_missing_block_is_named():
    page = "<!-- generated: a -->\n1\n<!-- end -->"
    assert fill_blocks(page, {"a": "2"}) == page.replace("1", "2")
    with pytest.raises(ValueError, match="generated: b .* 0 times"):
        fill_blocks(page, {"b": "new"})

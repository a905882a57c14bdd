"""The generated tables and pictures of docs/ are those that the code makes today."""

import shutil
from pathlib import Path

import pytest

from megatron5d.tools.report.dimensions import filled, write_docs

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_generated_documentation_is_up_to_date(tmp_path):
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    for file in write_docs(copy):
        wanted, kept = file.read_text(), (DOCS / file.relative_to(copy)).read_text()
        assert wanted == kept, f"{file.relative_to(copy)}: run `python tools/visualize.py docs`"


def test_a_page_without_its_block_is_named():
    assert (
        filled("<!-- generated: a -->\n1\n<!-- end -->", {"a": "2"})
        == "<!-- generated: a -->\n2\n<!-- end -->"
    )
    with pytest.raises(ValueError, match="generated: b .* 0 times"):
        filled("<!-- generated: a -->\n<!-- end -->", {"b": "new"})

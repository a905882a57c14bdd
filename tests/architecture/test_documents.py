"""Files, folders and configuration keys that the documents name exist."""

import dataclasses
import re
from pathlib import Path

import pytest
from architecture.layers import PICTURE, layers_picture

from megatron5d.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS")]
DOCUMENTS += [*sorted((ROOT / "docs").rglob("*.md"))]
PREFIXES = ("", "megatron5d/")  # a file of the package may be named from within it
GROUPS = {field.name for field in dataclasses.fields(Config)}
MISSPELLED = {"train.stepz"}  # docs/configuration.md shows how it is rejected
# made by the examples of CONTRIBUTING.md
PLANNED = {"conf/model/qwen2_0_5b.yaml", "kernels/relu_squared.py"}
FOLDERS = "megatron5d|kernels|tools|launch|tests|conf|docs"


def paths_in(text):
    """`folder/...` with a suffix or a slash at its end, and what links point to."""
    named = re.findall(
        rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*(?:\.(?:py|sh|yaml|md|txt|sbatch)|/))", text
    )
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", prose) if "://" not in link]
    return set(named) | set(linked)


def keys_in(text):
    return set(re.findall(rf"(?<![\w./])((?:{'|'.join(GROUPS)})\.[a-z_]+)(?==)", text))


def exists(name, document):
    return any(
        (base / prefix / name).exists() for base in (ROOT, document.parent) for prefix in PREFIXES
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    missing = {
        name for name in paths_in(document.read_text()) - PLANNED if not exists(name, document)
    }
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_keys_exist(document):
    groups = {field.name: field.default_factory() for field in dataclasses.fields(Config)}
    wrong = []
    for key in keys_in(document.read_text()) - MISSPELLED:
        group, name = key.split(".", 1)
        names = {field.name for field in dataclasses.fields(groups[group])} | {"async"}
        if name not in names:
            wrong.append(key)
    assert not wrong


def test_the_picture_of_the_layers_is_up_to_date():
    assert PICTURE.read_text() == layers_picture(), "run `python tests/architecture/layers.py`"


def test_paths_and_keys_are_recognized():
    text = "see `tools/plan.py`, [this](docs/data.md) and train.steps=3"
    assert paths_in(text) == {"tools/plan.py", "docs/data.md"}
    assert keys_in(text) == {"train.steps"}

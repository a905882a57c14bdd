"""Which code a run was made of can be told, and restored."""

import subprocess

import pytest

from megatron5d.config.load import from_yaml
from megatron5d.config.schema import Config
from megatron5d.train import provenance
from megatron5d.train.provenance import commit, write_provenance


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository of one commit, with a change and a new file since; the run is started from
    elsewhere."""
    root = tmp_path / "code"
    (root / "megatron5d").mkdir(parents=True)
    (root / "megatron5d" / "layer.py").write_text("one = 1\n \n")

    def git(*arguments):
        who = ["-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(
            ["git", *who, *arguments], cwd=root, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (root / "megatron5d" / "layer.py").write_text("one = 2\n \n")
    (root / "megatron5d" / "new.py").write_text("two = 2\n")
    monkeypatch.setattr(provenance, "ROOT", root)
    monkeypatch.chdir(tmp_path)
    commit.cache_clear()
    yield root, git
    commit.cache_clear()


def test_the_patch_of_a_run_restores_its_code(checkout, tmp_path):
    root, git = checkout
    head = git("rev-parse", "HEAD").strip()
    assert commit() == f"{head}-dirty"
    write_provenance(tmp_path / "run", Config())
    write_provenance(tmp_path / "run", Config())  # resumed with the same code
    (patch,) = (tmp_path / "run" / "code").iterdir()
    assert patch.name.startswith(head[:12]) and f"commit {head}-dirty" in patch.read_text()
    git("reset", "-q", "--hard")
    (root / "megatron5d" / "new.py").unlink()
    git("apply", str(patch))
    assert (root / "megatron5d" / "layer.py").read_text() == "one = 2\n \n"
    assert (root / "megatron5d" / "new.py").read_text() == "two = 2\n"


def test_code_that_is_installed_in_another_checkout_has_no_commit(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", checkout[0] / "megatron5d")
    commit.cache_clear()
    assert commit() is None
    write_provenance(tmp_path / "run", Config())
    assert not list((tmp_path / "run" / "code").iterdir())
    assert from_yaml((tmp_path / "run" / "config.yaml").read_text()) == Config()

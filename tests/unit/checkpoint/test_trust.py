"""A checkpoint is data: nothing in it is executed, and no file of another one is taken for its
own."""

import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from megatron5d.checkpoint.folder import step_folder, write_manifest
from megatron5d.checkpoint.hf.safetensors_folder import save_folder
from megatron5d.checkpoint.index import read_pickled_index
from megatron5d.checkpoint.index_writer import IndexWriter
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import SavedTensors, load_tensors
from megatron5d.checkpoint.save import Saver

VALUES = {"model.a": torch.randn(6, 4, dtype=torch.float64), "model.b": torch.randn(10).bfloat16()}


class Calls:
    """Pickled, this calls a function when it is loaded."""

    def __init__(self, function, *args):
        self.called = function, args

    def __reduce__(self):
        return self.called


@pytest.fixture
def place(tmp_path):
    saver = Saver(tmp_path / "ours", keep=0)
    for step in (12, 24):
        tensors = {
            key: ShardedTensor(x.shape, [((0,) * x.dim(), x + step)], x.dtype)
            for key, x in VALUES.items()
        }
        saver.save(step, tensors, {})
    return tmp_path / "ours"


def by_dcp(folder, **more):
    """A checkpoint as earlier versions wrote it: DCP's files and the list of them."""
    dcp.save(VALUES | more, checkpoint_id=folder)
    (folder / "run.json").write_text("{}")
    write_manifest(folder)
    return folder


def loaded(folder):
    found = {key: torch.zeros_like(x) for key, x in VALUES.items()}
    load_tensors(
        folder,
        {key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype) for key, x in found.items()},
    )
    return found


def is_whole(found, step=0):
    return all(torch.equal(found[key], x + step) for key, x in VALUES.items())


def polluted():
    """A pickle that sets an attribute of a class that it may name."""
    return b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93N}\x8c\x05chunkK\x01s\x86b."


def test_what_dcp_itself_wrote_is_read(tmp_path):
    """With an object that is no tensor, with chunks of a tensor, and with DCP's names for what was
    nested."""
    assert is_whole(
        loaded(by_dcp(tmp_path / "old", other={"nested": [1, "text"]}, step=torch.tensor(3)))
    )


def test_dcp_reads_what_we_write(place):
    found = {key: torch.zeros_like(x) for key, x in VALUES.items()}
    dcp.load(found, checkpoint_id=place / "step-00000012")
    assert is_whole(found, 12)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (os.system, ("touch {}",)),
        (eval, ("open('{}', 'w')",)),
        (os.mkdir, ("{}",)),
        (Path.touch, (Path("{}"),)),
        (torch.load, ("{}",)),
        (io.open, ("{}", "w")),
    ],
)
@pytest.mark.parametrize("where", ["planner_data", "outermost"])
def test_no_metadata_executes_anything(tmp_path, function, args, where):
    folder, mark = by_dcp(tmp_path / "old"), tmp_path / "executed"
    evil = Calls(function, *(type(one)(str(one).format(str(mark))) for one in args))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"a": evil}
    (folder / ".metadata").write_bytes(pickle.dumps(evil if where == "outermost" else metadata))
    write_manifest(folder)
    with pytest.raises(
        ValueError, match=r"old/\.metadata is refused: it names .*\..*no part of DCP's metadata"
    ):
        loaded(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", polluted(), pickle.dumps(OrderedDict(a=1)), pickle.dumps({})]
)
def test_a_metadata_that_is_none_is_refused_without_effect(content):
    before = dict(vars(Metadata))
    with pytest.raises(ValueError, match="no metadata of DCP"):
        read_pickled_index(content)
    assert dict(vars(Metadata)) == before


def test_metadata_beside_our_index_is_not_opened(place):
    (place / "step-00000024" / ".metadata").write_bytes(
        pickle.dumps(Calls(exec, "raise SystemExit"))
    )
    assert is_whole(loaded(place / "step-00000024"), 24)


def test_verifying_reports_metadata_that_other_tools_would_execute(place):
    folder = place / "step-00000024"
    assert SavedTensors(folder).errors_outside_tensors() == []
    (folder / ".metadata").write_bytes(pickle.dumps(Calls(exec, "raise SystemExit")))
    write_manifest(folder)
    (fault,) = SavedTensors(folder).errors_outside_tensors()
    assert ".metadata is refused: it names builtins.exec" in fault


def test_no_item_of_tensors_executes_anything(tmp_path):
    """The item's own pickle calls a function, and every checksum is renewed."""
    folder, mark = by_dcp(tmp_path / "old"), tmp_path / "executed"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index, info = next(
        (index, info) for index, info in metadata.storage_data.items() if index.fqn == "model.a"
    )
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps(Calls(os.system, f"touch {mark}"), 2))
        made.writestr("archive/version", "3\n")
    (folder / info.relative_path).write_bytes(archive.getvalue())
    info.offset, info.length = 0, len(archive.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(folder)
    with pytest.raises(ValueError, match=r"distcp cannot be read: .*shard of model.a"):
        loaded(folder)
    assert not mark.exists()


def test_no_message_of_a_rank_executes_anything(tmp_path):
    with pytest.raises(ValueError):
        IndexWriter().build(
            [zlib.compress(pickle.dumps(Calls(os.mkdir, str(tmp_path / "executed"))))]
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda index: index["tensors"]["model.a"][2][0].__setitem__(2, "../x.distcp"),
            "no file of the folder",
        ),
        (lambda index: index["tensors"]["model.a"][2][0].__setitem__(3, -1), "bytes -1"),
        (lambda index: index["tensors"]["model.a"].__setitem__(0, "load"), "dtype 'load'"),
        (lambda index: index["tensors"]["model.a"].__setitem__(2, 7), "wrong type"),
        (lambda index: index["tensors"]["model.a"].__setitem__(1, None), "wrong type"),
        (lambda index: index.__setitem__("tensors", []), "wrong type"),
        (lambda index: index.pop("save"), "wrong type"),
        (lambda index: index.__setitem__("format", 99), "upgrade"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(place, change, told):
    folder = place / "step-00000024"
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    write_manifest(folder)
    with pytest.raises(
        ValueError, match=rf"index\.json is refused: .*{told}.*checkpoint\.resume=.*step-00000012"
    ):
        loaded(folder)


def test_a_file_of_another_step_is_not_taken(place, tmp_path):
    old, new = step_folder(place, 12), step_folder(place, 24)
    assert is_whole(loaded(old), 12) and is_whole(loaded(new), 24)
    whole = (new / "__0_0.distcp").read_bytes()
    shutil.copy(old / "__0_0.distcp", new)
    with pytest.raises(
        ValueError,
        match=r"__0_0\.distcp is of another .*of step 12, save .*of step 24, save .*again",
    ):
        loaded(new)
    (new / "__0_0.distcp").write_bytes(b" " * 256 + whole[256:])
    with pytest.raises(
        ValueError, match="of a save of an earlier version, and the folder of step 24"
    ):
        loaded(new)
    earlier = by_dcp(tmp_path / "step-00000036")
    shutil.copy(old / "__0_0.distcp", earlier)
    with pytest.raises(
        ValueError, match="of step 12, save .*, and the folder of a save of an earlier version"
    ):
        loaded(earlier)


def test_the_same_step_of_another_run_is_another_save(place, tmp_path):
    other = Saver(tmp_path / "other", keep=0)
    other.save(
        24,
        {key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype) for key, x in VALUES.items()},
        {},
    )
    shutil.copy(tmp_path / "other" / "step-00000024" / "__0_0.distcp", place / "step-00000024")
    with pytest.raises(ValueError, match="is of another checkpoint"):
        loaded(place / "step-00000024")


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_have_the_mode_that_the_user_wants(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_folder(tmp_path / "hf", iter([("w", torch.zeros(3)), ("v", torch.zeros(3))]), 12)
        tensors = {"model.a": ShardedTensor((3,), [((0,), torch.ones(3))], torch.float32)}
        Saver(tmp_path / "ours", keep=0).save(1, tensors, {})
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 3 + 6
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}

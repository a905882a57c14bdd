"""One byte of a checkpoint that is not what was saved: told with file, tensor and what to do, or
without effect."""

import gc
import json
import shutil
import sys
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks

from megatron5d.checkpoint.folder import checkpoint_error, newest_checkpoint, step_folder
from megatron5d.checkpoint.layout import ShardedTensor, slices
from megatron5d.checkpoint.load import SavedWeights, load_tensors
from megatron5d.checkpoint.reader import Reader
from megatron5d.checkpoint.save import Saver
from megatron5d.checkpoint.tensor_file import TensorFile

VALUES = {"model.a": torch.randn(6, 4, dtype=torch.float64), "model.b": torch.randn(10)}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    saver = Saver(directory, keep=0)
    parts = {
        key: [((0,) * x.dim(), x[:4]), ((4, *(0,) * (x.dim() - 1)), x[4:])]
        for key, x in VALUES.items()
    }
    for step in (1, 2):
        tensors = {key: ShardedTensor(x.shape, parts[key], x.dtype) for key, x in VALUES.items()}
        saver.save(step, tensors, {"progress": {"step": step}})
    return directory


def test_a_save_after_one_that_failed_is_told_anew(tmp_path, monkeypatch):
    """Of other tensors: where they lie is not taken from the save that failed. The next one has
    nothing to tell."""
    saver, told = Saver(tmp_path, keep=0), []
    saver._group.send = lambda message, send=saver._group.send: (
        told.append(len(message) > 1),
        send(message),
    )
    one, other = (
        {key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype)} for key, x in VALUES.items()
    )
    saver.save(1, one, {})
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
        patch.setattr(
            "megatron5d.checkpoint.save.commit", lambda *_: exec("raise OSError('no room')")
        )
        saver.save(2, other, {})
    saver.save(3, one, {})
    found = {
        key: ShardedTensor(
            each.shape, [((0, 0), torch.zeros(each.shape, dtype=each.dtype))], each.dtype
        )
        for key, each in one.items()
    }
    load_tensors(step_folder(tmp_path, 3), found)
    assert torch.equal(found["model.a"].shards[0, 0], VALUES["model.a"])
    saver.save(4, one, {})
    assert told == [True, True, True, False]


def test_a_save_in_the_background_that_failed_is_told_at_the_next_one(tmp_path, monkeypatch):
    saver = Saver(tmp_path, keep=0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            "megatron5d.checkpoint.save.commit", lambda *_: exec("raise OSError('no room')")
        )
        saver.save(1, {}, {})
        with pytest.raises(OSError, match="step 1 could not be written: no room"):
            saver.save(2, {}, {})
    saver.save(2, {}, {})  # it was told once
    saver.wait()
    assert newest_checkpoint(tmp_path) == step_folder(tmp_path, 2)


@pytest.fixture
def place(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def loaded(folder):
    found = {key: torch.zeros_like(x) for key, x in VALUES.items()}
    load_tensors(
        folder,
        {key: ShardedTensor(x.shape, [((0,) * x.dim(), x)], x.dtype) for key, x in found.items()},
    )
    return found


def flip(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


def is_whole(found):
    return all(torch.equal(found[key], x) for key, x in VALUES.items())


def test_wherever_a_tensors_file_changed_no_wrong_value_is_read(place):
    folder, first = step_folder(place, 2), step_folder(place, 1)
    file = folder / "__0_0.distcp"
    content, messages = file.read_bytes(), []
    for at in range(0, len(content), 17):
        flip(file, at)
        try:
            assert is_whole(loaded(folder)), f"byte {at}"
        except ValueError as error:
            messages.append(str(error))
        file.write_bytes(content)
    assert is_whole(loaded(folder))
    assert len(messages) >= 40
    for message in messages:
        told = (
            "is damaged: bytes ",
            "cannot be read: bytes ",
            "is of another checkpoint, or its first 256 bytes",
        )
        assert any(f"{file} {one}" in message for one in told)
        assert f"checkpoint.resume={first}" in message
    assert {
        key for key in VALUES if any(f"shard of {key}, are not" in message for message in messages)
    } == set(VALUES)


@pytest.mark.parametrize("kind", ["flip", "truncate", "swap", "zero"])
def test_no_random_damage_reads_a_wrong_value(place, kind):
    """A quarter of a hundred of each kind, in any file: a start passes over the checkpoint, refuses
    it, or is right."""
    folder, random, refused = step_folder(place, 2), Random(kind), 0
    files = {path: path.read_bytes() for path in sorted(folder.iterdir())}
    for _ in range(50):
        path = random.choice(list(files))
        content, size = bytearray(files[path]), len(files[path])
        length = random.randint(1, min(200, size // 2))
        first, second = (
            random.randint(0, size // 2 - length),
            random.randint(size // 2, size - length),
        )
        if kind == "flip":
            content[random.randrange(size)] ^= 1 << random.randrange(8)
        elif kind == "truncate":
            del content[random.randrange(size) :]
        elif kind == "swap":
            one, two = content[first : first + length], content[second : second + length]
            content[first : first + length], content[second : second + length] = two, one
        else:
            content[first : first + length] = bytes(length)
        path.write_bytes(content)
        try:
            whole = newest_checkpoint(place) == step_folder(place, 1) or is_whole(loaded(folder))
        except ValueError:
            whole, refused = True, refused + 1
        path.write_bytes(files[path])
        assert whole, (path.name, kind)
    assert is_whole(loaded(folder)) and (refused or kind == "truncate")


def test_parts_of_equal_size_do_not_pass_for_each_other(tmp_path):
    """Two archives in each other's place, each of them sound by itself."""
    one, two = torch.randn(5, 3), torch.randn(5, 3)
    tensors = {
        key: ShardedTensor(x.shape, [((0, 0), x)], x.dtype) for key, x in (("a", one), ("b", two))
    }
    Saver(tmp_path, keep=0).save(1, tensors, {})
    folder = step_folder(tmp_path, 1)
    items = [saved.items[0, 0] for saved in Reader(folder).tensors().values()]
    content = bytearray((folder / items[0].file).read_bytes())
    first, second = (slice(item.start, item.start + item.length) for item in items)
    content[first], content[second] = content[second], content[first]
    (folder / items[0].file).write_bytes(content)
    with pytest.raises(ValueError, match="is damaged: bytes .* shard of a, are not"):
        load_tensors(folder, {"a": ShardedTensor(one.shape, [((0, 0), one)], one.dtype)})


def test_a_part_is_read_by_the_blocks_that_it_lies_in(tmp_path):
    """Rows, columns and boxes of an archive of many blocks, on either side of their edges; as DCP
    reads it, too."""
    x = torch.arange(3 * 700 * 801, dtype=torch.float64).view(3, 700, 801)
    Saver(tmp_path, keep=0).save(
        1, {"model.x": ShardedTensor(x.shape, [((0, 0, 0), x)], x.dtype)}, {}
    )
    folder, random = step_folder(tmp_path, 1), Random(5)
    weights, file = SavedWeights(folder), folder / "__0_0.distcp"
    for _ in range(40):
        offset = [random.randrange(size) for size in x.shape]
        shape = [random.randint(1, size - at) for size, at in zip(x.shape, offset)]
        box = x[slices(offset, shape)]
        assert torch.equal(weights.read("x", offset, shape), box)
    found = {"model.x": torch.zeros_like(x)}
    dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["model.x"], x)
    flip(file, file.stat().st_size // 2)
    assert torch.equal(weights.read("x", (0, 5, 0), (1, 400, 801)), x[:1, 5:405]), (
        "its blocks are sound"
    )
    with pytest.raises(ValueError, match="is damaged"):
        weights.read("x", (1, 5, 0), (1, 400, 801))


def test_a_part_of_a_tensor_is_checked_with_the_item_it_lies_in(place):
    folder = step_folder(place, 2)
    lower = Reader(folder).tensors()["model.a"].items[4, 0]
    content = (folder / lower.file).read_bytes()
    last_row = VALUES["model.a"][5].numpy().tobytes()
    flip(folder / lower.file, content.index(last_row, lower.start))
    weights = SavedWeights(folder)
    assert torch.equal(weights.read("a", (1, 0), (2, 4)), VALUES["model.a"][1:3]), (
        "its item is sound"
    )
    with pytest.raises(ValueError, match="is damaged: bytes .* shard of model.a, are not"):
        weights.read("a", (4, 0), (1, 4))


def test_what_is_sound_is_not_called_damaged(place, monkeypatch):
    def no_memory(*args, **kwargs):
        raise RuntimeError("can't allocate memory: you tried to allocate 96 bytes")

    monkeypatch.setattr(TensorFile, "_read_blocks", no_memory)
    with pytest.raises(
        ValueError, match="cannot be read: bytes .* shard of model.*: can't allocate memory"
    ) as told:
        loaded(step_folder(place, 2))
    assert "damaged" not in str(told.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(place, enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    loaded(step_folder(place, 2))
    after = gc.isenabled()
    (gc.enable if before else gc.disable)()
    assert after == enabled


def test_files_without_tensors(place):
    second, first = step_folder(place, 2), step_folder(place, 1)
    index = second / "index.json"
    content = index.read_bytes()
    for at in (0, len(content) // 2, len(content) - 1):
        flip(index, at)
        with pytest.raises(
            ValueError, match=r"index\.json is damaged: .*checkpoint\.resume=.*step-00000001"
        ):
            loaded(second)
        index.write_bytes(content)
    for name in ("run.json", "files.json"):
        file = second / name
        content = file.read_bytes()
        flip(file, content.index(b"1" if name == "files.json" else b"2"))
        assert f"{file} is damaged" in checkpoint_error(
            second
        ) or "bytes were saved" in checkpoint_error(second)
        assert newest_checkpoint(place) == first, "a run starts from the one before"
        file.write_bytes(content)
    flip(first / "index.json", 0)
    with pytest.raises(ValueError, match="There is no complete checkpoint before it"):
        loaded(first)


def test_rank_0_reads_for_all_where_everything_lies(place):
    """Every rank of thousands would read the same large file, and find its damage by itself."""
    folder = step_folder(place, 2)

    def read_by(rank, world):
        opened = []
        sys.addaudithook(
            lambda event, args: opened.append(str(args[0])) if event == "open" else None
        )
        try:
            told = is_whole(loaded(folder))
        except ValueError as error:
            told = str(error)
        return told, sum(name.endswith("index.json") for name in opened)

    (first, times), other = run_ranks(read_by, 2)
    assert first is True and times > 0 and other == (True, 0)
    flip(folder / "index.json", 3)
    (first, _), (second, _) = run_ranks(read_by, 2)
    assert second == f"rank 0: {first}" and "index.json is damaged" in first


def test_damage_is_told_where_the_folder_cannot_be_searched_for_an_earlier_one(place, monkeypatch):
    """As what it is, a fault of the checkpoint: rank 0 tells the other ranks no other."""
    flip(step_folder(place, 2) / "index.json", 40)
    monkeypatch.setattr(
        "megatron5d.checkpoint.reader.checkpoint_before",
        lambda _: exec("raise OSError('not listed')"),
    )
    with pytest.raises(
        ValueError, match=r"index\.json.*cannot be searched for an earlier checkpoint: not listed"
    ):
        loaded(step_folder(place, 2))


def test_a_checkpoint_without_checksums_of_its_files_is_read(place):
    folder = step_folder(place, 2)
    manifest = folder / "files.json"
    entries = json.loads(manifest.read_text())
    assert {name for name, entry in entries.items() if "crc32" in entry} == {
        ".metadata",
        "index.json",
        "run.json",
    }
    manifest.write_text(json.dumps({name: entry["bytes"] for name, entry in entries.items()}))
    assert checkpoint_error(folder) is None and is_whole(loaded(folder))

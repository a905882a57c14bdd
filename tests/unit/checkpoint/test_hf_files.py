"""Reading and writing safetensors folders by rectangles, against plain slicing of the whole
tensors."""

import json
import resource

import pytest
import torch
from hf_folders import in_8_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron5d.checkpoint.hf.files import INDEX, SINGLE
from megatron5d.checkpoint.hf.safetensors_folder import (
    SafetensorsFolder,
    load_shards,
    save_folder,
    stored_tensors,
)
from megatron5d.checkpoint.hf.tensor_table import Entry
from megatron5d.checkpoint.layout import sharded_parameter
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, spec_of


def local(name, shape, pieces, rows, dtype=torch.float32):
    """A local parameter of `rows` rows, full of a value that no file contains."""
    parameter = new_parameter(
        (rows, *pieces[0].shape[1:]) if pieces else (rows, *shape[1:]),
        ShardSpec(name, shape, tuple(pieces)),
        dtype,
        "cpu",
    )
    parameter.data.fill_(-99)
    return parameter


def load_parameters(parameters, entries, folder, ignored=()):
    load_shards(
        [(spec_of(each), sharded_parameter(each)) for each in parameters], entries, folder, ignored
    )


def rectangle(tensors, name, offset, shape):
    return tensors[name][
        tuple(slice(start, start + extent) for start, extent in zip(offset, shape))
    ]


def numbered(*shape, start=0.0):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + start


def test_stacked_rows_land_in_their_pieces(tmp_path):
    """Rank 1 of 2: its q rows, then a k row and a v row, out of three files' worth of tensors."""
    q, k, v = numbered(8, 3), numbered(2, 3, start=100), numbered(2, 3, start=200)
    save_file({"q": q, "k": k, "v": v}, tmp_path / SINGLE)
    entries = [
        Entry("qkv", (0, 8), "q", (8, 3)),
        Entry("qkv", (8, 10), "k", (2, 3)),
        Entry("qkv", (10, 12), "v", (2, 3)),
    ]
    pieces = [Piece((4, 0), (4, 3), 0), Piece((9, 0), (1, 3), 4), Piece((11, 0), (1, 3), 5)]
    parameter = local("qkv", (12, 3), pieces, 6)
    load_parameters([parameter], entries, tmp_path)
    assert torch.equal(parameter.data, torch.cat([q[4:], k[1:], v[1:]]))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_transposed_on_disk(tmp_path, rank):
    """Conv1D keeps [in, out]; cut along our rows as well as along our columns."""
    stored = numbered(6, 9)  # [in, out]
    save_file({"c": stored}, tmp_path / SINGLE)
    entries = [Entry("w", (0, 9), "c", (6, 9), transposed=True)]
    column = local("w", (9, 6), [Piece((3 * rank, 0), (3, 6))], 3)
    row = local("w", (9, 6), [Piece((0, 2 * rank), (9, 2))], 9)
    load_parameters([column, row], entries, tmp_path)
    assert torch.equal(column.data, stored.t()[3 * rank : 3 * rank + 3])
    assert torch.equal(row.data, stored.t()[:, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_stacks_of_experts(tmp_path, ep, etp):
    """Gate and up of four experts on every rank: experts dealt out over ep, rows of each half over
    etp."""
    experts, f, h = 4, 6, 3
    gate, up = numbered(experts, f, h), numbered(experts, f, h, start=500)
    whole = torch.cat([gate, up], dim=1)  # [4, 12, 3]
    save_file(
        {f"{i}.{n}": t[i].clone() for n, t in (("g", gate), ("u", up)) for i in range(experts)},
        tmp_path / SINGLE,
    )
    entries = [Entry("w", (0, f), f"{i}.g", (f, h), expert=i) for i in range(experts)]
    entries += [Entry("w", (f, 2 * f), f"{i}.u", (f, h), expert=i) for i in range(experts)]
    count, rows = experts // ep, f // etp
    for first in range(0, experts, count):
        for r in range(etp):
            halves = [
                (e, part * f + r * rows) for e in range(first, first + count) for part in (0, 1)
            ]
            pieces = [Piece((e, row, 0), (1, rows, h), i) for i, (e, row) in enumerate(halves)]
            if etp == 1:
                pieces = [Piece((first, 0, 0), (count, 2 * f, h))]
            shape = (count, 2 * f, h) if etp == 1 else (2 * count, rows, h)
            parameter = new_parameter(
                shape, ShardSpec("w", (experts, 2 * f, h), tuple(pieces)), torch.float32, "cpu"
            )
            load_parameters([parameter], entries, tmp_path)
            wanted = torch.stack([whole[e, row : row + rows] for e, row in halves])
            assert torch.equal(parameter.data.flatten(), wanted.flatten())


def test_a_stack_that_is_not_tiled_is_refused(tmp_path):
    """One expert short of the model, and one whose halves leave a gap."""
    save_file({name: numbered(2, 3) for name in "ab"}, tmp_path / SINGLE)
    stack = new_parameter(
        (2, 2, 3), ShardSpec("w", (2, 2, 3), (Piece((0, 0, 0), (2, 2, 3)),)), torch.float32, "cpu"
    )
    load_parameters(
        [stack], [Entry("w", (0, 2), n, (2, 3), expert=i) for i, n in enumerate("ab")], tmp_path
    )
    assert torch.equal(stack.data, numbered(2, 3).expand(2, 2, 3))
    with pytest.raises(ValueError, match="fills 6 of 12 elements"):
        load_parameters([stack], [Entry("w", (0, 2), "a", (2, 3), expert=0)], tmp_path, ["b"])
    shifted = [Entry("w", (i, 2 + i), n, (2, 3), expert=i) for i, n in enumerate("ab")]
    with pytest.raises(AssertionError, match="9 of 12 elements written"):
        load_parameters([stack], shifted, tmp_path)


def test_padding_becomes_zero_and_dtype_is_cast(tmp_path):
    table = numbered(5, 2)
    save_file({"e": table.to(torch.bfloat16)}, tmp_path / SINGLE)
    entries = [Entry("embedding", (0, 5), "e", (5, 2))]
    last = local("embedding", (5, 2), [Piece((4, 0), (1, 2))], 4, torch.float64)
    beyond = local("embedding", (5, 2), [], 4)
    load_parameters([last, beyond], entries, tmp_path)
    assert torch.equal(last.data, torch.cat([table[4:], torch.zeros(3, 2)]).double())
    assert torch.equal(beyond.data, torch.zeros(4, 2))


def test_a_rank_reads_its_rectangle_and_no_more(tmp_path, monkeypatch):
    save_file({"q": numbered(8, 4), "k": numbered(8, 4)}, tmp_path / SINGLE)
    entries = [Entry("w", (0, 8), "q", (8, 4)), Entry("w", (8, 16), "k", (8, 4))]
    read = SafetensorsFolder.read
    elements = []

    def counted(self, name, offset, shape):
        elements.append(torch.Size(shape).numel())
        return read(self, name, offset, shape)

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    parameter = local("w", (16, 4), [Piece((2, 0), (2, 4), 0), Piece((12, 0), (4, 4), 2)], 6)
    load_parameters([parameter], entries, tmp_path)
    assert elements == [8, 16]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rectangle_of_any_tiling(tmp_path_factory, data):
    """Random row blocks on disk, in random orientation, and a random rectangle of the whole."""
    folder = tmp_path_factory.mktemp("hf")
    heights = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    width, rows = data.draw(st.integers(1, 5)), sum(heights)
    whole = torch.randn(rows, width)
    entries, tensors, start = [], {}, 0
    for i, height in enumerate(heights):
        turned = data.draw(st.booleans())
        block = whole[start : start + height]
        tensors[f"t{i}"] = (block.t() if turned else block).contiguous()
        entries.append(
            Entry("w", (start, start + height), f"t{i}", tuple(tensors[f"t{i}"].shape), turned)
        )
        start += height
    save_file(tensors, folder / SINGLE)
    r0, c0 = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    r1, c1 = data.draw(st.integers(r0 + 1, rows)), data.draw(st.integers(c0 + 1, width))
    parameter = local("w", (rows, width), [Piece((r0, c0), (r1 - r0, c1 - c0))], r1 - r0)
    load_parameters([parameter], data.draw(st.permutations(entries)), folder)
    assert torch.equal(parameter.data, whole[r0:r1, c0:c1])


def test_all_troubles_in_one_message_and_nothing_written(tmp_path):
    save_file(
        {
            "wrong": numbered(3, 2),
            "extra": numbered(1),
            "mask.bias": numbered(1),
            "good": numbered(2),
            "fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        },
        tmp_path / SINGLE,
    )
    entries = [
        Entry("a", (0, 2), "wrong", (2, 3)),
        Entry("b", (0, 2), "absent.one", (2,)),
        Entry("c", (0, 2), "absent.two", (2,)),
        Entry("d", (0, 2), "good", (2,)),
        Entry("e", (0, 2), "fp8", (2,)),
    ]
    parameter = local("d", (2,), [Piece((0,), (2,))], 2)
    with pytest.raises(ValueError) as error:
        load_parameters([parameter], entries, tmp_path, ignored=[r"mask\.bias$"])
    message = str(error.value)
    assert "2 missing:" in message and "absent.one" in message and "absent.two" in message
    assert "1 unexpected:" in message and "extra" in message and "mask.bias" not in message
    assert "wrong: [3, 2] on disk, [2, 3]" in message
    assert "F8_E4M3" in message
    assert str(tmp_path) in message
    assert torch.equal(parameter.data, torch.full((2,), -99.0))


def test_an_ignored_name_must_match(tmp_path):
    save_file({"w": numbered(2), "attn.c_attn.bias": numbered(2)}, tmp_path / SINGLE)
    parameter = local("w", (2,), [Piece((0,), (2,))], 2)
    with pytest.raises(ValueError, match=r"unexpected:\s+attn.c_attn.bias"):
        load_parameters(
            [parameter], [Entry("w", (0, 2), "w", (2,))], tmp_path, ignored=[r"(^|\.)attn\.bias$"]
        )


@pytest.mark.parametrize(
    "rows",
    [[(0, 2)], [(0, 2), (3, 5)], [(0, 3), (2, 5)], [(0, 3), (0, 3)]],
    ids=["short", "gap", "overlap", "twice"],
)
def test_every_element_has_exactly_one_source(tmp_path, rows):
    entries = [Entry("w", (a, b), f"t{i}", (b - a, 2)) for i, (a, b) in enumerate(rows)]
    save_file(
        {entry.stored_name: numbered(*entry.stored_shape) for entry in entries}, tmp_path / SINGLE
    )
    parameter = local("w", (5, 2), [Piece((0, 0), (5, 2))], 5)
    with pytest.raises(ValueError, match="family can hold"):
        load_parameters([parameter], entries, tmp_path)


def test_a_parameter_without_a_source_is_refused(tmp_path):
    save_file({"w": numbered(2)}, tmp_path / SINGLE)
    parameters = [
        local("w", (2,), [Piece((0,), (2,))], 2),
        local("x.bias", (3,), [Piece((0,), (3,))], 3),
    ]
    with pytest.raises(ValueError, match=r"x\.bias"):
        load_parameters(parameters, [Entry("w", (0, 2), "w", (2,))], tmp_path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match=SINGLE):
        SafetensorsFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="safe_serialization"):
        SafetensorsFolder(tmp_path)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}})
    )
    with pytest.raises(ValueError, match="model-00001-of-00001.safetensors, which is not there"):
        SafetensorsFolder(tmp_path)
    save_file({"w": numbered(64)}, tmp_path / SINGLE)
    (tmp_path / SINGLE).write_bytes((tmp_path / SINGLE).read_bytes()[:-8])
    with pytest.raises(ValueError, match=SINGLE):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": [1]}', "[]"])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(
        ValueError, match="model.safetensors.index.json (is damaged|is not a file of settings)"
    ):
        SafetensorsFolder(tmp_path)


def test_save_folder_cuts_files_and_indexes_them(tmp_path):
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate([10, 10, 10, 40, 1, 1])}
    total = save_folder(tmp_path / "out", tensors.items(), max_shard_bytes=100)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {INDEX, *(f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4))}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == total == 72 * 4
    read = {}
    for file in set(index["weight_map"].values()):
        part = load_file(tmp_path / "out" / file)
        assert sum(t.nbytes for t in part.values()) <= 100 or len(part) == 1
        assert all(index["weight_map"][name] == file for name in part)
        read |= part
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_save_folder_takes_one_file_at_a_time(tmp_path):
    """When tensor i is asked for, all but the pending file's two tensors are on disk already."""
    unwritten = []

    def stream():
        for i in range(8):
            files = len(list((tmp_path / "out").iterdir()))
            unwritten.append(i - 2 * files)
            yield f"t{i}", torch.zeros(10)

    save_folder(tmp_path / "out", stream(), max_shard_bytes=80)
    assert max(unwritten) == 2
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 4


def test_save_folder_clears_away_what_an_interrupted_one_left(tmp_path):
    def interrupted():
        yield "a", torch.zeros(4)
        yield "b", torch.zeros(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path, interrupted(), max_shard_bytes=16)
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    save_folder(tmp_path, [("c", torch.zeros(4))])
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]


def test_a_full_disk_is_told_with_the_file(tmp_path):
    """safetensors has an error of its own for it, which is no OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"part-00000-00000.safetensors.tmp cannot be written: .*File too large"
        ):
            save_folder(tmp_path, [("a", torch.zeros(1000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_save_folder_refuses_to_mix_with_older_files(tmp_path):
    save_file({"w": numbered(2)}, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="already holds model.safetensors"):
        save_folder(tmp_path, [("v", numbered(2))])


def test_what_is_written_reads_back(tmp_path):
    ours = {"a": torch.randn(6, 4), "b": torch.randn(5)}
    entries = [
        Entry("a", (0, 2), "a1", (2, 4)),
        Entry("a", (2, 6), "a2", (4, 4), transposed=True),
        Entry("b", (0, 5), "b", (5,)),
    ]
    tensors = stored_tensors(entries, lambda *part: rectangle(ours, *part), torch.float64)
    save_folder(tmp_path, tensors, max_shard_bytes=64)
    assert (tmp_path / INDEX).is_file()
    back = {
        name: local(name, tuple(t.shape), [Piece((0,) * t.ndim, tuple(t.shape))], len(t))
        for name, t in ours.items()
    }
    load_parameters(back.values(), entries, tmp_path)
    assert all(torch.equal(back[name].data, ours[name]) for name in ours)


@pytest.mark.parametrize(
    "at", [(0, 0, 300, 260), (127, 128, 2, 1), (130, 5, 170, 124), (299, 259, 1, 1)]
)
def test_any_rectangle_of_blocks_in_8_bits(tmp_path, at):
    values, scales, means = in_8_bits(torch.randn(300, 260) * torch.logspace(-3, 3, 260))
    save_file({"w": values, "w_scale_inv": scales}, tmp_path / SINGLE)
    row, column, rows, columns = at
    parameter = local("w", (300, 260), [Piece((row, column), (rows, columns))], rows)
    load_parameters([parameter], [Entry("w", (0, 300), "w", (300, 260))], tmp_path)
    assert torch.equal(parameter.data, means[row : row + rows, column : column + columns])


def test_scales_that_are_not_of_the_blocks_are_refused(tmp_path):
    values, scales, _ = in_8_bits(torch.randn(300, 260))
    save_file(
        {"w": values, "w_scale_inv": scales[:2].clone(), "v_scale_inv": scales}, tmp_path / SINGLE
    )
    parameter = local("w", (300, 260), [Piece((0, 0), (300, 260))], 300)
    with pytest.raises(ValueError) as error:
        load_parameters([parameter], [Entry("w", (0, 300), "w", (300, 260))], tmp_path)
    assert "w_scale_inv: [2, 3] on disk, [3, 3] by the 128×128 blocks of [300, 260]" in str(
        error.value
    )
    assert "1 unexpected:\n    v_scale_inv" in str(error.value)

"""Weights without an optimiser: rows out of a checkpoint, and parts that are made while it is
written."""

from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from megatron5d.checkpoint.layout import HostCopies, LazyTensor, ShardedTensor, by_key
from megatron5d.checkpoint.load import (
    SavedWeights,
    find_checkpoint,
    load_tensors,
    load_weights,
    widest_source,
)
from megatron5d.checkpoint.save import Saver
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter


def saved(folder, tensors) -> Path:
    Saver(folder, keep=1).save(1, tensors, {})
    found = find_checkpoint(None, str(folder))
    assert found is not None
    return found


@pytest.fixture
def whole():
    return torch.randn(7, 3).bfloat16()


def test_rows_across_the_parts_they_were_saved_in(tmp_path, whole):
    parts = [
        ((0, 0), whole[:4, :2].contiguous()),
        ((0, 2), whole[:4, 2:].contiguous()),
        ((4, 0), whole[4:]),
    ]
    vector = torch.randn(5)
    tensors = {
        "model.w": ShardedTensor((7, 3), parts, torch.bfloat16),
        "model.b": ShardedTensor((5,), [((0,), vector)], torch.float32),
        "optim.master.w": ShardedTensor((5,), [((0,), vector)], torch.float32),
    }
    weights = SavedWeights(saved(tmp_path, tensors))
    assert set(weights.tensors) == {"w", "b"}
    for start, stop in [(0, 7), (3, 6), (6, 7)]:
        rows = weights.read("w", (start, 0), (stop - start, 3))
        assert rows.dtype == torch.bfloat16 and torch.equal(rows, whole[start:stop])
    assert torch.equal(weights.read("b", (1,), (3,)), vector[1:4])
    assert torch.equal(weights.read("w", (2, 1), (4, 2)), whole[2:6, 1:])


def test_what_a_save_in_the_background_writes_is_a_copy(whole):
    tensor, copies = (
        ShardedTensor((7, 3), [((0, 0), whole[:4]), ((4, 0), whole[4:])], torch.bfloat16),
        HostCopies(),
    )
    before, taken = whole.clone(), copies.copy({"w": tensor})["w"].shards
    whole.zero_()
    assert torch.equal(torch.cat(list(taken.values())), before), (
        "training continues in its own memory"
    )
    again = copies.copy({"w": tensor})["w"].shards
    assert not torch.cat(list(again.values())).any()
    assert [one.data_ptr() for one in again.values()] == [
        one.data_ptr() for one in taken.values()
    ], "memory is kept"


def test_lazy_parts_are_made_when_they_are_written(tmp_path, whole):
    made = []

    def make(offset):
        made.append(offset)
        return whole[offset[0] : offset[0] + (4 if offset[0] == 0 else 3)]

    tensor = LazyTensor((7, 3), {(0, 0): (4, 3), (4, 0): (3, 3)}, torch.bfloat16, make)
    assert made == []
    folder = saved(tmp_path, {"model.w": tensor})
    assert sorted(made) == [(0, 0), (4, 0)]
    assert torch.equal(SavedWeights(folder).read("w", (0, 0), (7, 3)), whole)


def test_local_parameters_take_their_pieces_in_their_own_dtype(tmp_path, whole):
    folder = saved(tmp_path, {"model.w": ShardedTensor((7, 3), [((0, 0), whole)], torch.bfloat16)})
    pieces = (Piece((5, 0), (2, 3), 0), Piece((1, 0), (1, 3), 2))
    parameter = new_parameter((4, 3), ShardSpec("w", (7, 3), pieces), torch.float64, "cpu")
    load_weights([parameter], folder)
    assert torch.equal(
        parameter.data, torch.cat([whole[5:7], whole[1:2], torch.zeros(1, 3)]).double()
    )


def test_another_model_is_refused(tmp_path, whole):
    folder = saved(tmp_path, {"model.w": ShardedTensor((7, 3), [((0, 0), whole)], torch.bfloat16)})
    wide = new_parameter(
        (7, 4), ShardSpec("w", (7, 4), (Piece((0, 0), (7, 4)),)), torch.float32, "cpu"
    )
    other = new_parameter((2,), ShardSpec("b", (2,), (Piece((0,), (2,)),)), torch.float32, "cpu")
    with pytest.raises(
        ValueError, match=r"(?s)model\.b.*model\.w: saved \(7, 3\), this model has \(7, 4\)"
    ):
        load_weights([wide, other], folder)
    absent = {f"{kind}.x": ShardedTensor((2,), [], torch.float32) for kind in ("optim.m", "model")}
    with pytest.raises(ValueError, match=r"(?s)checkpoint: model\.x.*checkpoint: optim\.m\.x"):
        load_tensors(folder, absent)  # weights first


def test_what_does_not_fit_one_rank_is_told_on_all(tmp_path, whole):
    """Who raised alone would leave the others waiting."""
    folder = saved(tmp_path, {"model.w": ShardedTensor((7, 3), [((0, 0), whole)], torch.bfloat16)})

    def told(rank, world):
        rows = (7, 8)[rank]
        mine = new_parameter(
            (rows, 3), ShardSpec("w", (rows, 3), (Piece((0, 0), (rows, 3)),)), torch.float32, "cpu"
        )
        try:
            load_weights([mine], folder)
        except ValueError as error:
            return str(error)

    first, second = run_ranks(told, 2)
    assert first == second and "model.w: saved (7, 3), this model has (8, 3)" in first


def test_segments_of_one_parameter_become_one_tensor():
    spec, values = ShardSpec("a", (4, 2), ()), torch.arange(8.0).view(4, 2)
    halves = [
        ShardedTensor((4, 2), [((row, 0), values[row : row + 2])], values.dtype) for row in (0, 2)
    ]
    joined = by_key("model", [(spec, half) for half in halves])
    assert list(joined) == ["model.a"] and sorted(joined["model.a"].shards) == [(0, 0), (2, 0)]


@pytest.mark.parametrize(
    ("wanted", "source"),
    [
        (torch.float64, "optim.master.w"),
        (torch.float32, "optim.master.w"),
        (torch.bfloat16, "model.w"),
    ],
)
def test_weights_with_wider_masters_are_read_from_them(tmp_path, whole, wanted, source):
    """Also where what is wanted is wider than both."""
    master = whole.float() + 1e-4
    tensors = {
        "model.w": ShardedTensor((7, 3), [((0, 0), whole)], torch.bfloat16),
        "optim.master.w": ShardedTensor((7, 3), [((0, 0), master)], torch.float32),
    }
    folder, here = saved(tmp_path, tensors), torch.zeros(7, 3, dtype=wanted)
    twins = {"model.w": "optim.master.w", "optim.master.w": "model.w"}
    held = {"model.w": ShardedTensor((7, 3), [((0, 0), here)], wanted)}
    assert load_tensors(folder, held, twin=twins.get)["model.w"][0] == source
    assert torch.equal(here, (master if source != "model.w" else whole).to(wanted))
    assert widest_source("none", None, wanted, {}) is None

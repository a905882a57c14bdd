"""Rectangles, pieces and the initial weights that follow from them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.axis import Axis
from megatron5d.topology.init_weights import initialize, normal, stream_key
from megatron5d.topology.shard_spec import rectangles, spec_of


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_rectangles_cover_a_flat_range_in_order(shape, data):
    numbers = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    covered = torch.empty(0, dtype=torch.int64)
    pieces = rectangles(tuple(shape), start, stop)
    for offset, extent in pieces:
        index = tuple(slice(o, o + n) for o, n in zip(offset, extent))
        covered = torch.cat([covered, numbers[index].flatten()])
    assert len(pieces) <= 2 * len(shape) - 1
    assert torch.equal(covered, torch.arange(start, stop))


def tp_axis(rank, size):
    return Axis("tp", tuple(range(size)), rank)


def build(rank, size, kind):
    factory = {"dtype": torch.float32, "device": "cpu", "init": 0.5}
    if kind == "row":
        return RowParallelLinear(24, 10, "x", tp_axis(rank, size), **factory)
    num_copies = max(1, size // 2)
    first = rank // num_copies * num_copies
    copies = Axis("tp_kv", tuple(range(first, first + num_copies)), rank - first)
    blocks = [(4, 3), (2, 3), (2, 3)]  # 4 query heads and 2 KV heads of 3 dims
    return ColumnParallelLinear(
        10, blocks, "x", tp_axis(rank, size), bias=True, copies=copies, **factory
    )


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_slices_of_one_tensor_that_no_layout_changes(kind, size):
    full = build(0, 1, kind).weight
    initialize(full, seed=3)
    num_owners = torch.zeros_like(full)
    for rank in range(size):
        weight = build(rank, size, kind).weight
        initialize(weight, seed=3)
        for piece in spec_of(weight).pieces:
            index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            assert torch.equal(weight[piece.row : piece.row + piece.shape[0]], full[index])
            num_owners[index] += piece.owner
    assert (num_owners == 1).all(), "every element has exactly one owner"


def test_weights_depend_on_name_and_seed_and_look_normal():
    index = torch.arange(1 << 18)
    draw = normal(stream_key(1, "a"), index)
    # five standard errors of 2^18 normal deviates
    assert draw.mean().abs() < 0.01
    assert (draw.std() - 1).abs() < 0.007
    assert (draw.pow(4).mean() - 3).abs() < 0.096
    assert (draw[1:] * draw[:-1]).mean().abs() < 0.01
    for key in (stream_key(2, "a"), stream_key(1, "b")):
        assert (draw * normal(key, index)).mean().abs() < 0.01
    assert draw.unique().numel() > 0.999 * draw.numel()


def test_chunks_of_rows_give_the_same_weights(monkeypatch):
    """No rank allocates temporaries as large as a large weight."""
    weight = build(0, 1, "column").weight
    initialize(weight, seed=3)
    at_once = weight.detach().clone()
    monkeypatch.setattr("megatron5d.topology.init_weights._CHUNK", 20)
    initialize(weight, seed=3)
    assert torch.equal(weight, at_once)


def test_divide_names_both_numbers_the_axis_and_the_nearest():
    message = r"model.num_heads = 6 .* tp = 4 \(parallel.tp\); nearest that fit: 4 or 8"
    with pytest.raises(ValueError, match=message):
        tp_axis(0, 4).divide(6, "model.num_heads")
    assert Axis("tp").divide(7, "anything") == 7

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
    found = rectangles(tuple(shape), start, stop)
    assert len(found) <= 2 * len(shape) - 1
    walked = [numbers[tuple(slice(o, o + n) for o, n in zip(*each))].flatten() for each in found]
    assert torch.equal(
        torch.cat(walked) if walked else torch.empty(0, dtype=torch.int64),
        torch.arange(start, stop),
    )


def tp_axis(rank, size):
    return Axis("tp", tuple(range(size)), rank)


def copies_axis(rank, copies):
    first = rank // copies * copies
    return Axis("tp_kv", tuple(range(first, first + copies)), rank - first)


def build(rank, size, kind):
    factory = {"dtype": torch.float32, "device": "cpu"}
    if kind == "row":
        return RowParallelLinear(24, 10, "x", tp_axis(rank, size), init=0.5, **factory)
    copies = copies_axis(rank, max(1, size // 2))
    blocks = [(4, 3), (2, 3), (2, 3)]  # 4 query heads and 2 KV heads of 3 dims
    return ColumnParallelLinear(
        10, blocks, "x", tp_axis(rank, size), bias=True, copies=copies, init=0.5, **factory
    )


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_cut_from_one_whole_that_no_layout_changes(kind, size):
    one = build(0, 1, kind)
    initialize(one.weight, seed=3)
    counted = torch.zeros_like(one.weight)
    for rank in range(size):
        layer = build(rank, size, kind)
        initialize(layer.weight, seed=3)
        for piece in spec_of(layer.weight).pieces:
            index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape))
            assert torch.equal(
                layer.weight[piece.row : piece.row + piece.shape[0]], one.weight[index]
            )
            counted[index] += piece.owner
    assert (counted == 1).all(), "every element has exactly one owner"


def test_weights_depend_on_name_and_seed_and_look_normal():
    index = torch.arange(1 << 18)
    draw = normal(stream_key(1, "a"), index)
    # five standard errors of 2^18 normal deviates
    assert (
        draw.mean().abs() < 0.01
        and (draw.std() - 1).abs() < 0.007
        and (draw.pow(4).mean() - 3).abs() < 0.096
    )
    assert (draw[1:] * draw[:-1]).mean().abs() < 0.01
    for other in (stream_key(2, "a"), stream_key(1, "b")):
        assert (draw * normal(other, index)).mean().abs() < 0.01
    assert draw.unique().numel() > 0.999 * draw.numel()


def test_rows_are_made_a_few_at_a_time(monkeypatch):
    """No rank materialises a large weight's scratch: chunks give the same numbers as the whole."""
    layer = build(0, 1, "column")
    initialize(layer.weight, seed=3)
    whole = layer.weight.detach().clone()
    monkeypatch.setattr("megatron5d.topology.init_weights._CHUNK", 20)
    initialize(layer.weight, seed=3)
    assert torch.equal(layer.weight, whole)


def test_divide_names_both_numbers_the_axis_and_what_fits():
    with pytest.raises(
        ValueError, match=r"model.num_heads = 6 .* tp = 4 \(parallel.tp\); nearest that fit: 4 or 8"
    ):
        tp_axis(0, 4).divide(6, "model.num_heads")
    assert Axis("tp").divide(7, "anything") == 7

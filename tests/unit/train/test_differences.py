"""What is told of a difference: how large, where, on which ranks; and what nobody has."""

from math import inf, nan

import torch

from megatron5d.parity.differences import figure_differences, joined, tensor_differences
from megatron5d.parity.run import RankRecord

WHOLE = {"weight": torch.arange(1.0, 9.0).view(4, 2), "zero": torch.full((3,), 1e-17)}


def halves(**changes):
    """Two ranks with two rows each and a copy of the other tensor."""
    held = [
        [
            ("weight", (2 * r, 0), WHOLE["weight"][2 * r : 2 * r + 2].clone()),
            ("zero", (0,), WHOLE["zero"].clone()),
        ]
        for r in range(2)
    ]
    for rank, index, value in changes.values():
        held[rank][0][2][index] = value
    return held


def test_the_largest_difference_and_its_place():
    found = list(
        tensor_differences("gradient", halves(a=(1, (0, 1), 6.5), b=(0, (1, 1), 4.25)), WHOLE, 1e-3)
    )
    assert [each.name for each in found] == ["weight", "zero"] and found[1].relative == 0
    worst = found[0]
    assert (worst.relative, worst.rank, worst.ranks, worst.position) == (0.5 / 8, 1, (0, 1), (2, 1))
    assert (worst.got, worst.expected) == (6.5, 6.0)


def test_what_is_not_a_number_or_held_by_nobody_is_infinitely_far_off():
    (worst, _) = tensor_differences("weight", halves(a=(0, (0, 0), nan)), WHOLE)
    assert worst.relative == inf and worst.position == (0, 0) and worst.ranks == (0,)
    (worst, other) = tensor_differences("weight", halves()[:1], WHOLE)
    assert (
        worst.relative == inf
        and worst.rank is None
        and worst.position == (2, 0)
        and other.relative == 0
    )


def test_what_should_vanish_is_compared_on_the_scale_of_the_largest():
    held = halves()
    held[1][1][2][:] = 2e-17
    assert [each.relative for each in tensor_differences("gradient", held, WHOLE)][1] == 1.0
    assert [each.relative for each in tensor_differences("gradient", held, WHOLE, floor=1e-6)][
        1
    ] < 1e-11


def test_rectangles_of_one_process_are_joined():
    whole = joined([part for rank in halves() for part in rank])
    assert all(torch.equal(whole[name], WHOLE[name].double()) for name in WHOLE)


def test_a_step_without_a_target_is_equal_where_all_say_so():
    """Its loss is the mean over no token."""
    truth = RankRecord([{"loss": nan, "num_targets": 0.0}], [{}])
    other = RankRecord([{"loss": 1.5, "num_targets": 0.0}], [{}])
    (equal, *_), (loss, *_) = (
        list(figure_differences([truth, each], truth, 1e-10)) for each in (truth, other)
    )
    assert (equal.relative, equal.ranks) == (0.0, ()) and (loss.relative, loss.ranks) == (inf, (1,))
    diverged = RankRecord([{"loss": nan, "num_targets": 8.0}], [{}])
    assert next(figure_differences([diverged], diverged, 1e-10)).relative == inf


def test_figures_of_every_step_and_rank():
    truth = RankRecord([{"loss": 2.0}, {"loss": 1.0}], [{"load": 0.0}, {}])
    other = RankRecord([{"loss": 2.0}, {"loss": 1.5}], [{"load": 0.0}, {}])
    found = list(
        figure_differences(
            [truth, other, RankRecord([{}, {"loss": nan}], truth.layers)], truth, 1e-10
        )
    )
    assert [(each.quantity, each.name, each.relative, each.rank, each.ranks) for each in found] == [
        ("loss", "step 1", inf, 2, (2,)),
        ("loss", "step 2", inf, 2, (1, 2)),
        ("routers", "load, step 1", 0.0, 0, ()),
    ]

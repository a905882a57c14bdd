"""Which rank takes which sample, for all sizes in one process."""

import itertools

import pytest

from megatron5d.data.sample_order import global_batch_size, micro_batch_samples, samples_of_steps


@pytest.mark.parametrize(("mbs", "dp"), list(itertools.product([1, 2, 3, 4], [1, 2, 3, 5, 8])))
def test_global_batches_do_not_depend_on_the_layout(mbs, dp):
    gbs = 3 * mbs * dp
    for step in range(3):
        ranks = [micro_batch_samples(step * gbs, gbs, mbs, rank, dp) for rank in range(dp)]
        taken = [i for rank in ranks for each in rank for i in each]
        assert sorted(taken) == list(range(step * gbs, (step + 1) * gbs))
        assert all(len(rank) == gbs // (mbs * dp) and all(len(each) == mbs for each in rank) for rank in ranks)


def test_micro_steps_take_consecutive_entries_rank_by_rank():
    # two ranks, micro-batches of 2, batches of 8, after 16 samples: written out by hand
    assert micro_batch_samples(16, 8, 2, 0, 2) == [range(16, 18), range(20, 22)]
    assert micro_batch_samples(16, 8, 2, 1, 2) == [range(18, 20), range(22, 24)]


def slow_ramp(consumed, gbs, start, increment, length):
    """Megatron's rule with exact fractions: an increment after each length / ((gbs − start) / increment) samples."""
    size = start
    passed = 1
    while size < gbs and consumed * ((gbs - start) // increment) >= passed * length:
        size += increment
        passed += 1
    return size


@pytest.mark.parametrize("ramp", [[4, 4, 100], [8, 2, 37], [2, 14, 64], [16, 4, 50], [4, 4, 0]])
def test_ramp_grows_in_equal_increments(ramp):
    sizes = [global_batch_size(consumed, 16, ramp) for consumed in range(200)]
    assert sizes == [slow_ramp(consumed, 16, *ramp) for consumed in range(200)]
    assert sizes == sorted(sizes) and sizes[-1] == 16
    consumed = 0
    for steps in range(40):
        assert samples_of_steps(steps, 16, ramp) == consumed
        assert samples_of_steps(50 - steps, 16, ramp, consumed) == samples_of_steps(50, 16, ramp)
        consumed += global_batch_size(consumed, 16, ramp)


def test_without_a_ramp_samples_are_a_product():
    assert samples_of_steps(10**9, 7) == 7 * 10**9

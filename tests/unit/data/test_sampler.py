"""Which rank takes which sample, for all sizes in one process."""

import itertools

import pytest

from megatron5d.config.derived import batch_schedule, global_batch_size, samples_of_steps
from megatron5d.config.schema import Config, TrainConfig
from megatron5d.data.sample_order import micro_batch_samples


@pytest.mark.parametrize(("mbs", "dp"), list(itertools.product([1, 2, 3, 4], [1, 2, 3, 5, 8])))
def test_global_batches_do_not_depend_on_the_layout(mbs, dp):
    gbs = 3 * mbs * dp
    for step in range(3):
        ranks = [micro_batch_samples(step * gbs, gbs, mbs, rank, dp) for rank in range(dp)]
        taken = [i for rank in ranks for each in rank for i in each]
        assert sorted(taken) == list(range(step * gbs, (step + 1) * gbs))
        assert all(
            len(rank) == gbs // (mbs * dp) and all(len(each) == mbs for each in rank)
            for rank in ranks
        )


def test_micro_steps_take_consecutive_entries_rank_by_rank():
    # two ranks, micro-batches of 2, batches of 8, after 16 samples: written out by hand
    assert micro_batch_samples(16, 8, 2, 0, 2) == [range(16, 18), range(20, 22)]
    assert micro_batch_samples(16, 8, 2, 1, 2) == [range(18, 20), range(22, 24)]


def slow_ramp(consumed, gbs, start, increment, length):
    """Megatron's rule with exact fractions: an increment after each length / ((gbs − start) /
    increment) samples."""
    size = start
    passed = 1
    while size < gbs and consumed * ((gbs - start) // increment) >= passed * length:
        size += increment
        passed += 1
    return size


def ramped(*ramp, gbs=16, seq_len=10):
    return batch_schedule(
        Config(train=TrainConfig(gbs=gbs, gbs_ramp=[str(part) for part in ramp], seq_len=seq_len))
    )


@pytest.mark.parametrize(
    "ramp", [[4, 4, 100], [8, 2, 37], [2, 14, 64], [16, 4, 50], [4, 4, 0], [4, 1, 5]]
)
def test_ramp_grows_in_equal_increments(ramp):
    schedule = ramped(*ramp)
    sizes = [global_batch_size(consumed, schedule) for consumed in range(200)]
    assert sizes == [slow_ramp(consumed, 16, *ramp) for consumed in range(200)]
    assert sizes == sorted(sizes) and sizes[-1] == 16
    consumed = 0
    for steps in range(40):
        assert samples_of_steps(steps, schedule) == consumed
        assert samples_of_steps(50 - steps, schedule, consumed) == samples_of_steps(50, schedule)
        consumed += global_batch_size(consumed, schedule)


def megatrons_size(consumed, thresholds):
    """Of its StepBatchsizeNumMicroBatchesCalculator: (threshold in samples, size), the last that is
    reached."""
    return [size for begin, size in thresholds if consumed >= begin][-1]


@pytest.mark.parametrize("text", ["0:4 1.25K:8 2K:16", "0:3 95:5 1M:16", "0:16"])
def test_stages_by_tokens_are_megatrons(text):
    multiples = {"K": 1000, "M": 10**6}
    words = [word.split(":") for word in text.split()]
    tokens = [int(float(at.rstrip("KM")) * multiples.get(at[-1], 1)) for at, _ in words]
    thresholds = [(number // 10, int(size)) for number, (_, size) in zip(tokens, words)]
    schedule, consumed = ramped(text), 0
    for step in range(60):
        assert samples_of_steps(step, schedule) == consumed
        assert global_batch_size(consumed, schedule) == megatrons_size(consumed, thresholds)
        consumed += megatrons_size(consumed, thresholds)


def test_stages_by_steps_and_tokens():
    """6 steps of 2, 10 of 4, then 8 from the first step after 500 tokens, and 16 from step 20
    on."""
    schedule = ramped("0:2", "6steps:4", "500:8", "20steps:16")
    sizes = [2] * 6 + [4] * 10 + [8] * 4 + [16] * 5  # 12 samples, then 40 by 50 samples
    consumed = 0
    for step, size in enumerate(sizes):
        assert (samples_of_steps(step, schedule), global_batch_size(consumed, schedule)) == (
            consumed,
            size,
        )
        consumed += size


@pytest.mark.parametrize(
    "text", ["50:4 100:8", "0:4 0:8", "0:4 100:8 90:16", "0:4 3steps:8 2steps:16", "0:4 9:8"]
)
def test_stages_that_do_not_follow_each_other(text):
    with pytest.raises(ValueError, match="does not begin"):
        ramped(text)


def test_without_a_ramp_samples_are_a_product():
    assert samples_of_steps(10**9, [(0, 7)]) == 7 * 10**9

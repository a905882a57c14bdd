"""The numbers of the samples that a step takes, and of those that a data-parallel rank takes of them.

The state of the whole data pipeline is one number, `consumed_samples`. A step takes the next gbs samples of the global
order, so its set of samples depends on neither dp nor mbs. Each micro-step takes the next mbs·dp of them, of which rank
r gets the r-th mbs, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence


def global_batch_size(consumed_samples: int, gbs: int, ramp: Sequence[int] | None = None) -> int:
    """The global batch size of the step that begins after `consumed_samples`, in sequences.

    Args:
        consumed_samples: sequences of all earlier steps.
        gbs: final global batch.
        ramp: [start gbs, increment, ramp length in sequences]; None = constant.

    Returns:
        The size, which grows by the increment at equal distances of consumed samples.
    """
    if ramp is None:
        return gbs
    start, increment, length = ramp
    increments = (gbs - start) // increment
    if consumed_samples >= length or increments == 0:
        return gbs
    return start + consumed_samples * increments // length * increment


def samples_of_steps(steps: int, gbs: int, ramp: Sequence[int] | None = None, consumed: int = 0) -> int:
    """Sequences that are taken after `steps` more steps, those `consumed` before included."""
    for done in range(steps):
        size = global_batch_size(consumed, gbs, ramp)
        if size == gbs:  # the ramp is over: the rest is a product
            return consumed + (steps - done) * gbs
        consumed += size
    return consumed


def micro_batch_samples(consumed_samples: int, gbs: int, mbs: int, dp_rank: int, dp_size: int) -> list[range]:
    """The samples of one step that belong to one data-parallel rank.

    Args:
        consumed_samples: sequences of all earlier steps.
        gbs: this step's global batch, in sequences.
        mbs: micro-batch, in sequences.
        dp_rank: 0 … dp_size − 1.
        dp_size: data-parallel ranks.

    Returns:
        One range of mbs sample numbers per micro-batch, gbs/(mbs·dp) of them.
    """
    assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
    assert gbs % (mbs * dp_size) == 0, (gbs, mbs, dp_size)
    starts = range(consumed_samples + dp_rank * mbs, consumed_samples + gbs, mbs * dp_size)
    return [range(start, start + mbs) for start in starts]

"""The numbers of the samples that a step takes, and of those that a data-parallel rank takes of them.

The state of the whole data pipeline is one number, `consumed_samples`. A step takes the next gbs samples of the global
order, so its set of samples depends on neither dp nor mbs. Each micro-step takes the next mbs·dp of them, of which rank
r gets the r-th mbs, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence


def check_batch_sizes(gbs: int, mbs: int, dp_size: int, ramp: Sequence[int] | None = None) -> None:
    """Refuse sizes with which some step could not be divided into whole micro-batches.

    Args:
        gbs: global batch, in sequences.
        mbs: micro-batch of one rank, in sequences.
        dp_size: data-parallel ranks.
        ramp: [start gbs, increment, ramp length in sequences]; None = constant.

    Raises:
        ValueError: a size is not positive, or a batch size the run will use is not a multiple of mbs·dp.
    """
    unit = mbs * dp_size
    if mbs < 1 or dp_size < 1 or gbs < 1 or gbs % unit:
        nearest = max(unit, gbs // unit * unit) if unit > 0 else 1
        raise ValueError(
            f"train.gbs={gbs} is not a multiple of train.mbs·dp = {mbs}·{dp_size} = {unit}; nearest legal: {nearest}"
        )
    if ramp is None:
        return
    if len(ramp) != 3:
        raise ValueError(f"train.gbs_ramp={list(ramp)}; it is [start gbs, increment, ramp length in sequences]")
    start, increment, length = ramp
    if not (0 < start <= gbs and increment > 0 and length >= 0 and (gbs - start) % increment == 0):
        raise ValueError(
            f"train.gbs_ramp={list(ramp)} does not go from {start} to train.gbs={gbs} in steps of {increment}"
        )
    if start % unit or (gbs > start and increment % unit):
        legal = [max(unit, start // unit * unit), max(unit, increment // unit * unit), length]
        raise ValueError(
            f"train.gbs_ramp={list(ramp)}: start and increment must be multiples of train.mbs·dp = {mbs}·{dp_size} = "
            f"{unit}; nearest legal: {legal}"
        )


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

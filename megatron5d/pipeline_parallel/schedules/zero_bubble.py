"""Zero-bubble schedules: the backward is split, and weight gradients fill the time in which other
schedules would wait. ZB-V has two chunks per rank laid out as a V."""

from collections import deque

from megatron5d.pipeline_parallel.program import (
    Action,
    Program,
    Slot,
    loop_placement,
    make_program,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import schedule
from megatron5d.pipeline_parallel.schedules.dualpipe import unroll
from megatron5d.pipeline_parallel.schedules.gpipe_and_1f1b import depth_first, group_sizes


@schedule("zb_h1")
def zb_h1(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """ZB-H1: 1F1B's memory, a third of its bubble where F = I = W.

    Bubble (p − 1)(F + B − 2W) with B = I + W; activations p.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241), §2.1, Table 1.
    """

    def line(rank: int) -> list[Slot]:
        passes = depth_first(rank, num_ranks, num_microbatches, 1, backward="I")
        return _delay_weights(*passes, num_warmup=num_ranks - 1 - rank, max_deferred=rank)

    return make_program(
        "zb_h1", loop_placement(num_ranks), [0] * num_microbatches, map(line, range(num_ranks))
    )


@schedule("zb_h2")
def zb_h2(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """ZB-H2: no bubble between a rank's first and last action where F = I = W, for twice 1F1B's
    memory.

    Bubble (p − 1)(F + B − 3W) with B = I + W, if each rank may step its optimizer without waiting
    for the others (the paper validates afterwards); otherwise the ranks' shifted starts remain, (p
    − 1)F. Activations 2p − 1.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241), §2.2, Table 1.
    """

    def line(rank: int) -> list[Slot]:
        passes = depth_first(rank, num_ranks, num_microbatches, 1, backward="I")
        num_warmup = 2 * (num_ranks - 1 - rank)
        return _delay_weights(*passes, num_warmup=num_warmup, max_deferred=2 * rank)

    return make_program(
        "zb_h2", loop_placement(num_ranks), [0] * num_microbatches, map(line, range(num_ranks))
    )


@schedule("interleaved_zb", chunks=2, any_chunks=True)
def interleaved_zb(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Interleaved 1F1B with deferred weight gradients: ZB-H1's idea on v chunks per rank.

    Bubble (p − 1)(F + B − 2W)/v; activations p.
    Source: Qi et al. 2023 (2401.10241), §2.1, applied to the order of Narayanan et al. 2021
        (2104.04473), §2.2.2.
    """

    def line(rank: int) -> list[Slot]:
        first_group = group_sizes(num_ranks, num_microbatches)[0]
        num_warmup = (chunks - 1) * first_group + num_ranks - 1 - rank
        passes = depth_first(rank, num_ranks, num_microbatches, chunks, backward="I")
        return _delay_weights(*passes, num_warmup=num_warmup, max_deferred=rank)

    placement = loop_placement(num_ranks, chunks)
    return make_program(
        "interleaved_zb", placement, [0] * num_microbatches, map(line, range(num_ranks))
    )


def _delay_weights(
    forwards: list[Action], backwards: list[Action], num_warmup: int, max_deferred: int
) -> list[Slot]:
    """Warm-up forwards, then F and I alternating; the oldest W follows an I when more than
    `max_deferred` W are pending."""
    num_warmup = min(num_warmup, len(forwards))
    slots: list[Slot] = [(action,) for action in forwards[:num_warmup]]
    deferred: deque[Action] = deque()
    steady_forwards = iter(forwards[num_warmup:])
    for backward in backwards:
        forward = next(steady_forwards, None)
        slots += [(forward,)] if forward else []
        slots.append((backward,))
        deferred.append(backward._replace(op="W"))
        if len(deferred) > max_deferred:
            slots.append((deferred.popleft(),))
    return slots + [(action,) for action in deferred]


@schedule("zb_v", chunks=2)
def zb_v(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """ZB-V: no bubble between a rank's first and last action where F = I = W, in 1F1B's memory.

    The bubble that remains is the ranks' shifted starts, (p − 1)F/2. Activations p. With fewer than
    2p − 1 micro-batches, the same pattern leaves out the missing ones.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241), §6.
    """

    def line(rank: int) -> list[Slot]:
        to_turn = num_ranks - rank
        steady = max(num_microbatches - (2 * num_ranks - 1), 0) + rank
        sections = [
            (2 * to_turn - 1, "F0"),
            (rank, "F1 F0"),
            (to_turn, "F1 I1 W1"),
            (steady, "F0 I0 W0 F1 I1 W1"),
            (to_turn - 1, "I0 W0 F1 I1 W1"),
            (rank, "I0 I1"),
            (to_turn, "I0 W0"),
            (rank, "W1"),
            (rank, "W0"),
        ]
        return unroll(sections, (rank, 2 * num_ranks - 1 - rank), [range(num_microbatches)] * 2)

    placement = zigzag_placement(num_ranks)
    return make_program("zb_v", placement, [0] * num_microbatches, map(line, range(num_ranks)))

"""ZB-V: two chunks a rank laid out as a V, with deferred weight gradients."""

from megatron5d.pipeline_parallel.program import Program, Slot, make_program, zigzag_placement
from megatron5d.pipeline_parallel.registry import schedule
from megatron5d.pipeline_parallel.schedules.phases import unroll


@schedule("zb_v", chunks=2)
def zb_v(num_ranks: int, num_microbatches: int, chunks: int) -> Program:
    """Returns ZB-V: no bubble between a rank's first and last action where F = I = W, in 1F1B's memory.

    What remains is the ranks' shifted starts, (p − 1)F/2. Activations p. Fewer than 2p − 1 micro-batches run the same
    pattern with the missing ones left out.
    Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241), §6.
    """

    def line(rank: int) -> list[Slot]:
        to_turn = num_ranks - rank
        steady = max(num_microbatches - (2 * num_ranks - 1), 0) + rank
        phases = [
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
        return unroll(phases, (rank, 2 * num_ranks - 1 - rank), [range(num_microbatches)] * 2)

    placement = zigzag_placement(num_ranks)
    return make_program("zb_v", placement, [0] * num_microbatches, map(line, range(num_ranks)))

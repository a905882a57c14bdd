"""The executor takes the time that the simulator says, for every schedule, on 8 and on 16 ranks,
within 5 %; and ranks measure the bubble that the simulator says.

Stages wait instead of computing; executor, channels and messages are the true ones. A busy machine
can only add time, so a run that is too slow is repeated, with longer actions at last, for minutes
if need be.
"""

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ranks import run_ranks
from timed_stages import come_first, may_come_first, run_timed, timed_executor

from megatron5d.comm.ledger import Exposure
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.simulate import idle_fractions, simulate
from megatron5d.topology.axis import Axis

pytestmark = [] if may_come_first() else pytest.mark.timing

# of a forward through one rank's layers, attempt by attempt
UNITS_S = (0.04, 0.04, 0.04, 0.1, 0.1, 0.25)
LAST_UNIT_S, BUDGET_S = 0.4, 240.0  # of the attempts after these, while so much time is not used up
PLAIN = Costs(F=1.0, I=1.2, W=0.8)
EXPERTS = Costs(a2aF=0.5, a2aB=0.5)


def program_near(schedule: str, pp: int, wanted: int) -> Program:
    for m in range(wanted, wanted + 4 * pp):
        try:
            return build_program(schedule, pp, m)
        except ValueError:
            continue
    raise AssertionError(f"{schedule} admits no number of micro-batches near {wanted}")


def timed(rank: int, world: int, program: Program, costs: Costs, unit_s: float):
    axis, waits = Axis("pp", tuple(range(world)), rank, dist.group.WORLD), Exposure("cpu")
    executor, held = timed_executor(program, axis, costs, unit_s, waits)
    come_first()
    dist.barrier()
    begin = time.perf_counter()
    timeline = run_timed(executor, held)
    end = max(timing.end for timing in timeline)
    return timeline[0].start, end, held.peak, waits.take() / (end - begin)


def units() -> Iterator[float]:
    begin = time.monotonic()
    yield from UNITS_S
    while time.monotonic() - begin < BUDGET_S:
        yield LAST_UNIT_S


def check(program: Program, costs: Costs) -> None:
    expected = simulate(program, costs)
    ratios: list[float] = []
    for unit_s in units():
        found = run_ranks(timed, program.num_ranks, program, costs, unit_s, timeout=100)
        assert [peak for _, _, peak, _ in found] == pytest.approx(
            expected.peak_activations.tolist()
        )
        makespan = max(end for _, end, _, _ in found) - min(start for start, _, _, _ in found)
        ratios.append(makespan / (expected.makespan * unit_s))
        bubbles = [bubble for _, _, _, bubble in found]
        if 0.98 < ratios[-1] < 1.05 and bubbles == pytest.approx(
            idle_fractions(program, expected), abs=0.05
        ):
            return
    pytest.fail(
        f"{program.name}: measured over simulated makespan was {ratios}, at last with {LAST_UNIT_S} s a forward; then "
        f"ranks waited for the shares {bubbles}, simulated {idle_fractions(program, expected)}"
    )


@pytest.mark.parametrize("schedule", schedule_names())
def test_eight_ranks(schedule):
    check(program_near(schedule, 8, 10), PLAIN)


@pytest.mark.parametrize("schedule", schedule_names())
def test_sixteen_ranks(schedule):
    check(program_near(schedule, 16, 8), PLAIN)


@pytest.mark.parametrize("schedule", ["interleaved_overlap", "dualpipe", "dualpipe_v"])
def test_overlapped_pairs_hide_the_all_to_all(schedule):
    """One action's all-to-all runs while its partner computes; alone, it is waited for."""
    program = program_near(schedule, 8, 10)
    check(program, EXPERTS)
    plain = simulate(build_program("1f1b", 8, program.num_microbatches), EXPERTS)
    assert simulate(program, EXPERTS).exposed_a2a.sum() < plain.exposed_a2a.sum()


def test_stages_of_different_cost():
    scale = tuple(1.5 if stage == 7 else 0.9 for stage in range(8))
    check(program_near("zb_h1", 8, 10), Costs(F=1.0, I=1.2, W=0.8, stage_scale=scale))

"""The executor takes the simulated time, for every schedule, on 8 and on 16 ranks, within 5 %; and
ranks measure the simulated bubble.

Stages wait instead of computing; executor, channels and messages are real. A busy machine can only
add time, so a run that is too slow is repeated, later with longer actions, for minutes if
necessary.
"""

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from pipeline_configs import admitted_program
from ranks import run_ranks
from timed_stages import run_timed, take_priority, timed_executor

from megatron5d.comm.ledger import Exposure
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import Program
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.simulate import idle_fractions, simulate
from megatron5d.topology.axis import Axis

pytestmark = pytest.mark.timing

# of a forward through one rank's layers, attempt by attempt
UNITS_S = (0.04, 0.04, 0.04, 0.1, 0.1, 0.25)
LAST_UNIT_S, BUDGET_S = 0.4, 240.0  # of later attempts, until the budget is used up
PLAIN = Costs(F=1.0, I=1.2, W=0.8)
EXPERTS = Costs(a2aF=0.5, a2aB=0.5)


def timed(rank: int, world: int, program: Program, costs: Costs, unit_s: float):
    axis, waits = Axis("pp", tuple(range(world)), rank, dist.group.WORLD), Exposure("cpu")
    executor, record = timed_executor(program, axis, costs, unit_s, waits)
    take_priority()
    dist.barrier()
    begin = time.perf_counter()
    timeline = run_timed(executor, record)
    end = max(timing.end for timing in timeline)
    return timeline[0].start, end, record.peak, waits.take() / (end - begin)


def units() -> Iterator[float]:
    begin = time.monotonic()
    yield from UNITS_S
    while time.monotonic() - begin < BUDGET_S:
        yield LAST_UNIT_S


def check(program: Program, costs: Costs) -> None:
    expected = simulate(program, costs)
    idle, ratios = idle_fractions(program, expected), []
    for unit_s in units():
        starts, ends, peaks, bubbles = zip(
            *run_ranks(timed, program.num_ranks, program, costs, unit_s, timeout=100)
        )
        assert peaks == pytest.approx(expected.peak_activations)
        ratios.append((max(ends) - min(starts)) / (expected.makespan * unit_s))
        if 0.98 < ratios[-1] < 1.05 and bubbles == pytest.approx(idle, abs=0.05):
            return
    pytest.fail(
        f"{program.name}: measured over simulated makespan was {ratios}, at last with "
        f"{LAST_UNIT_S} s per forward; then ranks idled for {bubbles}, simulated {idle}"
    )


@pytest.mark.parametrize("schedule", schedule_names())
def test_eight_ranks(schedule):
    check(admitted_program(schedule, 8, 10), PLAIN)


@pytest.mark.parametrize("schedule", schedule_names())
def test_sixteen_ranks(schedule):
    check(admitted_program(schedule, 16, 8), PLAIN)


@pytest.mark.parametrize("schedule", ["interleaved_overlap", "dualpipe", "dualpipe_v"])
def test_overlapped_pairs_hide_the_all_to_all(schedule):
    """One action's all-to-all runs while its partner computes; without a partner it is exposed."""
    program = admitted_program(schedule, 8, 10)
    check(program, EXPERTS)
    plain = simulate(build_program("1f1b", 8, program.num_microbatches), EXPERTS)
    assert simulate(program, EXPERTS).exposed_a2a.sum() < plain.exposed_a2a.sum()


def test_stages_of_different_cost():
    scale = tuple(1.5 if stage == 7 else 0.9 for stage in range(8))
    check(admitted_program("zb_h1", 8, 10), Costs(F=1.0, I=1.2, W=0.8, stage_scale=scale))

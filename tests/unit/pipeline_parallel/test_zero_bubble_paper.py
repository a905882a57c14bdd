"""The bubble rates that the zero-bubble paper calculates from its profiled times, to the digit.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241): profiled times and bubble rates of four models on
A100s. There a bubble rate is 1 − work/cost, where cost is the longest time between a rank's first and last action: for
1F1B and ZB-H1 that is the makespan (rank 0 starts first and ends last); ZB-H2 leaves the ranks shifted.
"""

import itertools

import pytest

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate

# model, ranks, micro-batches, milliseconds of (F, B = our I, W, message), bubble rates of (1F1B, ZB-H1, ZB-H2)
PUBLISHED = [
    ("1.5B", 8, 24, (18.522, 18.086, 9.337, 0.601), (0.2431, 0.1585, 0.1083)),
    ("1.5B", 8, 32, (18.513, 18.086, 9.331, 0.626), (0.1985, 0.1242, 0.0837)),
    ("1.5B", 8, 64, (18.546, 18.097, 9.321, 0.762), (0.1240, 0.0674, 0.0444)),
    ("6.2B", 8, 24, (29.718, 29.444, 19.927, 0.527), (0.2347, 0.1323, 0.0698)),
    ("6.2B", 8, 32, (29.802, 29.428, 19.530, 0.577), (0.1898, 0.1045, 0.0559)),
    ("6.2B", 8, 64, (29.935, 29.621, 19.388, 0.535), (0.1091, 0.0554, 0.0294)),
    ("14.6B", 16, 48, (11.347, 11.248, 8.132, 0.377), (0.2552, 0.1397, 0.0672)),
    ("14.6B", 16, 64, (11.307, 11.254, 8.101, 0.379), (0.2082, 0.1088, 0.0516)),
    ("14.6B", 16, 128, (11.325, 11.308, 8.109, 0.378), (0.1251, 0.0576, 0.0266)),
    ("28.3B", 32, 96, (10.419, 10.207, 7.715, 0.408), (0.2646, 0.1421, 0.0641)),
    ("28.3B", 32, 128, (10.408, 10.204, 7.703, 0.408), (0.2168, 0.1106, 0.0490)),
    ("28.3B", 32, 256, (10.402, 10.248, 7.698, 0.460), (0.1352, 0.0594, 0.0257)),
]


@pytest.mark.parametrize("model, p, m, times, rates", PUBLISHED)
def test_bubble_rates(model, p, m, times, rates):
    f, i, w, comm = times
    for name, published in zip(("1f1b", "zb_h1", "zb_h2"), rates):
        program = build_program(name, p, m)
        result = simulate(program, Costs(F=f, I=i, W=w, comm=comm))
        edges = program.table.rank_start.tolist()
        cost = max(result.end[b - 1] - result.start[a] for a, b in itertools.pairwise(edges))
        assert 1 - result.work.max() / cost == pytest.approx(published, abs=0.6e-4), name
        if name != "zb_h2":
            assert result.bubble == pytest.approx(published, abs=0.6e-4)

"""Splits of the layers that are made for one schedule, and what is left to gain against schedules that have them."""

import numpy as np
import pytest

from megatron5d.model.partition import BALANCES
from megatron5d.pipeline_parallel.costs import parse_costs
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.search.fit import fitted
from megatron5d.pipeline_parallel.search.search import search_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.stage_costs import LayerCosts

COSTS = {"experts": "a2aF=0.5,a2aB=0.5", "dear": "a2aF=1,a2aB=1,comm=0.1", "dense": "F=1,I=1.2,W=0.8,comm=0.1"}


def deals(num_layers, text):
    """The embedding counts 0.3 ranks' layers and the head 1.5, and the first rank's layers have no experts.

    With the two splits that ask for no placement; others fit some memory that these do not.
    """
    return [LayerCosts(parse_costs(text), num_layers, 0.3, 1.5, 1.0, balance) for balance in BALANCES[:2]]


def fit(program, num_layers, text, memory, tries):
    """The layout found, its Simulation, and those of the starts."""
    ways, placement = deals(num_layers, text), program.placement
    starts = [way.layout(placement) for way in ways]
    layout = fitted(program, lambda layers: ways[0].dealt(layers, placement), starts, memory, tries)
    before = [simulate(program, way.of(placement)) for way in ways]
    return layout, simulate(program, ways[0].dealt(layout, placement)), before


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe", "interleaved_overlap"])
def test_a_fitted_split_is_faster_and_deals_every_layer(schedule):
    program = build_program(schedule, 4, 12)
    layout, found, before = fit(program, 30, COSTS["dear"], np.inf, 200)
    assert sum(layout) == 30 and min(layout) >= 0
    assert found.makespan <= min(start.makespan for start in before)
    assert found.work.min() > 0
    if schedule != "1f1b":
        assert found.makespan < min(start.makespan for start in before) - 0.1


def test_a_fitted_split_keeps_to_the_memory_where_even_ones_do_not():
    program = build_program("dualpipe", 16, 64)
    _, found, before = fit(program, 62, COSTS["experts"], 20.0, 300)
    assert min(start.peak_activations.max() for start in before) > 20
    assert found.peak_activations.max() <= 20 + 1e-9
    assert found.makespan < min(start.makespan for start in before) + 1


@pytest.mark.parametrize("text", COSTS.values(), ids=COSTS)
def test_a_quarter_less_overhead_than_named_schedules_with_splits_of_their_own(text):
    """At p = 16, m = 64, one copy, 1.25 p; overhead is what the step takes beyond the head, the busiest in any case."""
    head = 1.5 * 3 * 64
    named = []
    for schedule in (
        "1f1b",
        "zb_v",
        "dualpipe_v",
    ):  # faster than all others that fit
        _, found, _ = fit(build_program(schedule, 16, 64), 62, text, 20.0, 500)
        assert found.peak_activations.max() <= 20 + 1e-9
        named.append(found.makespan)
    found = search_program(16, 64, deals(62, text), memory=20.0, seconds=None, evaluations=2000).makespan
    assert found - head <= 0.75 * (min(named) - head)

"""Layers of stages, compared with the optimum by brute force; shared parameters; stage costs."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.model.flops import flops_per_token, head_flops
from megatron5d.model.partition import (
    StageSpec,
    even_ranks,
    even_stages,
    layers_per_stage,
    shared_parameters,
    split_layers,
    stage_specs,
)
from megatron5d.pipeline_parallel.program import (
    Placement,
    loop_placement,
    mirrored_placement,
    zigzag_placement,
)
from megatron5d.pipeline_parallel.registry import build_program
from megatron5d.pipeline_parallel.simulate import simulate
from megatron5d.planning.schedule_search.stage_costs import ModelCosts


def all_layouts(num_layers, num_stages):
    for cuts in combinations(range(num_layers + num_stages - 1), num_stages - 1):
        edges = [-1, *cuts, num_layers + num_stages - 1]
        yield [b - a - 1 for a, b in zip(edges, edges[1:])]


def loads_of(layout, costs, placement, first, last):
    """Work of every rank, and of every stage."""
    specs = stage_specs(layout, ModelConfig(num_layers=sum(layout)))
    stages = [sum(costs[i] for i in s.layers) + first * s.embedding + last * s.head for s in specs]
    ranks = range(placement.num_ranks)
    return [sum(stages[s] for _, s in placement.stages_of(rank)) for rank in ranks], stages


@given(
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_even_stages_is_the_best_split(costs, num_stages, first, last):
    def merit(layout):
        _, stages = loads_of(layout, costs, loop_placement(num_stages), first, last)
        return max(stages), sum(load * load for load in stages)

    def is_allowed(layout):
        middle, ends = layout[1:-1], (layout[0] or first, layout[-1] or last)
        return all(middle) and (all(ends) if num_stages > 1 else layout[0] or first + last)

    merits = [merit(layout) for layout in all_layouts(len(costs), num_stages) if is_allowed(layout)]
    if merits:
        assert merit(even_stages(costs, num_stages, first, last)) == min(merits)
    else:
        with pytest.raises(ValueError, match="require no fewer layers"):
            even_stages(costs, num_stages, first, last)


def test_the_first_stages_get_the_remaining_layers():
    assert even_stages([1.0] * 126, 16) == [8] * 14 + [7, 7]
    assert even_stages([1.0] * 5, 4) == [2, 1, 1, 1]


PLACEMENTS = [
    loop_placement(3),
    loop_placement(2, 2),
    loop_placement(2, 3),
    zigzag_placement(2),
    zigzag_placement(3),
    zigzag_placement(2, 3),
    mirrored_placement(4),
]


@given(
    st.sampled_from(PLACEMENTS),
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=4, max_size=7),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 2.5, 6.0]),
)
def test_even_ranks_is_the_best_split(placement, costs, equal_costs, first, last):
    """If layers cost the same; otherwise within half of the cost of the most expensive layer."""
    costs = [1.0] * len(costs) if equal_costs else costs
    layout = even_ranks(costs, placement, first, last)
    assert sum(layout) == len(costs) and min(layout) >= 0

    def merit(layout):
        ranks, stages = loads_of(layout, costs, placement, first, last)
        keys = max(ranks), sum(x * x for x in ranks), sum(x * x for x in stages)
        return tuple(round(key, 6) for key in keys)

    best = min(map(merit, all_layouts(len(costs), placement.num_stages)))
    if equal_costs:
        assert merit(layout) == best
    else:
        assert merit(layout)[0] <= best[0] + max(costs) / 2


def test_a_rank_with_an_expensive_end_holds_no_layer_elsewhere():
    """Rank 3 has the head; if ranks can be even, stages are too."""
    ones, zigzag = [1.0] * 126, zigzag_placement(4)
    assert even_ranks(ones[:24], loop_placement(4, 2), last=9.0) == [4, 4, 4, 0, 4, 4, 4, 0]
    assert even_ranks(ones[:19], zigzag, first=1.0, last=4.0) == [1, *[3] * 6, 0]
    assert even_ranks(ones[:12], mirrored_placement(4), last=6.0) == [3, 5, 4, 0]
    assert even_ranks(ones, loop_placement(16, 2)) == even_stages(ones, 32)
    with pytest.raises(ValueError, match="leaves one of the 4 pipeline ranks without"):
        even_ranks(ones[:3], loop_placement(4))


def test_with_two_copies_the_middle_gets_fewer_layers():
    """A rank holds a pair of stages, one on each side of the middle."""
    ones, mirrored = [1.0] * 128, mirrored_placement(16)
    ends = {"first": 0.3 * 62 / 16, "last": 1.5 * 62 / 16}
    assert split_layers("late", ones[:62], mirrored, **ends) == [2, *[4] * 10, 5, 5, 5, 5, 0]
    assert split_layers("ends", ones[:62], mirrored, **ends) == [3, *[4] * 11, 5, 5, 5, 0]
    expected = [5, *[9] * 7, *[8] * 3, *[9] * 4, 0]
    assert split_layers("ends", ones, mirrored, 2.4, 12.0) == expected
    assert split_layers("ends", ones[:3], mirrored_placement(4), 0.0, 9.0) == [1, 1, 1, 0]
    for balance in ("late", "ends"):
        # A rank keeps its only layer, and equal stages stay equal.
        assert split_layers(balance, [1.0], mirrored_placement(4), 0.0, 9.0) == [0, 0, 1, 0]
        assert split_layers(balance, ones[:64], mirrored, 0.0, 0.0) == [4] * 16
        expected = [4, 4, 4, 0, 4, 4, 4, 0]
        assert split_layers(balance, ones[:24], loop_placement(4, 2), 0.0, 9.0) == expected


def config_of(num_layers=8, **pipeline):
    return Config(
        model=ModelConfig(num_layers=num_layers, vocab_size=4096),
        parallel=ParallelConfig(pp=4),
        pipeline=PipelineConfig(**pipeline),
        train=TrainConfig(seq_len=64),
    )


def test_ends_can_count_as_layers():
    config = config_of(10, embedding_layers=1, head_layers=1)
    assert layers_per_stage(config, loop_placement(4)) == [2, 3, 3, 2]
    assert layers_per_stage(config_of(10), loop_placement(4)) == [3, 3, 2, 2]


def test_a_stage_may_be_empty_if_its_rank_has_others():
    """In `pipeline.layout`, or to balance the ranks, of which one has the head."""
    layout = [2, 0, 2, 2, 0, 1, 1, 0]
    assert layers_per_stage(config_of(layout=layout), zigzag_placement(4)) == layout
    even = config_of(12, balance="ranks", head_layers=4)
    assert layers_per_stage(even, loop_placement(4, 2)) == [2, 2, 2, 0, 2, 2, 2, 0]
    assert ModelCosts(even).of(loop_placement(4, 2)).compute[:, 3].tolist() == [0, 0, 0, 0]


def test_a_split_by_cost_includes_the_head():
    config = config_of(12, split="cost")
    head = 6 * 4096 * 64
    layer = (flops_per_token(config.model, 64) - head) / 12
    layout = layers_per_stage(config, loop_placement(4))
    assert sum(layout) == 12
    assert max(layout[:-1]) >= layout[-1] + int(head / layer) - 1
    assert layout[-1] < min(layout[:-1])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            [2, 2, 2],
            r"must have 4 entries \(got 3\), one for each stage of pipeline",
        ),
        ([2, 2, 2, 3], r"must sum to model.num_layers = 8 \(got 9\); nearest"),
        ([4, 0, 2, 2], r"leaves pipeline rank 1 \(stages \[1\]\) without a layer"),
    ],
)
def test_invalid_layouts_are_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        layers_per_stage(config_of(layout=layout), loop_placement(4))


def test_stages_cover_the_model_in_order():
    first, second, last = stage_specs([0, 3, 2], ModelConfig(num_layers=5))
    assert first == StageSpec(range(0), embedding=True)
    assert second == StageSpec(range(3))
    assert last == StageSpec(range(3, 5), head=True)
    assert stage_specs([2], ModelConfig(num_layers=2)) == [StageSpec(range(2), True, True)]


MTP_MODEL = ModelConfig(num_layers=4, num_mtp_layers=2)


@pytest.mark.parametrize(
    ("layout", "counted", "depths", "num_states"),
    [
        ([2, 1, 1, 0], [2, 1, 1, 0], [(), (), (), (0, 1)], [1, 1, 1]),  # both after the head
        ([2, 1, 1, 2], [2, 1, 1, 0], [(), (), (), (0, 1)], [1, 1, 1]),  # the same, counted
        ([2, 3, 1, 0], [2, 3, 1, 0], [(), (0,), (1,), ()], [1, 2, 3]),
        ([2, 3, 0, 1], [2, 3, 0, 0], [(), (0,), (), (1,)], [1, 2, 2]),
        ([6, 0, 0, 0], [6, 0, 0, 0], [(0, 1), (), (), ()], [3, 3, 3]),
    ],
)
def test_prediction_blocks_count_as_layers(layout, counted, depths, num_states):
    config = Config(
        model=MTP_MODEL,
        parallel=ParallelConfig(pp=2, vpp=2),
        pipeline=PipelineConfig(layout=layout),
    )
    if layout[1]:
        assert layers_per_stage(config, zigzag_placement(2, 2)) == counted
    specs = stage_specs(counted, MTP_MODEL)
    assert [tuple(spec.mtp) for spec in specs] == depths
    assert [spec.num_states for spec in specs[:-1]] == num_states
    assert [block for spec in specs for block in spec.blocks(MTP_MODEL)] == list(range(6))


def shared(placement, layout=None, **fields):
    model = ModelConfig(num_layers=2 * placement.num_stages, **fields)
    specs = stage_specs(layout or [2] * placement.num_stages, model)
    return shared_parameters(placement, specs, model)


def test_shared_parameters():
    tied, mtp = {"tie_embeddings": True}, {"num_mtp_layers": 1}
    assert shared(loop_placement(4), **tied) == {"tied": [(0, 3)]}
    assert shared(loop_placement(4, 2)) == shared(loop_placement(1)) == {}
    assert shared(zigzag_placement(4, 2), **tied) == {}
    assert shared(zigzag_placement(4, 3), **mtp) == {"tied": [(0, 3)]}
    pairs = [(0, 3), (1, 2)]
    assert shared(mirrored_placement(4), **mtp) == {"pair": pairs}
    assert shared(Placement(((0, 2, 1),), 3), **tied) == {"tied": [(0, 1)]}
    layout = [2, 2, 5, 0]  # the prediction block is on the stage before the head
    assert shared(loop_placement(4), layout, **mtp) == {"tied": [(0, 2)]}
    assert shared(loop_placement(4), layout, **mtp, **tied) == {"tied": [(0, 2, 3)]}
    expected = {"pair": pairs, "tied": [(0, 1, 2, 3)]}
    assert shared(mirrored_placement(4), layout, **mtp) == expected
    assert shared(zigzag_placement(2), layout, **mtp) == {"tied": [(0, 1)]}
    with pytest.raises(ValueError, match="mirrored ranks"):
        shared(Placement(((0, 1, 2), (2, 0, 1)), 3))


def test_prediction_blocks_cost_on_their_stage():
    """Their output matrix costs on the head's stage; the sum is unchanged; messages are larger."""
    config = config_of(6, layout=[2, 2, 4, 0], flops_per_byte=10.0)
    config = replace(config, model=replace(config.model, num_mtp_layers=2))
    with_head = replace(config, pipeline=replace(config.pipeline, layout=[2, 2, 2, 0]))
    costs, costs_with_head = (ModelCosts(c).of(loop_placement(4)) for c in (config, with_head))
    assert costs.compute.sum() == pytest.approx(costs_with_head.compute.sum())
    head = head_flops(config.model)
    unit = (flops_per_token(config.model, 64) - head) / 4
    _, second, third, last = costs.compute[0]
    assert last == pytest.approx(head / unit) and third > 1.9 * second
    message, program = costs.comm[0], build_program("1f1b", 4, 8)
    assert costs.comm == pytest.approx(message * np.array([1, 1, 3, 3]))
    assert costs_with_head.comm == pytest.approx(message * np.array([1, 1, 1, 3]))
    small_messages = replace(costs, comm=float(message))
    assert simulate(program, costs).makespan > simulate(program, small_messages).makespan


def test_stage_costs_add_up_to_the_models_flops():
    """F + I + W of all stages are the model's FLOPs on any placement; B is I + W."""
    config = config_of(8, split="cost")
    flops = flops_per_token(config.model, 64)
    for placement in (loop_placement(4), zigzag_placement(2, 2), loop_placement(2, 4)):
        costs = ModelCosts(config).of(placement)
        f, i, w, b = costs.compute
        unit = (flops - head_flops(config.model)) / 3 / placement.num_ranks
        assert (f + i + w).sum() * unit == pytest.approx(flops)
        assert b == pytest.approx(i + w)
        assert costs.activation.sum() == pytest.approx(placement.num_ranks)
        assert (w > 0).all() and (i >= w).all() and i.sum() > w.sum()


def test_stage_costs_include_the_all_to_alls():
    """Two experts a token, half of them on the other rank: a MoE block sends 2·2·½·h elements, in
    F, in I, and again in I where it is recomputed; nothing if all experts are local."""
    config = config_of(8, flops_per_byte=1000.0)
    model = replace(config.model, num_experts=4, top_k=2, first_k_dense=2)
    config = replace(config, model=model, precision=PrecisionConfig(dtype="bf16"))
    local = ModelCosts(config).of(loop_placement(4))
    assert not local.a2a.any() and (local.comm > 0).all()
    config = replace(
        config, parallel=ParallelConfig(pp=4, ep=2), recompute=RecomputeConfig("full", num_layers=1)
    )
    costs = ModelCosts(config).of(loop_placement(4))
    state = model.hidden_size * 2 * 1000.0
    unit = (flops_per_token(model, 64) - head_flops(model)) / 3 / 4
    assert costs.comm * unit == pytest.approx(state)
    forward, backward, weights, full = costs.a2a * unit / state
    assert forward == pytest.approx([0, 4, 4, 4]) and backward == pytest.approx([0, 6, 6, 6])
    assert not weights.any() and full == pytest.approx(backward)

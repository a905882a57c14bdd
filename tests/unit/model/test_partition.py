"""Layers to stages: the optimum by brute force, the user's list, and who shares what."""

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


def every_layout(num_layers, num_stages, first, last):
    for cuts in combinations(range(num_layers + num_stages - 1), num_stages - 1):
        edges = [-1, *cuts, num_layers + num_stages - 1]
        layout = [b - a - 1 for a, b in zip(edges, edges[1:])]
        own = [first * (s == 0) + last * (s == num_stages - 1) for s in range(num_stages)]
        if all(count or extra for count, extra in zip(layout, own)):
            yield layout, own


@given(
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_balanced_is_the_best_of_all_splits(costs, num_stages, first, last):
    def loads(layout, own):
        found, begin = [], 0
        for count, extra in zip(layout, own):
            found.append(sum(costs[begin : begin + count]) + extra)
            begin += count
        return found

    options = [loads(*option) for option in every_layout(len(costs), num_stages, first, last)]
    if not options:
        with pytest.raises(ValueError, match="require at least as many layers"):
            even_stages(costs, num_stages, first, last)
        return
    own = [first * (s == 0) + last * (s == num_stages - 1) for s in range(num_stages)]
    mine = loads(even_stages(costs, num_stages, first, last), own)
    assert max(mine) == min(map(max, options))
    assert sum(x * x for x in mine) == min(
        sum(x * x for x in found) for found in options if max(found) == max(mine)
    )


def test_left_over_layers_go_to_the_first_stages():
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


def rank_loads(layout, costs, placement, first, last):
    """Work of every rank, and of every stage."""
    parts = stage_specs(layout, ModelConfig(num_layers=sum(layout)))
    stages = [sum(costs[i] for i in p.layers) + first * p.embedding + last * p.head for p in parts]
    ranks = [
        sum(stages[s] for _, s in placement.stages_of(rank)) for rank in range(placement.num_ranks)
    ]
    return ranks, stages


@given(
    st.sampled_from(PLACEMENTS),
    st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=4, max_size=7),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([0.0, 1.0, 2.5, 6.0]),
)
def test_ranks_are_balanced_with_all_their_stages(placement, costs, alike, first, last):
    """The best of all splits where layers cost the same; else within half of the dearest layer of
    it."""
    costs = [1.0] * len(costs) if alike else costs
    layout = even_ranks(costs, placement, first, last)
    assert sum(layout) == len(costs) and min(layout) >= 0
    num_stages = placement.num_stages
    cuts = combinations(range(len(costs) + num_stages - 1), num_stages - 1)
    edges = ([-1, *cut, len(costs) + num_stages - 1] for cut in cuts)
    every = ([b - a - 1 for a, b in zip(line, line[1:])] for line in edges)

    def merit(split):
        ranks, stages = rank_loads(split, costs, placement, first, last)
        return tuple(
            round(x, 6) for x in (max(ranks), sum(x * x for x in ranks), sum(x * x for x in stages))
        )

    best, mine = min(map(merit, every)), merit(layout)
    assert mine == best if alike else mine[0] <= best[0] + max(costs) / 2


def test_a_rank_with_a_heavy_end_holds_no_layer_elsewhere():
    """Rank 3 has the head; where all is even, ranks are as even as stages."""
    assert even_ranks([1.0] * 24, loop_placement(4, 2), last=9.0) == [4, 4, 4, 0, 4, 4, 4, 0]
    assert even_ranks([1.0] * 19, zigzag_placement(4), first=1.0, last=4.0) == [
        1,
        3,
        3,
        3,
        3,
        3,
        3,
        0,
    ]
    assert even_ranks([1.0] * 12, mirrored_placement(4), last=6.0) == [3, 5, 4, 0]
    assert even_ranks([1.0] * 126, loop_placement(16, 2)) == even_stages([1.0] * 126, 32)
    with pytest.raises(ValueError, match="leaves one of the 4 pipeline ranks without"):
        even_ranks([1.0] * 3, loop_placement(4))


def test_with_two_copies_the_middle_gets_fewer_layers():
    """Pairs of stages, one on each side of the middle, share a rank; all else is as ranks are
    balanced."""
    mirrored, ends = mirrored_placement(16), {"first": 0.3 * 62 / 16, "last": 1.5 * 62 / 16}
    assert split_layers("late", [1.0] * 62, mirrored, **ends) == [2, *[4] * 10, 5, 5, 5, 5, 0]
    assert split_layers("ends", [1.0] * 62, mirrored, **ends) == [3, *[4] * 11, 5, 5, 5, 0]
    assert split_layers("ends", [1.0] * 128, mirrored, 2.4, 12.0) == [
        5,
        *[9] * 7,
        8,
        8,
        8,
        9,
        9,
        9,
        9,
        0,
    ]
    assert split_layers("ends", [1.0] * 3, mirrored_placement(4), 0.0, 9.0) == [1, 1, 1, 0]
    for balance in ("late", "ends"):  # no rank gives its only layer away, and equal stages stay
        assert split_layers(balance, [1.0], mirrored_placement(4), 0.0, 9.0) == [0, 0, 1, 0]
        assert split_layers(balance, [1.0] * 64, mirrored, 0.0, 0.0) == [4] * 16
        assert split_layers(balance, [1.0] * 24, loop_placement(4, 2), 0.0, 9.0) == [
            4,
            4,
            4,
            0,
            4,
            4,
            4,
            0,
        ]


def config_of(num_layers=8, **pipeline):
    return Config(
        model=ModelConfig(num_layers=num_layers, vocab_size=4096),
        parallel=ParallelConfig(pp=4),
        pipeline=PipelineConfig(**pipeline),
        train=TrainConfig(seq_len=64),
    )


def test_ends_count_as_layers_where_the_user_says_so():
    assert layers_per_stage(
        config_of(10, embedding_layers=1, head_layers=1), loop_placement(4)
    ) == [2, 3, 3, 2]
    assert layers_per_stage(config_of(10), loop_placement(4)) == [3, 3, 2, 2]


def test_a_stage_may_be_empty_where_its_rank_has_others():
    """As the user says, or to even the ranks of which one has the head."""
    told = [2, 0, 2, 2, 0, 1, 1, 0]
    assert layers_per_stage(config_of(layout=told), zigzag_placement(4)) == told
    even = config_of(12, balance="ranks", head_layers=4)
    assert layers_per_stage(even, loop_placement(4, 2)) == [2, 2, 2, 0, 2, 2, 2, 0]
    assert ModelCosts(even).of(loop_placement(4, 2)).compute[:, 3].tolist() == [0, 0, 0, 0]


def test_by_cost_the_head_weighs_what_it_computes():
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
            r"must have 4 entries \(got 3\), one for each stage of pipeline.schedule = 1f1b with parallel.pp = 4",
        ),
        ([2, 2, 2, 3], r"must sum to model.num_layers = 8 \(got 9\); nearest"),
        ([4, 0, 2, 2], r"leaves pipeline rank 1 \(stages \[1\]\) without a layer"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, message):
    with pytest.raises(ValueError, match=message):
        layers_per_stage(config_of(layout=layout), loop_placement(4))


def test_stages_cover_the_model_in_order():
    first, second, last = stage_specs([0, 3, 2], ModelConfig(num_layers=5))
    assert first == StageSpec(range(0), embedding=True)
    assert second == StageSpec(range(3))
    assert last == StageSpec(range(3, 5), head=True)
    assert stage_specs([2], ModelConfig(num_layers=2)) == [StageSpec(range(2), True, True)]


AHEAD = ModelConfig(num_layers=4, num_mtp_layers=2)


@pytest.mark.parametrize(
    ("layout", "counted", "depths", "sent"),
    [
        ([2, 1, 1, 0], [2, 1, 1, 0], [(), (), (), (0, 1)], [1, 1, 1]),  # all with the head
        ([2, 1, 1, 2], [2, 1, 1, 0], [(), (), (), (0, 1)], [1, 1, 1]),  # the same, counted
        ([2, 3, 1, 0], [2, 3, 1, 0], [(), (0,), (1,), ()], [1, 2, 3]),
        ([2, 3, 0, 1], [2, 3, 0, 0], [(), (0,), (), (1,)], [1, 2, 2]),
        ([6, 0, 0, 0], [6, 0, 0, 0], [(0, 1), (), (), ()], [3, 3, 3]),
    ],
)
def test_prediction_blocks_count_like_the_layers_that_they_follow(layout, counted, depths, sent):
    config = Config(
        model=AHEAD, parallel=ParallelConfig(pp=2, vpp=2), pipeline=PipelineConfig(layout=layout)
    )
    found = layers_per_stage(config, zigzag_placement(2, 2)) if layout[1] else counted
    assert found == counted
    specs = stage_specs(found, AHEAD)
    assert [tuple(spec.mtp) for spec in specs] == depths and [spec.num_states for spec in specs][
        :-1
    ] == sent
    assert [block for spec in specs for block in spec.blocks(AHEAD)] == list(range(6))


def shared(placement, layout=None, **fields):
    model = ModelConfig(num_layers=2 * placement.num_stages, **fields)
    specs = stage_specs(layout or [2] * placement.num_stages, model)
    return shared_parameters(placement, specs, model)


def test_who_shares_what():
    tied, ahead = {"tie_embeddings": True}, {"num_mtp_layers": 1}
    assert shared(loop_placement(4), **tied) == {"tied": [(0, 3)]}
    assert (
        shared(loop_placement(4, 2))
        == shared(zigzag_placement(4, 2), **tied)
        == shared(loop_placement(1))
        == {}
    )
    assert shared(zigzag_placement(4, 3), **ahead) == {"tied": [(0, 3)]}
    assert shared(mirrored_placement(4), **ahead) == {"pair": [(0, 3), (1, 2)]}
    assert shared(Placement(((0, 2, 1),), 3), **tied) == {"tied": [(0, 1)]}
    before = [2, 2, 5, 0]
    assert shared(loop_placement(4), before, **ahead) == {"tied": [(0, 2)]}
    assert shared(loop_placement(4), before, **ahead, **tied) == {"tied": [(0, 2, 3)]}
    assert shared(mirrored_placement(4), before, **ahead) == {
        "pair": [(0, 3), (1, 2)],
        "tied": [(0, 1, 2, 3)],
    }
    assert shared(zigzag_placement(2), [2, 2, 5, 0], **ahead) == {"tied": [(0, 1)]}
    with pytest.raises(ValueError, match="mirrored ranks"):
        shared(Placement(((0, 1, 2), (2, 0, 1)), 3))


def test_prediction_blocks_cost_where_they_stand():
    """The joins and blocks there, the output matrix with the head; the whole is the model's;
    messages are larger."""
    config = config_of(6, layout=[2, 2, 4, 0], flops_per_byte=10.0)
    config = replace(config, model=replace(config.model, num_mtp_layers=2))
    with_head = replace(config, pipeline=replace(config.pipeline, layout=[2, 2, 2, 0]))
    found, default = (ModelCosts(each).of(loop_placement(4)) for each in (config, with_head))
    assert found.compute.sum() == pytest.approx(default.compute.sum())
    head = (
        head_flops(config.model)
        / 3
        / ((flops_per_token(config.model, 64) - head_flops(config.model)) / 3 / 4)
    )
    assert (
        found.compute[0, 3] == pytest.approx(head)
        and found.compute[0, 2] > 1.9 * found.compute[0, 1]
    )
    assert found.comm == pytest.approx(found.comm[0] * np.array([1, 1, 3, 3]))
    assert default.comm == pytest.approx(np.full(4, found.comm[0]) * np.array([1, 1, 1, 3]))
    longer = simulate(build_program("1f1b", 4, 8), found).makespan
    assert (
        longer
        > simulate(build_program("1f1b", 4, 8), replace(found, comm=float(found.comm[0]))).makespan
    )


def test_modelled_costs_add_up_to_the_models_flops():
    """Over all stages F + I + W is the whole model's FLOPs, whatever the placement; B is I + W."""
    config = config_of(8, split="cost")
    whole = flops_per_token(config.model, 64)
    for placement in (loop_placement(4), zigzag_placement(2, 2), loop_placement(2, 4)):
        costs = ModelCosts(config).of(placement)
        f, i, w, b = costs.compute
        unit = (whole - head_flops(config.model)) / 3 / placement.num_ranks
        assert (f + i + w).sum() * unit == pytest.approx(whole)
        assert b == pytest.approx(i + w)
        assert costs.activation.sum() == pytest.approx(placement.num_ranks)
        assert (w > 0).all() and (i >= w).all() and i.sum() > w.sum()


def test_modelled_costs_count_what_is_sent():
    """Two experts a token, half of them on the other rank, there and back, 2·2·½·h elements a block
    that has experts.

    F once, I once more where the block is run again; nothing where all experts are at home.
    """
    config = config_of(8, flops_per_byte=1000.0)
    model = replace(config.model, num_experts=4, top_k=2, first_k_dense=2)
    config = replace(config, model=model, precision=PrecisionConfig(dtype="bf16"))
    at_home = ModelCosts(config).of(loop_placement(4))
    assert not at_home.a2a.any() and (at_home.comm > 0).all()
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

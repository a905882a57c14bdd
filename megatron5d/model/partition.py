"""Which layers each pipeline stage holds, and which parameters two ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.flops import end_flops, layer_flops
from megatron5d.pipeline_parallel.program import Placement


@dataclass(frozen=True)
class Part:
    """What one stage holds of the model."""

    layers: range  # global indices
    embedding: bool = False  # the first stage
    head: bool = False  # the last stage, which also computes the losses, those of multi-token prediction among them


def parts_of(layout: Sequence[int]) -> list[Part]:
    """What every stage holds, given its number of layers."""
    ends = list(accumulate(layout))
    last = len(layout) - 1
    return [Part(range(end - count, end), s == 0, s == last) for s, (count, end) in enumerate(zip(layout, ends))]


def layout_of(config: Config, num_stages: int) -> list[int]:
    """Layers per stage: as `pipeline.layout` says, else dealt out evenly, or by cost, as `pipeline.split` says.

    Raises:
        ValueError: the layout does not fit the stages or the model, or leaves a stage without anything to do; or
            `recompute.stage_layers` counts for other stages.
    """
    pipeline, num_layers, counts = config.pipeline, config.model.num_layers, config.recompute.stage_layers
    if counts is not None and len(counts) != num_stages:
        raise ValueError(
            f"recompute.stage_layers = {counts} names {len(counts)} stages, but pipeline.schedule = "
            f"{pipeline.schedule} with parallel.pp = {config.parallel.pp} has {num_stages}; nearest legal: "
            f"recompute.stage_layers={(counts + [0] * num_stages)[:num_stages]}"
        )
    if pipeline.layout is None:
        if pipeline.split == "cost":
            costs = [layer_flops(config.model, i, config.train.seq_len) for i in range(num_layers)]
            return balanced(costs, num_stages, 0.0, end_flops(config.model, config.train.seq_len))
        return balanced([1.0] * num_layers, num_stages, pipeline.embedding_layers, pipeline.head_layers)
    layout, even = list(pipeline.layout), "null (as even as possible)"
    if len(layout) != num_stages:
        raise ValueError(
            f"pipeline.layout = {layout} names {len(layout)} stages, but pipeline.schedule = {pipeline.schedule} with "
            f"parallel.pp = {config.parallel.pp} has {num_stages}; nearest legal: pipeline.layout={even}"
        )
    if sum(layout) != num_layers:
        raise ValueError(
            f"pipeline.layout = {layout} sums to {sum(layout)} layers, but model.num_layers = {num_layers}; "
            f"nearest legal: pipeline.layout={even}"
        )
    if 0 in layout[1:-1]:
        raise ValueError(
            f"pipeline.layout = {layout} leaves stage {layout.index(0, 1)} without a layer, which only the first stage "
            f"(embedding) and the last (head) can do; nearest legal: pipeline.layout={even}"
        )
    return layout


def balanced(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Layers per stage so that the dearest stage is as cheap as can be, and of such splits the most even one.

    Args:
        costs: of every layer, in any unit.
        num_stages: to deal the layers to; each gets one at least, but for an end whose own cost is not 0.
        first: cost that the first stage has besides (the embedding), in the same unit.
        last: cost that the last stage has besides (the head).

    Raises:
        ValueError: fewer layers than stages.
    """
    total = [0.0, *accumulate(costs)]

    def load(stage: int, begin: int, end: int) -> float:
        own = first * (stage == 0) + last * (stage == num_stages - 1)
        return total[end] - total[begin] + own if end > begin or own > 0 else inf

    dearest, _ = _cheapest_split(len(costs), num_stages, load, max)
    if dearest == inf:
        raise ValueError(
            f"model.num_layers = {len(costs)} is fewer than the {num_stages} stages of the pipeline (parallel.pp "
            f"times the chunks that pipeline.schedule or parallel.vpp asks for); "
            f"model.num_layers={num_stages}, or parallel.pp=1"
        )

    def evenness(before: float, own: float) -> float:
        return before + own * own if own <= dearest * (1 + 1e-9) else inf

    return _cheapest_split(len(costs), num_stages, load, evenness)[1]


def _cheapest_split(
    num_layers: int,
    num_stages: int,
    load: Callable[[int, int, int], float],
    add: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """The cost and the layout of the cheapest cut of a row of layers into stages; earlier stages are the larger ones.

    Args:
        num_layers, num_stages: sizes.
        load: (stage, first layer, last layer + 1) -> cost of the stage.
        add: (cost of the stages before, load of one more) -> cost of all.
    """
    cost, cuts = [0.0] + [inf] * num_layers, []
    for stage in range(num_stages):
        options = [
            [(add(cost[begin], load(stage, begin, end)), -begin) for begin in range(end, -1, -1)]
            for end in range(num_layers + 1)
        ]
        found = [min(row) for row in options]
        cost = [value for value, _ in found]
        cuts.append([-begin for _, begin in found])
    layout, end = [], num_layers
    for cut in reversed(cuts):
        layout.append(end - cut[end])
        end = cut[end]
    return cost[num_layers], layout[::-1]


def at_both_ends(model: ModelConfig) -> str | None:
    """The knob, if any, that puts the embedding on the last stage too."""
    if model.num_mtp_layers:
        return "model.num_mtp_layers"
    return "model.tie_embeddings" if model.tie_embeddings else None


def shared_by_mirror(placement: Placement, tied: str | None) -> str:
    """Which parameters a rank and its mirror image (rank num_ranks - 1 - r) hold together: all, tied, or none.

    Args:
        placement: of the stages.
        tied: the knob for which the embedding lies at both ends; None = it does not.

    Raises:
        ValueError: copies of a stage, or the two ends with the embedding, lie on ranks that do not mirror each other.
    """
    mirror = [placement.num_ranks - 1 - rank for rank in placement.route[0]]
    if placement.copies == 2:
        if list(placement.route[1]) != mirror:
            raise ValueError(
                f"the copies of a stage must lie on mirrored ranks: direction 0 runs through ranks "
                f"{list(placement.route[0])}, so direction 1 must run through {mirror}, not {list(placement.route[1])}"
            )
        ends = {placement.route[0][0], mirror[0]} == {placement.route[0][-1], mirror[-1]}
    else:
        ends = placement.route[0][-1] in (placement.route[0][0], mirror[0])
    if tied and not ends:
        raise ValueError(
            f"{tied} needs the first and the last stage on one rank or on mirrored ranks, but they lie "
            f"on ranks {placement.route[0][0]} and {placement.route[0][-1]} of {placement.num_ranks}; "
            f"set {tied}={'0' if tied == 'model.num_mtp_layers' else 'false'} or use another pipeline.schedule"
        )
    if placement.copies == 2:
        return "all"
    return "tied" if tied and placement.route[0][0] != placement.route[0][-1] else "none"

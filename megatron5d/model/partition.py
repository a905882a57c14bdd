"""Which layers each pipeline stage holds, and which parameters two ranks hold together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.flops import end_flops, layer_flops
from megatron5d.model.split import split_layers
from megatron5d.pipeline_parallel.program import Placement


@dataclass(frozen=True)
class StageSpec:
    """What one stage holds of the model."""

    layers: range  # global indices
    embedding: bool = False  # the first stage
    head: bool = False  # the last stage, which also computes the losses, those of multi-token prediction among them


def stage_specs(layout: Sequence[int]) -> list[StageSpec]:
    """What every stage holds, given its number of layers."""
    ends = list(accumulate(layout))
    last = len(layout) - 1
    return [StageSpec(range(end - count, end), s == 0, s == last) for s, (count, end) in enumerate(zip(layout, ends))]


def layers_per_stage(config: Config, placement: Placement) -> list[int]:
    """Layers per stage: as `pipeline.layout` says, else dealt out as `pipeline.split` and `pipeline.balance` say.

    `pipeline.balance = auto` evens stages here; where the search has chosen, the configuration that it gives says so.

    Raises:
        ValueError: the layout does not fit the stages or the model, or leaves a rank without anything to do; or
            `recompute.stage_layers` counts for other stages.
    """
    pipeline, num_stages, counts = config.pipeline, placement.num_stages, config.recompute.stage_layers
    if counts is not None and len(counts) != num_stages:
        legal = ",".join(map(str, (counts + [0] * num_stages)[:num_stages]))
        raise ValueError(
            f"recompute.stage_layers = {counts} names {len(counts)} stages, but pipeline.schedule = "
            f"{pipeline.schedule} with parallel.pp = {config.parallel.pp} has {num_stages}; nearest legal: "
            f"recompute.stage_layers=[{legal}]"
        )
    if pipeline.layout is not None:
        return _explicit_layout(config, placement)
    costs, first, last = [1.0] * config.model.num_layers, pipeline.embedding_layers, pipeline.head_layers
    if pipeline.split == "cost":
        costs = [layer_flops(config.model, i, config.train.seq_len) for i in range(config.model.num_layers)]
        first, last = 0.0, end_flops(config.model, config.train.seq_len)
    return list(_cached_split(pipeline.balance, tuple(costs), placement, first, last))


@lru_cache(maxsize=256)
def _cached_split(
    balance: str, costs: tuple[float, ...], placement: Placement, first: float, last: float
) -> Sequence[int]:
    """The same split is asked for by every schedule that is compared, and takes tenths of a second for many stages."""
    return split_layers(balance, costs, placement, first, last)


def _explicit_layout(config: Config, placement: Placement) -> list[int]:
    """`pipeline.layout`, which may leave a stage without a layer but no rank without anything."""
    pipeline, num_layers, num_stages = config.pipeline, config.model.num_layers, placement.num_stages
    layout, even = list(pipeline.layout or ()), "null (as even as possible)"
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
    holding = {stage for stage, count in enumerate(layout) if count} | {0, num_stages - 1}
    busy = {line[stage] for line in placement.route for stage in holding}
    idle = next((rank for rank in range(placement.num_ranks) if rank not in busy), None)
    if idle is not None:
        stages = [stage for _, stage in placement.stages_of(idle)]
        raise ValueError(
            f"pipeline.layout = {layout} leaves pipeline rank {idle}, which has stages {stages}, without a layer, "
            f"the embedding or the head; nearest legal: pipeline.layout={even}"
        )
    return layout


def two_embeddings_knob(model: ModelConfig) -> str | None:
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

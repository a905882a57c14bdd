"""The layers of each pipeline stage, and the parameters that several ranks share.

Layers are assigned so that no stage, or no rank with all its stages, is much busier than others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, inf

import numpy as np

from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.flops import end_flops, layer_flops
from megatron5d.pipeline_parallel.program import Placement
from megatron5d.topology.grid import SharedRanks

BALANCES = ("stages", "ranks", "late", "ends")
"""What a split balances: stages, or ranks with all their stages. `late` and `ends` are variants of
`ranks` for schedules whose micro-batches run in both directions (`lighten_middle`)."""
EXTRA_AT_ENDS = 1 / 4
"""Extra layers of the two end ranks under `ends`, as a fraction of an even share."""


def split_layers(
    balance: str, costs: Sequence[float], placement: Placement, first: float, last: float
) -> list[int]:
    """Layers per stage, balanced as `balance` says.

    Args:
        balance: one of BALANCES, or `auto`, which without a search is `stages`.
        costs: as in `even_stages`.
        placement: the rank of each stage.
        first, last: as in `even_stages`.

    Raises:
        ValueError: too few layers.
    """
    if balance in ("auto", "stages"):
        return even_stages(costs, placement.num_stages, first, last)
    layout = even_ranks(costs, placement, first, last)
    if balance == "ranks" or placement.copies == 1 or placement.num_ranks < 4:
        return layout
    heavy_ends = balance == "ends" and first + last > 0
    extra = ceil(len(costs) / placement.num_ranks * EXTRA_AT_ENDS) if heavy_ends else 0
    return lighten_middle(layout, extra)


def even_stages(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers per stage that minimize the cost of the most expensive stage, as evenly as possible.

    Args:
        costs: of every layer, in any unit.
        num_stages: each gets at least one layer, except an end with an additional cost.
        first, last: additional costs of the first stage (the embedding) and the last (the head), in
            the same unit.

    Raises:
        ValueError: fewer layers than stages.
    """
    total = np.array([0.0, *accumulate(costs)])
    begin, end = np.ogrid[: len(total), : len(total)]

    def load(stage: int) -> np.ndarray:
        extra = first * (stage == 0) + last * (stage == num_stages - 1)
        is_allowed = (end > begin) | ((end == begin) & (extra > 0))
        return np.where(is_allowed, total - total[:, None] + extra, inf)

    highest, _ = _cheapest_split(len(costs), num_stages, load, np.maximum)
    if highest == inf:
        raise ValueError(
            f"the {num_stages} stages of the pipeline (parallel.pp times the chunks of "
            "pipeline.schedule or parallel.vpp) require no fewer layers (got "
            f"model.num_layers = {len(costs)}); model.num_layers={num_stages}, or parallel.pp=1"
        )

    def sum_of_squares(earlier: np.ndarray, load: np.ndarray) -> np.ndarray:
        return earlier + np.where(load <= highest * (1 + 1e-9), load * load, inf)

    return _cheapest_split(len(costs), num_stages, load, sum_of_squares)[1]


def _cheapest_split(
    num_layers: int,
    num_stages: int,
    load: Callable[[int], np.ndarray],
    add: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[float, list[int]]:
    """Cost and layout of the cheapest split into stages; of equal ones, with larger early stages.

    Args:
        num_layers, num_stages: sizes.
        load: stage -> `[first layer, last layer + 1]` cost of the stage.
        add: (cost of the earlier stages, load of one more) -> cost of all.
    """
    cost, cuts = np.array([0.0] + [inf] * num_layers), []
    for stage in range(num_stages):
        # Reversed, so that of equal options argmin takes the stage that begins last.
        options = add(cost[::-1, None], load(stage)[::-1])
        cuts.append(num_layers - options.argmin(axis=0))
        cost = options.min(axis=0)
    layout, end = [], num_layers
    for cut in reversed(cuts):
        layout.append(int(end - cut[end]))
        end = cut[end]
    return float(cost[-1]), layout[::-1]


def even_ranks(
    costs: Sequence[float], placement: Placement, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers per stage that minimize the work of the busiest rank, with all its stages.

    Of such splits it takes one with even ranks, and of these one with even stages. Each layer in
    turn is assigned to the least busy rank, and there to the least busy stage, which is optimal if
    layers cost the same. If they do not, layers are then moved as long as that helps. A rank that
    is busy with an end may hold no layer, so stages between the ends may be empty.

    Args:
        costs: of every layer, in any unit.
        placement: the rank of each stage; of two copies each does half of the work.
        first, last: as in `even_stages`.

    Raises:
        ValueError: a rank would have no work.
    """
    unit, num_stages = sum(costs) / len(costs), placement.num_stages
    total = np.array([0.0, *accumulate(cost / unit for cost in costs)])
    ends = np.zeros(num_stages)
    ends[0] += first / unit
    ends[-1] += last / unit
    share = np.zeros((placement.num_ranks, num_stages))  # of a stage's work that a rank does
    for stage_ranks in placement.route:
        share[stage_ranks, range(num_stages)] += 1 / placement.copies
    counts = _assign_equal_layers(len(costs), ends, share)
    # Move layers as long as that helps; option 0 is to move none.
    best = None
    while best != 0:
        busiest = (share @ (counts + ends)).argmax()
        options = np.array([counts, *_moves(counts, share[busiest] > 0)])
        cuts = np.concatenate([np.zeros_like(options[:, :1]), options.cumsum(axis=1)], axis=1)
        loads = np.diff(total[cuts]) + ends
        best = _argmin(np.square(loads).sum(axis=1), *_imbalance(loads @ share.T))
        counts = options[best]
    if not (share @ (counts + ends)).all():
        raise ValueError(
            f"model.num_layers = {len(costs)} leaves one of the {placement.num_ranks} pipeline "
            f"ranks without work; model.num_layers={placement.num_ranks}, or parallel.pp=1"
        )
    return counts.tolist()


def _assign_equal_layers(num_layers: int, ends: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Layers per stage if all cost the same, assigned one after the other (`even_ranks`)."""
    loads, rank_loads = ends.copy(), share @ ends
    for _ in range(num_layers):
        stage = _argmin(loads, *_imbalance(share.T + rank_loads))
        loads[stage] += 1
        rank_loads += share[:, stage]
    return np.rint(loads - ends).astype(int)


def lighten_middle(layout: Sequence[int], extra: int) -> list[int]:
    """Layers per stage where rank r holds stages r and p − 1 − r, with fewer on the middle ranks.

    A middle rank waits for its first micro-batch, and then for that micro-batch's return. Both
    waits are shorter with fewer layers in the middle. So pairs of stages hold fewer layers toward
    the middle. Pairs differ in the second half, whose last stages are the larger ones. Found by
    experiment.

    Args:
        layout: of `even_ranks`.
        extra: layers to move from the middle to the first stage. End ranks wait for no other rank,
            and a head has no all-to-all, so they can do more work than the others.
    """
    half = len(layout) // 2
    pairs = sorted((layout[s] + layout[-1 - s] for s in range(1, half)), reverse=True)
    moved = 0
    while moved < extra and pairs[0] > 1:
        pairs[pairs.count(pairs[0]) - 1] -= 1  # the innermost of the largest, so they stay sorted
        moved += 1
    most_in_front = round(sum(pairs) / len(pairs) / 2)
    front = [min(most_in_front, pair) for pair in pairs]
    back = [pair - layers for pair, layers in zip(pairs, front)]
    return [layout[0] + moved, *front, *reversed(back), layout[-1]]


def _imbalance(rank_loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum of squares and maximum of the ranks' work `[options, ranks]`."""
    return np.square(rank_loads).sum(axis=1), rank_loads.max(axis=1)


def _argmin(*keys: np.ndarray) -> int:
    """First option that is minimal by the last key, then by the one before, and so on."""
    # Rounded, because equal options differ in the last digits.
    return int(np.lexsort([key.round(9) for key in keys])[0])


def _moves(counts: np.ndarray, busiest: np.ndarray) -> Iterator[np.ndarray]:
    """Splits with one layer moved: to an adjacent stage, or from the busiest rank to any stage.

    The stages between the two shift by a layer.
    """
    for source in np.flatnonzero(counts):
        for target in range(len(counts)):
            if target != source and (busiest[source] or abs(source - target) == 1):
                moved = counts.copy()
                moved[source] -= 1
                moved[target] += 1
                yield moved


@dataclass(frozen=True)
class StageSpec:
    """The part of the model that one stage holds."""

    layers: range  # global indices
    embedding: bool = False  # on the first stage
    head: bool = False  # on the last stage, which computes all losses
    mtp: range = range(0)  # depths of the prediction blocks that follow its layers, or its head

    @property
    def num_states(self) -> int:
        """Hidden states that it sends: of its layers, and of every prediction depth so far."""
        return 1 + self.mtp.stop

    def blocks(self, model: ModelConfig) -> list[int]:
        """Its layers, and its prediction blocks, numbered after all layers of the model."""
        return [*self.layers, *(model.num_layers + depth for depth in self.mtp)]


def stage_specs(layout: Sequence[int], model: ModelConfig) -> list[StageSpec]:
    """The part of the model that every stage holds.

    Args:
        layout: number of layers of each stage, as `layers_per_stage` counts them.
        model: the architecture.
    """
    n, last, specs, end = model.num_layers, len(layout) - 1, list[StageSpec](), 0
    for stage, count in enumerate(layout):
        begin, end = end, end + count
        mtp = range(max(begin - n, 0), model.num_mtp_layers if stage == last else max(end - n, 0))
        specs.append(StageSpec(range(min(begin, n), min(end, n)), stage == 0, stage == last, mtp))
    return specs


def full_model(model: ModelConfig) -> StageSpec:
    """The spec of a single stage."""
    return stage_specs([model.num_layers], model)[0]


def layers_per_stage(config: Config, placement: Placement) -> list[int]:
    """Layers per stage, by `pipeline.layout` or by `pipeline.split` and `pipeline.balance`.

    Prediction blocks (MTP) on the last stage follow the head and are not counted. Those that
    `pipeline.layout` assigns to an earlier stage count as layers.

    `pipeline.balance = auto` balances stages here; a search replaces it in the configuration.

    Raises:
        ValueError: the layout does not fit the stages or the model, or leaves a rank without work;
            or `recompute.stage_layers` has another number of stages.
    """
    pipeline, model, seq_len = config.pipeline, config.model, config.train.seq_len
    num_stages, counts = placement.num_stages, config.recompute.stage_layers
    if counts is not None and len(counts) != num_stages:
        legal = ",".join(map(str, (counts + [0] * num_stages)[:num_stages]))
        raise ValueError(
            f"recompute.stage_layers = {counts} must have {num_stages} entries (got "
            f"{len(counts)}), one for each stage of {_schedule_text(config)}; nearest legal: "
            f"recompute.stage_layers=[{legal}]"
        )
    if pipeline.layout is not None:
        return _explicit_layout(config, placement)
    costs = [1.0] * model.num_layers
    first, last = pipeline.embedding_layers, pipeline.head_layers
    if pipeline.split == "cost":
        costs = [layer_flops(model, layer, seq_len) for layer in range(model.num_layers)]
        first, last = 0.0, end_flops(model, seq_len)
    return list(_cached_split(pipeline.balance, tuple(costs), placement, first, last))


def _schedule_text(config: Config) -> str:
    schedule, pp = config.pipeline.schedule, config.parallel.pp
    return f"pipeline.schedule = {schedule} with parallel.pp = {pp}"


@lru_cache(maxsize=256)
def _cached_split(
    balance: str, costs: tuple[float, ...], placement: Placement, first: float, last: float
) -> Sequence[int]:
    """`split_layers`, cached: a search needs the same splits again, at tenths of a second each."""
    return split_layers(balance, costs, placement, first, last)


def _explicit_layout(config: Config, placement: Placement) -> list[int]:
    """Checks `pipeline.layout`; it may leave a stage without layers, but no rank without work."""
    num_layers, num_mtp_layers = config.model.num_layers, config.model.num_mtp_layers
    layout, num_stages = list(config.pipeline.layout or ()), placement.num_stages
    fix = "nearest legal: pipeline.layout=null (as even as possible)"
    if len(layout) != num_stages:
        raise ValueError(
            f"pipeline.layout = {layout} must have {num_stages} entries (got {len(layout)}), one "
            f"for each stage of {_schedule_text(config)}; {fix}"
        )
    if not num_layers <= sum(layout) <= num_layers + num_mtp_layers:
        mtp = f" to {num_layers + num_mtp_layers} with prediction blocks" if num_mtp_layers else ""
        raise ValueError(
            f"pipeline.layout = {layout} must sum to model.num_layers = {num_layers}{mtp} (got "
            f"{sum(layout)}); {fix}"
        )
    # Prediction blocks on the last stage follow the head and are not counted.
    layout[-1] = max(0, num_layers - sum(layout[:-1]))
    filled = {stage for stage, count in enumerate(layout) if count} | {0, num_stages - 1}
    busy = {stage_ranks[stage] for stage_ranks in placement.route for stage in filled}
    idle = next((rank for rank in range(placement.num_ranks) if rank not in busy), None)
    if idle is not None:
        stages = [stage for _, stage in placement.stages_of(idle)]
        raise ValueError(
            f"pipeline.layout = {layout} leaves pipeline rank {idle} (stages {stages}) without a "
            f"layer, the embedding or the head; {fix}"
        )
    return layout


def shared_parameters(
    placement: Placement, specs: Sequence[StageSpec], model: ModelConfig
) -> SharedRanks:
    """The pipeline ranks that share parameters.

    Args:
        placement: the rank of each stage.
        specs: the part of the model on each stage.
        model: the architecture.

    Raises:
        ValueError: the copies of a stage are not on mirrored ranks.
    """
    last, shared = placement.num_ranks - 1, dict[str, Sequence[Sequence[int]]]()
    if placement.copies == 2:
        forward, backward = map(list, placement.route)
        mirror = [last - rank for rank in forward]
        if backward != mirror:
            raise ValueError(
                f"the copies of a stage must be on mirrored ranks: direction 0 runs through ranks "
                f"{forward}, so direction 1 must run through {mirror} (got {backward})"
            )
        shared["pair"] = [(rank, last - rank) for rank in range(placement.num_ranks // 2)]
    readers = [
        stage
        for stage, spec in enumerate(specs)
        if spec.embedding or spec.mtp or (spec.head and model.tie_embeddings)
    ]
    ranks = {stage_ranks[stage] for stage_ranks in placement.route for stage in readers}
    if len(ranks) > placement.copies:  # otherwise two copies share all of their parameters
        shared["tied"] = [tuple(sorted(ranks))]
    return shared

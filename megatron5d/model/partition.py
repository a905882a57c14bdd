"""Which layers each pipeline stage holds, and which parameters two ranks hold together.

A row of layers is cut so that no stage, or no rank with all its stages, has too much to do.
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
"""What a split evens: stages; ranks with all their stages; and the latter in two ways that differ only where
micro-batches go both ways, see `fewer_in_the_middle`."""
MORE_AT_ENDS = 1 / 4
"""Of an even share of the layers: what `ends` gives to the two end ranks beyond that."""


def split_layers(
    balance: str, costs: Sequence[float], placement: Placement, first: float, last: float
) -> list[int]:
    """Layers per stage so that what `balance` names is even.

    Args:
        balance: one of BALANCES; a run without a search has `auto`, which is `stages`.
        costs: as in `even_stages`.
        placement: which rank holds which stage.
        first: as in `even_stages`.
        last: as in `even_stages`.

    Raises:
        ValueError: too few layers.
    """
    if balance in ("auto", "stages"):
        return even_stages(costs, placement.num_stages, first, last)
    layout = even_ranks(costs, placement, first, last)
    if balance == "ranks" or placement.copies == 1 or placement.num_ranks < 4:
        return layout
    heavy_ends = balance == "ends" and first + last > 0
    more = ceil(len(costs) / placement.num_ranks * MORE_AT_ENDS) if heavy_ends else 0
    return fewer_in_the_middle(layout, more)


def even_stages(
    costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0
) -> list[int]:
    """Layers per stage so that the most expensive stage costs as little as possible; of such splits
    the most even one.

    Args:
        costs: of every layer, in any unit.
        num_stages: to deal the layers to; each gets one at least, but for an end whose own cost is
            not 0.
        first: cost that the first stage has besides (the embedding), in the same unit.
        last: cost that the last stage has besides (the head).

    Raises:
        ValueError: fewer layers than stages.
    """
    total = np.array([0.0, *accumulate(costs)])
    begin, end = np.ogrid[: len(total), : len(total)]

    def load(stage: int) -> np.ndarray:
        own = first * (stage == 0) + last * (stage == num_stages - 1)
        return np.where(
            (end > begin) | ((end == begin) & (own > 0)), total - total[:, None] + own, inf
        )

    highest, _ = _cheapest_split(len(costs), num_stages, load, np.maximum)
    if highest == inf:
        raise ValueError(
            f"model.num_layers = {len(costs)} is fewer than the {num_stages} stages of the pipeline (parallel.pp "
            f"times the chunks that pipeline.schedule or parallel.vpp asks for); "
            f"model.num_layers={num_stages}, or parallel.pp=1"
        )

    def evenness(before: np.ndarray, own: np.ndarray) -> np.ndarray:
        return before + np.where(own <= highest * (1 + 1e-9), own * own, inf)

    return _cheapest_split(len(costs), num_stages, load, evenness)[1]


def _cheapest_split(
    num_layers: int,
    num_stages: int,
    load: Callable[[int], np.ndarray],
    add: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> tuple[float, list[int]]:
    """Returns the cost and the layout of the cheapest cut of a row of layers into stages; earlier
    stages are the larger ones.

    Args:
        num_layers, num_stages: sizes.
        load: stage -> `[first layer, last layer + 1]` cost of the stage.
        add: (cost of the stages before, load of one more) -> cost of all.
    """
    cost, cuts = np.array([0.0] + [inf] * num_layers), []
    for stage in range(num_stages):
        # backwards: of equal ones the one that begins last
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
    """Layers per stage so that the busiest rank, with all its stages, has as little to do as can
    be.

    Of such splits one with even ranks, and of these one with even stages. Each layer in turn goes
    to the rank with the least, and there to the stage with the least, which is the optimum where
    layers cost the same; where they do not, layers then move on as long as that helps. A rank that
    an end keeps busy may hold no layer anywhere, so stages between the ends may be empty.

    Args:
        costs: of every layer, in any unit.
        placement: which rank holds which stage; of two copies each does half of the work.
        first: cost that the first stage has besides (the embedding), in the same unit.
        last: cost that the last stage has besides (the head).

    Raises:
        ValueError: some rank would have nothing to do.
    """
    unit, num_stages = sum(costs) / len(costs), placement.num_stages
    total = np.array([0.0, *accumulate(cost / unit for cost in costs)])
    ends = np.zeros(num_stages)
    ends[0] += first / unit
    ends[-1] += last / unit
    share = np.zeros((placement.num_ranks, num_stages))  # of a stage's work that a rank does
    for line in placement.route:
        share[line, range(num_stages)] += 1 / placement.copies
    loads, ranks = ends.copy(), share @ ends
    for _ in costs:
        stage = _first_of(loads, *_evenness(share.T + ranks))
        loads[stage] += 1
        ranks += share[:, stage]
    counts = np.rint(loads - ends).astype(int)
    best = -1
    while best != 0:
        options = np.array([counts, *_moves(counts, share[(share @ (counts + ends)).argmax()] > 0)])
        cuts = np.concatenate([np.zeros_like(options[:, :1]), options.cumsum(axis=1)], axis=1)
        loads = np.diff(total[cuts]) + ends
        best = _first_of(np.square(loads).sum(axis=1), *_evenness(loads @ share.T))
        counts = options[best]
    if not (share @ (counts + ends)).all():
        raise ValueError(
            f"model.num_layers = {len(costs)} leaves one of the {placement.num_ranks} ranks of the pipeline without "
            f"anything to do; model.num_layers={placement.num_ranks}, or parallel.pp=1"
        )
    return counts.tolist()


def fewer_in_the_middle(layout: Sequence[int], more: int) -> list[int]:
    """Layers per stage where rank r holds stages r and p − 1 − r, so that the middle ranks are not
    late.

    A middle rank waits for its first micro-batch, and then for the first one to come back: in both
    it helps to have fewer layers there. So the pairs of stages hold the fewer layers, the nearer
    they are to the middle, and what differs lies in the second half, where the last stages are the
    larger ones. Found by experiment.

    Args:
        layout: of `even_ranks`.
        more: layers that move from the middle to the first stage; end ranks wait for nobody, and a
            head has no all-to-all, so they may have more to do than the others.
    """
    half = len(layout) // 2
    pairs = sorted((layout[s] + layout[-1 - s] for s in range(1, half)), reverse=True)
    moved = 0
    while moved < more and pairs[0] > 1:
        pairs[pairs.count(pairs[0]) - 1] -= 1  # the innermost of the fullest: the order stays
        moved += 1
    early = round(sum(pairs) / len(pairs) / 2)
    front = [min(early, pair) for pair in pairs]
    back = [pair - own for pair, own in zip(pairs, front)]
    return [layout[0] + moved, *front, *reversed(back), layout[-1]]


def _evenness(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how even splits are, given every rank's work `[options, ranks]`: the sum of squares,
    and the maximum."""
    return np.square(ranks).sum(axis=1), ranks.max(axis=1)


def _first_of(*keys: np.ndarray) -> int:
    """Returns the option that is least by the last key, then by the key before; the first of equal
    ones."""
    # rounded, for equal ones differ in the last digits
    return int(np.lexsort([key.round(9) for key in keys])[0])


def _moves(counts: np.ndarray, busiest: np.ndarray) -> Iterator[np.ndarray]:
    """Splits with one layer in another stage: from any to its neighbours, from those of the busiest
    rank to all.

    What lies between the two stages shifts by a layer.
    """
    stages = range(len(counts))
    for a in np.flatnonzero(counts):
        for b in stages:
            if b != a and (busiest[a] or abs(a - b) == 1):
                moved = counts.copy()
                moved[a] -= 1
                moved[b] += 1
                yield moved


@dataclass(frozen=True)
class StageSpec:
    """What one stage holds of the model."""

    layers: range  # global indices
    embedding: bool = False  # the first stage
    # the last stage, which computes the losses, those of multi-token prediction among them
    head: bool = False
    # depths of the multi-token prediction blocks that follow its layers, or its head
    mtp: range = range(0)

    @property
    def sent(self) -> int:
        """Hidden states that it passes on: its layers', and those of every depth so far."""
        return 1 + self.mtp.stop

    def blocks(self, model: ModelConfig) -> list[int]:
        """Returns its layers and, numbered after all of them, its blocks of multi-token
        prediction."""
        return [*self.layers, *(model.num_layers + depth for depth in self.mtp)]


def stage_specs(layout: Sequence[int], model: ModelConfig) -> list[StageSpec]:
    """Returns what every stage holds, given its number of layers as `layers_per_stage` counts
    them."""
    n, last, found, end = model.num_layers, len(layout) - 1, list[StageSpec](), 0
    for stage, count in enumerate(layout):
        begin, end = end, end + count
        mtp = range(max(begin - n, 0), model.num_mtp_layers if stage == last else max(end - n, 0))
        found.append(StageSpec(range(min(begin, n), min(end, n)), stage == 0, stage == last, mtp))
    return found


def whole_model(model: ModelConfig) -> StageSpec:
    """Returns what the only stage holds."""
    return stage_specs([model.num_layers], model)[0]


def layers_per_stage(config: Config, placement: Placement) -> list[int]:
    """Layers per stage: as `pipeline.layout` says, else dealt out as `pipeline.split` and
    `pipeline.balance` say.

    The blocks of multi-token prediction follow the head on the last stage, and no number counts
    them. Those that `pipeline.layout` gives to a stage before it count like the layers that they
    follow.

    `pipeline.balance = auto` evens stages here; where the search has chosen, the configuration that
    it gives says so.

    Raises ValueError: the layout does not fit the stages or the model, or leaves a rank without
    anything to do; or `recompute.stage_layers` counts for other stages.
    """
    pipeline, num_stages, counts = (
        config.pipeline,
        placement.num_stages,
        config.recompute.stage_layers,
    )
    if counts is not None and len(counts) != num_stages:
        legal = ",".join(map(str, (counts + [0] * num_stages)[:num_stages]))
        raise ValueError(
            f"recompute.stage_layers = {counts} names {len(counts)} stages, but pipeline.schedule = "
            f"{pipeline.schedule} with parallel.pp = {config.parallel.pp} has {num_stages}; nearest legal: "
            f"recompute.stage_layers=[{legal}]"
        )
    if pipeline.layout is not None:
        return _explicit_layout(config, placement)
    costs, first, last = (
        [1.0] * config.model.num_layers,
        pipeline.embedding_layers,
        pipeline.head_layers,
    )
    if pipeline.split == "cost":
        costs = [
            layer_flops(config.model, i, config.train.seq_len)
            for i in range(config.model.num_layers)
        ]
        first, last = 0.0, end_flops(config.model, config.train.seq_len)
    return list(_cached_split(pipeline.balance, tuple(costs), placement, first, last))


@lru_cache(maxsize=256)
def _cached_split(
    balance: str, costs: tuple[float, ...], placement: Placement, first: float, last: float
) -> Sequence[int]:
    """Keeps splits: every schedule that is compared asks for the same, and many stages take tenths
    of a second."""
    return split_layers(balance, costs, placement, first, last)


def _explicit_layout(config: Config, placement: Placement) -> list[int]:
    """Returns `pipeline.layout`, which may leave a stage without a layer but no rank without
    anything."""
    pipeline, num_layers, num_stages = (
        config.pipeline,
        config.model.num_layers,
        placement.num_stages,
    )
    layout, even = list(pipeline.layout or ()), "null (as even as possible)"
    if len(layout) != num_stages:
        raise ValueError(
            f"pipeline.layout = {layout} names {len(layout)} stages, but pipeline.schedule = {pipeline.schedule} with "
            f"parallel.pp = {config.parallel.pp} has {num_stages}; nearest legal: pipeline.layout={even}"
        )
    most = num_layers + config.model.num_mtp_layers
    if not num_layers <= sum(layout) <= most:
        raise ValueError(
            f"pipeline.layout = {layout} sums to {sum(layout)} layers, but model.num_layers = {num_layers}"
            f"{f', and {most} with the blocks of model.num_mtp_layers' if most > num_layers else ''}; "
            f"nearest legal: pipeline.layout={even}"
        )
    # blocks of multi-token prediction follow the head there
    layout[-1] = max(0, num_layers - sum(layout[:-1]))
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


def shared_parameters(
    placement: Placement, specs: Sequence[StageSpec], model: ModelConfig
) -> SharedRanks:
    """Returns which pipeline ranks hold parameters together.

    Args:
        specs: what each of them holds.

    Raises:
        ValueError: copies of a stage lie on ranks that do not mirror each other.
    """
    last, found = placement.num_ranks - 1, dict[str, Sequence[Sequence[int]]]()
    if placement.copies == 2:
        mirror = [last - rank for rank in placement.route[0]]
        if list(placement.route[1]) != mirror:
            raise ValueError(
                f"the copies of a stage must lie on mirrored ranks: direction 0 runs through ranks "
                f"{list(placement.route[0])}, so direction 1 must run through {mirror}, not {list(placement.route[1])}"
            )
        found["pair"] = [(rank, last - rank) for rank in range(placement.num_ranks // 2)]
    reading = [
        s
        for s, spec in enumerate(specs)
        if spec.embedding or spec.mtp or (spec.head and model.tie_embeddings)
    ]
    holders = tuple(sorted({line[stage] for line in placement.route for stage in reading}))
    if len(holders) > placement.copies:  # two copies share all that they hold
        found["tied"] = [holders]
    return found

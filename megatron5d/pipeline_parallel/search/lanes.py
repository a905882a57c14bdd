"""The search's view of a pipeline: every (direction, stage) is a lane, and what is known of a lane is one record."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Placement

LANE_OPS = ("F", "I", "W")
"""What the search schedules; a full backward is an I and its W."""
PAIRS = ("F&I", "F&W", "I&W", "F&F", "I&I")
"""Which two may overlap; two weight gradients have nothing to hide."""
UNLIKE = PAIRS[:3]
"""What policies overlap: two of one kind pay here and there only, where the local search puts them."""

LANE = np.dtype(
    [
        ("rank", "i8"),  # who holds it
        ("beside", "i8", 2),  # the lanes of the next stage and of the stage before, -1 where there is none
        ("latency", "f8", 2),  # of the messages to them
        ("count", "i8"),  # micro-batches
        ("compute", "f8", 3),  # time of F, I, W
        ("a2a", "f8", 3),  # all-to-all inside F, I, W
        ("size", "f8"),  # activations of one micro-batch
    ]
)


class Lanes(NamedTuple):
    """What a list schedule needs to know of a placement, its costs and its memory. G lanes, R ranks, C lanes a rank."""

    table: np.ndarray  # [G] of LANE
    held_by: np.ndarray  # [R, C] the lanes of each rank, the one nearest to the embedding first
    position: np.ndarray  # [R] where a rank lies between an end (-1) and the middle or turn (1) of its route
    cap: np.ndarray  # [R] the most activations a rank may hold
    pairs: np.ndarray  # [3] which of UNLIKE may overlap
    span: int  # ranks of the whole pipeline, in which policies reckon, too
    unit: float  # mean compute of an action: the time in which policies reckon


def lanes_of(
    placement: Placement,
    costs: StageCosts,
    direction: Sequence[int],
    memory: float | np.ndarray,
    pairs: Collection[str] = PAIRS,
) -> Lanes:
    """Returns the lanes of a placement.

    Args:
        placement: which rank holds which stage.
        costs: of every stage.
        direction: of every micro-batch.
        memory: the most activations a rank may hold, in micro-batches of one rank's layers; one number or one a rank.
        pairs: which of PAIRS may overlap; none does where there is no all-to-all to hide.
    """
    num_stages, num_ranks, copies = placement.num_stages, placement.num_ranks, placement.copies
    lane = np.arange(copies * num_stages)
    stage, ops = lane % num_stages, [OPS.index(op) for op in LANE_OPS]
    table = np.zeros(len(lane), dtype=LANE)
    rank = table["rank"] = np.array(placement.route).reshape(-1)
    beside = np.stack([np.where(stage < num_stages - 1, lane + 1, -1), np.where(stage > 0, lane - 1, -1)], axis=1)
    table["beside"] = beside
    table["latency"] = np.where(rank[beside] != rank[:, None], costs.comm, 0.0)
    table["count"] = np.bincount(direction, minlength=copies)[lane // num_stages]
    table["compute"], table["a2a"] = costs.compute[ops][:, stage].T, costs.a2a[ops][:, stage].T
    table["size"] = costs.activation[stage]
    held_by = [
        [d * num_stages + s for d, s in sorted(placement.stages_of(r), key=lambda held: held[1])]
        for r in range(num_ranks)
    ]
    line = np.arange(num_ranks) / max(num_ranks - 1, 1)
    return Lanes(
        table=table,
        held_by=np.array(held_by, dtype=np.int64),
        position=1 - 2 * abs(2 * line - 1) if copies > 1 else 2 * line - 1,
        cap=np.broadcast_to(np.asarray(memory, dtype=float), (num_ranks,)) + 1e-9,
        pairs=np.array([bool(costs.a2a.any()) and pair in pairs for pair in UNLIKE]),
        span=num_ranks,
        unit=float(table["compute"].mean()) or 1.0,
    )

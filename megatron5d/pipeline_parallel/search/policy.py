"""The numbers that decide what a free rank does next; they name no micro-batch, so they serve every p and m.

The search's view of a pipeline: every (direction, stage) is a lane, and what is known of a lane is one record.

Policies found earlier, shipped as data: where every search starts.
"""

import json
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
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


class Policy(NamedTuple):
    """A rank takes the slot of highest score; C is the number of lanes a rank holds. Times are in `Lanes.unit`.

    Three phases: warm-up until a rank's first I; the steady one; cool-down once few forwards are left to it.

    The score of an action is its priority, shifted by where its rank lies, by what the rank ran last, by how long its
    input has been waiting, by what is in flight or pending, and lowered by the time the rank would idle for it. A pair
    scores as the better of the two, plus a bonus.
    """

    priority: np.ndarray  # [3 phases, 3 ops, C]
    slope: np.ndarray  # [3 phases, 3 ops, C] times the rank's position
    rhythm: np.ndarray  # [3 phases, 3 ops, 3 ops] of an op after another: F I W F I W wastes no latency where it fits
    age: np.ndarray  # [2] of F and I, per unit of time since the input arrived
    crowding: np.ndarray  # [C] of F, per micro-batch of one rank's layers between F and W on its lane, over p
    pressure: np.ndarray  # [3 phases] of W, per micro-batch of one rank's layers between I and W, over p
    idle: np.ndarray  # [3 phases] per unit of time that the rank would wait
    bonus: np.ndarray  # [3 phases, 3 pairs]
    reserve: np.ndarray  # [2, C] share of the cap that an F leaves free: constant, and times the rank's position
    sticky: np.ndarray  # [2] of F and of I, while its lane is in the middle of a group
    group: np.ndarray  # [2] micro-batches in a group of F and of I, over p
    ending: np.ndarray  # [1] cool-down begins when a rank has so many forwards left, over p, in micro-batches


INPUT = np.dtype([("age", "f8"), ("sticky", "f8"), ("group", "i8")])
PHASE = np.dtype([("idle", "f8"), ("pressure", "f8"), ("bonus", "f8", 3), ("rhythm", "f8", (3, 3))])


class Rules(NamedTuple):
    """A policy brought to the ranks, times and activations of one problem, so that a decision takes few steps."""

    score: np.ndarray  # [R, 3 phases, 3 ops, C]
    limit: np.ndarray  # [R, C] activations after an F on this lane
    crowding: np.ndarray  # [C] per activation
    inputs: np.ndarray  # [2] of INPUT, for F and I
    phases: np.ndarray  # [3] of PHASE
    ending: float  # activations of forwards left


def rules_of(policy: Policy, lanes: Lanes) -> Rules:
    """Returns a policy's Rules for one problem."""
    num_ranks = lanes.span
    along = lanes.position[:, None]
    inputs, phases = np.zeros(2, dtype=INPUT), np.zeros(3, dtype=PHASE)
    inputs["age"], inputs["sticky"] = policy.age / lanes.unit, policy.sticky
    inputs["group"] = np.maximum(np.rint(policy.group * num_ranks), 1)
    phases["idle"], phases["pressure"] = policy.idle / lanes.unit, policy.pressure / num_ranks
    phases["bonus"], phases["rhythm"] = policy.bonus, policy.rhythm
    return Rules(
        score=policy.priority + policy.slope * along[:, None, None],
        limit=lanes.cap[:, None] * (1 - np.clip(policy.reserve[0] + policy.reserve[1] * along, 0, 1)) + 1e-9,
        crowding=policy.crowding / num_ranks,
        inputs=inputs,
        phases=phases,
        ending=float(policy.ending[0]) * num_ranks,
    )


def shapes(num_lanes: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every field of a Policy for ranks of `num_lanes` lanes."""
    return {
        "priority": (3, 3, num_lanes),
        "slope": (3, 3, num_lanes),
        "rhythm": (3, 3, 3),
        "age": (2,),
        "crowding": (num_lanes,),
        "pressure": (3,),
        "idle": (3,),
        "bonus": (3, 3),
        "reserve": (2, num_lanes),
        "sticky": (2,),
        "group": (2,),
        "ending": (1,),
    }


def policy_of(numbers: np.ndarray, num_lanes: int) -> Policy:
    """Returns the Policy whose fields lie one after another in `numbers`."""
    fields, first = {}, 0
    for name, shape in shapes(num_lanes).items():
        size = int(np.prod(shape))
        fields[name] = numbers[first : first + size].reshape(shape)
        first += size
    assert first == len(numbers), f"a policy for {num_lanes} lanes has {first} numbers, not {len(numbers)}"
    return Policy(**fields)


def flat(policy: Policy) -> np.ndarray:
    """Returns the numbers of a policy one after another."""
    return np.concatenate([np.asarray(field, dtype=float).reshape(-1) for field in policy])


def plain_policy(num_lanes: int) -> Policy:
    """Returns the policy that evolution can always start from: backwards first, deep lanes first, W in the gaps."""
    depth = np.arange(num_lanes) / max(num_lanes - 1, 1)
    by_op = np.stack([1.0 + depth, 3.0 + depth, -1.0 + 0 * depth])
    return Policy(
        priority=np.stack([by_op, by_op, by_op]),
        slope=np.zeros((3, 3, num_lanes)),
        rhythm=np.zeros((3, 3, 3)),
        age=np.zeros(2),
        crowding=np.zeros(num_lanes),
        pressure=np.array([1.0, 1.0, 0.0]),
        idle=np.full(3, 2.0),
        bonus=np.full((3, 3), 1.0),
        reserve=np.stack([0.1 * (1 - depth), np.zeros(num_lanes)]),
        sticky=np.zeros(2),
        group=np.ones(2),
        ending=np.array([0.5]),
    )


def resampled(policy: Policy, num_lanes: int) -> Policy:
    """Returns a policy for ranks of another number of lanes, by interpolation from the first to the last."""
    here = policy.crowding.shape[0]
    if here == num_lanes:
        return policy
    wanted = np.linspace(0, here - 1, num_lanes) if num_lanes > 1 else np.array([(here - 1) / 2])
    below = np.floor(wanted).astype(int)
    above, share = np.minimum(below + 1, here - 1), wanted - below

    def fit(field: np.ndarray) -> np.ndarray:
        return field[..., below] * (1 - share) + field[..., above] * share

    per_lane = ("priority", "slope", "crowding", "reserve")
    return policy._replace(**{name: fit(getattr(policy, name)) for name in per_lane})


FILE = Path(__file__).with_name("policies.json")


@cache
def shipped_policies() -> tuple[Policy, ...]:
    """Returns all policies of the file."""
    if not FILE.exists():
        return ()
    return tuple(_policy(entry["policy"]) for entry in json.loads(FILE.read_text())["policies"])


def starting_points(num_lanes: int) -> list[np.ndarray]:
    """Returns the numbers of every policy to start from, fitted to ranks of `num_lanes` lanes; the plain one first."""
    found = [resampled(policy, num_lanes) for policy in shipped_policies()]
    return [flat(policy) for policy in (plain_policy(num_lanes), *found)]


def _policy(fields: dict[str, list]) -> Policy:
    policy = Policy(**{name: np.array(field, dtype=float) for name, field in fields.items()})
    expected = shapes(policy.crowding.shape[0])
    wrong = [name for name, field in policy._asdict().items() if field.shape != expected[name]]
    assert not wrong, f"{FILE.name}: fields of the wrong shape: {wrong}"
    return policy

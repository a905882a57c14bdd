"""Policies found earlier, shipped as data: where every search starts."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from megatron5d.pipeline_parallel.search.policy import Policy, flat, plain_policy, resampled, shapes

FILE = Path(__file__).with_name("policies.json")


@dataclass(frozen=True)
class Shipped:
    """A policy with the place where it was found.

    Args:
        placement: name of the placement.
        costs: text of the costs.
        num_ranks: pp.
        num_microbatches: of one step.
        memory: cap, in micro-batches of one rank's layers.
        overhead: what it reached there.
        policy: the numbers.
    """

    placement: str
    costs: str
    num_ranks: int
    num_microbatches: int
    memory: float
    overhead: float
    policy: Policy


@cache
def shipped_policies() -> tuple[Shipped, ...]:
    """Returns all policies of the file."""
    if not FILE.exists():
        return ()
    return tuple(
        Shipped(**{**entry, "policy": _policy(entry["policy"])}) for entry in json.loads(FILE.read_text())["policies"]
    )


def starting_points(num_lanes: int) -> list[np.ndarray]:
    """Returns the numbers of every policy to start from, fitted to ranks of `num_lanes` lanes; the plain one first."""
    found = [resampled(shipped.policy, num_lanes) for shipped in shipped_policies()]
    return [flat(policy) for policy in (plain_policy(num_lanes), *found)]


def write_policies(policies: Iterable[Shipped], path: Path) -> None:
    """Writes the file, one line a field, six decimals a number: with three, schedules change."""
    entries = [
        {
            **{name: value for name, value in vars(shipped).items() if name != "policy"},
            "policy": {name: np.round(field, 6).tolist() for name, field in shipped.policy._asdict().items()},
        }
        for shipped in policies
    ]
    lines = ",\n".join(
        "  {\n" + ",\n".join(f"   {json.dumps(name)}: {json.dumps(value)}" for name, value in entry.items()) + "\n  }"
        for entry in entries
    )
    path.write_text('{\n "policies": [\n' + lines + "\n ]\n}\n")


def _policy(fields: dict[str, list]) -> Policy:
    policy = Policy(**{name: np.array(field, dtype=float) for name, field in fields.items()})
    expected = shapes(policy.crowding.shape[0])
    wrong = [name for name, field in policy._asdict().items() if field.shape != expected[name]]
    assert not wrong, f"{FILE.name}: fields of the wrong shape: {wrong}"
    return policy

"""What an action costs: the times and the memory that simulation and search assume."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from megatron5d.pipeline_parallel.program import Placement


@dataclass(frozen=True)
class StageCosts:
    """Times and memory of every stage, modeled or measured, in any one unit of time."""

    compute: np.ndarray  # `[len(OPS), num_stages]` compute time of each op on each stage
    # `[len(OPS), num_stages]` time of an op's all-to-all, which only an overlapped partner can hide
    a2a: np.ndarray
    # latency of a message between adjacent stages on different ranks; one number, or
    # `[num_stages]`, of each stage with the next
    comm: float | np.ndarray
    # `[num_stages]` memory from F until W (or B) has run, in micro-batches of one rank's layers
    activation: np.ndarray
    # `[num_stages]` additional memory of a deferred W, from I until W has run, in the same unit
    stash: np.ndarray

    def plain(self) -> np.ndarray:
        """`[len(OPS), num_stages]` time of an action that nothing overlaps."""
        return self.compute + self.a2a


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch through one rank's share (1/num_ranks) of the model.

    The chunks of a rank divide its share.
    """

    F: float = 1.0  # compute of a forward
    I: float = 1.0  # compute of a backward of the input
    W: float = 1.0  # compute of a backward of the weights; a full backward B costs I + W
    # latency of a message between adjacent stages on different ranks; it delays the receiver only
    comm: float = 0.0
    a2aF: float = 0.0  # all-to-all inside F
    a2aB: float = 0.0  # all-to-all inside I, or inside B
    # time and activations of each stage relative to an even split; None = all 1
    stage_scale: tuple[float, ...] | None = None

    def of(self, placement: Placement) -> StageCosts:
        """Costs of every stage of `placement`.

        Raises:
            ValueError: `stage_scale` has another number of stages than the placement.
        """
        num_stages = placement.num_stages
        scale = (
            np.ones(num_stages)
            if self.stage_scale is None
            else np.array(self.stage_scale, dtype=float)
        )
        if len(scale) != num_stages:
            raise ValueError(
                f"stage_scale has {len(scale)} entries, but the schedule has {num_stages} stages"
            )
        share = scale * (placement.num_ranks / num_stages)
        return StageCosts(self.compute * share, self.a2a * share, self.comm, share, share)

    @property
    def compute(self) -> np.ndarray:
        """`[len(OPS), 1]` compute of each op."""
        return np.array([[self.F], [self.I], [self.W], [self.I + self.W]])

    @property
    def a2a(self) -> np.ndarray:
        """`[len(OPS), 1]` all-to-all of each op."""
        return np.array([[self.a2aF], [self.a2aB], [0.0], [self.a2aB]])


def parse_costs(text: str, stage_scale: Sequence[float] | None = None) -> Costs:
    """Parses a text such as `F=1,I=1.2,W=0.8,comm=0.1,a2aF=0.5,a2aB=0.5`; others keep defaults.

    Raises:
        ValueError: an unknown key, a key twice, or a value that is not a finite number of at least
            0.
    """
    names = [field.name for field in fields(Costs) if field.name != "stage_scale"]
    values: dict[str, float] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        key, _, value = item.partition("=")
        if key not in names:
            raise ValueError(f"costs: unknown key {key!r}; the keys are {', '.join(names)}")
        if key in values:
            raise ValueError(f"costs: {key} is given twice")
        try:
            values[key] = float(value)
        except ValueError:
            raise ValueError(f"costs: {key}={value!r} is not a number") from None
        if not 0 <= values[key] < float("inf"):
            raise ValueError(f"costs: {key}={value} must be a finite number of at least 0")
    wrong = [scale for scale in stage_scale or () if not 0 <= scale < float("inf")]
    if wrong:
        raise ValueError(f"stage_scale {wrong[0]:g} must be a finite number of at least 0")
    return Costs(**values, stage_scale=None if stage_scale is None else tuple(stage_scale))

"""Rank arithmetic in plain integers: the position of each rank in the dense and the expert view of
one world.

Dense view   pp · dp · cp · tp     (in any order; dp = dp_replicate × dp_shard, shard fastest)
Expert view  pp · edp · ep · etp   (folds the ranks of one pipeline stage, etp fastest;
                                    edp = edp_replicate × edp_shard)

Nothing here communicates: the layout of 16,384 ranks can be checked in one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod

SharedRanks = Mapping[str, Sequence[Sequence[int]]]
"""Pipeline ranks that hold parameters together: "pair" -> sets of ranks that hold the same stages,
"tied" -> the set that holds the embedding, where that is another."""

DENSE_AXES = ("pp", "dp", "cp", "tp")

# process groups of layers and reductions: name -> the axes of the dense or expert grid they span
DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_replicate": ("dp_replicate",),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "cp_tp": ("cp", "tp"),
    "stage": ("dp_replicate", "dp_shard", "cp", "tp"),
}
EXPERT_GROUPS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "etp": ("etp",),
    "ep_etp": ("ep", "etp"),
    "edp": ("edp_replicate", "edp_shard"),
    "edp_replicate": ("edp_replicate",),
    "edp_shard": ("edp_shard",),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of all axes of a world, in ranks; `resolve` makes them from what the user gives."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int
    etp: int
    order: tuple[str, ...] = DENSE_AXES
    cp_inner: int = 1
    ep_inner: int = 1

    @property
    def dp(self) -> int:
        """Ranks among which the global batch is divided."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        """All ranks of the run."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Copies of each expert: dp·cp·tp / (ep·etp)."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    @property
    def edp_replicate(self) -> int:
        """HSDP replicas within edp: the number for dp where that divides edp, otherwise 1."""
        return self.dp_replicate if self.edp % self.dp_replicate == 0 else 1


def resolve(
    world: int,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    dp_replicate: int = 1,
    order: tuple[str, ...] = DENSE_AXES,
    cp_inner: int = 1,
    ep_inner: int = 1,
) -> Sizes:
    """Derives dp from the world size and the other axes.

    Args:
        tp, cp, pp, ep, etp, dp_replicate: sizes of the axes, valid (config/checks/layout.py);
            etp=None means tp.
        order: the dense axes, slowest first.
        cp_inner: neighbors in the cp group that exchange heads for sequence
            (`parallel.cp_method=two_level`).
        ep_inner: neighbors in the ep group that are in one node.

    Returns:
        Sizes of which both views have exactly `world` ranks.
    """
    assert sorted(order) == sorted(DENSE_AXES), order
    dp, etp = world // (tp * cp * pp), tp if etp is None else etp
    assert dp * tp * cp * pp == world and dp % dp_replicate == 0, (world, tp, cp, pp, dp_replicate)
    assert dp * cp * tp % (ep * etp) == 0, (dp, cp, tp, ep, etp)
    dp_shard = dp // dp_replicate
    return Sizes(pp, dp_replicate, dp_shard, cp, tp, ep, etp, tuple(order), cp_inner, ep_inner)


class Grid:
    """Ranks laid out row-major along named axes, slowest first.

    Args:
        axes: (name, size) pairs, slowest first.
        ranks: the rank at each row-major position; None = 0 ... n-1.
    """

    def __init__(
        self, axes: tuple[tuple[str, int], ...], ranks: tuple[int, ...] | None = None
    ) -> None:
        self.names = tuple(name for name, _ in axes)
        self.sizes = tuple(size for _, size in axes)
        self.ranks = tuple(range(prod(self.sizes))) if ranks is None else ranks
        assert len(self.ranks) == prod(self.sizes)
        self._position = {rank: i for i, rank in enumerate(self.ranks)}
        self._stride = {name: prod(self.sizes[i + 1 :]) for i, name in enumerate(self.names)}
        self._size = dict(zip(self.names, self.sizes))

    def coordinate(self, rank: int, name: str) -> int:
        """Position of `rank` along one axis, 0 ... size-1."""
        return self._position[rank] // self._stride[name] % self._size[name]

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """All ranks that differ from `rank` along `names` only, row-major in the grid's order."""
        axes = [name for name in self.names if name in names]
        offset = sum(self.coordinate(rank, name) * self._stride[name] for name in axes)
        start = self._position[rank] - offset
        # a list, because a generator is slower here
        return tuple([self.ranks[start + step] for step in self._steps(axes)])

    def groups(self, *names: str) -> Iterator[tuple[int, ...]]:
        """Yields every group along `names` once; together they partition the ranks."""
        steps = self._steps([name for name in self.names if name in names])
        for start in self._steps([name for name in self.names if name not in names]):
            yield tuple([self.ranks[start + step] for step in steps])

    def _steps(self, names: list[str]) -> list[int]:
        """Positions of all coordinates along these axes, with 0 along the others."""
        ranges = [range(0, self._size[n] * self._stride[n], self._stride[n]) for n in names]
        return [sum(offsets) for offsets in product(*ranges)]


@lru_cache(maxsize=8)
def dense_grid(sizes: Sizes) -> Grid:
    """Grid of pp, dp_replicate, dp_shard, cp and tp, in the configured order."""
    axes: list[tuple[str, int]] = []
    for name in sizes.order:
        if name == "dp":
            axes += [("dp_replicate", sizes.dp_replicate), ("dp_shard", sizes.dp_shard)]
        else:
            axes.append((name, getattr(sizes, name)))
    return Grid(tuple(axes))


def describe_rank(sizes: Sizes, rank: int) -> str:
    """A rank's number and its coordinates in the dense view, for messages."""
    grid = dense_grid(sizes)
    coordinates = ", ".join(f"{axis} {grid.coordinate(rank, axis)}" for axis in grid.names)
    return f"rank {rank} ({coordinates})"


@lru_cache(maxsize=8)
def expert_grid(sizes: Sizes, dense: Grid) -> Grid:
    """Grid of pp, edp_replicate, edp_shard, ep and etp, with the ranks of a stage ascending."""
    stages = [sorted(dense.group(first, *DENSE_GROUPS["stage"])) for first in dense.group(0, "pp")]
    ranks = tuple(chain.from_iterable(stages))
    replicate, shard = sizes.edp_replicate, sizes.edp // sizes.edp_replicate
    edp = (("edp_replicate", replicate), ("edp_shard", shard))
    return Grid((("pp", sizes.pp), *edp, ("ep", sizes.ep), ("etp", sizes.etp)), ranks)

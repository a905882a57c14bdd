"""The placements that the search tries, by name: `loop:4`, `zigzag:2` (the V), `mirrored`."""

from megatron5d.pipeline_parallel.program import Placement, loop_placement, mirrored_placement, zigzag_placement

DEFAULT = ("loop:1", "loop:2", "loop:4", "zigzag:2", "zigzag:4", "mirrored")
"""What is tried where the user names nothing; as far as copies and the number of ranks admit."""


def placement_called(name: str, num_ranks: int) -> Placement:
    """Returns the placement of a name.

    Raises:
        ValueError: An unknown name, or a number of chunks or ranks that it does not admit.
    """
    kind, _, text = name.partition(":")
    if kind not in ("loop", "zigzag", "mirrored") or (kind == "mirrored") == bool(text) or not (text or "1").isdigit():
        raise ValueError(f"placement {name!r} is none of loop:<chunks>, zigzag:<chunks>, mirrored; such as loop:4")
    if kind == "mirrored":
        if num_ranks % 2:
            raise ValueError(
                f"placement mirrored pairs ranks, but parallel.pp={num_ranks} is odd; set parallel.pp={num_ranks + 1}"
            )
        return mirrored_placement(num_ranks)
    chunks = int(text)
    if chunks < 1:
        raise ValueError(f"placement {name!r} has {chunks} chunks per rank; the fewest is {kind}:1")
    return loop_placement(num_ranks, chunks) if kind == "loop" else zigzag_placement(num_ranks, chunks)


def called(placement: Placement) -> str:
    """Returns the name of a placement, or its number of stages where it has none."""
    chunks, num_ranks = placement.chunks, placement.num_ranks
    for name in (f"loop:{chunks}", f"zigzag:{chunks}", "mirrored"):
        if (name != "mirrored" or num_ranks % 2 == 0) and placement_called(name, num_ranks) == placement:
            return name
    return f"custom:{chunks}"


def candidates(num_ranks: int, copies: int) -> list[str]:
    """Returns the names of the default placements that need no more copies and that this number of ranks admits."""
    return [name for name in DEFAULT if name != "mirrored" or (copies >= 2 and num_ranks % 2 == 0)]

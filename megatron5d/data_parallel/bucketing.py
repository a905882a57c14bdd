"""Divides the parameters of a stage into buckets."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron5d.data_parallel.bucket import Bucket, GatherFormat
from megatron5d.phases.phase import Phase
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import ShardSpec, spec_of


def data_axes(mesh: Mesh, zero: int, shared: str = "", expert: bool = False) -> tuple[Axis, Axis]:
    """Returns the axes over which a bucket is sharded and replicated.

    Args:
        zero: ZeRO stage, 0 ... 3.
        shared: `ShardSpec.shared` of the bucket's parameters.
        expert: `ShardSpec.expert` of them.

    Returns:
        (shard, replicate): the ranks that own one slice each, and the ranks that own the same
        slice.
    """
    pair = f"_{shared}" if shared else ""
    whole, shard, replicate = (
        ("edp", "edp_shard", "edp_replicate")
        if expert
        else ("dp_cp", "dp_shard_cp", "dp_replicate")
    )
    if zero == 0:
        return Axis(shard), mesh[whole + pair]
    if zero == 1:
        return mesh[shard + pair], mesh[replicate]
    return mesh[shard], mesh[replicate + pair]


def _kind(
    parameter: nn.Parameter, gather_format: type[GatherFormat] | None
) -> tuple[str, bool, bool]:
    """Returns a parameter's kind: those of one kind are reduced over the same ranks and gathered in
    one format."""
    spec = spec_of(parameter)
    return spec.shared, spec.expert, gather_format is not None and gather_format.accepts(parameter)


class Buckets(NamedTuple):
    """The buckets of a stage, and which of them a phase uses."""

    buckets: list[Bucket]
    uses: dict[Phase, list[int]]  # phase -> buckets it reads and writes
    ends: dict[Phase, set[int]]  # phase -> buckets whose gradient of a micro-batch it completes


def make_buckets(
    units: Sequence[Sequence[Phase]],
    mesh: Mesh,
    zero: int,
    grad_dtype: torch.dtype,
    gather_format: type[GatherFormat] | None,
    separate: Callable[[ShardSpec], bool],
    frozen: Callable[[ShardSpec], bool],
) -> Buckets:
    """Puts every parameter into a bucket; arguments as in GradSync."""
    made, bucket_of = Buckets([], {}, {}), dict[nn.Parameter, int]()
    for unit in units:
        own = {
            parameter: None
            for phase in unit
            for parameter in phase.parameters()
            if parameter not in bucket_of
        }
        specs = {parameter: spec_of(parameter) for parameter in own}
        kinds = {
            p: (*_kind(p, gather_format), separate(spec), frozen(spec)) for p, spec in specs.items()
        }
        for kind in sorted(set(kinds.values())):
            shared, expert, formatted, _, fixed = kind
            parameters = [parameter for parameter in own if kinds[parameter] == kind]
            bucket_of |= dict.fromkeys(parameters, len(made.buckets))
            axes, chosen = (
                data_axes(mesh, zero, shared, expert),
                gather_format if formatted else None,
            )
            made.buckets.append(
                Bucket(parameters, *axes, grad_dtype, zero, gather_format=chosen, frozen=fixed)
            )
        earlier: set[int] = set()
        for phase in unit:
            made.uses[phase] = sorted({bucket_of[parameter] for parameter in phase.parameters()})
            # the first phase in a unit is last in a backward
            made.ends[phase] = set(made.uses[phase]) - earlier
            earlier |= made.ends[phase]
    return made

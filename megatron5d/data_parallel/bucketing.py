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
    """Axes over which a bucket is sharded and replicated.

    Args:
        mesh: this rank's axes.
        zero: ZeRO stage, 0 ... 3.
        shared: `ShardSpec.shared` of the bucket's parameters.
        expert: `ShardSpec.expert` of them.

    Returns:
        (shard, replicate): the ranks that own one slice each, and the ranks that own the same
        slice.
    """
    suffix = f"_{shared}" if shared else ""
    both, shard, replicate = (
        ("edp", "edp_shard", "edp_replicate")
        if expert
        else ("dp_cp", "dp_shard_cp", "dp_replicate")
    )
    if zero == 0:
        return Axis(shard), mesh[both + suffix]
    if zero == 1:
        return mesh[shard + suffix], mesh[replicate]
    return mesh[shard], mesh[replicate + suffix]


def bucket_kind(
    parameter: nn.Parameter, gather_format: type[GatherFormat] | None
) -> tuple[str, bool, bool]:
    """What the parameters of a bucket have in common: their ranks and their gather format."""
    spec = spec_of(parameter)
    return spec.shared, spec.expert, gather_format is not None and gather_format.accepts(parameter)


class Buckets(NamedTuple):
    """The buckets of a stage, and the phases that use them."""

    buckets: list[Bucket]
    uses: dict[Phase, list[int]]  # phase -> buckets that it reads and writes
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
    """Assigns every parameter to a bucket; arguments as in GradSync."""
    stage, bucket_of = Buckets([], {}, {}), dict[nn.Parameter, int]()
    for unit in units:
        # A parameter that several units use belongs to the first.
        parameters = [parameter for phase in unit for parameter in phase.parameters()]
        specs = {p: spec_of(p) for p in parameters if p not in bucket_of}
        kinds = {
            parameter: (*bucket_kind(parameter, gather_format), separate(spec), frozen(spec))
            for parameter, spec in specs.items()
        }
        for kind in sorted(set(kinds.values())):
            shared, expert, formatted, _, is_frozen = kind
            members = [parameter for parameter in kinds if kinds[parameter] == kind]
            bucket_of |= dict.fromkeys(members, len(stage.buckets))
            axes = data_axes(mesh, zero, shared, expert)
            bucket_format = gather_format if formatted else None
            stage.buckets.append(
                Bucket(members, *axes, grad_dtype, zero, bucket_format, frozen=is_frozen)
            )
        earlier: set[int] = set()
        for phase in unit:
            stage.uses[phase] = sorted({bucket_of[parameter] for parameter in phase.parameters()})
            # The first phase of a unit is the last in a backward.
            stage.ends[phase] = set(stage.uses[phase]) - earlier
            earlier |= stage.ends[phase]
    return stage

"""What the MoE layers of one rank share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron5d.config.derived import batch_schedule, samples_of_steps
from megatron5d.config.schema import Config
from megatron5d.expert_parallel.dispatcher import SendCapacity
from megatron5d.expert_parallel.load_balancing import Balancer
from megatron5d.expert_parallel.replay import RoutingFile
from megatron5d.expert_parallel.router import Jitter
from megatron5d.expert_parallel.token_share import TokenShare
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh


@dataclass(frozen=True)
class MoEInputs:
    """Objects that all MoE layers of a rank share."""

    balancer: Balancer
    token_share: TokenShare  # takes the tokens that this rank routes
    send_capacity: SendCapacity | None  # moe.exchange=planned; None = rows are counted
    jitter: Jitter | None  # of what routers read in training
    routing_file: RoutingFile | None  # which moe.replay reads, or moe.record writes


def moe_inputs(
    config: Config, mesh: Mesh, device: torch.device | str, layers: Sequence[int], stage: Axis
) -> MoEInputs:
    """Builds what a rank's MoE layers share.

    Args:
        layers: global indices of its MoE layers; a rank without any takes part in the balancer's
            collectives.
        stage: ranks that hold these layers and see other tokens.
    """
    moe, train = config.moe, config.train
    capacity = SendCapacity(moe.planned_imbalance, device) if moe.exchange == "planned" else None
    jitter = Jitter(moe.jitter, train.seed, train.seq_len) if moe.jitter else None
    routing_file, path = None, moe.replay or moe.record
    if path is not None:
        samples = samples_of_steps(train.steps, batch_schedule(config)) if moe.record else None
        routing_file = RoutingFile(path, config.model, train.seq_len, samples)
    return MoEInputs(
        Balancer(config.model, moe, layers, mesh["cp_tp"], stage, device),
        TokenShare(mesh["tp"], config.parallel.sp),
        capacity,
        jitter,
        routing_file,
    )

"""Attaches to a model's phases what they recompute, and to its matrices their FP8 recipe, tp overlap and replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from torch import nn

from megatron5d.autograd.recompute import KEEP_ALL, ActivationPolicy, RecomputedParts
from megatron5d.comm.collectives import all_reduce
from megatron5d.config.derived import quantised_matrices
from megatron5d.config.schema import Config, RecomputeConfig
from megatron5d.model.embedding_head import TIED
from megatron5d.precision.gemm import ExpertGemms, Gemms
from megatron5d.tensor_parallel.overlap import NO_OVERLAP, Chunked, Overlap
from megatron5d.topology.mesh import Mesh, Shared
from megatron5d.topology.shard_spec import spec_of


def is_recomputed(recompute: RecomputeConfig, stage: int, place: int) -> bool:
    """Returns whether the block at a place of a stage, counted from 0, is recomputed, as a whole or in parts."""
    count = recompute.num_layers if recompute.stage_layers is None else recompute.stage_layers[stage]
    return recompute.mode != "none" and (count is None or place < count)


def set_recompute(phases: Iterable[nn.Module], recompute: RecomputeConfig, stage: int, place: int) -> None:
    """Sets which activations a block's phases keep for their backward, and where.

    Args:
        phases: of the block at a place of a stage; those without a `kind`, the join of MTP, recompute no parts.
        recompute, stage, place: as in `is_recomputed`.
    """
    chosen, least = is_recomputed(recompute, stage, place), recompute.offload_min_bytes
    full = chosen and recompute.mode == "full"
    parts = RecomputedParts(recompute.parts) if chosen and not full else KEEP_ALL
    group = place // recompute.group_layers if full else None
    input_host_bytes = least if full and "inputs" in recompute.offload else None
    for phase in phases:
        kind = getattr(phase, "kind", None)
        host_bytes = least if not full and kind in recompute.offload else None
        phase.activation_policy = ActivationPolicy(parts, group, host_bytes, input_host_bytes)  # type: ignore[assignment]
        for module in phase.modules() if kind else ():
            if hasattr(module, "parts"):
                module.parts = parts  # type: ignore[assignment]


def mark_replicas(parameters: Iterable[nn.Parameter], replicas: Shared) -> None:
    """Notes in the specs which parameters other pipeline ranks hold too."""
    for parameter in parameters:
        spec = spec_of(parameter)
        shared = "tied" if spec.name == TIED and "tied" in replicas else "pair" if "pair" in replicas else ""
        parameter.spec = replace(spec, shared=shared)  # type: ignore[attr-defined]


def recipes(config: Config, mesh: Mesh) -> tuple[Gemms, ExpertGemms]:
    """Builds the FP8 GEMMs of linear layers, and of experts.

    Comm: later, in every tensorwise GEMM: all_reduce of one number over cp_tp for each input and gradient, and over
        tp for each weight; of one number per expert over etp for experts.
    """
    from megatron5d.precision.fp8_recipes import (
        BlockwiseExpertGemms,
        BlockwiseGemms,
        TensorwiseExpertGemms,
        TensorwiseGemms,
    )

    powers_of_two = config.precision.fp8_pow2_scales
    if config.precision.fp8 == "blockwise":
        return BlockwiseGemms(powers_of_two), BlockwiseExpertGemms(powers_of_two)
    of_tokens, of_weight, of_experts = (
        partial(all_reduce, axis=mesh[axis], op="max") for axis in ("cp_tp", "tp", "etp")
    )
    return TensorwiseGemms(powers_of_two, of_tokens, of_weight), TensorwiseExpertGemms(powers_of_two, of_experts)


def choose_gemms(parameters: Iterable[nn.Parameter], config: Config, mesh: Mesh) -> None:
    """Sets `.gemms` of the weights that FP8 GEMMs read; all others are multiplied as they are."""
    chosen = {f"{name}.weight" for name in quantised_matrices(config)}
    if not chosen:
        return
    linear, experts = recipes(config, mesh)
    for parameter in parameters:
        if spec_of(parameter).name in chosen:
            parameter.gemms = experts if spec_of(parameter).expert else linear  # type: ignore[attr-defined]


def choose_overlap(parameters: Iterable[nn.Parameter], config: Config, mesh: Mesh) -> Overlap:
    """Sets `.overlap` of the weights as `parallel.tp_overlap` says, and returns it.

    Raises:
        ValueError: on every rank, if `fused` is not possible here.
    """
    mode, tp = config.parallel.tp_overlap, mesh["tp"]
    if mode == "none" or tp.size == 1:
        return NO_OVERLAP
    parameters = list(parameters)
    overlap: Overlap = Chunked()
    if mode == "fused":
        from megatron5d.tensor_parallel.fused_overlap import Fused

        overlap = Fused(tp, parameters[0].device, config.parallel.timeout_s)
    for parameter in parameters:
        parameter.overlap = overlap  # type: ignore[attr-defined]
    return overlap

"""Chooses for each of a model's matrices in how many bits it is multiplied, and how its collectives overlap."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from megatron5d.comm.collectives import all_reduce
from megatron5d.config.derived import quantised_matrices
from megatron5d.config.schema import Config
from megatron5d.precision.fp8_recipes import (
    BlockwiseExpertGemms,
    BlockwiseGemms,
    TensorwiseExpertGemms,
    TensorwiseGemms,
)
from megatron5d.precision.gemm import ExpertGemms, Gemms
from megatron5d.tensor_parallel.overlap import WHOLE, Chunked, Fused, Overlap
from megatron5d.topology.mesh import Mesh
from megatron5d.topology.shard_spec import spec_of


def recipes(config: Config, mesh: Mesh) -> tuple[Gemms, ExpertGemms]:
    """How 8-bit products are made: of linear layers, and of experts.

    Comm: later, in every tensorwise product: all_reduce of one number over cp_tp for each input and gradient, and over
        tp for each weight; of one number per expert over etp for experts.
    """
    powers_of_two = config.precision.fp8_pow2_scales
    if config.precision.fp8 == "blockwise":
        return BlockwiseGemms(powers_of_two), BlockwiseExpertGemms(powers_of_two)
    of_tokens, of_weight, of_experts = (
        partial(all_reduce, axis=mesh[axis], op="max") for axis in ("cp_tp", "tp", "etp")
    )
    return TensorwiseGemms(powers_of_two, of_tokens, of_weight), TensorwiseExpertGemms(powers_of_two, of_experts)


def choose_gemms(parameters: Iterable[nn.Parameter], config: Config, mesh: Mesh) -> None:
    """Sets `.gemms` of the weights that are multiplied in 8 bits; all others are multiplied as they are."""
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
        return WHOLE
    parameters = list(parameters)
    overlap: Overlap = Chunked()
    if mode == "fused":
        overlap = Fused(tp, parameters[0].device, config.parallel.timeout_s)
    for parameter in parameters:
        parameter.overlap = overlap  # type: ignore[attr-defined]
    return overlap

"""Rotary position embedding: frequencies, and their scaling to longer contexts.

Pair j of the rotary dims is rotated by position·θ^(-2j/dr) (Su et al., arXiv:2104.09864).
Scaling types, with their names in Hugging Face's configurations:
  linear   all frequencies / factor (Chen et al., arXiv:2306.15595)
  llama3   frequencies with wavelengths above original/low_freq_factor are divided by factor; those
           with wavelengths below original/high_freq_factor stay; a linear blend between (Dubey et
           al., arXiv:2407.21783; constants in its released configuration)
  yarn     the same, with a ramp between the dims that make beta_slow and beta_fast rotations over
           the original context; cos and sin are multiplied by an attention factor (Peng et al.,
           arXiv:2309.00071)
"""

import math

import torch
from torch import Tensor

from megatron5d.config.schema import RopeScaling
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.phases.phase import MicroBatch


def inverse_frequencies(
    dim: int, theta: float, scaling: RopeScaling, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Angle per position of each rotary pair.

    Args:
        dim: rotary dims dr of a head.
        theta: base.
        scaling: of the frequencies.
        dtype: fp32, or fp64 for a model in fp64.

    Returns:
        `[dr/2]`.
    """
    inv = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(dtype) / dim)
    if scaling.type == "linear":
        return inv / scaling.factor
    if scaling.type == "llama3":
        return _llama3(inv, scaling)
    if scaling.type == "yarn":
        return _yarn(inv, dim, theta, scaling)
    return inv


def _llama3(inv: Tensor, scaling: RopeScaling) -> Tensor:
    original = scaling.original_max_positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = 2 * math.pi / inv
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv / scaling.factor + blend * inv
    scaled = torch.where(wavelength > original / low, inv / scaling.factor, inv)
    is_between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(is_between, blended, scaled)


def _yarn(inv: Tensor, dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    def pair_of(rotations: float) -> float:
        """Fractional index of the pair that makes this many rotations over the original context."""
        wavelength = scaling.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=inv.dtype) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv / scaling.factor * ramp + inv * (1 - ramp)


def attention_factor(scaling: RopeScaling) -> float:
    """Factor of cos and sin: yarn's temperature, otherwise 1."""
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale_all_dim:
        return _temperature(scaling, scaling.mscale) / _temperature(scaling, scaling.mscale_all_dim)
    return _temperature(scaling, 1.0)


def softmax_temperature(scaling: RopeScaling) -> float:
    """Factor of the scores of latent attention: from DeepSeek's mscale_all_dim, otherwise 1."""
    return _temperature(scaling, scaling.mscale_all_dim) ** 2 if scaling.type == "yarn" else 1.0


def _temperature(scaling: RopeScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


class RotaryTables:
    """cos and sin of the tokens' angles, computed once per stage for all layers with this base.

    Args:
        dim: rotary dims dr of a head.
        theta, scaling: as in ModelConfig.
        dtype: of the model; tables are fp32, or fp64 for fp64.
        device: of the frequencies.
    """

    def __init__(
        self, dim: int, theta: float, scaling: RopeScaling, dtype: torch.dtype, device
    ) -> None:
        self.inv = inverse_frequencies(dim, theta, scaling, statistics_dtype(dtype)).to(device)
        self.factor = attention_factor(scaling)

    def __call__(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """cos and sin of a micro-batch, `[s/cp, b, dr/2]`; a stage's phases share the tensors."""
        return batch.cached(self, lambda: self.of(batch.positions))

    def of(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[s/cp, b, dr/2]` of global positions, int64 `[b, s/cp]`."""
        angles = positions.t().to(self.inv.dtype).unsqueeze(-1) * self.inv
        cos, sin = angles.cos(), angles.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)

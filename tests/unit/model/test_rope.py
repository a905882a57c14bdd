"""Scaled rotary frequencies equal those of transformers, also where they blend."""

import math

import pytest
import torch

from megatron5d.config.schema import RopeScaling
from megatron5d.model.rope import inverse_frequencies

transformers = pytest.importorskip("transformers")


def transformers_frequencies(dim: int, theta: float, kind: str, **scaling) -> torch.Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": theta, **scaling}
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        rope_parameters=rope,
        max_position_embeddings=131072,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0]


def test_llama3_blends_between_long_and_short_wavelengths():
    """Llama 3.1's settings: some wavelengths are between original / high and original / low."""
    original = 8192
    scaled = inverse_frequencies(128, 5e5, RopeScaling("llama3", 8.0, original))
    plain = inverse_frequencies(128, 5e5, RopeScaling())
    wavelengths = 2 * math.pi / plain
    blended = (wavelengths > original / 4) & (wavelengths < original)
    assert blended.sum() >= 3
    assert ((plain / 8 < scaled) & (scaled < plain))[blended].all()
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected = transformers_frequencies(
        128, 5e5, "llama3", original_max_position_embeddings=original, **scaling
    )
    torch.testing.assert_close(scaled, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("theta, original", [(1e4, 4096), (100.0, 4096), (1e4, 16)])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_bands(theta, original, truncate):
    """Also where the slow band is beyond the last pair, or the fast one before the first."""
    scaled = inverse_frequencies(64, theta, RopeScaling("yarn", 4.0, original, truncate=truncate))
    expected = transformers_frequencies(
        64, theta, "yarn", factor=4.0, original_max_position_embeddings=original, truncate=truncate
    )
    torch.testing.assert_close(scaled, expected, rtol=1e-5, atol=0)

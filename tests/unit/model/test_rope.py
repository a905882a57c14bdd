"""Stretched rotary frequencies are those of transformers, also where they blend."""

import math

import pytest
import torch

from megatron5d.config.schema import RopeScaling
from megatron5d.model.rope import inverse_frequencies

transformers = pytest.importorskip("transformers")


def theirs(dim: int, theta: float, kind: str, **scaling) -> torch.Tensor:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": kind, "rope_theta": theta, **scaling}
    sizes = {
        "hidden_size": 4 * dim,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": dim,
    }
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, max_position_embeddings=131072)
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")[0]


def test_llama3_blends_between_long_and_short_waves():
    """Llama 3.1's own numbers: some of its waves are between original / high and original / low."""
    original, factors = 8192, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = RopeScaling("llama3", 8.0, original)
    found, plain = (inverse_frequencies(128, 5e5, each) for each in (scaling, RopeScaling()))
    waves = 2 * math.pi / plain
    blended = (waves > original / 4) & (waves < original)
    assert blended.sum() >= 3
    assert ((plain / 8 < found) & (found < plain))[blended].all()
    want = theirs(
        128, 5e5, "llama3", factor=8.0, original_max_position_embeddings=original, **factors
    )
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("theta, original", [(1e4, 4096), (100.0, 4096), (1e4, 16)])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_the_bands_wherever_they_lie(theta, original, truncate):
    """Also where the slow band lies beyond the last pair, or the fast one before the first."""
    scaling = RopeScaling("yarn", 4.0, original, truncate=truncate)
    factor = {"factor": 4.0, "original_max_position_embeddings": original, "truncate": truncate}
    found = inverse_frequencies(64, theta, scaling)
    torch.testing.assert_close(found, theirs(64, theta, "yarn", **factor), rtol=1e-5, atol=0)

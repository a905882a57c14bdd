"""transformers computed in fp64 throughout, as an oracle.

Its norms, rotary tables and softmax are written in fp32 whatever the model's dtype, so the names of
fp32 mean fp64 while a model is built and run here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch


@contextlib.contextmanager
def fp32_means_fp64():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@contextlib.contextmanager
def model_in_fp64(folder: Path):
    """The causal model of a folder; it computes in fp64 inside the context only."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights, config = (
        {name: weight.double() for name, weight in model.state_dict().items()},
        model.config,
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others know fp32 and bf16 alone
    with fp32_means_fp64():
        model = type(model)(config).double()
        model.load_state_dict(weights)
        yield model

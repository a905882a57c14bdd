"""Layers that work in place against layers with copies, and models of kernels against torch."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kernel_lab.accuracy import relative_error
from parity_configs import config_of
from whole_stage import loss_and_gradients, new_model

from megatron5d.config.schema import PrecisionConfig, RecomputeConfig
from megatron5d.kernels import activation
from megatron5d.phases.wgrad import run_now
from megatron5d.precision import fp8_tensor
from megatron5d.precision.fp8_recipes import is_quantized

pytestmark = pytest.mark.hopper


@pytest.fixture
def overwritten(monkeypatch):
    """Whether each backward of SwiGLU wrote over its input."""
    results, original = [], activation.activation_backward

    def observed(dy, gate_up, *args, **options):
        gradients = original(dy, gate_up, *args, **options)
        results.append(gradients[0].data_ptr() == gate_up.data_ptr())
        return gradients

    for module in (activation, fp8_tensor):
        monkeypatch.setattr(module, "activation_backward", observed)
    return results


def first_block(config, in_place, monkeypatch):
    """Output and gradients of the first block, in place or with copies."""
    gpt, batch = new_model(config, torch.get_default_device())
    block = gpt.layers["0"]
    feed_forward = block.mlp.feed_forward
    assert block.attention.rotates_in_place
    assert is_quantized(feed_forward.down.weight) == (config.precision.fp8 != "none")
    block.attention.rotates_in_place = in_place
    if not in_place:
        for parts in (block.attention.parts, feed_forward.parts):
            monkeypatch.setattr(parts, "keeps", lambda name: name != "activation")
    torch.manual_seed(0)
    x = torch.randn(config.train.seq_len, 1, config.model.hidden_size).bfloat16().requires_grad_()
    y = x
    for phase in block.children():
        with phase.activation_policy.saving(phase.parameters()):
            y = phase(y, batch, run_now)
    y.backward(torch.randn_like(y))
    return [y, x.grad, *(weight.grad for weight in block.parameters())]


@pytest.mark.parametrize(
    "recomputed, fp8, inner",
    [
        ([], "none", 48),
        (["qkv"], "none", 48),
        (["attention", "mlp"], "none", 48),
        pytest.param([], "blockwise", 48, marks=pytest.mark.fp8),
        pytest.param([], "blockwise", 128, marks=pytest.mark.fp8),
        pytest.param(["mlp"], "blockwise", 128, marks=pytest.mark.fp8),
    ],
)
def test_the_same_bits_in_place(recomputed, fp8, inner, overwritten, monkeypatch):
    """If the inner dim is divisible by 128, the gradient of SwiGLU is computed in FP8, both ways,
    and never stored wide."""
    recompute = RecomputeConfig("selective", parts=recomputed) if recomputed else RecomputeConfig()
    config = config_of("llama_gqa", gbs=1, recompute=recompute)
    # The attention kernels require head dims of at least 16.
    model = dataclasses.replace(config.model, head_dim=16, ffn_hidden_size=inner)
    precision = PrecisionConfig(dtype="bf16", fp8=fp8)
    config = dataclasses.replace(config, model=model, precision=precision)
    in_place = first_block(config, True, monkeypatch)
    assert all(map(torch.equal, in_place, first_block(config, False, monkeypatch)))
    assert overwritten == ([True, False] if inner == 48 else [False])


MODELS = {
    "experts": {
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 48,
        "shared_ffn_hidden_size": 16,
    },
    "latent": {"attention": "mla", "q_lora_rank": 32, "kv_lora_rank": 32},
    "layernorm": {"norm": "layernorm"},
}


def run_layer(dtype, fields):
    """Loss and gradients of one layer, computed by kernels (fp64: by plain torch)."""
    config = config_of("llama_gqa", gbs=1)
    model = dataclasses.replace(config.model, num_layers=1, head_dim=16, vocab_size=32, **fields)
    config = dataclasses.replace(config, model=model, precision=PrecisionConfig(dtype=dtype))
    return loss_and_gradients(config, torch.get_default_device())


@pytest.mark.parametrize("name", MODELS)
def test_models_of_kernels_equal_plain_torch(name):
    results, exact = (run_layer(dtype, MODELS[name]) for dtype in ("fp32", "fp64"))
    assert all(relative_error(x, y) <= 3e-6 for x, y in zip(results, exact, strict=True))

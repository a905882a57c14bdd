"""SwiGLU and norms stored in FP8 only: the bits of quantizing the wide results, in whole models
too."""

import dataclasses

import pytest
import torch
from parity_configs import config_of
from whole_stage import loss_and_gradients

from megatron5d import kernels
from megatron5d.config.schema import RecomputeConfig
from megatron5d.kernels.norm import norm_reference
from megatron5d.phases import activations
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.precision import fp8_recipes as fp8
from megatron5d.precision.fp8_tensor import Fp8Tensor
from megatron5d.precision.gemm import PLAIN, ExpertGemms, Gemms, gemms_of
from megatron5d.topology.shard_spec import state_of

EPS = 1e-5


def norm_and_input(x, weight, bias=None):
    """The reference, because torch's norms round differently on a CPU."""
    return norm_reference(x, weight, bias, eps=EPS, centered=bias is not None), x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_operations(dtype, powers_of_two):
    torch.manual_seed(0)
    gemms, expert_gemms = fp8.BlockwiseGemms(powers_of_two), fp8.BlockwiseExpertGemms(powers_of_two)
    shapes = (5, 3, 400), (5, 3, 200), (200,), (200,), (5, 400)
    gate_up, x, weight, bias, rows = (torch.randn(s).to(dtype).requires_grad_() for s in shapes)
    probs = torch.rand(5).requires_grad_()
    cases = [  # outputs in FP8, wide outputs, inputs
        ((gemms.activate(gate_up, "swiglu"),), (kernels.activate(gate_up, "swiglu"),), (gate_up,)),
        (
            (expert_gemms.activate(rows, probs, "swiglu"),),
            (kernels.activate(rows, "swiglu", probs),),
            (rows, probs),
        ),
        (gemms.norm(x, weight, None, EPS), norm_and_input(x, weight), (x, weight)),
        (gemms.norm(x, weight, bias, EPS), norm_and_input(x, weight, bias), (x, weight, bias)),
    ]
    for outputs, wide_outputs, inputs in cases:
        (y, *stream), (wide, *wide_stream) = outputs, wide_outputs
        assert isinstance(y, Fp8Tensor) and (y.shape, y.dtype) == (wide.shape, wide.dtype)
        assert all(map(torch.equal, stream, wide_stream)), "the stream is the norm's input"
        operand, expected = gemms.operand(y.detach()), gemms.operand(wide.detach())
        assert all(torch.equal(a.double(), b.double()) for a, b in zip(operand, expected))
        assert [a.shape for a in operand] == [b.shape for b in expected]
        dy = [torch.randn(wide.shape).to(dtype) for _ in outputs]
        grads, wide_grads = (
            torch.autograd.grad(out, inputs, dy[0], retain_graph=True) for out in (y, wide)
        )
        assert all(map(torch.equal, grads, wide_grads))
        grads, wide_grads = (
            torch.autograd.grad(results, inputs, dy) for results in (outputs, wide_outputs)
        )
        torch.testing.assert_close(grads, wide_grads)
    for result in (gemms.activate(x, "gelu"), expert_gemms.activate(rows, probs, "gelu")):
        assert type(result) is torch.Tensor


def new_fp8_tensor(*shape, device="cpu"):
    x, weight = torch.randn(shape, device=device), torch.ones(shape[-1], device=device)
    return fp8.BlockwiseGemms(True).norm(x, weight, None, EPS)[0]


@pytest.mark.parametrize(
    "operation",
    [lambda y: y + 1, torch.clone, lambda y: y[0], lambda y: y.view(-1), lambda y: y.mT, list],
)
def test_other_operations_are_rejected(operation):
    with pytest.raises(RuntimeError, match="only FP8 GEMMs read it"):
        operation(new_fp8_tensor(5, 3, 400))


def test_views_and_detached_tensors_share_the_memory():
    y = new_fp8_tensor(5, 3, 400)
    with MemoryWatch() as watch:
        flat = y.view(15, 400).detach()
        assert (flat.shape, flat.scales.shape) == ((15, 400), (15, 4)) and watch.peak_bytes == 0
        for name in ("qdata", "scales"):
            assert getattr(flat, name).data_ptr() == getattr(y, name).data_ptr()
        other = new_fp8_tensor(4, 256, device="meta")
        live_bytes = watch.live_bytes
        del other
    assert live_bytes >= 4 * 256 + 4 * 2 * 4, "the inner tensors are counted"


def test_weights_with_different_gemms_read_their_input_wide():
    gemms, weights = fp8.BlockwiseGemms(True), [torch.zeros(2, 2) for _ in range(3)]
    for weight in weights[:2]:
        state_of(weight).gemms = gemms
    assert gemms_of(*weights[:2]) is gemms and gemms_of(*weights) is PLAIN


MODELS = {
    "dense": {},
    "mixture": {
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 144,
        "shared_ffn_hidden_size": 48,
    },
    "latent": {"attention": "mla", "q_lora_rank": 32, "kv_lora_rank": 32, "hidden_size": 144},
    "latent, plain queries": {"attention": "mla", "kv_lora_rank": 32, "norm": "layernorm"},
}
RECOMPUTED = {
    "nothing": RecomputeConfig(),
    "parts": RecomputeConfig("selective", ["norm", "activation"]),
    "around": RecomputeConfig("selective", ["qkv", "mlp"]),
    "host": RecomputeConfig(
        "selective", ["qkv", "mlp"], offload=["attention", "mlp"], offload_min_bytes=0
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_equal_those_of_two_passes(model, monkeypatch):
    """In bf16, whatever is recomputed or offloaded; and some part keeps an Fp8Tensor."""
    base = config_of("llama_gqa", gbs=2, mbs=2)
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=2, vocab_size=32, **MODELS[model]),
        train=dataclasses.replace(base.train, seq_len=24),
        precision=dataclasses.replace(base.precision, dtype="bf16", fp8="blockwise"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(fp8.BlockwiseGemms, "norm", Gemms.norm)
        patch.setattr(fp8.BlockwiseGemms, "activate", Gemms.activate)
        patch.setattr(fp8.BlockwiseExpertGemms, "activate", ExpertGemms.activate)
        expected = loss_and_gradients(config)
    assert all(tensor.isfinite().all() for tensor in expected)
    wrappers, original = [], activations._Wrapper.__init__
    monkeypatch.setattr(
        activations._Wrapper, "__init__", lambda *args: (wrappers.append(1), original(*args))[1]
    )
    for name, recompute in RECOMPUTED.items():
        results = loss_and_gradients(dataclasses.replace(config, recompute=recompute))
        assert all(map(torch.equal, expected, results)), name
    assert wrappers, "a part around a GEMM keeps the FP8 tensor that it reads"

"""SwiGLU and norms made in FP8 at once: the bits of making them wide and quantising them, in whole
models too."""

import dataclasses

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from whole_stage import WholeStage

from megatron5d import kernels
from megatron5d.config.schema import RecomputeConfig
from megatron5d.kernels.plain_norm import layer_norm_reference, rms_norm_reference
from megatron5d.model.gpt import GPT
from megatron5d.phases import recompute as activations
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.precision import fp8_recipes as fp8
from megatron5d.precision.fp8_tensor import Fp8Tensor
from megatron5d.precision.gemm import PLAIN, ExpertGemms, Gemms, gemms_of
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import state_of
from megatron5d.train.build import sizes_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("powers_of_two", [True, False])
def test_operations_alone(dtype, powers_of_two):
    torch.manual_seed(0)
    gemms, of_experts = fp8.BlockwiseGemms(powers_of_two), fp8.BlockwiseExpertGemms(powers_of_two)
    sizes = (5, 3, 400), (5, 3, 200), (200,), (200,)
    gate_up, x, weight, bias = (torch.randn(size).to(dtype).requires_grad_() for size in sizes)
    row, probs = torch.randn(5, 400).to(dtype).requires_grad_(), torch.rand(5).requires_grad_()
    weighted = of_experts.activate(row, probs, "swiglu"), kernels.activate(row, "swiglu", probs)
    scaled = rms_norm_reference(x, weight, 1e-5)  # what runs on a CPU rounds otherwise
    centered = layer_norm_reference(x, weight, bias, 1e-5)
    cases = [
        ((gemms.activate(gate_up, "swiglu"),), (kernels.activate(gate_up, "swiglu"),), (gate_up,)),
        ((weighted[0],), (weighted[1],), (row, probs)),
        (gemms.rms_norm(x, weight, 1e-5), (scaled, x), (x, weight)),
        (gemms.layer_norm(x, weight, bias, 1e-5), (centered, x), (x, weight, bias)),
    ]
    for (eight, *ours_beside), (wide, *theirs_beside), inputs in cases:
        assert isinstance(eight, Fp8Tensor) and (eight.shape, eight.dtype) == (
            wide.shape,
            wide.dtype,
        )
        for got, want in zip(
            gemms.operand(eight.detach()), gemms.operand(wide.detach()), strict=True
        ):
            assert got.shape == want.shape and torch.equal(got.double(), want.double())
        assert all(map(torch.equal, ours_beside, theirs_beside)), (
            "the stream that a norm hands on is its input"
        )
        dy = [torch.randn(wide.shape).to(dtype) for _ in range(1 + len(ours_beside))]
        ours, theirs = (
            torch.autograd.grad(y, inputs, dy[0], retain_graph=True) for y in (eight, wide)
        )
        assert all(map(torch.equal, ours, theirs))
        ours = torch.autograd.grad([eight, *ours_beside], inputs, dy)
        torch.testing.assert_close(ours, torch.autograd.grad([wide, *theirs_beside], inputs, dy))
        for mistake in (
            lambda y: y + 1,
            torch.clone,
            lambda y: y[0],
            lambda y: y.view(-1),
            lambda y: y.mT,
            list,
        ):
            with pytest.raises(RuntimeError, match="only FP8 GEMMs read it"):
                mistake(eight.detach())
    assert (
        type(gemms.activate(x, "gelu"))
        is type(of_experts.activate(row, probs, "gelu"))
        is torch.Tensor
    )


def test_views_and_detached_copies_share_the_memory():
    y = fp8.BlockwiseGemms(True).rms_norm(torch.randn(5, 3, 400), torch.ones(400), 1e-5)[0]
    with MemoryWatch() as watch:
        flat = y.view(15, 400).detach()
        assert (flat.shape, flat.scales.shape) == ((15, 400), (15, 4)) and watch.peak_bytes == 0
        for name in ("qdata", "scales"):
            assert getattr(flat, name).data_ptr() == getattr(y, name).data_ptr()
        more = fp8.BlockwiseGemms(True).rms_norm(
            torch.empty(4, 256, device="meta"), torch.ones(256, device="meta"), 1e-5
        )
        kept = watch.live_bytes
        del more
    assert kept >= 4 * 256 + 4 * 2 * 4, "the inner tensors are counted"


def test_gemms_of_one_input_agree_or_take_it_wide():
    gemms, weights = (
        fp8.BlockwiseGemms(True),
        [torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(3)],
    )
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
KEPT = {
    "all": RecomputeConfig(),
    "parts": RecomputeConfig("selective", ["norm", "activation"]),
    "around": RecomputeConfig("selective", ["qkv", "mlp"]),
    "host": RecomputeConfig(
        "selective", ["qkv", "mlp"], offload=["attention", "mlp"], offload_min_bytes=0
    ),
}


def loss_and_gradients(config):
    model = GPT(config, build_mesh(sizes_of(config, 1)))
    model.initialize(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if model.balancer is not None:
        model.balancer.start_step(1, torch.tensor(48.0), Axis("dp_cp"), False)
    stage, batch = WholeStage(model.phases), micro_batch(config, make_rows(config, 1))
    loss = stage.forward(0, None, batch)
    stage.backward_input(0, torch.tensor([1.0, 0.0]))
    stage.backward_weight(0)
    return [loss, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("model", MODELS)
def test_models_are_those_of_two_passes(model, monkeypatch):
    """With bf16 around, whatever is recomputed or waits on the host; and Fp8Tensors are there at
    all."""
    base = config_of("llama_gqa", gbs=2, mbs=2)
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=2, vocab_size=32, **MODELS[model]),
        train=dataclasses.replace(base.train, seq_len=24),
        precision=dataclasses.replace(base.precision, dtype="bf16", fp8="blockwise"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(fp8.BlockwiseGemms, "rms_norm", Gemms.rms_norm)
        patch.setattr(fp8.BlockwiseGemms, "layer_norm", Gemms.layer_norm)
        patch.setattr(fp8.BlockwiseGemms, "activate", Gemms.activate)
        patch.setattr(fp8.BlockwiseExpertGemms, "activate", ExpertGemms.activate)
        wide = loss_and_gradients(config)
    assert all(each.isfinite().all() for each in wide)
    wrapped, start = [], activations._Wrapper.__init__
    monkeypatch.setattr(
        activations._Wrapper, "__init__", lambda *args: (wrapped.append(1), start(*args))[1]
    )
    for name, recompute in KEPT.items():
        eight = loss_and_gradients(dataclasses.replace(config, recompute=recompute))
        assert all(map(torch.equal, wide, eight)), name
    assert wrapped, "a part around a GEMM keeps the FP8 tensor that it reads"

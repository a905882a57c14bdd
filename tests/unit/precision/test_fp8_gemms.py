"""The FP8 GEMMs of linear layers and experts against quantisation and sums written out by hand."""

import dataclasses

import pytest
import torch

from megatron5d.config.derived import matrices, quantized_matrices
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.expert_parallel.experts import Experts
from megatron5d.model.gpt import GPT
from megatron5d.precision import fp8_recipes as fp8
from megatron5d.precision.gemm import (
    Gemms,
    expert_gemms_of,
    forget_copies,
    gemms_of,
)
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of, state_of


def quantised(block, largest, dtype, powers_of_two):
    amax = block.float().abs().max()
    scale = amax / largest if amax > 0 else torch.tensor(1.0)
    if powers_of_two and amax > 0:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return (block.float() * (1 / scale)).clamp(-largest, largest).to(dtype).float() * scale


def grid(x, rows, columns, powers_of_two):
    """Blocks of rows × columns through e4m3 and back."""
    y = torch.empty(x.shape)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            block = x[i : i + rows, j : j + columns]
            y[i : i + rows, j : j + columns] = quantised(
                block, 448.0, torch.float8_e4m3fn, powers_of_two
            )
    return y


def by_hand(recipe, powers_of_two, x, weight, dy):
    """y, dx, dW in float32 of x [t, in], W [out, in], dy [t, out]."""
    if recipe == "tensorwise":
        x, weight = (
            quantised(each, 448.0, torch.float8_e4m3fn, powers_of_two) for each in (x, weight)
        )
        dy = quantised(dy, 57344.0, torch.float8_e5m2, powers_of_two)
        return x @ weight.t(), dy @ weight, dy.t() @ x
    x, dy, weight = (
        grid(each, rows, 128, powers_of_two) for each, rows in ((x, 1), (dy, 1), (weight, 128))
    )
    transposed_dy, transposed_x = (grid(each.t(), 1, 128, powers_of_two) for each in (dy, x))
    return x @ weight.t(), dy @ weight, transposed_dy @ transposed_x.t()


def recipe_of(name, powers_of_two):
    if name == "blockwise":
        return fp8.BlockwiseGemms(powers_of_two), fp8.BlockwiseExpertGemms(powers_of_two)
    return (
        fp8.TensorwiseGemms(powers_of_two, lambda amax: amax, lambda amax: amax),
        fp8.TensorwiseExpertGemms(powers_of_two, lambda amax: amax),
    )


RECIPES = [("blockwise", True), ("blockwise", False), ("tensorwise", True), ("tensorwise", False)]


@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_linear_layer_is_the_emulation(recipe, powers_of_two, split, kind):
    torch.manual_seed(0)
    size = {"dtype": torch.bfloat16, "device": "cpu"}
    if kind == "column":
        layer = ColumnParallelLinear(208, [(1, 144)], "up", Axis("tp"), **size)
    else:
        layer = RowParallelLinear(208, 144, "down", Axis("tp"), **size)
    layer.weight.data.normal_().mul_(torch.logspace(-2, 2, 208))
    state_of(layer.weight).gemms = recipe_of(recipe, powers_of_two)[0]
    state_of(layer.weight).main_grad = torch.randn(144, 208)
    before = state_of(layer.weight).main_grad.clone()
    x = (torch.randn(50, 3, 208) * torch.logspace(2, -2, 208)).bfloat16().requires_grad_()
    dy = torch.randn(50, 3, 144).bfloat16()
    kept, waiting = [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(x, waiting.append if split else lambda closure: closure())
    y.backward(dy)
    assert len(waiting) == split and (
        torch.equal(state_of(layer.weight).main_grad, before) == split
    )
    for closure in waiting:
        closure()
    want = by_hand(
        recipe, powers_of_two, x.detach().flatten(0, 1), layer.weight.detach(), dy.flatten(0, 1)
    )
    assert torch.equal(y.detach().flatten(0, 1), want[0].bfloat16())
    assert torch.equal(x.grad.flatten(0, 1), want[1].bfloat16())
    torch.testing.assert_close(
        state_of(layer.weight).main_grad, before + want[2], rtol=1e-5, atol=1e-3
    )
    # FP8 values and their scales
    assert sum(t.numel() * t.element_size() for t in kept) <= 50 * 3 * (208 + 8)


@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
def test_experts_are_the_emulation_expert_by_expert(recipe, powers_of_two):
    torch.manual_seed(0)
    config = ModelConfig(num_experts=3, hidden_size=144, moe_ffn_hidden_size=80, activation="gelu")
    experts = Experts(config, "experts", Axis("ep"), Axis("etp"), dtype=torch.float32, device="cpu")
    counts = [150, 0, 7]
    offsets = torch.tensor([0, *counts]).cumsum(0)
    for parameter in experts.parameters():
        parameter.data.normal_()
        state_of(parameter).gemms = recipe_of(recipe, powers_of_two)[1]
        state_of(parameter).main_grad = torch.zeros_like(parameter)
    x, dy = torch.randn(157, 144).requires_grad_(), torch.randn(157, 144)
    weights, waiting = torch.rand(157).requires_grad_(), []
    experts(x, weights, offsets, waiting.append).backward(dy)
    for closure in waiting:
        closure()
    for e, (first, last) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        if first == last:
            assert (
                not state_of(experts.up).main_grad[e].any()
                and not state_of(experts.down).main_grad[e].any()
            )
            continue
        rows = slice(first, last)
        inner = by_hand(
            recipe,
            powers_of_two,
            x.detach()[rows],
            experts.up[e].detach(),
            torch.zeros(last - first, 80),
        )[0]
        inner.requires_grad_()
        mine = weights.detach()[rows].requires_grad_()
        active = torch.nn.functional.gelu(inner) * mine[:, None]
        _, dactive, ddown = by_hand(
            recipe, powers_of_two, active.detach(), experts.down[e].detach(), dy[rows]
        )
        dinner, dmine = torch.autograd.grad(active, (inner, mine), dactive)
        _, dx, dup = by_hand(
            recipe, powers_of_two, x.detach()[rows], experts.up[e].detach(), dinner
        )
        # a gelu that differs in the last bit may move a value to its neighbour
        close = {"rtol": 1e-3, "atol": 1e-3}
        torch.testing.assert_close(state_of(experts.down).main_grad[e], ddown, **close)
        torch.testing.assert_close(x.grad[rows], dx, **close)
        torch.testing.assert_close(state_of(experts.up).main_grad[e], dup, **close)
        torch.testing.assert_close(weights.grad[rows], dmine, **close)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
def test_experts_that_no_token_chose(recipe, powers_of_two, activation):
    """A micro-batch may leave a rank's experts without a row: the step continues, and their
    gradients are zero."""
    config = ModelConfig(
        num_experts=3, hidden_size=144, moe_ffn_hidden_size=80, activation=activation
    )
    experts = Experts(config, "experts", Axis("ep"), Axis("etp"), dtype=torch.float32, device="cpu")
    for parameter in experts.parameters():
        parameter.data.normal_()
        state_of(parameter).gemms = recipe_of(recipe, powers_of_two)[1]
        state_of(parameter).main_grad = torch.zeros_like(parameter)
    x, weights, waiting = torch.randn(0, 144).requires_grad_(), torch.rand(0).requires_grad_(), []
    experts(x, weights, torch.zeros(4, dtype=torch.int64), waiting.append).backward(
        torch.randn(0, 144)
    )
    for closure in waiting:
        closure()
    assert x.grad.shape == (0, 144) and weights.grad.shape == (0,)
    assert not any(state_of(parameter).main_grad.any() for parameter in experts.parameters())


def test_weights_are_quantised_once_until_they_change():
    weight = torch.nn.Parameter(torch.randn(128, 128))
    gemms, made = fp8.BlockwiseGemms(True), []
    pairs = [gemms.copies(weight) for _ in range(2)]
    made += [pairs[0] is pairs[1]]
    with torch.no_grad():
        weight.mul_(2)  # through the parameter: noticed
    pairs.append(gemms.copies(weight))
    weight.data.mul_(2)  # through its memory: must be said
    assert gemms.copies(weight) is pairs[2]
    forget_copies([weight])
    pairs.append(gemms.copies(weight))
    assert made == [True]
    for factor, pair in zip((2, 4), pairs[2:]):
        assert torch.equal(pair.plain.dequantize(), factor * pairs[0].plain.dequantize())
        assert torch.equal(pair.transposed.dequantize(), pair.plain.dequantize().t())


MODELS = {
    "dense": {},
    "mixture": {"num_experts": 4, "shared_ffn_hidden_size": 32, "first_k_dense": 1},
    "latent": {"attention": "mla", "q_lora_rank": 16, "kv_lora_rank": 16, "hidden_size": 128},
    "latent, plain queries": {
        "attention": "mla",
        "kv_lora_rank": 16,
        "num_experts": 4,
        "moe_layers": [0],
    },
}


@pytest.mark.parametrize("model", MODELS)
def test_every_matrix_of_the_layers_and_no_other(model):
    precision = PrecisionConfig(
        fp8="blockwise", fp8_skip_last=1, fp8_exclude=["*.attention.out", "layers.0.*.up"]
    )
    config = Config(model=ModelConfig(num_layers=3, **MODELS[model]), precision=precision)
    gpt = GPT(config, build_mesh(resolve(1), 0), device="meta")
    names = {spec_of(p).name.removesuffix(".weight") for p in gpt.parameters() if p.ndim >= 2}
    layers = {name for name in names if name.startswith("layers.") and not name.endswith("router")}
    if not config.model.reduces_latent_gradients:  # what tp sums before these is not rounded
        layers = {
            name for name in layers if not name.endswith(("attention.q_down", "attention.kv_down"))
        }
    assert layers == set(matrices(config.model))
    chosen = set()
    for p in gpt.parameters():
        expert = spec_of(p).expert
        gemms = expert_gemms_of(p) if expert else gemms_of(p)
        if fp8.is_quantized(p):
            assert isinstance(gemms, fp8.BlockwiseExpertGemms if expert else Gemms)
            chosen.add(spec_of(p).name.removesuffix(".weight"))
    assert chosen == set(quantized_matrices(config))
    left_out = {
        name for name in layers if name.startswith("layers.2.") or name.endswith("attention.out")
    }
    left_out |= {name for name in layers if name.startswith("layers.0.") and name.endswith(".up")}
    assert chosen == layers - left_out and chosen
    plain = dataclasses.replace(config, precision=PrecisionConfig())
    model = GPT(plain, build_mesh(resolve(1), 0), device="meta")
    assert not any(fp8.is_quantized(p) for p in model.parameters())


def test_rows_past_the_last_expert_are_padding():
    x, offsets = torch.randn(9, 16).bfloat16(), torch.tensor([0, 2, 6])
    gemms = fp8.TensorwiseExpertGemms(True, lambda amax: amax)
    values, scales = gemms.operand(x, offsets)
    alone, own = gemms.operand(x[:2], torch.tensor([0, 2, 2]))
    assert (
        values.shape == x.shape
        and torch.equal(values[:2].float(), alone.float())
        and torch.equal(scales[:2], own)
    )


def test_an_experts_scale_is_that_of_all_its_parts():
    """Other ranks hold larger elements of the same experts: as if all were four times as large as
    here."""
    weight = torch.nn.Parameter(torch.randn(2 * 128, 128))
    here, everywhere = (fp8.TensorwiseExpertGemms(True, lambda amax, n=n: amax * n) for n in (1, 4))
    ours = here.copies(weight, 2).plain.scales
    forget_copies([weight])
    assert torch.equal(everywhere.copies(weight, 2).plain.scales, 4 * ours)

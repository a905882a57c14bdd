"""The FP8 GEMMs of linear layers and experts against quantization and sums written by hand."""

import dataclasses

import pytest
import torch

from megatron5d.config.derived import matrices, quantized_matrices
from megatron5d.config.schema import Config, ModelConfig, PrecisionConfig
from megatron5d.expert_parallel.experts import Experts
from megatron5d.model.gpt import GPT
from megatron5d.precision import fp8_recipes as fp8
from megatron5d.precision.gemm import Gemms, expert_gemms_of, forget_copies, gemms_of
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of, state_of


def quantized(block, powers_of_two, dtype=torch.float8_e4m3fn):
    """A block converted to FP8 with one scale, and back."""
    largest, amax = torch.finfo(dtype).max, block.float().abs().max()
    scale = amax / largest if amax > 0 else torch.tensor(1.0)
    if powers_of_two and amax > 0:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    return (block.float() * (1 / scale)).clamp(-largest, largest).to(dtype).float() * scale


def quantized_blocks(x, rows, powers_of_two):
    """Blocks of rows × 128 converted to FP8 and back."""
    bands = [
        torch.cat([quantized(block, powers_of_two) for block in band.split(128, 1)], 1)
        for band in x.split(rows)
    ]
    return torch.cat(bands)


def by_hand(recipe, powers_of_two, x, weight, dy):
    """y, dx, dW in float32 of x [t, in], W [out, in], dy [t, out]."""
    if recipe == "tensorwise":
        x, weight = quantized(x, powers_of_two), quantized(weight, powers_of_two)
        dy = quantized(dy, powers_of_two, torch.float8_e5m2)
        return x @ weight.t(), dy @ weight, dy.t() @ x
    weight = quantized_blocks(weight, 128, powers_of_two)
    x, dy = (quantized_blocks(rows, 1, powers_of_two) for rows in (x, dy))
    dy_t, x_t = (quantized_blocks(rows.t(), 1, powers_of_two) for rows in (dy, x))
    return x @ weight.t(), dy @ weight, dy_t @ x_t.t()


def recipe_of(name, powers_of_two):
    """GEMMs of linear layers, and of experts."""
    if name == "blockwise":
        return fp8.BlockwiseGemms(powers_of_two), fp8.BlockwiseExpertGemms(powers_of_two)
    return (
        fp8.TensorwiseGemms(powers_of_two, lambda amax: amax, lambda amax: amax),
        fp8.TensorwiseExpertGemms(powers_of_two, lambda amax: amax),
    )


RECIPES = [("blockwise", True), ("blockwise", False), ("tensorwise", True), ("tensorwise", False)]


@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_linear_layers_equal_the_emulation(recipe, powers_of_two, is_split, kind):
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cpu"}
    if kind == "column":
        layer = ColumnParallelLinear(208, [(1, 144)], "up", Axis("tp"), **options)
    else:
        layer = RowParallelLinear(208, 144, "down", Axis("tp"), **options)
    layer.weight.data.normal_().mul_(torch.logspace(-2, 2, 208))
    state = state_of(layer.weight)
    state.gemms, state.main_grad = recipe_of(recipe, powers_of_two)[0], torch.randn(144, 208)
    before = state.main_grad.clone()
    x = (torch.randn(50, 3, 208) * torch.logspace(2, -2, 208)).bfloat16().requires_grad_()
    dy, saved, deferred = torch.randn(50, 3, 144).bfloat16(), [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x, deferred.append if is_split else lambda closure: closure())
    y.backward(dy)
    assert len(deferred) == is_split and torch.equal(state.main_grad, before) == is_split
    for closure in deferred:
        closure()
    rows, weight = x.detach().flatten(0, 1), layer.weight.detach()
    exact_y, dx, dweight = by_hand(recipe, powers_of_two, rows, weight, dy.flatten(0, 1))
    assert torch.equal(y.detach().flatten(0, 1), exact_y.bfloat16())
    assert torch.equal(x.grad.flatten(0, 1), dx.bfloat16())
    torch.testing.assert_close(state.main_grad, before + dweight, rtol=1e-5, atol=1e-3)
    # FP8 values and their scales
    assert sum(t.nbytes for t in saved) <= 50 * 3 * (208 + 8)


def run_experts(recipe, powers_of_two, activation, counts):
    """Three experts, their input, row weights and output gradient, after a backward."""
    torch.manual_seed(0)
    config = ModelConfig(
        num_experts=3, hidden_size=144, moe_ffn_hidden_size=80, activation=activation
    )
    experts = Experts(config, "experts", Axis("ep"), Axis("etp"), dtype=torch.float32, device="cpu")
    for parameter in experts.parameters():
        parameter.data.normal_()
        state_of(parameter).gemms = recipe_of(recipe, powers_of_two)[1]
        state_of(parameter).main_grad = torch.zeros_like(parameter)
    num_rows, deferred = sum(counts), []
    x, dy = torch.randn(num_rows, 144).requires_grad_(), torch.randn(num_rows, 144)
    weights = torch.rand(num_rows).requires_grad_()
    experts(x, weights, torch.tensor([0, *counts]).cumsum(0), deferred.append).backward(dy)
    for closure in deferred:
        closure()
    return experts, x, weights, dy


@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
def test_experts_equal_the_emulation(recipe, powers_of_two):
    counts, first = [150, 0, 7], 0
    experts, *tensors = run_experts(recipe, powers_of_two, "gelu", counts)
    up_grad, down_grad = (state_of(p).main_grad for p in (experts.up, experts.down))
    for e, count in enumerate(counts):
        x, weights, dy = (t.detach()[first : first + count] for t in tensors)
        dx, dweights = (t.grad[first : first + count] for t in tensors[:2])
        first += count
        if count == 0:
            assert not up_grad[e].any() and not down_grad[e].any()
            continue
        up, down = experts.up[e].detach(), experts.down[e].detach()
        inner = by_hand(recipe, powers_of_two, x, up, torch.zeros(count, 80))[0].requires_grad_()
        active = torch.nn.functional.gelu(inner) * weights.requires_grad_()[:, None]
        _, dactive, ddown = by_hand(recipe, powers_of_two, active.detach(), down, dy)
        dinner, exact_dweights = torch.autograd.grad(active, (inner, weights), dactive)
        _, exact_dx, dup = by_hand(recipe, powers_of_two, x, up, dinner)
        # A GELU that differs in the last bit may round to another FP8 value.
        for grad, expected in (
            (down_grad[e], ddown),
            (dx, exact_dx),
            (up_grad[e], dup),
            (dweights, exact_dweights),
        ):
            torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize(("recipe", "powers_of_two"), RECIPES)
def test_experts_without_rows(recipe, powers_of_two, activation):
    """A micro-batch may leave a rank's experts without a row; their gradients are zero."""
    experts, x, weights, _ = run_experts(recipe, powers_of_two, activation, [0, 0, 0])
    assert x.grad.shape == (0, 144) and weights.grad.shape == (0,)
    assert not any(state_of(parameter).main_grad.any() for parameter in experts.parameters())


def test_weights_are_quantized_once_until_they_change():
    weight, gemms = torch.nn.Parameter(torch.randn(128, 128)), fp8.BlockwiseGemms(True)
    pairs = [gemms.copies(weight)]
    assert gemms.copies(weight) is pairs[0]
    with torch.no_grad():
        weight.mul_(2)  # a change through the parameter is noticed
    pairs.append(gemms.copies(weight))
    weight.data.mul_(2)  # one through its memory must be declared
    assert gemms.copies(weight) is pairs[1]
    forget_copies([weight])
    pairs.append(gemms.copies(weight))
    for factor, pair in zip((1, 2, 4), pairs):
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
    if not config.model.reduces_latent_gradients:  # tp sums before these, in full precision
        layers = {
            name for name in layers if not name.endswith(("attention.q_down", "attention.kv_down"))
        }
    assert layers == set(matrices(config.model))
    in_fp8 = set()
    for p in filter(fp8.is_quantized, gpt.parameters()):
        is_expert = spec_of(p).expert
        gemms = expert_gemms_of(p) if is_expert else gemms_of(p)
        assert isinstance(gemms, fp8.BlockwiseExpertGemms if is_expert else Gemms)
        in_fp8.add(spec_of(p).name.removesuffix(".weight"))
    assert in_fp8 == set(quantized_matrices(config))
    excluded = {
        name
        for name in layers
        if name.startswith("layers.2.")
        or name.endswith("attention.out")
        or (name.startswith("layers.0.") and name.endswith(".up"))
    }
    assert in_fp8 == layers - excluded and in_fp8
    plain = dataclasses.replace(config, precision=PrecisionConfig())
    gpt = GPT(plain, build_mesh(resolve(1), 0), device="meta")
    assert not any(fp8.is_quantized(p) for p in gpt.parameters())


def test_rows_past_the_last_expert_are_padding():
    x, gemms = torch.randn(9, 16).bfloat16(), fp8.TensorwiseExpertGemms(True, lambda amax: amax)
    values, scales = gemms.operand(x, torch.tensor([0, 2, 6]))
    expert_values, expert_scales = gemms.operand(x[:2], torch.tensor([0, 2, 2]))
    assert values.shape == x.shape and torch.equal(scales[:2], expert_scales)
    assert torch.equal(values[:2].float(), expert_values.float())


def test_an_experts_scale_is_that_of_all_its_parts():
    """Other ranks hold elements of the same experts that are four times as large."""
    weight = torch.nn.Parameter(torch.randn(2 * 128, 128))
    alone, reduced = (fp8.TensorwiseExpertGemms(True, lambda amax, n=n: amax * n) for n in (1, 4))
    scales = alone.copies(weight, 2).plain.scales
    forget_copies([weight])
    assert torch.equal(reduced.copies(weight, 2).plain.scales, 4 * scales)

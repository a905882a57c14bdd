"""Choices and weights compared with plain loops, and with the routers of transformers."""

import dataclasses

import pytest
import torch

from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.router import (
    Jitter,
    Router,
    choose_experts,
    in_best_groups,
    scores_of,
    weights_of,
)
from megatron5d.topology.axis import Axis
from megatron5d.topology.init_weights import initialize
from megatron5d.topology.shard_spec import state_of

E, K, H = 12, 4, 16
BASE = ModelConfig(hidden_size=H, num_experts=E, top_k=K)


def logits(n=50, seed=0):
    return torch.randn(n, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_router(dtype, biased=False):
    router = Router(BASE, "r", Axis("tp"), biased=biased, owner=True, dtype=dtype, device="cpu")
    initialize(router.weight, 1)
    return router


def choose_in_python(scores, bias, config):
    """One token at a time."""
    choices = []
    for row in scores.tolist():
        ranked = [(s + b, -e) for e, (s, b) in enumerate(zip(row, bias))]
        size = E // config.num_groups
        groups = [ranked[g * size : (g + 1) * size] for g in range(config.num_groups)]
        group_scores = [
            max(group)[0] if config.group_score == "max" else sum(sorted(x for x, _ in group)[-2:])
            for group in groups
        ]
        order = sorted(range(config.num_groups), key=lambda g: (-group_scores[g], g))
        allowed = [entry for g in order[: config.top_groups] for entry in groups[g]]
        choices.append([-e for _, e in sorted(allowed, reverse=True)[: config.top_k]])
    return choices


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("groups", "top", "group_score"),
    [(1, 1, "max"), (4, 2, "max"), (4, 3, "top2_sum"), (3, 3, "max")],
)
@pytest.mark.parametrize("biased", [False, True])
def test_choices(score, groups, top, group_score, biased):
    config = dataclasses.replace(
        BASE, num_groups=groups, top_groups=top, group_score=group_score, router_score=score
    )
    bias = torch.randn(E, dtype=torch.float64) * 0.3 if biased else None
    scores = scores_of(logits(), score)
    expected = choose_in_python(scores, bias.tolist() if biased else [0.0] * E, config)
    assert choose_experts(scores, config, bias).tolist() == expected


def test_equal_scores_choose_the_lower_expert():
    assert choose_experts(torch.zeros(2, E), BASE).tolist() == [[0, 1, 2, 3]] * 2


def test_negative_scores_of_excluded_groups_are_never_chosen():
    """A bias can make every allowed score negative; an excluded group must not win with zeros."""
    config = dataclasses.replace(BASE, num_groups=4, top_groups=2)
    bias = torch.full((E,), -5.0, dtype=torch.float64)
    scores = scores_of(logits(), "sigmoid")
    experts = choose_experts(scores, config, bias)
    assert in_best_groups(scores + bias, config).gather(1, experts).all()


@pytest.mark.parametrize("norm", [False, True])
def test_weights(norm):
    config = dataclasses.replace(BASE, norm_topk_prob=norm, routed_scaling_factor=2.5)
    scores = torch.softmax(logits(), -1)
    experts = choose_experts(scores, config)
    expected = scores.gather(1, experts)
    expected = 2.5 * (expected / expected.sum(1, keepdim=True) if norm else expected)
    torch.testing.assert_close(weights_of(scores, experts, config), expected)
    assert not weights_of(torch.zeros_like(scores), experts, config).any(), "sigmoids may all be 0"


def test_a_bf16_model_routes_in_fp32():
    router = make_router(torch.bfloat16, biased=True)
    x = torch.randn(5, H, dtype=torch.bfloat16)
    y = router.logits(x)
    assert y.dtype == router.bias.dtype == torch.float32
    torch.testing.assert_close(y, x.float() @ router.weight.float().t())


def test_a_bf16_routers_gradient_has_the_main_gradients_dtype():
    router = make_router(torch.bfloat16)
    state_of(router.weight).main_grad = torch.zeros(E, H)
    x, dy = torch.randn(5, H).bfloat16().requires_grad_(), torch.randn(5, E)
    router.logits(x).backward(dy)
    torch.testing.assert_close(state_of(router.weight).main_grad, dy.t() @ x.detach().float())


def test_the_weight_gradient_is_deferred():
    router = make_router(torch.float64)
    x = torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    deferred = []
    router.logits(x, deferred.append).square().sum().backward()
    assert router.weight.grad is None and len(deferred) == 1
    with torch.no_grad():
        deferred[0]()
    w, leaf = (t.detach().clone().requires_grad_() for t in (router.weight, x))
    (leaf @ w.t()).square().sum().backward()
    torch.testing.assert_close(router.weight.grad, w.grad)
    torch.testing.assert_close(x.grad, leaf.grad)


def transformers_block(kind):
    transformers = pytest.importorskip("transformers")
    if kind == "qwen3_moe":
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Block

        config = transformers.Qwen3MoeConfig(
            hidden_size=H,
            num_experts=E,
            num_experts_per_tok=K,
            moe_intermediate_size=8,
            norm_topk_prob=True,
        )
    elif kind == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Block

        config = transformers.MixtralConfig(
            hidden_size=H, num_local_experts=E, num_experts_per_tok=K, intermediate_size=8
        )
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE as Block

        config = transformers.DeepseekV3Config(
            hidden_size=H,
            n_routed_experts=E,
            num_experts_per_tok=K,
            moe_intermediate_size=8,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            n_shared_experts=1,
        )
    config._experts_implementation = "eager"
    return Block(config).float()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_layer_computes_what_transformers_computes(kind):
    """Our router and a loop over the experts of transformers, compared with its block."""
    torch.manual_seed(3)
    block = transformers_block(kind)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    config, bias = BASE, None
    if kind == "deepseek_v3":
        block.gate.e_score_correction_bias.normal_(std=0.3)
        bias = block.gate.e_score_correction_bias
        config = dataclasses.replace(
            BASE,
            router_score="sigmoid",
            num_groups=4,
            top_groups=2,
            group_score="top2_sum",
            routed_scaling_factor=2.5,
        )
    x = torch.randn(1, 40, H)
    with torch.no_grad():
        expected = block(x)
        expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
        if kind == "deepseek_v3":
            expected = expected - block.shared_experts(x)[0]
        scores = scores_of(x[0] @ block.gate.weight.t(), config.router_score)
        experts = choose_experts(scores, config, bias)
        weights = weights_of(scores, experts, config)
        y = torch.zeros_like(expected)
        for t in range(40):
            for j in range(K):
                e = experts[t, j]
                gate, up = (block.experts.gate_up_proj[e] @ x[0, t]).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                y[t] += weights[t, j] * (block.experts.down_proj[e] @ inner)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_jitter_has_a_factor_for_each_token_and_feature():
    sample, position = torch.arange(4).repeat_interleave(8), torch.arange(8).repeat(4)
    jitter = Jitter(0.1, seed=1, seq_len=8)

    def factors(layer=0, dtype=torch.float64):
        ones = torch.ones(32, H, dtype=dtype)
        return jitter(ones, f"layers.{layer}.router", sample, position)

    assert factors().unique().numel() == factors().numel() and (factors() - 1).abs().max() <= 0.1
    assert torch.equal(factors(dtype=torch.bfloat16), factors().bfloat16())
    assert not torch.equal(factors(), factors(layer=1))

"""Choices and weights against plain loops, and against transformers' own routers from the same
weights."""

import dataclasses

import pytest
import torch

from megatron5d.config.schema import ModelConfig
from megatron5d.expert_parallel.router import (
    Jitter,
    Router,
    choose,
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


def chosen_by_hand(scores, bias, config):
    """One token at a time, in plain Python."""
    found = []
    for row in scores.tolist():
        ranked = [(s + b, -e) for e, (s, b) in enumerate(zip(row, bias))]
        size = E // config.num_groups
        groups = [ranked[g * size : (g + 1) * size] for g in range(config.num_groups)]
        worth = [
            max(g)[0] if config.group_score == "max" else sum(sorted(x for x, _ in g)[-2:])
            for g in groups
        ]
        best = sorted(range(config.num_groups), key=lambda g: (-worth[g], g))[: config.top_groups]
        allowed = [entry for g in best for entry in groups[g]]
        found.append([-e for _, e in sorted(allowed, reverse=True)[: config.top_k]])
    return found


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("groups", "top", "worth"), [(1, 1, "max"), (4, 2, "max"), (4, 3, "top2_sum"), (3, 3, "max")]
)
@pytest.mark.parametrize("biased", [False, True])
def test_choice(score, groups, top, worth, biased):
    config = dataclasses.replace(
        BASE, num_groups=groups, top_groups=top, group_score=worth, router_score=score
    )
    bias = torch.randn(E, dtype=torch.float64) * 0.3 if biased else None
    scores = scores_of(logits(), score)
    experts = choose(scores, config, bias)
    assert experts.tolist() == chosen_by_hand(
        scores, bias.tolist() if biased else [0.0] * E, config
    )


def test_equal_scores_choose_the_lower_expert():
    assert choose(torch.zeros(2, E), BASE).tolist() == [[0, 1, 2, 3]] * 2


def test_negative_scores_of_excluded_groups_are_never_chosen():
    """A bias can make every allowed score negative; an excluded group must not win with zeros."""
    config = dataclasses.replace(BASE, num_groups=4, top_groups=2)
    bias = torch.full((E,), -5.0, dtype=torch.float64)
    scores = scores_of(logits(), "sigmoid")
    experts = choose(scores, config, bias)
    assert in_best_groups(scores + bias, config).gather(1, experts).all()


@pytest.mark.parametrize("norm", [False, True])
def test_weights(norm):
    config = dataclasses.replace(BASE, norm_topk_prob=norm, routed_scaling_factor=2.5)
    scores = torch.softmax(logits(), -1)
    experts = choose(scores, config)
    picked = torch.stack([scores[t, experts[t]] for t in range(len(scores))])
    expected = 2.5 * (picked / picked.sum(1, keepdim=True) if norm else picked)
    torch.testing.assert_close(weights_of(scores, experts, config), expected)
    assert not weights_of(torch.zeros_like(scores), experts, config).any(), "sigmoids may all be 0"


def test_a_bf16_model_routes_in_fp32():
    router = Router(
        BASE, "r", Axis("tp"), biased=True, owner=True, dtype=torch.bfloat16, device="cpu"
    )
    initialize(router.weight, 1)
    x = torch.randn(5, H, dtype=torch.bfloat16)
    got = router.logits(x)
    assert got.dtype == router.bias.dtype == torch.float32
    torch.testing.assert_close(got, x.float() @ router.weight.float().t())


def test_a_bf16_routers_gradient_is_that_of_its_main_gradients_dtype():
    router = Router(
        BASE, "r", Axis("tp"), biased=False, owner=True, dtype=torch.bfloat16, device="cpu"
    )
    initialize(router.weight, 1)
    state_of(router.weight).main_grad = torch.zeros(E, H)
    x, dy = torch.randn(5, H).bfloat16().requires_grad_(), torch.randn(5, E)
    router.logits(x).backward(dy)
    torch.testing.assert_close(state_of(router.weight).main_grad, dy.t() @ x.detach().float())


def test_the_weight_half_of_the_backward_waits():
    router = Router(
        BASE, "r", Axis("tp"), biased=False, owner=True, dtype=torch.float64, device="cpu"
    )
    initialize(router.weight, 1)
    x = torch.randn(5, H, dtype=torch.float64, requires_grad=True)
    waiting = []
    router.logits(x, waiting.append).square().sum().backward()
    assert router.weight.grad is None and len(waiting) == 1
    with torch.no_grad():
        waiting[0]()
    w, leaf = router.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    (leaf @ w.t()).square().sum().backward()
    torch.testing.assert_close(router.weight.grad, w.grad)
    torch.testing.assert_close(x.grad, leaf.grad)


def theirs(kind):
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
def test_a_whole_layer_gives_what_transformers_gives(kind):
    """Our router and a loop over their experts against their block."""
    torch.manual_seed(3)
    block = theirs(kind)
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
        wanted = block(x)
        wanted = (wanted[0] if isinstance(wanted, tuple) else wanted)[0]
        if kind == "deepseek_v3":
            wanted = wanted - block.shared_experts(x)[0]
        scores = scores_of(x[0] @ block.gate.weight.t(), config.router_score)
        experts = choose(scores, config, bias)
        weights = weights_of(scores, experts, config)
        got = torch.zeros_like(wanted)
        for t in range(40):
            for j in range(K):
                e = experts[t, j]
                gate, up = (block.experts.gate_up_proj[e] @ x[0, t]).chunk(2)
                got[t] += weights[t, j] * (
                    block.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up)
                )
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_jitter_draws_each_token_and_feature_anew():
    sample, position = torch.arange(4).repeat_interleave(8), torch.arange(8).repeat(4)
    ones, jitter = torch.ones(32, H, dtype=torch.float64), Jitter(0.1, seed=1, seq_len=8)
    factors = jitter(ones, "layers.0.router", sample, position)
    assert factors.unique().numel() == factors.numel() and (factors - 1).abs().max() <= 0.1
    assert torch.equal(factors, jitter(ones, "layers.0.router", sample, position))
    assert torch.equal(
        jitter(ones.bfloat16(), "layers.0.router", sample, position), factors.bfloat16()
    )
    assert not torch.equal(factors, jitter(ones, "layers.1.router", sample, position))

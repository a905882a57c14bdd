"""Auxiliary losses and gradients compared with autograd on their formulas; counts; figures."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks

from megatron5d.comm.collectives import Pending
from megatron5d.config.schema import ModelConfig, MoeConfig
from megatron5d.expert_parallel.load_balancing import (
    Balancer,
    Tokens,
    counts_of,
    normalized,
    normalized_backward,
)
from megatron5d.topology.axis import Axis
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh

E, K, B, S = 6, 2, 3, 5
N = B * S


def tokens(real=None):
    order = torch.arange(N)
    return Tokens(order % B, order, real, B)


def logits(seed=0):
    return torch.randn(N, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_balancer(score="softmax", microbatches=4, num_tokens=50.0, figures=False, **moe):
    model = ModelConfig(num_layers=3, num_experts=E, top_k=K, router_score=score)
    balancer = Balancer(model, MoeConfig(**moe), [0, 2], Axis("cp_tp"), Axis("stage"), "cpu")
    count = torch.tensor(num_tokens, dtype=torch.float64)
    balancer.start_step(microbatches, count, Axis("dp_cp"), figures)
    return balancer


def attach_and_backward(balancer, layer, z, experts, batch):
    """The backward of a forward whose outputs do not depend on the weights."""
    weights = z.gather(1, experts.clamp(max=E - 1)) * 0.0
    balancer.attach(weights, layer, z, experts, batch).sum().backward()


def probabilities(z, score):
    s = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
    return s / s.sum(-1, keepdim=True)


def term(counts, probs, num_tokens):
    return E / (K * num_tokens**2) * (counts * probs).sum()


def formulas(z, score, real, microbatches, num_tokens, counts):
    """The four losses of one micro-batch, by their definitions."""
    p = probabilities(z, score) * real[:, None]
    chosen = torch.zeros(N, E, dtype=z.dtype).scatter(1, z.detach().topk(K).indices, 1.0)
    chosen = chosen * real[:, None]
    aux = term(chosen.sum(0), p.sum(0), real.sum()) / microbatches
    seq_aux = sum(
        term(chosen[b::B].sum(0), p[b::B].sum(0), real[b::B].sum().clamp(min=1)) for b in range(B)
    )
    return {
        "aux": aux,
        "seq_aux": seq_aux / B / microbatches,
        "global_aux": term(counts, p.sum(0), counts.sum() / K),
        "z": (torch.logsumexp(z, -1).square() * real).sum() / num_tokens,
    }


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "kinds", [["aux"], ["seq_aux"], ["global_aux"], ["aux", "seq_aux", "global_aux"], []]
)
@pytest.mark.parametrize("padded", [False, True])
def test_gradient_and_value(score, kinds, padded):
    real = torch.ones(N, dtype=torch.float64)
    if padded:
        real[torch.tensor([2, 5, 8, 11, 14, 13])] = 0  # the third sequence, and one more token
    moe = {"balance": kinds or ["none"], "aux_coef": 0.3 if kinds else 0.0, "z_coef": 0.07}
    balancer = make_balancer(score, **moe)
    counts = torch.randint(1, 9, (E,), generator=torch.Generator().manual_seed(1))
    balancer.unbiased_counts[1] = counts
    z = logits().requires_grad_()
    experts = z.detach().topk(K).indices.masked_fill(~real.bool()[:, None], E)
    attach_and_backward(balancer, 2, z, experts, tokens(real.bool() if padded else None))

    leaf = logits().requires_grad_()
    terms = formulas(leaf, score, real, 4, 50.0, counts.double())
    (sum((0.3 * terms[kind] for kind in kinds), 0.0 * leaf.sum()) + 0.07 * terms["z"]).backward()
    torch.testing.assert_close(z.grad, leaf.grad, rtol=1e-12, atol=1e-14)
    assert balancer.loss_names == (*(f"{kind}_loss" for kind in kinds), "router_z_loss")
    expected = [terms[kind].item() for kind in [*kinds, "z"]]
    assert balancer.loss_values.tolist() == pytest.approx(expected, rel=1e-12)


def test_the_loss_of_perfect_balance_is_one():
    """Uniform probabilities and equal counts: aux = 1 for any E and k."""
    balancer = make_balancer(balance=["aux"], aux_coef=1.0, microbatches=1)
    z = torch.zeros(N, E, dtype=torch.float64, requires_grad=True)
    experts = torch.arange(N * K).view(N, K) % E
    balancer.unbiased_choices = lambda *_: experts
    attach_and_backward(balancer, 0, z, experts, tokens())
    assert balancer.loss_values.item() == pytest.approx(1.0)


def test_auxiliary_gradients_reach_a_backward_of_only_the_inputs():
    """A schedule computes the gradients of a stage's inputs alone (I), and the auxiliary losses are
    on their path."""
    balancer = make_balancer(balance=["aux"], aux_coef=1.0)
    z = logits().requires_grad_()
    experts = z.detach().topk(K).indices
    out = balancer.attach(z.gather(1, experts), 0, z, experts, tokens())
    (without,) = torch.autograd.grad(z.gather(1, experts).sum(), z)
    (grad,) = torch.autograd.grad(out.sum(), z)
    assert (grad - without).abs().max() > 1e-4


def test_nothing_is_attached_without_gradients_or_without_a_loss():
    z = logits()
    experts = z.topk(K).indices
    weights = z.gather(1, experts)
    balancer = make_balancer(balance=["aux"], aux_coef=1.0)
    with torch.no_grad():
        assert balancer.attach(weights, 0, z, experts, tokens()) is weights
    assert make_balancer().attach(weights, 0, z, experts, tokens()) is weights


def test_the_bias_moves_by_the_sign_of_the_difference():
    balancer = make_balancer(balance=["bias"], bias_rate=0.01)
    bias = balancer.biases[2] = torch.zeros(E, dtype=torch.float64)
    balancer.counts[1] = torch.tensor([4, 4, 4, 7, 1, 4])
    balancer.finish_step()
    balancer.finish_step()
    assert bias.tolist() == pytest.approx([0, 0, 0, -0.02, 0.02, 0])


def test_updating_the_bias_keeps_each_ranks_counts_for_the_figures():
    def on_rank(rank, world):
        balancer = make_balancer(balance=["bias"], bias_rate=0.01)
        mesh = build_mesh(resolve(world), rank)
        balancer.stage = mesh["stage"]
        balancer.biases[2] = torch.zeros(E, dtype=torch.float64)
        balancer.counts[1, rank] = 4
        balancer.finish_step()
        balancer.figures[1, 3] = 4  # tokens
        figures = balancer.layer_figures(mesh["world"])
        counts, bias = balancer.counts[1].tolist(), balancer.biases[2].tolist()
        return counts, bias, figures["moe/layer_2/bias_range"]

    for rank, (counts, bias, bias_range) in enumerate(run_ranks(on_rank, 2)):
        assert bias_range == pytest.approx(0.02)
        assert counts == [4 * (expert == rank) for expert in range(E)]
        assert bias == pytest.approx([-0.01, -0.01, 0.01, 0.01, 0.01, 0.01])


@torch.no_grad()
def test_forwards_without_gradients_count_only_for_the_global_loss():
    balancer = make_balancer(balance=["global_aux", "bias"], figures=True)
    z = logits()
    experts = z.topk(K).indices
    balancer.observe(0, z, experts, None, tokens())
    assert not balancer.unbiased_counts.any()
    balancer.start_counting()
    balancer.observe(0, z, experts, None, tokens())
    balancer.finish_counting()
    balancer.observe(0, z, experts, None, tokens())
    assert torch.equal(balancer.unbiased_counts[0], counts_of(experts, E))
    assert not balancer.counts.any() and not balancer.figures.any()


@torch.no_grad()
def test_padding_does_not_count_where_there_is_a_bias():
    balancer, real = make_balancer(balance=["global_aux", "bias"]), torch.arange(N) % 4 != 0
    balancer.biases[2] = torch.zeros(E)
    experts = logits().topk(K).indices.masked_fill(~real[:, None], E)
    balancer.start_counting()
    balancer.observe(2, logits(), experts, None, tokens(real))
    assert torch.equal(balancer.unbiased_counts[1], counts_of(experts, E))


@torch.no_grad()
def test_counts_for_the_global_loss_ignore_groups():
    balancer = make_balancer(balance=["global_aux"])
    balancer.model = replace(balancer.model, num_groups=3, top_groups=1)
    balancer.start_counting()
    balancer.observe(0, logits(), torch.zeros(N, K, dtype=torch.int64), None, tokens())
    assert torch.equal(balancer.unbiased_counts[0], counts_of(logits().topk(K).indices, E))


def test_figures():
    balancer = make_balancer("sigmoid", balance=["bias"], figures=True)
    balancer.biases[2] = torch.tensor([0.0, 0.5, -0.25, 0, 0, 0])
    z = logits()
    real = torch.ones(N, dtype=torch.bool)
    real[3] = False
    experts = (torch.arange(N * K) % 4).view(N, K)  # experts 4 and 5 are dead
    experts[3] = E
    balancer.observe(2, z, experts, torch.tensor(3), tokens(real))
    p = probabilities(z, "sigmoid")[real]
    counts = torch.bincount(experts[real].flatten(), minlength=E)
    assert balancer.layer_figures(Axis("world")) == pytest.approx(
        {
            "moe/layer_2/load": (counts.max() / counts.double().mean()).item(),
            "moe/layer_2/entropy": -(p * p.log()).sum(-1).mean().item(),
            "moe/layer_2/dropped": 3 / 28,
            "moe/layer_2/dead_experts": 2.0,
            "moe/layer_2/bias_range": 0.75,
            "moe/layer_2/logit_norm": z[real].square().sum(-1).mean().sqrt().item(),
        }
    )


def test_a_step_starts_from_zeros():
    balancer = make_balancer(balance=["global_aux"], figures=True)
    z = logits().requires_grad_()
    experts = z.detach().topk(K).indices
    balancer.start_counting()
    with torch.no_grad():
        balancer.observe(0, z, experts, None, tokens())
    balancer.observe(0, z, experts, torch.tensor(3), tokens())
    attach_and_backward(balancer, 0, z, experts, tokens())
    names = ("counts", "unbiased_counts", "figures", "loss_values")
    assert all(getattr(balancer, name).any() for name in names)
    balancer.start_step(1, torch.ones((), dtype=torch.float64), Axis("dp_cp"), True)
    assert not any(getattr(balancer, name).any() for name in names)


def test_a_step_of_only_padding_has_no_gradient():
    balancer = make_balancer(
        balance=["aux", "seq_aux", "global_aux"], z_coef=0.1, aux_coef=1.0, num_tokens=0.0
    )
    z, padding = logits().requires_grad_(), torch.zeros(N, dtype=torch.bool)
    attach_and_backward(balancer, 0, z, torch.full((N, K), E), tokens(padding))
    assert not z.grad.any() and balancer.loss_values.tolist() == [0.0] * 4


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradient_through_normalized_scores(score):
    z, grad = logits().requires_grad_(), logits(1)
    p = normalized(z, score)
    (expected,) = torch.autograd.grad(p, z, grad)
    torch.testing.assert_close(normalized_backward(p.detach(), z.detach(), grad, score), expected)


def test_padding_is_not_counted():
    assert counts_of(torch.tensor([[0, 2], [3, 3], [2, 1]]), 3).tolist() == [1, 1, 2]


def test_the_backward_waits_for_the_counts():
    class Counting(Pending):
        waited = False

        def wait(self):
            self.waited = True
            return super().wait()

    counting = Counting(torch.ones(B, E, dtype=torch.int64))
    make_balancer(balance=["aux"], aux_coef=1.0).logit_gradient(0, logits(), tokens(), counting)
    assert counting.waited


def test_scales_are_megatron_cores():
    """Its switch_load_balancing_loss_func and z_loss_func for a micro-batch of T tokens, rewritten:
    E·coef/(k·T²) · Σ_e counts_e Σ_t p_te, and coef · mean(logsumexp²)."""
    z = logits(3)
    experts = z.topk(K).indices
    probs, mask = torch.softmax(z, -1), torch.zeros(N, E, dtype=z.dtype).scatter(1, experts, 1.0)
    coef, z_coef = 0.01, 0.001
    expected = [
        (probs.sum(0) * mask.sum(0)).sum().item() * (E * coef / (K * N * N)),
        z_coef * torch.logsumexp(z, -1).square().mean().item(),
    ]
    balancer = make_balancer(
        balance=["aux"], aux_coef=coef, z_coef=z_coef, microbatches=1, num_tokens=float(N)
    )
    attach_and_backward(balancer, 0, z.requires_grad_(), experts, tokens())
    assert balancer.loss_names == ("aux_loss", "router_z_loss")
    aux_loss, z_loss = balancer.loss_values.tolist()
    assert [coef * aux_loss, z_coef * z_loss] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("replay", [None, "experts.npy"])
def test_the_loss_of_replayed_tokens_is_that_of_transformers_router(replay):
    """Its load_balancing_loss_func (k times ours, in fp32) counts the best k of the logits."""
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    z = logits(4)
    expected = module.load_balancing_loss_func((z,), E, K).item() / K
    experts = z.topk(K).indices if replay is None else z.topk(K, largest=False).indices
    aux = {"aux_coef": 1.0, "microbatches": 1, "replay": replay}
    balancer = make_balancer(balance=["aux"], **aux)
    attach_and_backward(balancer, 0, z.requires_grad_(), experts, tokens())
    assert balancer.loss_values.item() == pytest.approx(expected, rel=1e-6)

    ahead = make_balancer(balance=["global_aux"], **aux)
    ahead.start_counting()
    with torch.no_grad():
        ahead.observe(0, z, experts, None, tokens())
    attach_and_backward(ahead, 0, z, experts, tokens())
    assert ahead.loss_values.item() == pytest.approx(expected, rel=1e-6)

"""Auxiliary losses and their gradients against autograd on the formulas; figures; what counts and
what does not."""

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
    normalised,
    normalised_backward,
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


def balancer(score="softmax", microbatches=4, num_tokens=50.0, watched=False, **moe):
    model = ModelConfig(num_layers=3, num_experts=E, top_k=K, router_score=score)
    made = Balancer(model, MoeConfig(**moe), [0, 2], Axis("cp_tp"), Axis("stage"), "cpu")
    made.start_step(
        microbatches, torch.tensor(num_tokens, dtype=torch.float64), Axis("dp_cp"), watched
    )
    return made


def probabilities(z, score):
    s = torch.softmax(z, -1) if score == "softmax" else torch.sigmoid(z)
    return s / s.sum(-1, keepdim=True)


def term(n, mass, size):
    return E / (K * size**2) * (n * mass).sum()


def formulas(z, score, keep, microbatches, num_tokens, counts):
    """The four terms of one micro-batch among several, straight from their definitions."""
    p = probabilities(z, score) * keep[:, None]
    plain = (
        torch.zeros(N, E, dtype=z.dtype).scatter(1, z.detach().topk(K).indices, 1.0) * keep[:, None]
    )
    aux = term(plain.sum(0), p.sum(0), keep.sum()) / microbatches
    per_sequence = [
        term(plain[b::B].sum(0), p[b::B].sum(0), keep[b::B].sum().clamp(min=1)) for b in range(B)
    ]
    seq = sum(per_sequence) / B / microbatches
    glob = term(counts, p.sum(0), counts.sum() / K)
    lse = (torch.logsumexp(z, -1).square() * keep).sum() / num_tokens
    return {"aux": aux, "seq_aux": seq, "global_aux": glob, "z": lse}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    "kinds", [["aux"], ["seq_aux"], ["global_aux"], ["aux", "seq_aux", "global_aux"], []]
)
@pytest.mark.parametrize("padded", [False, True])
def test_gradient_and_value(score, kinds, padded):
    keep = torch.ones(N, dtype=torch.float64)
    if padded:
        keep[torch.tensor([2, 5, 8, 11, 14, 13])] = 0  # the whole third sequence, and one more
    moe = {"balance": kinds or ["none"], "aux_coef": 0.3 if kinds else 0.0, "z_coef": 0.07}
    made = balancer(score, **moe)
    counts = torch.randint(1, 9, (E,), generator=torch.Generator().manual_seed(1))
    made.plain[1] = counts
    z = logits().requires_grad_()
    where = tokens(keep.bool() if padded else None)
    experts = z.detach().topk(K).indices.masked_fill(~keep.bool()[:, None], E)
    weights = z.gather(1, experts.clamp(max=E - 1)) * 0.0
    out = made.attach(weights, 2, z, experts, where)
    out.sum().backward()

    leaf = logits().requires_grad_()
    terms = formulas(leaf, score, keep, 4, 50.0, counts.double())
    (sum((0.3 * terms[kind] for kind in kinds), 0.0 * leaf.sum()) + 0.07 * terms["z"]).backward()
    torch.testing.assert_close(z.grad, leaf.grad, rtol=1e-12, atol=1e-14)
    assert made.names == (*(f"{kind}_loss" for kind in kinds), "router_z_loss")
    expected = [terms[kind].item() for kind in [*kinds, "z"]]
    assert made.values.tolist() == pytest.approx(expected, rel=1e-12)


def test_perfect_balance_is_worth_one():
    """Uniform probabilities and equal counts: aux = 1 for any E and k."""
    made = balancer(balance=["aux"], aux_coef=1.0, microbatches=1)
    z = torch.zeros(N, E, dtype=torch.float64, requires_grad=True)
    experts = torch.arange(N * K).view(N, K) % E
    made.plain_choice = lambda *_: experts
    made.attach(z[:, :K] * 1.0, 0, z, experts, tokens()).sum().backward()
    assert made.values.item() == pytest.approx(1.0)


def test_gradients_reach_a_pass_that_asks_for_inputs_alone():
    """A schedule asks for the gradients of a stage's outputs; the auxiliary term lies on their
    path."""
    made = balancer(balance=["aux"], aux_coef=1.0)
    z = logits().requires_grad_()
    experts = z.detach().topk(K).indices
    out = made.attach(z.gather(1, experts), 0, z, experts, tokens())
    (plain,) = torch.autograd.grad(z.gather(1, experts).sum(), z)
    (grad,) = torch.autograd.grad(out.sum(), z)
    assert (grad - plain).abs().max() > 1e-4


def test_nothing_is_attached_without_gradients_or_without_a_term():
    z = logits()
    experts = z.topk(K).indices
    weights = z.gather(1, experts)
    with torch.no_grad():
        assert (
            balancer(balance=["aux"], aux_coef=1.0).attach(weights, 0, z, experts, tokens())
            is weights
        )
    assert balancer().attach(weights, 0, z, experts, tokens()) is weights


def test_the_bias_moves_by_the_sign_of_what_is_missing():
    made = balancer(balance=["bias"], bias_rate=0.01)
    bias = torch.zeros(E, dtype=torch.float64)
    made.biases[2] = bias
    made.chosen[1] = torch.tensor([4, 4, 4, 7, 1, 4])
    made.finish_step()
    made.finish_step()
    assert bias.tolist() == pytest.approx([0, 0, 0, -0.02, 0.02, 0])


def test_moving_the_bias_leaves_each_ranks_own_choices_for_the_figures():
    def on_rank(rank, world):
        made = balancer(balance=["bias"], bias_rate=0.01)
        made.stage = build_mesh(resolve(world), rank)["stage"]
        made.biases[2] = torch.zeros(E, dtype=torch.float64)
        made.chosen[1, rank] = 4
        made.finish_step()
        made.figures[1, 3] = 4  # tokens that were watched
        figures = made.layer_figures(build_mesh(resolve(world), rank)["world"])
        return made.chosen[1].tolist(), made.biases[2].tolist(), figures["moe/layer_2/bias_range"]

    for rank, (chosen, bias, spread) in enumerate(run_ranks(on_rank, 2)):
        assert spread == pytest.approx(0.02)
        assert chosen == [4 * (e == rank) for e in range(E)]
        assert bias == pytest.approx([-0.01, -0.01, 0.01, 0.01, 0.01, 0.01])


def test_forwards_without_gradients_count_for_the_global_loss_alone():
    made = balancer(balance=["global_aux", "bias"], watched=True)
    z = logits()
    experts = z.topk(K).indices
    with torch.no_grad():
        made.observe(0, z, experts, None, tokens())
        assert not made.chosen.any() and not made.plain.any() and not made.figures.any()
        made.start_counting()
        made.observe(0, z, experts, None, tokens())
        made.finish_counting()
        made.observe(0, z, experts, None, tokens())
    assert made.plain[0].tolist() == torch.bincount(experts.flatten(), minlength=E).tolist()
    assert not made.chosen.any()


def test_padding_counts_for_nothing_where_a_bias_has_chosen():
    made, real = balancer(balance=["global_aux", "bias"]), torch.arange(N) % 4 != 0
    made.biases[2] = torch.zeros(E)
    experts = logits().topk(K).indices.masked_fill(~real[:, None], E)
    made.start_counting()
    with torch.no_grad():
        made.observe(2, logits(), experts, None, tokens(real))
    assert torch.equal(made.plain[1], counts_of(experts, E))


def test_groups_choose_and_the_plain_scores_count():
    """As with a bias: what is balanced is what the scores alone would choose."""
    made = balancer(balance=["global_aux"])
    made.model = replace(made.model, num_groups=3, top_groups=1)
    made.start_counting()
    with torch.no_grad():
        made.observe(0, logits(), torch.zeros(N, K, dtype=torch.int64), None, tokens())
    assert torch.equal(made.plain[0], counts_of(logits().topk(K).indices, E))


def test_figures():
    made = balancer("sigmoid", balance=["bias"], watched=True)
    made.biases[2] = torch.tensor([0.0, 0.5, -0.25, 0, 0, 0])
    z = logits()
    real = torch.ones(N, dtype=torch.bool)
    real[3] = False
    experts = (torch.arange(N * K) % 4).view(N, K)  # experts 4 and 5 are dead
    experts[3] = E
    made.observe(2, z, experts, torch.tensor(3), tokens(real))
    got = made.layer_figures(Axis("world"))
    p = probabilities(z, "sigmoid")[real]
    counts = torch.bincount(experts[real].flatten(), minlength=E)
    assert got == pytest.approx(
        {
            "moe/layer_2/load": (counts.max() / counts.double().mean()).item(),
            "moe/layer_2/entropy": -(p * p.log()).sum(-1).mean().item(),
            "moe/layer_2/dropped": 3 / 28,
            "moe/layer_2/dead_experts": 2.0,
            "moe/layer_2/bias_range": 0.75,
            "moe/layer_2/logit_norm": z[real].square().sum(-1).mean().sqrt().item(),
        }
    )


def test_a_step_begins_with_nothing_of_the_last_one():
    made = balancer(balance=["global_aux"], watched=True)
    z = logits().requires_grad_()
    experts = z.detach().topk(K).indices
    made.start_counting()
    with torch.no_grad():
        made.observe(0, z, experts, None, tokens())
    made.observe(0, z, experts, torch.tensor(3), tokens())
    made.attach(z.gather(1, experts), 0, z, experts, tokens()).sum().backward()
    sums = {name: getattr(made, name) for name in ("chosen", "plain", "figures", "values")}
    assert all(tensor.any() for tensor in sums.values())
    made.start_step(1, torch.ones((), dtype=torch.float64), Axis("dp_cp"), True)
    assert [name for name, tensor in sums.items() if tensor.any()] == []


def test_a_step_of_nothing_but_padding_has_no_gradient():
    made = balancer(
        balance=["aux", "seq_aux", "global_aux"], z_coef=0.1, aux_coef=1.0, num_tokens=0.0
    )
    z = logits().requires_grad_()
    experts = torch.full((N, K), E)
    made.attach(
        z[:, :K] * 1.0, 0, z, experts, tokens(torch.zeros(N, dtype=torch.bool))
    ).sum().backward()
    assert (
        torch.equal(z.grad[:, K:], torch.zeros(N, E - K, dtype=z.dtype))
        and made.values.tolist() == [0.0] * 4
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradient_through_normalised_scores(score):
    z, grad = logits().requires_grad_(), logits(1)
    p = normalised(z, score)
    (wanted,) = torch.autograd.grad(p, z, grad)
    torch.testing.assert_close(normalised_backward(p.detach(), z.detach(), grad, score), wanted)


def test_counts_leave_padding_out():
    assert counts_of(torch.tensor([[0, 2], [3, 3], [2, 1]]), 3).tolist() == [1, 1, 2]


def test_a_pending_count_may_arrive_late():
    """What the backward waits for is looked at in the backward, not before."""
    made = balancer(balance=["aux"], aux_coef=1.0)

    class Late(Pending):
        waited = False

        def wait(self):
            self.waited = True
            return super().wait()

    late = Late(torch.ones(B, E, dtype=torch.int64))
    made.logit_gradient(0, logits(), tokens(), late)
    assert late.waited


def test_scales_are_megatron_cores():
    """Its switch_load_balancing_loss_func and z_loss_func, retold: with E experts, k chosen and T
    tokens of a batch, E·coef/(k·T²) · Σ_e counts_e Σ_t p_te, and coef · mean(logsumexp²); a batch
    here is one micro-batch of one step."""
    z = logits(3)
    experts = z.topk(K).indices
    probs, mask = torch.softmax(z, -1), torch.zeros(N, E, dtype=z.dtype).scatter(1, experts, 1.0)
    coef, z_coef = 0.01, 0.001
    theirs = (
        (probs.sum(0) * mask.sum(0)).sum() * (E * coef / (K * N * N)),
        z_coef * torch.logsumexp(z, -1).square().mean(),
    )
    made = balancer(
        balance=["aux"], aux_coef=coef, z_coef=z_coef, microbatches=1, num_tokens=float(N)
    )
    z.requires_grad_()
    made.attach(z.gather(1, experts) * 0.0, 0, z, experts, tokens()).sum().backward()
    ours = dict(zip(made.names, made.values.tolist()))
    assert coef * ours["aux_loss"] == pytest.approx(theirs[0].item(), rel=1e-12)
    assert z_coef * ours["router_z_loss"] == pytest.approx(theirs[1].item(), rel=1e-12)

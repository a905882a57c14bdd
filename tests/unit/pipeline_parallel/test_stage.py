"""A stage's three actions: split or not, recomputed or not, interleaved or not, the gradients are
the same bits."""

import pytest
import torch
from torch import nn
from whole_stage import WholeStage

from megatron5d.phases.phase import Phase, PhaseHooks
from megatron5d.phases.recompute import ActivationPolicy
from megatron5d.phases.wgrad import add_weight_grad


class Twice(torch.autograd.Function):
    """x·Wᵀ with the weight half of its backward handed to defer, counting how often each half
    runs."""

    @staticmethod
    def forward(ctx, x, weight, layer, defer):
        ctx.save_for_backward(x)
        ctx.weight, ctx.layer, ctx.defer = weight, layer, defer
        layer.log.append("F")
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.layer.log.append("I")

        def closure():
            ctx.layer.log.append("W")
            add_weight_grad(ctx.weight, dy, x)

        ctx.defer(closure)
        return dy @ ctx.weight, None, None, None


class Layer(Phase):
    def __init__(self, log, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64, generator=generator))
        self.gain = nn.Parameter(torch.randn(6, dtype=torch.float64, generator=generator))
        self.log = log

    def forward(self, x, batch, defer):
        x = batch if x is None else x
        return x + torch.tanh(Twice.apply(x * self.gain, self.weight, self, defer))


BATCHES = [
    torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
    for i in range(2)
]
GRAD = torch.ones(4, 6, dtype=torch.float64)


def make(recompute=0):
    log = []
    layers = [Layer(log, seed) for seed in range(3)]
    for layer in layers[:recompute]:
        layer.activation_policy = ActivationPolicy(group=0)
    return layers, log


def grads(layers):
    return [p.grad.clone() for layer in layers for p in layer.parameters()]


def truth():
    layers, _ = make()
    for batch in BATCHES:
        x = batch
        for layer in layers:
            x = x + torch.tanh((x * layer.gain) @ layer.weight.t())
        x.backward(GRAD)
    return grads(layers)


@pytest.mark.parametrize("recompute", [0, 1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_autograds(split, recompute):
    layers, log = make(recompute)
    stage = WholeStage(layers)
    for i, batch in enumerate(BATCHES):
        stage.forward(i, None, batch)
    for i in range(2):
        if split:
            stage.backward_input(i, GRAD)
        else:
            stage.backward(i, GRAD)
    assert log.count("W") == (0 if split else 6)
    if split:
        assert stage.num_in_flight == 2
        for i in (1, 0):
            stage.backward_weight(i)
    assert stage.num_in_flight == 0
    assert log.count("F") == 6 + 2 * recompute, (
        "each recomputed once, in I or B, and never again in W"
    )
    for ours, theirs in zip(grads(layers), truth()):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_two_micro_batches_interleave_phase_by_phase():
    layers, log = make()
    stage = WholeStage(layers)
    stage.forward(0, None, BATCHES[0])
    log.clear()
    backward, forward = stage.begin("B", 0, GRAD), stage.begin("F", 1, None, BATCHES[1])
    follows = [(backward.advance(), forward.advance()) for _ in range(3)]
    assert log == ["I", "W", "F"] * 3
    assert follows == [(True, True), (True, True), (False, False)]
    stage.backward(1, GRAD)
    for ours, theirs in zip(grads(layers), truth()):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def test_hooks_hear_of_weights_when_they_are_complete():
    heard = []

    class Hooks(PhaseHooks):
        def before(self, phase, kind):
            heard.append((kind, layers.index(phase)))

        def after(self, phase, kind):
            heard.append((f"/{kind}", layers.index(phase)))

    layers, _ = make()
    stage = WholeStage(layers, Hooks())
    stage.forward(0, None, BATCHES[0])
    assert heard == [(word, i) for i in (0, 1, 2) for word in ("forward", "/forward")]
    heard.clear()
    stage.backward_input(0, GRAD)
    assert heard == [(word, i) for i in (2, 1, 0) for word in ("backward", "/backward")]
    heard.clear()
    stage.backward_weight(0)
    assert heard == [(word, i) for i in (2, 1, 0) for word in ("wgrad", "/wgrad")]
    stage.forward(1, None, BATCHES[0])
    heard.clear()
    stage.backward(1, GRAD)
    assert heard == [(word, i) for i in (2, 1, 0) for word in ("backward", "/backward", "/wgrad")]


def test_the_gradient_of_the_input_comes_back():
    layers, _ = make()
    x = torch.randn(4, 6, dtype=torch.float64)
    stage = WholeStage(layers)
    stage.forward(0, x, None)
    dx = stage.backward(0, GRAD)
    leaf = x.clone().requires_grad_()
    y = leaf
    for layer in layers:
        y = y + torch.tanh((y * layer.gain) @ layer.weight.t())
    torch.testing.assert_close(dx, torch.autograd.grad(y, leaf, GRAD)[0])

"""A stage's actions give autograd's gradients: split, recomputed, interleaved, or not."""

import pytest
import torch
from torch import nn
from whole_stage import WholeStage

from megatron5d.phases.activations import ActivationPolicy
from megatron5d.phases.phase import Phase, PhaseHooks
from megatron5d.phases.wgrad import add_weight_grad


class LoggedLinear(torch.autograd.Function):
    """x·Wᵀ that passes the weight half of its backward to defer and logs each half."""

    @staticmethod
    def forward(ctx, x, weight, log, defer):
        ctx.save_for_backward(x)
        ctx.weight, ctx.log, ctx.defer = weight, log, defer
        log.append("F")
        return x @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        ctx.log.append("I")

        def closure():
            ctx.log.append("W")
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
        return x + torch.tanh(LoggedLinear.apply(x * self.gain, self.weight, self.log, defer))


INPUTS = [
    torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
    for i in range(2)
]
GRAD = torch.ones(4, 6, dtype=torch.float64)


def make_layers(num_recomputed=0):
    log = []
    layers = [Layer(log, seed) for seed in range(3)]
    for layer in layers[:num_recomputed]:
        layer.activation_policy = ActivationPolicy(group=0)
    return layers, log


def assert_autograds_gradients(layers, input_grads):
    reference, _ = make_layers()
    for x, input_grad in zip(INPUTS, input_grads, strict=True):
        y = leaf = x.clone().requires_grad_()
        for layer in reference:
            y = y + torch.tanh((y * layer.gain) @ layer.weight.t())
        y.backward(GRAD)
        torch.testing.assert_close(input_grad, leaf.grad, rtol=1e-14, atol=1e-14)
    for layer, expected in zip(layers, reference):
        for parameter, other in zip(layer.parameters(), expected.parameters()):
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("num_recomputed", [0, 1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_gradients_are_autograds(split, num_recomputed):
    layers, log = make_layers(num_recomputed)
    stage = WholeStage(layers)
    for i, x in enumerate(INPUTS):
        stage.forward(i, x, None)
    backward = stage.backward_input if split else stage.backward
    input_grads = [backward(i, GRAD) for i in range(2)]
    assert log.count("W") == (0 if split else 6)
    assert stage.num_in_flight == (2 if split else 0)
    for i in (1, 0) if split else ():
        stage.backward_weight(i)
    assert stage.num_in_flight == 0
    assert log.count("F") == 6 + 2 * num_recomputed, "recomputed once, in I or B, and never in W"
    assert_autograds_gradients(layers, input_grads)


def test_two_micro_batches_interleave_phase_by_phase():
    layers, log = make_layers()
    stage = WholeStage(layers)
    stage.forward(0, INPUTS[0], None)
    log.clear()
    backward, forward = stage.begin("B", 0, GRAD), stage.begin("F", 1, INPUTS[1])
    follows = [(backward.advance(), forward.advance()) for _ in range(3)]
    assert log == ["I", "W", "F"] * 3
    assert follows == [(True, True), (True, True), (False, False)]
    assert_autograds_gradients(layers, [backward.state, stage.backward(1, GRAD)])


def test_hooks_run_when_weight_gradients_are_complete():
    calls = []

    class Hooks(PhaseHooks):
        def before(self, phase, kind):
            calls.append((kind, layers.index(phase)))

        def after(self, phase, kind):
            calls.append((f"/{kind}", layers.index(phase)))

    layers, _ = make_layers()
    stage = WholeStage(layers, Hooks())

    def assert_calls(order, *kinds):
        assert calls == [(kind, i) for i in order for kind in kinds]
        calls.clear()

    stage.forward(0, INPUTS[0], None)
    assert_calls((0, 1, 2), "forward", "/forward")
    stage.backward_input(0, GRAD)
    assert_calls((2, 1, 0), "backward", "/backward")
    stage.backward_weight(0)
    assert_calls((2, 1, 0), "wgrad", "/wgrad")
    stage.forward(1, INPUTS[0], None)
    calls.clear()
    stage.backward(1, GRAD)
    assert_calls((2, 1, 0), "backward", "/backward", "/wgrad")

"""A stage whose actions are single calls, and models to run in it; the executor runs actions phase
by phase."""

import torch
from layouts import make_rows, micro_batch

from megatron5d.model.gpt import GPT
from megatron5d.phases.stage import Stage
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of


class WholeStage(Stage):
    def run(self, op, microbatch, x=None, batch=None):
        """Runs all steps of an action; the arguments are those of `Stage.begin`."""
        action = self.begin(op, microbatch, x, batch)
        while action.advance():
            pass
        return action.state

    def forward(self, microbatch, x, batch):
        """F: the stage's output."""
        return self.run("F", microbatch, x, batch)

    def backward(self, microbatch, grad):
        """B: the gradient of the input."""
        return self.run("B", microbatch, grad)

    def backward_input(self, microbatch, grad):
        """I: the gradient of the input; weight gradients are kept."""
        return self.run("I", microbatch, grad)

    def backward_weight(self, microbatch):
        """W: runs the weight gradients that I kept."""
        self.run("W", microbatch)


def new_model(config, device="cpu"):
    """A model on one rank, ready for a step, and the micro-batch of its data."""
    gpt = GPT(config, build_mesh(sizes_of(config, 1)), device)
    gpt.initialize(1)
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if gpt.balancer is not None:
        tokens = torch.tensor(float(config.train.gbs * config.train.seq_len))
        gpt.balancer.start_step(1, tokens, Axis("dp_cp"), False)
    with torch.device("cpu"):  # the same tokens on every device
        rows = make_rows(config, 1)
    return gpt, micro_batch(config, rows.to(device))


def loss_and_gradients(config, device="cpu"):
    """The loss of a split step on one rank, and the gradients of all parameters."""
    gpt, batch = new_model(config, device)
    stage = WholeStage(gpt.phases)
    loss = stage.forward(0, None, batch)
    stage.backward_input(0, torch.tensor([1.0, 0.0], dtype=loss.dtype))
    stage.backward_weight(0)
    return [loss, *(parameter.grad for parameter in gpt.parameters())]

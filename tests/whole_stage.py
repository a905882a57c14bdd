"""A stage whose actions are single calls, for tests of what one action does; the executor runs them phase by phase."""

from megatron5d.pipeline_parallel.stage import Stage


class WholeStage(Stage):
    """The arguments are those of the steps of a Stage."""

    def forward(self, microbatch, x, batch):
        """F: the stage's output."""
        *_, y = self.forward_steps(microbatch, x, batch)
        return y

    def backward(self, microbatch, grad):
        """B: the gradient of the input."""
        *_, dx = self.backward_steps(microbatch, grad)
        return dx

    def backward_input(self, microbatch, grad):
        """I: the gradient of the input; weight gradients are kept."""
        *_, dx = self.backward_steps(microbatch, grad, split=True)
        return dx

    def backward_weight(self, microbatch):
        """W: the weight gradients that I kept."""
        for _ in self.weight_steps(microbatch):
            pass

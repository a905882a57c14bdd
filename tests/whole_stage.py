"""A stage whose actions are single calls, for tests of what one action does; the executor runs them
phase by phase."""

from megatron5d.phases.stage import Stage


class WholeStage(Stage):
    """The arguments are those of `Stage.begin`."""

    def whole(self, op, microbatch, x=None, batch=None):
        """All steps of an action: what it passes on."""
        running = self.begin(op, microbatch, x, batch)
        while running.advance():
            pass
        return running.state

    def forward(self, microbatch, x, batch):
        """F: the stage's output."""
        return self.whole("F", microbatch, x, batch)

    def backward(self, microbatch, grad):
        """B: the gradient of the input."""
        return self.whole("B", microbatch, grad)

    def backward_input(self, microbatch, grad):
        """I: the gradient of the input; weight gradients are kept."""
        return self.whole("I", microbatch, grad)

    def backward_weight(self, microbatch):
        """W: the weight gradients that I kept."""
        self.whole("W", microbatch)

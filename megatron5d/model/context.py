"""What context parallelism means to the model: this rank's positions, and the attention that reaches all others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron5d.config.context_cost import split_of
from megatron5d.config.schema import Config
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.context_parallel.block_plan import Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.model.mtp import look_ahead
from megatron5d.pipeline_parallel.microbatch import MicroBatch
from megatron5d.topology.mesh import Mesh

_SEQUENCES = (  # fields of a micro-batch whose last dim is the sequence
    "tokens", "labels", "loss_mask", "positions", "padding", "ahead_tokens", "ahead_labels", "ahead_mask",
)  # fmt: skip


def context_attention(config: Config, mesh: Mesh) -> ContextAttention | None:
    """The attention of all layers over cp; None where sequences are whole."""
    if mesh["cp"].size == 1:
        return None
    return ContextAttention(config.parallel.cp_method, mesh["cp_outer"], mesh["cp_inner"])


class SequenceSharding:
    """Turns a micro-batch of whole sequences into what this cp rank's model reads; the loader calls it.

    Multi-token prediction looks ahead while sequences are whole; then attention is planned, and this rank's positions
    are taken.

    Args:
        config: of the run (parallel.cp_method, cp_inner, train.seq_len, the model's masks and num_mtp_layers).
        mesh: this rank's axes.
        device: where the plan's index tensors will be used.
    """

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str = "cpu") -> None:
        self.cp, model = mesh["cp"], config.model
        layout = SequenceLayout(config.train.seq_len, *split_of(config))
        self.depths = model.num_mtp_layers
        masks: dict[str, Any] = {"causal": model.attention_causal, "window": model.attention_window}
        self._plan = Planner(layout, self.cp.rank, **masks, device=device)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """`[b, s]` -> `[b, s/cp]`, positions and labels still those of the whole sequence.

        Args:
            batch: whole sequences, on the CPU (the plan looks at where documents end).
        """
        batch = look_ahead(batch, self.depths)
        if self.cp.size == 1:
            return batch
        plan = self._plan(batch.documents)
        held = torch.from_numpy(plan.layout.rows(self.cp.rank))  # [s/cp]: the positions that this rank holds
        whole = {name: getattr(batch, name) for name in _SEQUENCES}
        # each [b, s] -> [b, s/cp]; what looks ahead [D, b, s] -> [D, b, s/cp]
        local: dict[str, Any] = {name: None if values is None else values[..., held] for name, values in whole.items()}
        return replace(batch, **local, documents=None, context=plan)

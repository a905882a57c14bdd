"""What the modules of one rank are built from, and which tokens it routes to experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron5d.comm.collectives import gather_replicated, local_slice, scatter_to
from megatron5d.config.derived import batch_schedule, samples_of_steps, window_of
from megatron5d.config.schema import Config, ModelConfig, RopeScaling
from megatron5d.kernels.choice import Settings
from megatron5d.model.norm import Norm
from megatron5d.model.rope import RotaryTables
from megatron5d.phases.phase import MicroBatch
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh

if TYPE_CHECKING:
    from megatron5d.context_parallel.attention import ContextAttention
    from megatron5d.expert_parallel.dispatcher import Room
    from megatron5d.expert_parallel.load_balancing import Balancer, Tokens
    from megatron5d.expert_parallel.replay import RoutingFile
    from megatron5d.expert_parallel.router import Jitter

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class BlockInputs:
    """What a block's layers are built from, beside `layer`, its global index."""

    config: Config  # of the whole run
    mesh: Mesh  # this rank's axes
    device: torch.device | str  # of the parameters
    balancer: Balancer | None = None  # of this rank's MoE layers; None for a dense model

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def tp(self) -> Axis:
        """The axis that cuts heads, features and the vocabulary."""
        return self.mesh["tp"]

    @property
    def sp(self) -> bool:
        """Whether activations between tp regions are cut along the sequence."""
        return self.config.parallel.sp

    @property
    def factory(self) -> dict[str, Any]:
        """The dtype and the device of parameters."""
        return {"dtype": DTYPES[self.config.precision.dtype], "device": self.device}

    @cached_property
    def kernels(self) -> Settings:
        """Which libraries may compute the layers' operations on a GPU."""
        return Settings(**asdict(self.config.kernels))

    @cached_property
    def _rotary(self) -> dict[tuple[float, RopeScaling], RotaryTables]:
        return {}

    def rope(self, layer: int) -> RotaryTables | None:
        """Returns the tables of cos and sin of a layer, one object for all of its base; None
        without rotary positions.

        They are computed once for each micro-batch and stage: forward, recompute and backward of
        all layers share them.
        """
        model = self.model
        if model.position != "rope":
            return None
        base = model.rope_theta, model.rope_scaling
        if model.window_rope_theta is not None and window_of(model, layer) is not None:
            base = model.window_rope_theta, RopeScaling()
        if base not in self._rotary:
            self._rotary[base] = RotaryTables(model.rotary_dim, *base, **self.factory)
        return self._rotary[base]

    @cached_property
    def context(self) -> ContextAttention | None:
        """The attention over cp; None where sequences are whole."""
        if self.mesh["cp"].size == 1:
            return None
        from megatron5d.context_parallel.attention import ContextAttention

        return ContextAttention(
            self.config.parallel.cp_method,
            self.mesh["cp_outer"],
            self.mesh["cp_inner"],
            self.kernels,
        )

    @cached_property
    def token_share(self) -> TokenShare:
        """The tokens that this rank routes."""
        return TokenShare(self.tp, self.sp)

    @cached_property
    def room(self) -> Room:
        """The room for tokens on their way to experts."""
        from megatron5d.expert_parallel.dispatcher import Room

        moe = self.config.moe
        return Room(moe.planned_imbalance if moe.exchange == "planned" else None, self.device)

    @cached_property
    def jitter(self) -> Jitter | None:
        """The jitter of what routers read in training."""
        amount, train = self.config.moe.jitter, self.config.train
        if not amount:
            return None
        from megatron5d.expert_parallel.router import Jitter

        return Jitter(amount, train.seed, train.seq_len)

    @cached_property
    def routing(self) -> RoutingFile | None:
        """The file of experts that moe.replay reads, or moe.record writes."""
        moe, train = self.config.moe, self.config.train
        if moe.replay is None and moe.record is None:
            return None
        from megatron5d.expert_parallel.replay import RoutingFile

        samples = (
            None
            if moe.record is None
            else samples_of_steps(train.steps, batch_schedule(self.config))
        )
        return RoutingFile(moe.replay or moe.record or "", self.model, train.seq_len, samples)

    def pre_norm(self, name: str) -> Norm | None:
        """Builds the norm before a residual branch; None where it has none (model.block_norm)."""
        return None if self.model.block_norm == "post" else self.norm(f"{name}.norm")

    def post_norm(self, name: str) -> Norm | None:
        """Builds the norm after a residual branch; None where it has none (model.block_norm)."""
        return None if self.model.block_norm == "pre" else self.norm(f"{name}.post_norm")

    def norm(
        self,
        name: str,
        size: int | None = None,
        kind: str | None = None,
        partial_grad: bool | None = None,
        eps: float | None = None,
    ) -> Norm:
        """Builds a norm.

        Args:
            name: global name.
            size: of the last dim; None = the hidden size.
            kind: None = as `model.norm` says.
            partial_grad: as in Norm; None = with sp.
            eps: None = as `model.norm_eps` says.
        """
        partial_grad = self.sp if partial_grad is None else partial_grad
        size = size or self.model.hidden_size
        options = {
            "eps": eps or self.model.norm_eps,
            "zero_centered": self.model.norm_zero_centered,
            "settings": self.kernels,
            **self.factory,
        }
        return Norm(
            kind or self.model.norm, size, name, self.tp, partial_grad=partial_grad, **options
        )


class TokenShare:
    """Which tokens of a micro-batch a rank routes to experts.

    Args:
        tp: ranks that hold the same sequence positions (sp: neighbouring shares of them).
        sp: tokens arrive cut along the sequence.
    """

    def __init__(self, tp: Axis, sp: bool) -> None:
        self.tp, self.sp = tp, sp and tp.size > 1
        self._tokens_of_whole = cache(self._tokens_at)
        # a batch, which lives no longer for it; its tokens
        self._last: tuple[Any, ...] = (lambda: None,)

    def take(self, x: Tensor) -> Tensor:
        """Maps `[s/cp/tp, b, h]` (sp; else `[s/cp, b, h]`) -> `[n, h]`, n = s·b/(cp·tp), without sp
        rounded up.

        Comm: none / without sp all_gather tp.
        """
        flat = x.flatten(0, 1)
        if self.sp or self.tp.size == 1:
            return flat
        return scatter_to(F.pad(flat, (0, 0, 0, -flat.shape[0] % self.tp.size)), self.tp)

    def restore(self, y: Tensor, like: Tensor) -> Tensor:
        """Maps `[n, h]` -> what `take` was given, `like`. Comm: without sp all_gather tp / none."""
        if not self.sp and self.tp.size > 1:
            y = gather_replicated(y, self.tp)[: like.shape[0] * like.shape[1]]
        return y.view(like.shape)

    def tokens(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        """Returns which tokens those are that `take` takes from hidden states of a shape; worked
        out once a batch."""
        if self._last[0]() is not batch or self._last[1] != shape:
            self._last = ref(batch), shape, self._of_batch(shape, batch)
        return self._last[2]

    def _of_batch(self, shape: torch.Size, batch: MicroBatch) -> Tokens:
        if batch.context is None:
            tokens = self._tokens_of_whole(shape[0], shape[1], batch.tokens.device)
        else:
            tokens = self._tokens_at(
                shape[0], shape[1], batch.tokens.device, batch.context.own_rows
            )
        tokens = replace(tokens, samples=batch.samples)
        if batch.padding is None:
            return tokens
        real = ~batch.padding.t()  # [s/cp, b]
        if self.sp:
            return replace(tokens, real=local_slice(real, self.tp).flatten())
        real = F.pad(real.flatten(), (0, -real.numel() % self.tp.size))
        return replace(tokens, real=local_slice(real, self.tp))

    def _tokens_at(self, s: int, b: int, device, rows: Tensor | None = None) -> Tokens:
        """Returns the tokens at sequence positions `rows`, those of this cp rank; None = all
        positions."""
        from megatron5d.expert_parallel.load_balancing import Tokens

        count = s * self.tp.size if self.sp else s
        rows = torch.arange(count, device=device) if rows is None else rows
        assert rows.numel() == count, f"{count} positions of a sequence, {rows.numel()} expected"
        order = (rows[:, None] * b + torch.arange(b, device=device)).flatten()
        missing = 0 if self.sp else -order.numel() % self.tp.size
        if missing:  # what pads to equal shares comes last
            order = torch.cat((order, order.max() + 1 + torch.arange(missing, device=device)))
        real = (
            torch.arange(order.numel(), device=device) < order.numel() - missing
            if missing
            else None
        )
        order = local_slice(order, self.tp)
        return Tokens(order % b, order, None if real is None else local_slice(real, self.tp), b)

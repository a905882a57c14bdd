"""Load balancing: auxiliary losses, the bias, and figures for the log, without a host
synchronisation per step.

T tokens (padding does not count), E experts, k chosen; n_e = tokens that choose e by the plain
scores (no bias, no groups); p = softmax of the logits, or sigmoid divided by its sum. Summed over
the layers:

    aux         E/(k·T²) · Σ_e n_e Σ_t p_te over a micro-batch, then the mean over the global batch's micro-batches
    seq_aux     the same over each sequence, then the mean over the global batch's sequences
    global_aux  the same over the global batch
    z           mean over the global batch's tokens of logsumexp²
    bias        after a step, bias += rate·sign(mean count − count); counts of the choices made, before any is dropped

The objective contains aux_coef times the first three and z_coef times the fourth. Their gradients
are added in the backward of the chosen experts' weights (`attach`), so they need no output of their
own. The coefficients mean the same as in Megatron-Core: aux, times aux_coef, is its
`switch_load_balancing_loss_func` of a micro-batch (E·coef/(k·T²)·Σ counts·Σp), and z, times z_coef,
its `z_loss_func` (coef·mean of logsumexp²), both of megatron/core/transformer/moe/moe_utils.py.
Source: Fedus et al. 2021 (arXiv:2101.03961), section 2.2; z: Zoph et al. 2022 (arXiv:2202.08906),
    section 3.2; per
sequence and bias: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; global: Qiu et al. 2025
(arXiv:2501.11873).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron5d.comm.collectives import Pending, all_reduce, start_all_reduce
from megatron5d.config.derived import blocks
from megatron5d.config.schema import ModelConfig, MoeConfig
from megatron5d.expert_parallel.router import scores_of
from megatron5d.expert_parallel.token_share import Tokens
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.kernels.routing import top_experts
from megatron5d.topology.axis import Axis

AUXILIARY = ("aux", "seq_aux", "global_aux")


def counts_of(experts: Tensor, num_experts: int) -> Tensor:
    """Returns int64 `[E]`: how often each expert is chosen in `[n, k]`; entries of `num_experts` do
    not count."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))[
        :num_experts
    ]


_DROPPED, _ENTROPY, _SQUARE, _WATCHED = range(4)  # columns of Balancer.figures


class Balancer:
    """Balancing of all MoE layers that one rank holds.

    Args:
        model, moe: the architecture and the training of its routers.
        layers: global indices of the MoE layers here.
        cp_tp: ranks that share a micro-batch's tokens.
        stage: ranks that hold these layers and see other tokens.
    """

    def __init__(
        self,
        model: ModelConfig,
        moe: MoeConfig,
        layers: Sequence[int],
        cp_tp: Axis,
        stage: Axis,
        device,
    ) -> None:
        self.model, self.moe, self.layers = model, moe, list(layers)
        self.cp_tp, self.stage = cp_tp, stage
        self.kinds = tuple(kind for kind in AUXILIARY if kind in moe.balance)
        self.names = tuple(f"{kind}_loss" for kind in self.kinds) + (
            ("router_z_loss",) if moe.z_coef else ()
        )
        self.biases: dict[int, Tensor] = {}  # layer -> the router's buffer
        self._row = {layer: i for i, layer in enumerate(self.layers)}
        shape = (len(self.layers), model.num_experts)
        # choices of this rank's tokens, this step; and those of padding
        self._counts = torch.zeros(shape[0], shape[1] + 1, dtype=torch.int64, device=device)
        self.chosen, self._counts_of = self._counts[:, :-1], self._counts.unbind()
        self._one = torch.ones((), dtype=torch.int64, device=device)
        # by the plain scores; global_aux alone
        self.plain = torch.zeros(shape, dtype=torch.int64, device=device)
        self.figures = torch.zeros(len(self.layers), 4, dtype=torch.float64, device=device)
        # this rank's share, this step
        self.values = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.watched = False
        self._counting = False
        self._num_microbatches = 1
        self._counted = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tokens: Pending | None = None

    @property
    def counts_ahead(self) -> bool:
        """Whether the choices of the whole global batch must be known before the first backward."""
        return "global_aux" in self.kinds

    def start_step(
        self, num_microbatches: int, num_tokens: Tensor, dp_cp: Axis, watched: bool
    ) -> None:
        """Clears the figures and sets the scale of the step's auxiliary gradients.

        Args:
            num_microbatches: of the global batch.
            num_tokens: fp64 scalar, this data-parallel rank's tokens that are not padding.
            dp_cp: ranks with other tokens.
            watched: collect what `layer_figures` tells.

        Comm: all_reduce dp_cp of one number, waited for in the first backward.
        """
        for tensor in (self._counts, self.plain, self.figures, self.values):
            tensor.zero_()
        self.watched = watched
        self._num_microbatches = num_microbatches
        # in memory that graphs read
        self._num_tokens = start_all_reduce(self._counted.copy_(num_tokens), dp_cp)

    def settle(self) -> None:
        """Waits for the scale, which graphs of phases cannot."""
        if self._num_tokens is not None:
            self._num_tokens.wait()

    def start_counting(self) -> None:
        """Makes forwards without gradients count choices for global_aux."""
        self._counting = True

    def finish_counting(self) -> None:
        """Sums the counts over ranks. Comm: all_reduce over the stage's ranks of E counts a
        layer."""
        self._counting = False
        all_reduce(self.plain, self.stage)

    def observe(
        self, layer: int, logits: Tensor, experts: Tensor, dropped: Tensor | None, tokens: Tokens
    ) -> None:
        """Counts a micro-batch's choices, once: forwards without gradients are repeated later, or
        evaluations.

        Args:
            layer: global index.
            logits: `[n, E]`.
            experts: int64 `[n, k]` before anything is dropped; `num_experts` for padding.
            dropped: scalar, choices that a full expert refused; None = none.
            tokens: `Tokens` of these rows.
        """
        row, num_experts = self._row[layer], self.model.num_experts
        if not torch.is_grad_enabled():
            if self._counting:
                self.plain[row] += counts_of(
                    self.plain_choice(logits, experts, tokens), num_experts
                )
            return
        self._counts_of[row].scatter_add_(0, experts.flatten(), self._one.expand(experts.numel()))
        if dropped is not None:
            self.figures[row, _DROPPED] += dropped
        if self.watched:
            self._watch(row, logits.detach(), tokens)

    def _watch(self, row: int, logits: Tensor, tokens: Tokens) -> None:
        logprobs = torch.log_softmax(logits, -1)
        if self.model.router_score == "sigmoid":
            logprobs = normalised(logits, "sigmoid").clamp(min=1e-30).log()
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        real = entropy.numel() if tokens.real is None else tokens.real.sum()
        self.figures[row, _ENTROPY] += tokens.masked(entropy).sum()
        self.figures[row, _SQUARE] += tokens.masked(logits.square().sum(-1)).sum()
        self.figures[row, _WATCHED] += real

    def plain_choice(self, logits: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        """Returns the experts that would be chosen by the scores alone, without bias and groups;
        `num_experts` for padding."""
        model = self.model
        if not (self.biases or self.moe.force_balanced) and model.top_groups == model.num_groups:
            return experts
        plain = top_experts(scores_of(logits.detach(), model.router_score), model.top_k)
        return (
            plain
            if tokens.real is None
            else plain.masked_fill(~tokens.real[:, None], model.num_experts)
        )

    def attach(
        self, weights: Tensor, layer: int, logits: Tensor, experts: Tensor, tokens: Tokens
    ) -> Tensor:
        """Returns `weights` unchanged; their backward adds these tokens' auxiliary gradients to
        that of the logits.

        Args:
            weights: `[n, k]`, on every path from the experts to the output.
            layer: global index.
            logits: `[n, E]`.
            experts: int64 `[n, k]` as in `observe`.

        Comm: all_reduce cp_tp of E counts a sequence, waited for in the backward.
        """
        if not self.names or not torch.is_grad_enabled():
            return weights
        pending = None
        if "aux" in self.kinds or "seq_aux" in self.kinds:
            plain, b = self.plain_choice(logits, experts, tokens), tokens.num_sequences
            width = self.model.num_experts + 1
            counts = counts_of(plain + tokens.sequence[:, None] * width, b * width).view(b, width)[
                :, :-1
            ]
            pending = start_all_reduce(counts.contiguous(), self.cp_tp)
        return _Attach.apply(weights, logits, self, self._row[layer], tokens, pending)

    def logit_gradient(
        self, row: int, logits: Tensor, tokens: Tokens, counting: Pending | None
    ) -> Tensor:
        """Returns gradient of all auxiliary terms of these tokens; their values are added to this
        rank's share.

        Args:
            row: of the layer among those held here.
            logits: `[n, E]`.
            counting: of int64 `[b, E]` plain choices per sequence of the whole micro-batch.
        """
        assert self._num_tokens is not None, "start_step sets the scale of auxiliary gradients"
        num_tokens = self._num_tokens.wait().to(logits.dtype).clamp(min=1)
        gradient = torch.zeros_like(logits)
        if self.kinds:
            counts = None if counting is None else counting.wait().to(logits.dtype)
            # [b, E] or [1, E] each
            prob_gradients = [
                self._prob_gradient(kind, row, counts, num_tokens, tokens) for kind in self.kinds
            ]
            probs = normalised(logits, self.model.router_score)
            sums = tokens.per_sequence(probs)  # [b, E]
            for i, each in enumerate(prob_gradients):
                self.values[i] += (each * sums).sum()
            # [b, E]
            total = sum(prob_gradients[1:], prob_gradients[0]).expand(tokens.num_sequences, -1)
            by_token = total[tokens.sequence] * self.moe.aux_coef  # [n, E]
            gradient += normalised_backward(probs, logits, by_token, self.model.router_score)
        if self.moe.z_coef:
            lse = torch.logsumexp(logits, -1, keepdim=True)
            self.values[-1] += tokens.masked(lse.square()).sum() / num_tokens
            gradient += 2 * self.moe.z_coef / num_tokens * lse * torch.exp(logits - lse)
        return tokens.masked(gradient)

    def _prob_gradient(
        self, kind: str, row: int, counts: Tensor | None, num_tokens: Tensor, tokens: Tokens
    ) -> Tensor:
        """Returns d(loss of one kind)/d(p_te) of a sequence's tokens, before the coefficient."""
        model, b, share = self.model, tokens.num_sequences, 1.0
        if kind == "global_aux":
            n = self.plain[row][None].to(num_tokens.dtype)
        else:
            assert counts is not None
            n = counts if kind == "seq_aux" else counts.sum(0, keepdim=True)
            share = 1 / self._num_microbatches / (b if kind == "seq_aux" else 1)
        size = n.sum(-1, keepdim=True) / model.top_k  # T
        return share * model.num_experts / (model.top_k * size.clamp(min=1).square()) * n

    def finish_step(self) -> None:
        """Updates the biases by the step's counts, equally on every rank that holds them.

        Comm: all_reduce over the stage's ranks of E counts a layer, where there are biases.
        """
        if "bias" not in self.moe.balance or not self.biases:
            return
        counts = all_reduce(self.chosen.clone(), self.stage).double()
        moves = self.moe.bias_rate * torch.sign(counts.mean(-1, keepdim=True) - counts)
        for layer, bias in self.biases.items():
            bias += moves[self._row[layer]].to(bias.dtype)

    def layer_figures(self, world: Axis) -> dict[str, float]:
        """Figures for the log, per layer, over the step's global batch.

        Returns `moe/layer_{i}/{figure}`: load (busiest expert's count / mean), entropy (nats a
        token), dropped (share of the choices), dead_experts (a count), bias_range (largest -
        smallest), logit_norm (root mean square of a token's norm).

        Comm: all_reduce over the world of E + 5 numbers for every block of the model.
        """
        E = self.model.num_experts
        table = torch.zeros(
            len(blocks(self.model)), E + 5, dtype=torch.float64, device=self.chosen.device
        )
        for layer, row in self._row.items():
            table[layer, :E], table[layer, E : E + 4] = self.chosen[row], self.figures[row]
            if layer in self.biases and self.stage.rank == 0:
                table[layer, E + 4] = self.biases[layer].max() - self.biases[layer].min()
        found: dict[str, float] = {}
        for layer, (*counts, dropped, entropy, square, tokens, spread) in enumerate(
            all_reduce(table, world).tolist()
        ):
            total = sum(counts)
            if not total:
                continue
            figures = {
                "load": max(counts) * E / total,
                "entropy": entropy / tokens,
                "dropped": dropped / total,
                "dead_experts": float(counts.count(0)),
                "bias_range": spread,
                "logit_norm": (square / tokens) ** 0.5,
            }
            found |= {f"moe/layer_{layer}/{name}": value for name, value in figures.items()}
        return found


def normalised(logits: Tensor, score: str) -> Tensor:
    """Scores that sum to 1: softmax, or sigmoid divided by its sum."""
    scores = scores_of(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def normalised_backward(probs: Tensor, logits: Tensor, grad: Tensor, score: str) -> Tensor:
    """Returns gradient of the logits from that of `probs = normalised(logits, score)`."""
    centred = grad - (grad * probs).sum(-1, keepdim=True)
    if score == "softmax":
        return probs * centred
    # p = s / Σs and ds/dlogit = s(1 - s): d/dlogit = p (1 - s) (g - Σ g p)
    return probs * (1 - torch.sigmoid(logits)) * centred


class _Attach(FirstOrderFunction):
    @staticmethod
    def forward(ctx, weights, logits, balancer, row, tokens, pending):
        ctx.save_for_backward(logits)
        ctx.balancer, ctx.row, ctx.tokens, ctx.pending = balancer, row, tokens, pending
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        return (
            grad,
            ctx.balancer.logit_gradient(ctx.row, logits, ctx.tokens, ctx.pending),
            None,
            None,
            None,
            None,
        )

"""Load balancing: auxiliary losses, the bias, and figures for the log, without a host sync.

T tokens (without padding), E experts, k choices per token; n_e = tokens that choose e by their
scores alone (without bias and groups, also under moe.replay); p = softmax of the logits, or sigmoid
divided by its sum. Summed over the layers:

    aux         E/(k·T²) · Σ_e n_e Σ_t p_te of a micro-batch; mean over the global batch
    seq_aux     the same of each sequence; mean over the global batch
    global_aux  the same of the global batch
    z           logsumexp² of a token; mean over the global batch
    bias        after a step bias += rate·sign(mean count − count), before any choice is dropped

The objective contains aux_coef times the first three and z_coef times the fourth. Their gradients
are added in the backward of the chosen experts' weights (`attach`), so they need no output of their
own. The coefficients mean the same as in Megatron-Core: aux times aux_coef is its
`switch_load_balancing_loss_func` of a micro-batch (E·coef/(k·T²)·Σ counts·Σp), and z times z_coef
is its `z_loss_func` (coef·mean of logsumexp²), both in megatron/core/transformer/moe/moe_utils.py.
Source: Fedus et al. 2021 (arXiv:2101.03961), section 2.2; z: Zoph et al. 2022 (arXiv:2202.08906),
    section 3.2; per sequence and bias: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2; global: Qiu
    et al. 2025 (arXiv:2501.11873).
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
    """Number of choices of each expert in `[n, k]`, int64 `[E]`; `num_experts` does not count."""
    counts, flat = experts.new_zeros(num_experts + 1, dtype=torch.int64), experts.flatten()
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


_DROPPED, _ENTROPY, _SQUARE, _TOKENS = range(4)  # columns of Balancer.figures


class Balancer:
    """Balances all MoE layers of a rank.

    Args:
        model, moe: the architecture, and how its routers are trained.
        layers: global indices of this rank's MoE layers.
        cp_tp: ranks that share a micro-batch's tokens.
        stage: ranks that hold these layers and see other tokens.
        device: of the counts.
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
        self.loss_names = tuple(f"{kind}_loss" for kind in self.kinds) + (
            ("router_z_loss",) if moe.z_coef else ()
        )
        self.biases: dict[int, Tensor] = {}  # layer -> the router's buffer
        self._row = {layer: i for i, layer in enumerate(self.layers)}
        num_layers, num_experts = len(self.layers), model.num_experts
        # this rank's choices in this step, and in the last column those of padding
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self.counts, self._counts_of_row = self._counts[:, :-1], self._counts.unbind()
        self._one = torch.ones((), dtype=torch.int64, device=device)
        # choices by the scores alone, only for global_aux
        self.unbiased_counts = self.counts.new_zeros(num_layers, num_experts)
        self.figures = torch.zeros(num_layers, 4, dtype=torch.float64, device=device)
        # this rank's shares of the losses in this step
        self.loss_values = torch.zeros(len(self.loss_names), dtype=torch.float64, device=device)
        self._collects_figures = False
        self._is_counting = False
        self._num_microbatches = 1
        self._local_tokens = torch.zeros((), dtype=torch.float64, device=device)
        self._num_tokens: Pending | None = None

    @property
    def needs_counts_first(self) -> bool:
        """Whether the first backward needs the choices of the entire global batch."""
        return "global_aux" in self.kinds

    def start_step(
        self, num_microbatches: int, num_tokens: Tensor, dp_cp: Axis, collect_figures: bool
    ) -> None:
        """Clears the figures and sets the scale of the step's auxiliary gradients.

        Args:
            num_microbatches: of the global batch.
            num_tokens: fp64 scalar, this data-parallel rank's tokens without padding.
            dp_cp: ranks with other tokens.
            collect_figures: for `layer_figures`.

        Comm: all_reduce dp_cp of one number, waited for in the first backward.
        """
        for tensor in (self._counts, self.unbiased_counts, self.figures, self.loss_values):
            tensor.zero_()
        self._collects_figures = collect_figures
        self._num_microbatches = num_microbatches
        # Copied, because CUDA graphs read the same memory in every step.
        self._num_tokens = start_all_reduce(self._local_tokens.copy_(num_tokens), dp_cp)

    def wait_for_scale(self) -> None:
        """Waits for the scale before the first backward, because CUDA graphs cannot wait for it."""
        if self._num_tokens is not None:
            self._num_tokens.wait()

    def start_counting(self) -> None:
        """Makes forwards without gradients count choices for global_aux."""
        self._is_counting = True

    def finish_counting(self) -> None:
        """Sums the counts over ranks.

        Comm: all_reduce over the stage's ranks of E counts a layer.
        """
        self._is_counting = False
        all_reduce(self.unbiased_counts, self.stage)

    def observe(
        self, layer: int, logits: Tensor, experts: Tensor, dropped: Tensor | None, tokens: Tokens
    ) -> None:
        """Counts a micro-batch's choices.

        Forwards without gradients do not count: they are evaluations, or are repeated later.

        Args:
            layer: global index.
            logits: `[n, E]`.
            experts: int64 `[n, k]` before any choice is dropped; `num_experts` for padding.
            dropped: scalar, number of choices dropped for capacity; None = 0.
            tokens: of these rows.
        """
        row = self._row[layer]
        if not torch.is_grad_enabled():
            if self._is_counting:
                choices = self.unbiased_choices(logits, experts, tokens)
                self.unbiased_counts[row] += counts_of(choices, self.model.num_experts)
            return
        choices = experts.flatten()
        self._counts_of_row[row].scatter_add_(0, choices, self._one.expand(choices.numel()))
        if dropped is not None:
            self.figures[row, _DROPPED] += dropped
        if self._collects_figures:
            self._add_figures(row, logits.detach(), tokens)

    def _add_figures(self, row: int, logits: Tensor, tokens: Tokens) -> None:
        logprobs = torch.log_softmax(logits, -1)
        if self.model.router_score == "sigmoid":
            logprobs = normalized(logits, "sigmoid").clamp(min=1e-30).log()
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        num_tokens = entropy.numel() if tokens.real is None else tokens.real.sum()
        self.figures[row, _ENTROPY] += tokens.masked(entropy).sum()
        self.figures[row, _SQUARE] += tokens.masked(logits.square().sum(-1)).sum()
        self.figures[row, _TOKENS] += num_tokens

    def unbiased_choices(self, logits: Tensor, experts: Tensor, tokens: Tokens) -> Tensor:
        """The experts with the best scores, whatever the choice follows; `num_experts` for
        padding."""
        model, moe = self.model, self.moe
        chosen_by_score = not (self.biases or moe.force_balanced or moe.replay)
        if chosen_by_score and model.top_groups == model.num_groups:
            return experts
        choices = top_experts(scores_of(logits.detach(), model.router_score), model.top_k)
        if tokens.real is None:
            return choices
        return choices.masked_fill(~tokens.real[:, None], model.num_experts)

    def attach(
        self, weights: Tensor, layer: int, logits: Tensor, experts: Tensor, tokens: Tokens
    ) -> Tensor:
        """Adds the auxiliary losses' gradients to those of the logits in the backward of `weights`.

        Args:
            weights: `[n, k]`, on every path from the experts to the output.
            layer: global index.
            logits: `[n, E]`.
            experts: int64 `[n, k]` as in `observe`.
            tokens: of these rows.

        Returns:
            `weights`, unchanged.

        Comm: all_reduce cp_tp of E counts a sequence, waited for in the backward.
        """
        if not self.loss_names or not torch.is_grad_enabled():
            return weights
        counting = None
        if "aux" in self.kinds or "seq_aux" in self.kinds:
            choices, b = self.unbiased_choices(logits, experts, tokens), tokens.num_sequences
            width = self.model.num_experts + 1  # with a column for padding
            by_sequence = counts_of(choices + tokens.sequence[:, None] * width, b * width)
            counts = by_sequence.view(b, width)[:, :-1].contiguous()
            counting = start_all_reduce(counts, self.cp_tp)
        return _AttachLosses.apply(weights, logits, self, self._row[layer], tokens, counting)

    def logit_gradient(
        self, row: int, logits: Tensor, tokens: Tokens, counting: Pending | None
    ) -> Tensor:
        """Gradient of all auxiliary losses of these tokens; adds their values to `loss_values`.

        Args:
            row: index of the layer on this rank.
            logits: `[n, E]`.
            tokens: of these rows.
            counting: int64 `[b, E]`, `unbiased_choices` per sequence of the entire micro-batch.
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
            probs = normalized(logits, self.model.router_score)
            sums = tokens.per_sequence(probs)  # [b, E]
            for i, prob_gradient in enumerate(prob_gradients):
                self.loss_values[i] += (prob_gradient * sums).sum()
            # [b, E]
            total = sum(prob_gradients[1:], prob_gradients[0]).expand(tokens.num_sequences, -1)
            by_token = total[tokens.sequence] * self.moe.aux_coef  # [n, E]
            gradient += normalized_backward(probs, logits, by_token, self.model.router_score)
        if self.moe.z_coef:
            lse = torch.logsumexp(logits, -1, keepdim=True)
            self.loss_values[-1] += tokens.masked(lse.square()).sum() / num_tokens
            gradient += 2 * self.moe.z_coef / num_tokens * lse * torch.exp(logits - lse)
        return tokens.masked(gradient)

    def _prob_gradient(
        self, kind: str, row: int, counts: Tensor | None, num_tokens: Tensor, tokens: Tokens
    ) -> Tensor:
        """d(loss of one kind)/d(p_te) of a sequence's tokens, without the coefficient."""
        model, b, share = self.model, tokens.num_sequences, 1.0
        if kind == "global_aux":
            n = self.unbiased_counts[row][None].to(num_tokens.dtype)
        else:
            assert counts is not None
            n = counts if kind == "seq_aux" else counts.sum(0, keepdim=True)
            share = 1 / self._num_microbatches / (b if kind == "seq_aux" else 1)
        size = n.sum(-1, keepdim=True) / model.top_k  # T
        return share * model.num_experts / (model.top_k * size.clamp(min=1).square()) * n

    def finish_step(self) -> None:
        """Updates the biases from the step's counts, on every rank that holds them.

        Comm: all_reduce over the stage's ranks of E counts a layer, if there are biases.
        """
        if "bias" not in self.moe.balance or not self.biases:
            return
        counts = all_reduce(self.counts.clone(), self.stage).double()
        updates = self.moe.bias_rate * torch.sign(counts.mean(-1, keepdim=True) - counts)
        for layer, bias in self.biases.items():
            bias += updates[self._row[layer]].to(bias.dtype)

    def layer_figures(self, world: Axis) -> dict[str, float]:
        """Figures for the log, per layer, over the step's global batch.

        Returns:
            `moe/layer_{i}/{figure}`: load (busiest expert's count / mean), entropy (nats per
            token), dropped (share of the choices), dead_experts (a count), bias_range (largest -
            smallest), logit_norm (root mean square of a token's norm).

        Comm: all_reduce over the world of E + 5 numbers for every block of the model.
        """
        E, num_blocks = self.model.num_experts, len(blocks(self.model))
        table = torch.zeros(num_blocks, E + 5, dtype=torch.float64, device=self.counts.device)
        for layer, row in self._row.items():
            table[layer, :E], table[layer, E : E + 4] = self.counts[row], self.figures[row]
            if layer in self.biases and self.stage.rank == 0:
                table[layer, E + 4] = self.biases[layer].max() - self.biases[layer].min()
        layer_figures: dict[str, float] = {}
        for layer, columns in enumerate(all_reduce(table, world).tolist()):
            *counts, dropped, entropy, square, tokens, bias_range = columns
            total = sum(counts)
            if not total:
                continue
            figures = {
                "load": max(counts) * E / total,
                "entropy": entropy / tokens,
                "dropped": dropped / total,
                "dead_experts": float(counts.count(0)),
                "bias_range": bias_range,
                "logit_norm": (square / tokens) ** 0.5,
            }
            layer_figures |= {f"moe/layer_{layer}/{name}": v for name, v in figures.items()}
        return layer_figures


def normalized(logits: Tensor, score: str) -> Tensor:
    """Scores that sum to 1: softmax, or sigmoid divided by its sum."""
    scores = scores_of(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)


def normalized_backward(probs: Tensor, logits: Tensor, grad: Tensor, score: str) -> Tensor:
    """Gradient of the logits from that of `probs = normalized(logits, score)`."""
    centered = grad - (grad * probs).sum(-1, keepdim=True)
    if score == "softmax":
        return probs * centered
    # p = s / Σs and ds/dlogit = s(1 - s): d/dlogit = p (1 - s) (g - Σ g p)
    return probs * (1 - torch.sigmoid(logits)) * centered


class _AttachLosses(FirstOrderFunction):
    @staticmethod
    def forward(ctx, weights, logits, balancer, row, tokens, counting):
        ctx.save_for_backward(logits)
        ctx.balancer, ctx.row, ctx.tokens, ctx.counting = balancer, row, tokens, counting
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        dlogits = ctx.balancer.logit_gradient(ctx.row, logits, ctx.tokens, ctx.counting)
        return grad, dlogits, None, None, None, None

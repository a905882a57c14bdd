"""Multi-head latent attention: projects q, k and v up from two small latents, heads cut over tp.

    q = q_up(norm(q_down(x)))  or  q(x)                  per head: dn, and dr that are rotated
    c_kv, k_pe = kv_down(x);  k, v = kv_up(norm(c_kv))   per head: dn and dv
    scores = [q, rope(q_pe)] · [k, rope(k_pe)]           k_pe, of dr, is the same for all heads

The down-projections are small, and every tp rank holds them. The heads of all tp ranks use their
outputs, so exactly one collective must sum gradients over tp (under sp it also gathers the
sequence). It is placed where fewer elements are sent: after the down-projections
(`enters_tp_late`), or before them if queries are projected from x or the latents are not smaller
than x.
Source: DeepSeek-AI 2024 (arXiv:2405.04434), section 2.1.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron5d.comm.collectives import copy_to, gather_from
from megatron5d.kernels import accumulate_weight_grad, apply_rope_to_ends
from megatron5d.model.attention import AttentionBranch, AttentionCore
from megatron5d.model.block_inputs import BlockInputs
from megatron5d.model.norm import Norm
from megatron5d.model.rope import softmax_temperature
from megatron5d.phases.phase import MicroBatch
from megatron5d.phases.wgrad import Defer, defer_weight_grad, grad_buffer, run_now
from megatron5d.precision.gemm import PLAIN, Gemms, gemms_of
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, local_linear


class MultiLatentAttention(AttentionBranch):
    """Phase: x + out(attention(q, k, v))."""

    def __init__(self, inputs: BlockInputs, layer: int) -> None:
        super().__init__(inputs, layer)
        config, name = inputs.model, f"layers.{layer}.attention"
        self.tp, self.interleaved = inputs.tp, config.rope_interleaved
        self.sp = inputs.sp and inputs.tp.size > 1
        rope = inputs.rope(layer)
        assert rope is not None
        self.rope = rope
        # cp ranks exchange latents instead of keys and values
        self.compress = inputs.config.parallel.cp_compress_kv and inputs.context is not None
        self.adds_grads_at_once = self.compress  # the gradient of kv_up (LatentKV)
        self.num_heads = self.tp.divide(config.num_heads, "model.num_heads")  # a/tp
        self.dims = dn, dr, dv = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        self.latent_dims = config.q_lora_rank or 0, config.kv_lora_rank, dr
        self.enters_tp_late = config.reduces_latent_gradients
        self._build_projections(inputs, name)
        scale = softmax_temperature(config.rope_scaling) / math.sqrt(dn + dr)
        self.core = AttentionCore(inputs, layer, scale)
        self.out = inputs.row_linear(
            config.num_heads * dv, f"{name}.out", config.attention_out_bias
        )

    def _build_projections(self, inputs: BlockInputs, name: str) -> None:
        config, h, eps = inputs.model, inputs.model.hidden_size, inputs.model.latent_norm_eps
        (dn, dr, dv), (q_rank, kv_rank, _) = self.dims, self.latent_dims
        # A rank computes the gradient of its share of the sequence, or of its heads.
        partial_grad = self.sp or not self.enters_tp_late

        def down(rank: int, weight_name: str) -> nn.Parameter:
            return inputs.replicated((rank, h), weight_name, partial_grad=partial_grad)

        def norm(rank: int, norm_name: str) -> Norm:
            return inputs.norm(norm_name, rank, "rmsnorm", partial_grad, eps)

        def up(rank: int, features: int, layer_name: str) -> ColumnParallelLinear:
            heads = [(config.num_heads, features)]
            return inputs.column_linear(rank, heads, layer_name, sp=False)

        self.q_down = self.q_norm = None
        if q_rank:
            self.q_down = down(q_rank, f"{name}.q_down.weight")
            self.q_norm = norm(q_rank, f"{name}.q_norm")
        self.kv_down = down(kv_rank + dr, f"{name}.kv_down.weight")
        self.kv_norm = norm(kv_rank, f"{name}.kv_norm")
        self.q = up(q_rank or h, dn + dr, f"{name}.q_up" if q_rank else f"{name}.q")
        self.kv_up = up(kv_rank, dn + dv, f"{name}.kv_up")

    def attend(self, normed: Tensor, batch: MicroBatch, defer: Defer) -> Tensor:
        # [s/cp, b, rq], [s/cp, b, r], [s/cp, b, dr]  all_gather tp
        latents = self._down(normed, defer)
        # Sections in `recompute.parts` are recomputed in the backward. q, k, v of a/tp heads:
        heads = self.parts.run("qkv", partial(self._up, batch=batch, defer=defer), *latents)
        # [s/cp, b, a·dv/tp]
        core = self.parts.run("attention", partial(self._core, batch=batch), *heads)
        return self.out(core, defer)  # [s/cp/tp, b, h]  reduce_scatter tp

    def _down(self, x: Tensor, defer: Defer) -> tuple[Tensor, Tensor, Tensor]:
        """Latent queries `[s/cp, b, rq]` (or x), c_kv `[s/cp, b, r]` and k_pe `[s/cp, b, dr]`."""
        if not self.enters_tp_late:
            x = self._enter_tp(x)  # [s/cp/tp, b, h] -> [s/cp, b, h]  all_gather tp
        q = x
        if self.q_down is not None and self.q_norm is not None:
            # [s/cp/tp, b, rq] if enters_tp_late, else [s/cp, b, rq]
            q = self.q_norm(local_linear(x, self.q_down, defer))
        _, kv_rank, dr = self.latent_dims
        # cut along the sequence as q is
        c_kv, k_pe = local_linear(x, self.kv_down, defer).split([kv_rank, dr], -1)
        c_kv = self.kv_norm(c_kv)
        if self.enters_tp_late:
            # [s/cp/tp, b, rq+r+dr] -> [s/cp, ...]  all_gather tp
            latents = self._enter_tp(torch.cat((q, c_kv, k_pe), -1))
            q, c_kv, k_pe = latents.split(list(self.latent_dims), -1)
        return q, c_kv, k_pe

    def _up(
        self, q: Tensor, c_kv: Tensor, k_pe: Tensor, batch: MicroBatch, defer: Defer
    ) -> tuple[Tensor, ...]:
        """q `[s/cp, b, a/tp, dn+dr]` with k and v of this rank's heads, or with the latents.

        With latents where cp ranks exchange those (`compress`).
        """
        dn, dr, dv = self.dims
        # [s/cp, b, a/tp, dn+dr]
        q = local_linear(q, self.q.weight, defer).unflatten(-1, (self.num_heads, dn + dr))
        tables = self.rope(batch)
        q, k_pe = apply_rope_to_ends(q, k_pe.unsqueeze(2), *tables, interleaved=self.interleaved)
        if self.compress:
            return q, torch.cat((c_kv, k_pe.squeeze(2)), -1)  # [s/cp, b, r+dr]
        kv = local_linear(c_kv, self.kv_up.weight, defer)  # [s/cp, b, a·(dn+dv)/tp]
        kv = kv.unflatten(-1, (self.num_heads, dn + dv))  # [s/cp, b, a/tp, dn+dv]
        k, v = _split_kv(kv, k_pe, dn)  # [s/cp, b, a/tp, dn+dr], [s/cp, b, a/tp, dv]
        return q, k, v.contiguous()  # a view would keep all of kv for the backward

    def _core(self, q: Tensor, *keys: Tensor, batch: MicroBatch) -> Tensor:
        if self.compress:
            kv_format = LatentKV(self.kv_up.weight, self.num_heads, self.dims)
            return self.core.compressed(q, keys[0], kv_format, batch)
        return self.core(q, *keys, batch=batch)

    def input_gemms(self) -> Gemms:
        if not self.enters_tp_late or self.q_down is None:
            return PLAIN  # `_enter_tp` reads the normed input too
        return gemms_of(self.kv_down, self.q_down)

    def _enter_tp(self, x: Tensor) -> Tensor:
        """Gives all tp ranks the same x; the backward sums the gradients of their heads.

        Comm: all_gather tp with sp, else none / reduce_scatter tp with sp, else all_reduce.
        """
        return gather_from(x, self.tp) if self.sp else copy_to(x, self.tp)


def _split_kv(kv: Tensor, k_pe: Tensor, dn: int) -> tuple[Tensor, Tensor]:
    """kv `[t, b, a, dn+dv]`, k_pe `[t, b, 1, dr]` -> k `[t, b, a, dn+dr]`, v `[t, b, a, dv]`."""
    k_nope, v = kv.split([dn, kv.shape[-1] - dn], -1)
    return torch.cat((k_nope, k_pe.expand(-1, -1, kv.shape[2], -1)), -1), v


class LatentKV:
    """KVFormat of latents: a block is c_kv and the rotated k_pe, `[t, b, r+dr]`.

    kv_up is applied to every received block. Its weight gradient is never deferred: that would keep
    the gradients of all blocks' keys and values, which are those of the entire sequence.

    Args:
        weight: of kv_up, `[a/tp·(dn+dv), r]`.
        num_heads: number of heads in `rows`.
        dims: dn, dr, dv.
        rows: the weight's rows of these heads; None = all.
    """

    def __init__(
        self, weight: Tensor, num_heads: int, dims: tuple[int, int, int], rows: slice | None = None
    ) -> None:
        self.weight, self.num_heads, self.dims = weight, num_heads, dims
        self.rows = slice(None) if rows is None else rows
        self.value_dim = dims[2]

    def for_heads(self, rank: int, size: int) -> LatentKV:
        """The format for the heads of one of `size` ranks that exchange heads."""
        if size == 1:
            return self
        dn, _, dv = self.dims
        num_heads = self.num_heads // size
        num_rows = num_heads * (dn + dv)
        rows = slice(rank * num_rows, (rank + 1) * num_rows)
        return LatentKV(self.weight, num_heads, self.dims, rows)

    def unpack(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Maps latents `[t, b, r+dr]` -> k `[t, b, a/tp, dn+dr]`, v `[t, b, a/tp, dv]`."""
        dn, dr, dv = self.dims
        c_kv, k_pe = block.split([block.shape[-1] - dr, dr], -1)
        kv = F.linear(c_kv, self.weight[self.rows]).unflatten(-1, (self.num_heads, dn + dv))
        return _split_kv(kv, k_pe.unsqueeze(2), dn)

    def unpack_backward(self, block: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """Maps dk, dv -> the gradient of the block, `[t, b, r+dr]`; adds the weight gradient."""
        dn, dr, _ = self.dims
        dk_nope, dk_pe = dk.split([dn, dr], -1)
        dkv = torch.cat((dk_nope, dv), -1).flatten(2).to(block.dtype)  # [t, b, a·(dn+dv)]
        c_kv = block[..., :-dr]

        def add_grad() -> None:
            grad = grad_buffer(self.weight)[self.rows]
            accumulate_weight_grad(grad, dkv.flatten(0, 1), c_kv.reshape(-1, c_kv.shape[-1]))

        defer_weight_grad(self.weight, run_now, add_grad)
        return torch.cat(((dkv @ self.weight[self.rows]).to(dk.dtype), dk_pe.sum(2)), -1)

"""RMSNorm and LayerNorm over the last dim, replicated over tp, or over all heads, cut over tp."""

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import copy_to, reduce_from
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.phases.activations import KEEP_ALL
from megatron5d.precision.gemm import PLAIN, Gemms
from megatron5d.tensor_parallel.linear import column_pieces, replicated_parameter
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter


class Norm(nn.Module):
    """Normalizes the last dim of `[..., n]`, with statistics in fp32 (fp64 for fp64).

    Args:
        kind: "rmsnorm" or "layernorm".
        size: n.
        name: global name.
        tp: ranks that hold copies of the weight.
        partial_grad: the norm sees a share of the sequence or of the heads, so that its gradient is
            summed over tp.
        eps: added to the variance.
        zero_centered: scales by 1 + weight.
        settings: which library may compute it on a GPU.
        factory: dtype and device.
    """

    parts = KEEP_ALL  # `norm` may be recomputed

    def __init__(
        self,
        kind: str,
        size: int,
        name: str,
        tp: Axis,
        *,
        partial_grad: bool,
        eps: float,
        zero_centered: bool = False,
        settings: Settings = AUTO,
        **factory,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered, self.settings = eps, zero_centered, settings
        init = "zeros" if zero_centered else "ones"
        self.weight = replicated_parameter(
            (size,), f"{name}.weight", tp, partial_grad=partial_grad, init=init, **factory
        )
        self.bias = None
        self.kind = kind
        if kind == "layernorm":
            self.bias = replicated_parameter(
                (size,), f"{name}.bias", tp, partial_grad=partial_grad, **factory
            )

    def forward(self, x: Tensor, gemms: Gemms = PLAIN) -> Tensor:
        """Normalizes x.

        Args:
            x: `[..., n]`.
            gemms: the GEMMs that read the result, which FP8 ones get quantized; the default if
                anything else reads it too.
        """
        return self.parts.run("norm", lambda x: self._norm_and_input(x, gemms)[0], x)

    def branch(self, x: Tensor, gemms: Gemms = PLAIN) -> tuple[Tensor, Tensor]:
        """Input of a residual branch: the normalized x, and x for the sum at the branch's end.

        The norm's backward adds the gradients of both in one pass over memory. If the norm is
        recomputed, autograd adds them.

        Args:
            x, gemms: as in `forward`.
        """
        return self._norm_and_input(x, gemms) if self.parts.keeps("norm") else (self(x, gemms), x)

    def _norm_and_input(self, x: Tensor, gemms: Gemms) -> tuple[Tensor, Tensor]:
        weight = centered_weight(self.weight) if self.zero_centered else self.weight
        return gemms.norm(x, weight, self.bias, self.eps, self.settings)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.weight.shape[0]}"


class NoNorm(nn.Module):
    """Passes its input on, in place of a norm that a block does not have."""

    def forward(self, x: Tensor, gemms: Gemms = PLAIN) -> Tensor:
        return x

    def branch(self, x: Tensor, gemms: Gemms = PLAIN) -> tuple[Tensor, Tensor]:
        return x, x


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads together, cut over tp.

    Args:
        num_heads, head_dim: of the global projection.
        name: global name.
        tp: axis that cuts the heads.
        copies: tp ranks that share a head.
        eps: added to the mean square.
        zero_centered: as in Norm.
        factory: dtype and device.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        name: str,
        tp: Axis,
        *,
        copies: Axis,
        eps: float,
        zero_centered: bool = False,
        **factory,
    ) -> None:
        super().__init__()
        self.tp, self.eps, self.zero_centered = tp, eps, zero_centered
        rows, pieces = column_pieces([(num_heads, head_dim)], (), tp, copies)
        spec = ShardSpec(
            f"{name}.weight",
            (num_heads * head_dim,),
            pieces,
            init="zeros" if zero_centered else "ones",
            decay=False,
        )
        self.weight = new_parameter((rows,), spec, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes `[s/cp, b, heads/tp, d]`.

        Comm: all_reduce tp of s/cp·b numbers / the same.
        """
        wide = x.flatten(2).to(statistics_dtype(x.dtype))
        squares = wide.square().sum(-1, keepdim=True)
        # [s/cp, b, 1]  all_reduce tp / all_reduce tp
        # A copied head counts as often in the sum as in the divisor.
        mean = copy_to(reduce_from(squares, self.tp), self.tp) / (self.tp.size * wide.shape[-1])
        weight = centered_weight(self.weight) if self.zero_centered else self.weight
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype).view(x.shape)


def centered_weight(weight: Tensor) -> Tensor:
    """1 + weight in fp32 (fp64 for fp64), because bf16 would lose most bits of a small weight."""
    return weight.to(statistics_dtype(weight.dtype)) + 1.0


def branch_input(
    norm: Norm | NoNorm, state: Tensor | tuple[Tensor, Tensor], gemms: Gemms = PLAIN
) -> tuple[Tensor, Tensor]:
    """The normed input of a block's second branch, and its residual.

    Args:
        norm: of the branch.
        state: hidden states; in a parallel block the residual, and what the branch reads.
        gemms: as in Norm.
    """
    if isinstance(state, tuple):
        residual, x = state
        return norm(x, gemms), residual
    return norm.branch(state, gemms)

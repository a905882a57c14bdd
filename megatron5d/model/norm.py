"""RMSNorm and LayerNorm over the last dim, replicated in tp, or over all heads, cut over tp;
residual branches."""

import torch
from torch import Tensor, nn

from megatron5d.comm.collectives import copy_to, reduce_from
from megatron5d.kernels.choice import AUTO, Settings
from megatron5d.kernels.dispatch import statistics_dtype
from megatron5d.phases.recompute import KEEP_ALL
from megatron5d.precision.gemm import PLAIN, Gemms
from megatron5d.tensor_parallel.linear import column_pieces, replicated_parameter
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import ShardSpec, new_parameter


class Norm(nn.Module):
    """`[..., n]` -> the same, normalised; statistics in fp32 (fp64 for fp64).

    Args:
        kind: "rmsnorm" or "layernorm".
        size: n.
        name: global name.
        tp: ranks that hold copies of the weight.
        partial_grad: this rank's norm sees a share of the sequence or of the heads, so its gradient
            is summed over tp.
        eps: added to the variance.
        zero_centered: it scales by 1 + weight.
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
        """Maps `[..., n]` -> the same.

        Args:
            x: `[..., n]`.
            gemms: the GEMMs that read the result (FP8 ones quantise it at once); the default if
                anything else reads it too.
        """
        return self.parts.run("norm", lambda x: self._norm_and_input(x, gemms)[0], x)

    def branch(self, x: Tensor, gemms: Gemms = PLAIN) -> tuple[Tensor, Tensor]:
        """Begins a residual branch: the normalised x, and x itself for the sum at the branch's end.

        The two gradients meet in the norm's backward, in one pass over memory; if the norm is
        recomputed, autograd adds them.

        Args:
            x, gemms: as in `forward`.
        """
        return self._norm_and_input(x, gemms) if self.parts.keeps("norm") else (self(x, gemms), x)

    def _norm_and_input(self, x: Tensor, gemms: Gemms) -> tuple[Tensor, Tensor]:
        weight = centred_weight(self.weight) if self.zero_centered else self.weight
        return gemms.norm(x, weight, self.bias, self.eps, self.settings)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.weight.shape[0]}"


class NoNorm(nn.Module):
    """Stands where a block has no norm, and returns its input."""

    def forward(self, x: Tensor, gemms: Gemms = PLAIN) -> Tensor:
        return x

    def branch(self, x: Tensor, gemms: Gemms = PLAIN) -> tuple[Tensor, Tensor]:
        return x, x


class AllHeadsNorm(nn.Module):
    """RMSNorm over all heads together, which tp cuts.

    Args:
        num_heads, head_dim: of the whole projection.
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
        """Maps `[s/cp, b, heads/tp, d]` -> the same. Comm: all_reduce tp of s/cp·b numbers / the
        same."""
        wide = x.flatten(2).to(statistics_dtype(x.dtype))
        squares = wide.square().sum(-1, keepdim=True)
        # [s/cp, b, 1]  all_reduce tp, both ways; a copied head counts as often in the sum as in its
        # size
        mean = copy_to(reduce_from(squares, self.tp), self.tp) / (self.tp.size * wide.shape[-1])
        weight = centred_weight(self.weight) if self.zero_centered else self.weight
        return (wide * torch.rsqrt(mean + self.eps) * weight).to(x.dtype).view(x.shape)


def centred_weight(weight: Tensor) -> Tensor:
    """Returns 1 + weight, in fp32 (fp64 for fp64): in bf16 the sum would lose most bits of a small
    weight."""
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

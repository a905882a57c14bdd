"""RMSNorm and LayerNorm over the hidden dim, replicated in tp."""

from __future__ import annotations

from torch import Tensor, nn

from megatron5d.autograd.recompute import KEEP_ALL
from megatron5d.precision.gemm import PLAIN, Gemms
from megatron5d.tensor_parallel.linear import replicated_parameter
from megatron5d.topology.axis import Axis


class Norm(nn.Module):
    """`[..., n]` -> the same, normalised; statistics in fp32 (fp64 for fp64).

    Args:
        kind: "rmsnorm" or "layernorm".
        size: n.
        name: global name.
        tp: ranks that hold copies of the weight.
        partial_grad: this rank's norm sees a share of the sequence or of the heads, so its gradient is summed over tp.
        eps: added to the variance.
        factory: dtype and device.
    """

    parts = KEEP_ALL  # `norm` may be recomputed

    def __init__(self, kind: str, size: int, name: str, tp: Axis, *, partial_grad: bool, eps: float, **factory) -> None:
        super().__init__()
        self.eps = eps
        self.weight = replicated_parameter(
            (size,), f"{name}.weight", tp, partial_grad=partial_grad, init="ones", **factory
        )
        self.bias = None
        self.kind = kind
        if kind == "layernorm":
            self.bias = replicated_parameter((size,), f"{name}.bias", tp, partial_grad=partial_grad, **factory)

    def forward(self, x: Tensor, gemms: Gemms = PLAIN) -> Tensor:
        """`[..., n]` -> the same.

        Args:
            x: `[..., n]`.
            gemms: how the products are made that read the result (8-bit ones quantise it at once); the default if
                anything else reads it too.
        """
        return self.parts.run("norm", lambda x: self._norm_and_input(x, gemms)[0], x)

    def branch(self, x: Tensor, gemms: Gemms = PLAIN) -> tuple[Tensor, Tensor]:
        """Begins a residual branch: the normalised x, and x itself for the sum at the branch's end.

        The two gradients meet in the norm's backward, in one pass over memory; if the norm is recomputed, autograd adds
        them.

        Args:
            x, gemms: as in `forward`.
        """
        return self._norm_and_input(x, gemms) if self.parts.keeps("norm") else (self(x, gemms), x)

    def _norm_and_input(self, x: Tensor, gemms: Gemms) -> tuple[Tensor, Tensor]:
        if self.bias is not None:
            return gemms.layer_norm(x, self.weight, self.bias, self.eps)
        return gemms.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.weight.shape[0]}"

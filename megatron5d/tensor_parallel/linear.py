"""Linear layers cut over tp by columns (outputs) or rows (inputs), with a split backward.

                forward                    backward of the input (I)     weights (W)
Column, sp      all_gather x; y = x·Wᵀ     dx = dy·W; reduce_scatter dx  all_gather x; dW = dyᵀ·x
Column, no sp   y = x·Wᵀ                   dx = dy·W; all_reduce dx      dW = dyᵀ·x
Row, sp         y = x·Wᵀ; reduce_scatter y all_gather dy; dx = dy·W      dW = dyᵀ·x
Row, no sp      y = x·Wᵀ; all_reduce y     dx = dy·W                     dW = dyᵀ·x

`defer` runs W at once, while dx's collective is in flight, or keeps it for a schedule that splits
the backward. With sp only the sharded x is saved for the backward, and gathered again while dx's
GEMM runs. The weight's state says how it is multiplied, in what form x and dy are saved and
gathered (`gemms_of`, precision/gemm.py), and whether a GEMM and its collective overlap
(`overlap_of`, overlap.py).
Source: Shoeybi et al. 2019 (arXiv:1909.08053); sequence parallelism Korthikanti et al. 2022
    (arXiv:2205.05198).
"""

from collections.abc import Sequence

from torch import Tensor, nn

from megatron5d.comm.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.phases.wgrad import Defer, defer_weight_grad, run_now
from megatron5d.precision.gemm import gemms_of
from megatron5d.tensor_parallel.overlap import NO_OVERLAP, Gemm, overlap_of
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import Piece, ShardSpec, new_parameter, unsharded


class _LocalLinear(FirstOrderFunction):
    """A linear layer without communication."""

    @staticmethod
    def forward(ctx, x, weight, defer: Defer):
        ctx.weight, ctx.defer, gemms = weight, defer, gemms_of(weight)
        operand = gemms.saved_operand(x)
        ctx.save_for_backward(*operand)
        return gemms.forward(operand, weight)  # [..., in] -> [..., out]

    @staticmethod
    def backward(ctx, dy):
        weight, x, gemms = ctx.weight, ctx.saved_tensors, gemms_of(ctx.weight)
        dy = gemms.operand(dy, gradient=True)
        dx = gemms.input_grad(dy, weight)  # [..., out] -> [..., in]
        dy = gemms.for_weight_grad(dy)
        # dW [out, in]
        defer_weight_grad(weight, ctx.defer, lambda: gemms.weight_grad(weight, dy, x))
        return dx, None, None


def local_linear(x: Tensor, weight: Tensor, defer: Defer = run_now) -> Tensor:
    """Computes x·Wᵀ without communication: `[..., in]`, `[out, in]` -> `[..., out]`.

    For tp = 1, and for callers that gather x and sum its gradient over tp themselves.
    """
    return _LocalLinear.apply(x, weight, defer)


class _ColumnLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weight, tp: Axis, sp: bool, defer: Defer):
        ctx.tp, ctx.sp, ctx.defer, ctx.weight = tp, sp, defer, weight
        gemms = gemms_of(weight)
        operand = gemms.saved_operand(x)
        ctx.save_for_backward(*operand)
        if not sp:
            return gemms.forward(operand, weight)  # [s/cp, b, in] -> [s/cp, b, out/tp]
        # [s/cp/tp, b, in] -> [s/cp, b, in] -> [s/cp, b, out/tp]  all_gather tp
        return overlap_of(weight).all_gather_gemm(operand, Gemm(weight), tp, keep=False)[0]

    @staticmethod
    def backward(ctx, dy):
        tp, weight = ctx.tp, ctx.weight
        gemms = gemms_of(weight)
        # [s/cp/tp, b, in] -> [s/cp, b, in]  all_gather tp
        gathering = [
            start_all_gather(tensor, tp) if ctx.sp else Pending(tensor)
            for tensor in ctx.saved_tensors
        ]
        dy = gemms.operand(dy, gradient=True)
        if ctx.sp and overlap_of(weight) is not NO_OVERLAP:
            # [s/cp, b, out/tp] -> [s/cp/tp, b, in]  reduce_scatter tp
            reducing = Pending(
                overlap_of(weight).gemm_reduce_scatter(dy, Gemm(weight, backward=True), tp)
            )
        else:
            dx = gemms.input_grad(dy, weight)  # [s/cp, b, out/tp] -> partial [s/cp, b, in]
            # partial [s/cp, b, in] -> [s/cp/tp, b, in]  reduce_scatter tp
            # without sp            -> [s/cp, b, in]     all_reduce tp
            reducing = start_reduce_scatter(dx, tp) if ctx.sp else start_all_reduce(dx, tp)
        x, dy = tuple(pending.wait() for pending in gathering), gemms.for_weight_grad(dy)
        # dW [out/tp, in]
        defer_weight_grad(weight, ctx.defer, lambda: gemms.weight_grad(weight, dy, x))
        return reducing.wait(), None, None, None, None


def column_linear(x: Tensor, weight: Tensor, tp: Axis, sp: bool, defer: Defer = run_now) -> Tensor:
    """Computes x·Wᵀ, with W's rows cut over tp.

    Args:
        x: `[s/cp/tp, b, in]` with sp, else `[s/cp, b, in]`.
        weight: `[out/tp, in]`.
        tp: axis that cuts the outputs.
        sp: x is cut along the sequence.
        defer: takes the weight-gradient half of the backward.

    Returns:
        `[s/cp, b, out/tp]`.

    Comm: with sp all_gather tp of s/cp·b·in elements / all_gather and reduce_scatter tp of the
        same size; without sp none / all_reduce tp.
    """
    if tp.size == 1:
        return local_linear(x, weight, defer)
    return _ColumnLinear.apply(x, weight, tp, sp, defer)


class _RowLinear(FirstOrderFunction):
    @staticmethod
    def forward(ctx, x, weight, tp: Axis, sp: bool, defer: Defer):
        ctx.tp, ctx.sp, ctx.defer, ctx.weight = tp, sp, defer, weight
        gemms = gemms_of(weight)
        operand = gemms.saved_operand(x)
        ctx.save_for_backward(*operand)
        if sp:  # [s/cp, b, in/tp] -> [s/cp/tp, b, out]  reduce_scatter tp
            return overlap_of(weight).gemm_reduce_scatter(operand, Gemm(weight), tp)
        # [s/cp, b, in/tp] -> [s/cp, b, out]  all_reduce tp
        return all_reduce(gemms.forward(operand, weight), tp)

    @staticmethod
    def backward(ctx, dy):
        weight, x = ctx.weight, ctx.saved_tensors
        gemms = gemms_of(weight)
        dy = gemms.operand(dy, gradient=True)
        if ctx.sp:  # [s/cp/tp, b, out] -> [s/cp, b, in/tp]  all_gather tp
            dx, dy = overlap_of(weight).all_gather_gemm(
                dy, Gemm(weight, backward=True), ctx.tp, keep=True
            )
        else:
            dx = gemms.input_grad(dy, weight)  # [s/cp, b, out] -> [s/cp, b, in/tp]
        # dW [out, in/tp]
        defer_weight_grad(weight, ctx.defer, lambda: gemms.weight_grad(weight, dy, x))
        return dx, None, None, None, None


def column_pieces(
    blocks: Sequence[tuple[int, int]], inner: tuple[int, ...], tp: Axis, copies: Axis
) -> tuple[int, tuple[Piece, ...]]:
    """Pieces of this rank's share of a matrix whose rows are stacked matrices of blocks.

    Args:
        blocks: (number of blocks, rows of a block) of each matrix, such as q heads, k heads and v
            heads; blocks are never cut.
        inner: the other dims, `(in,)` for a weight and `()` for a bias.
        copies: the tp ranks that hold copies of one block, where a matrix has fewer blocks than
            there are ranks (KV heads).

    Returns:
        Number of local rows, and the pieces in local order.
    """
    pieces: list[Piece] = []
    start = row = 0
    zeros = (0,) * len(inner)
    for count, rows in blocks:
        if count % tp.size == 0:
            local, first, shared = count // tp.size, tp.rank * (count // tp.size), False
        else:
            assert tp.size % count == 0 and copies.size == tp.size // count, (count, tp, copies)
            local, first, shared = 1, tp.rank // copies.size, True
        offset, shape = (start + first * rows, *zeros), (local * rows, *inner)
        summed, owner = (copies.name,) if shared else (), not shared or copies.rank == 0
        pieces.append(Piece(offset, shape, row, summed, owner))
        start += count * rows
        row += local * rows
    return row, tuple(pieces)


class ColumnParallelLinear(nn.Module):
    """y = x·Wᵀ + bias, with the outputs cut over tp.

    Args:
        in_features: size of x's last dim.
        blocks: (number of blocks, rows of a block) of each matrix that is stacked in W; a matrix
            with fewer blocks than ranks is copied over `copies` (KV heads).
        name: global name of the layer.
        tp: axis that cuts the outputs.
        sp: x is cut along the sequence.
        bias: whether there is a bias.
        init: standard deviation of the weight's initialization.
        copies: tp ranks that share a block.
        factory: dtype and device of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        blocks: Sequence[tuple[int, int]],
        name: str,
        tp: Axis,
        *,
        sp: bool = False,
        bias: bool = False,
        init: float = 0.02,
        copies: Axis | None = None,
        **factory,
    ) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp and tp.size > 1
        copies = copies or Axis("tp_kv")
        out_features = sum(count * rows for count, rows in blocks)
        self.shape = (out_features, in_features)
        rows, pieces = column_pieces(blocks, (in_features,), tp, copies)
        stack = tuple(count * rows for count, rows in blocks)
        heads = tuple(rows for _, rows in blocks) if all(rows > 1 for _, rows in blocks) else ()
        spec = ShardSpec(
            f"{name}.weight", self.shape, pieces, init=init, stack=stack, head_rows=heads
        )
        self.weight = new_parameter((rows, in_features), spec, **factory)
        self.bias = None
        if bias:
            rows, pieces = column_pieces(blocks, (), tp, copies)
            spec = ShardSpec(f"{name}.bias", (out_features,), pieces, decay=False)
            self.bias = new_parameter((rows,), spec, **factory)

    def forward(self, x: Tensor, defer: Defer = run_now) -> Tensor:
        """Adds the bias to `column_linear`: `[s/cp/tp | s/cp, b, in]` -> `[s/cp, b, out/tp]`."""
        y = column_linear(x, self.weight, self.tp, self.sp, defer)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]} cut over {self.tp}, sp={self.sp}"


class RowParallelLinear(nn.Module):
    """y = x·Wᵀ + bias, with the inputs cut over tp; the bias is added once, after the reduction.

    Args:
        in_features, out_features: of the global weight.
        name: global name of the layer.
        tp: axis that cuts the inputs.
        sp: y is cut along the sequence.
        bias: whether there is a bias.
        init: standard deviation of the weight's initialization.
        factory: dtype and device of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        name: str,
        tp: Axis,
        *,
        sp: bool = False,
        bias: bool = False,
        init: float = 0.02,
        **factory,
    ) -> None:
        super().__init__()
        self.tp, self.sp = tp, sp and tp.size > 1
        self.shape = (out_features, in_features)
        n = tp.divide(in_features, f"inputs of {name}")
        spec = ShardSpec(
            f"{name}.weight", self.shape, (Piece((0, tp.rank * n), (out_features, n)),), init=init
        )
        self.weight = new_parameter((out_features, n), spec, **factory)
        self.bias = None
        if bias:
            self.bias = replicated_parameter(
                (out_features,), f"{name}.bias", tp, partial_grad=self.sp, **factory
            )

    def forward(self, x: Tensor, defer: Defer = run_now) -> Tensor:
        """Multiplies, reduces over tp and adds the bias.

        Args:
            x: `[s/cp, b, in/tp]`.
            defer: takes the weight-gradient half of the backward.

        Returns:
            `[s/cp/tp, b, out]` with sp, else `[s/cp, b, out]`.

        Comm: with sp reduce_scatter tp of s/cp·b·out elements / all_gather tp of the same
            number; without sp all_reduce tp / none.
        """
        if self.tp.size == 1:
            y = local_linear(x, self.weight, defer)
        else:
            y = _RowLinear.apply(x, self.weight, self.tp, self.sp, defer)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]}, inputs cut over {self.tp}, sp={self.sp}"


def replicated_parameter(
    shape: tuple[int, ...],
    name: str,
    tp: Axis,
    *,
    partial_grad: bool,
    init: float | str = "zeros",
    decay: bool = False,
    **factory,
) -> nn.Parameter:
    """Makes a parameter that every tp rank holds (norms, output biases, position tables).

    Args:
        shape: of the parameter.
        name: global name.
        tp: ranks that hold it.
        partial_grad: a rank computes only its share of the gradient (that of its part of the
            sequence), which is summed over tp.
        init, decay: as in ShardSpec.
        factory: dtype and device.
    """
    summed = (tp.name,) if partial_grad and tp.size > 1 else ()
    pieces = unsharded(shape, summed=summed, owner=tp.rank == 0)
    return new_parameter(shape, ShardSpec(name, shape, pieces, init=init, decay=decay), **factory)

"""A linear layer's GEMM and its collective: one after the other, or in chunks, so that one hides
the other.

                         whole (`none`)                   in chunks of one rank's tokens (`chunked`, `fused`)
    all_gather_gemm      all_gather x, then one GEMM      GEMMs of own x, the previous rank's, ... as they arrive
    gemm_reduce_scatter  one GEMM, then reduce_scatter    GEMMs for the other ranks first, own chunk last; their sums

In chunks there are tp GEMMs, each of 1/tp of the rows. Either way (tp-1)/tp of the whole travels.
`chunked` passes chunks around a ring of ranks and adds up in that order. With `fused` ranks write
into each other's memory (fused_overlap.py).
Source: Wang et al. 2022, "Overlap communication with dependent computation via decomposition"
    (ASPLOS 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_gather, reduce_scatter, start_shift
from megatron5d.precision.gemm import PLAIN, Operand, gemms_of
from megatron5d.topology.axis import Axis
from megatron5d.topology.shard_spec import state_of


@dataclass(frozen=True)
class Gemm:
    """A linear layer's GEMM for some of the tokens, forward or backward."""

    weight: Tensor  # `[out, in]`
    # False computes outputs, `[..., in]` -> `[..., out]`; True gradients of inputs, `[..., out]` ->
    # `[..., in]`
    backward: bool = False

    def __call__(self, operand: Operand) -> Tensor:
        gemms = gemms_of(self.weight)
        return (
            gemms.input_grad(operand, self.weight)
            if self.backward
            else gemms.forward(operand, self.weight)
        )

    @property
    def is_plain(self) -> bool:
        """Whether it multiplies with the weight as it is, not in FP8, so that a fused kernel can do
        it."""
        return gemms_of(self.weight) is PLAIN


class Overlap:
    """Combines a GEMM and its collective; `parallel.tp_overlap=none`: one after the other."""

    buffer_bytes = 0  # of this rank's memory that other ranks write into

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Returns gemm(all_gather(operand)), and what was gathered.

        Args:
            operand: tensors `[s/tp, ...]`, this rank's tokens.
            gemm: `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that hold a share of the tokens each, in their order.
            keep: also return what was gathered.

        Returns:
            `[s, b, out]`, and with keep the operand of all tokens.

        Comm: (tp-1)·numel elements of the operand: all_gather tp.
        """
        whole = tuple(all_gather(part, tp) for part in operand)
        return gemm(whole), whole if keep else ()

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Returns reduce_scatter(gemm(operand)).

        Args:
            operand: tensors `[s, ...]`, all tokens.
            gemm: a term of the sum over tp; `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that hold a term each.

        Returns:
            `[s/tp, b, out]`, this rank's tokens summed.

        Comm: (tp-1)/tp·numel elements of the output: reduce_scatter tp.
        """
        return reduce_scatter(gemm(operand), tp)

    def check(self) -> None:
        """Raises if an exchange failed; called once the device has computed results, before they
        are used for good.

        Raises TimeoutError: a rank has not sent its share; names it. Collectives time out by
        themselves.
        """


class Chunked(Overlap):
    """`parallel.tp_overlap=chunked`: chunks go around the ring of ranks."""

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Gathers chunk by chunk. Comm: tp-1 shifts of the operand."""
        outputs: list[Tensor] = [operand[0]] * tp.size
        chunks: list[Operand] = [operand] * tp.size
        chunk = tuple(part.contiguous() for part in operand)
        for step in range(tp.size):
            last = step + 1 == tp.size
            shifts = [] if last else [start_shift(part, tp, tag) for tag, part in enumerate(chunk)]
            owner = (tp.rank - step) % tp.size
            # [s/tp, b, out] of the rank `step` behind
            outputs[owner], chunks[owner] = gemm(chunk), chunk
            chunk = tuple(shift.wait() for shift in shifts)
        return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*chunks)) if keep else ()

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Reduces chunk by chunk. Comm: tp-1 shifts of 1/tp of the output."""
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        travelling = None
        for step in range(tp.size):
            owner = (tp.rank - step - 1) % tp.size
            term = gemm(tuple(part.narrow(0, owner * rows, rows) for part in operand)).contiguous()
            if travelling is not None:
                term += travelling.wait()
            # [s/tp, b, out]  shift tp
            travelling = start_shift(term, tp) if step + 1 < tp.size else None
        return term


NO_OVERLAP = Overlap()


def overlap_of(weight: Tensor) -> Overlap:
    """Returns how this weight's GEMMs and their collectives are combined; model/gpt.py sets it."""
    return state_of(weight).overlap or NO_OVERLAP

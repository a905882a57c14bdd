"""A linear layer's GEMM and its collective: in sequence, or in chunks that overlap.

                         in sequence (`none`)           in chunks of one rank's tokens
    all_gather_gemm      all_gather x, then one GEMM    GEMM of the local chunk, then of the others
    gemm_reduce_scatter  one GEMM, then reduce_scatter  GEMM of the local chunk last

Chunks need tp GEMMs, each of 1/tp of the rows. In both cases (tp-1)/tp of the tensor is sent.
`chunked` sends chunks around a ring of ranks and sums them in that order; with `fused` ranks write
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
    """A linear layer's GEMM for a chunk of tokens, forward or backward."""

    weight: Tensor  # `[out, in]`
    # False: outputs `[..., in]` -> `[..., out]`; True: input gradients `[..., out]` -> `[..., in]`
    backward: bool = False

    def __call__(self, operand: Operand) -> Tensor:
        gemms = gemms_of(self.weight)
        multiply = gemms.input_grad if self.backward else gemms.forward
        return multiply(operand, self.weight)

    @property
    def is_plain(self) -> bool:
        """Whether the weight is multiplied in its own dtype, as fused kernels require."""
        return gemms_of(self.weight) is PLAIN


class Overlap:
    """Runs a GEMM and its collective in sequence (`parallel.tp_overlap=none`)."""

    buffer_bytes = 0  # size of the buffers on this rank that other ranks write into

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Computes gemm(all_gather(operand)).

        Args:
            operand: tensors `[s/tp, ...]`, this rank's tokens.
            gemm: `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that hold equal shares of the tokens, in their order.
            keep: whether to return the gathered operand.

        Returns:
            `[s, b, out]`, and with `keep` the operand of all tokens, else ().

        Comm: all_gather tp: (tp-1)·numel elements of the operand.
        """
        gathered = tuple(all_gather(tensor, tp) for tensor in operand)
        return gemm(gathered), gathered if keep else ()

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Computes reduce_scatter(gemm(operand)).

        Args:
            operand: tensors `[s, ...]`, all tokens.
            gemm: computes this rank's term of the sum; `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that compute a term each.

        Returns:
            `[s/tp, b, out]`, the sums for this rank's tokens.

        Comm: reduce_scatter tp: (tp-1)/tp·numel elements of the output.
        """
        return reduce_scatter(gemm(operand), tp)

    def check(self) -> None:
        """Checks the exchanges of a step, before its results update the weights.

        Raises:
            TimeoutError: a rank, which the message names, has not sent its share. Collectives time
                out by themselves.
        """


class Chunked(Overlap):
    """Sends chunks around a ring of ranks (`parallel.tp_overlap=chunked`)."""

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Gathers chunk by chunk.

        Comm: tp-1 shifts of the operand.
        """
        outputs: list[Tensor] = [operand[0]] * tp.size
        chunks: list[Operand] = [operand] * tp.size
        chunk = tuple(tensor.contiguous() for tensor in operand)
        for step in range(tp.size):
            sent = enumerate(chunk if step + 1 < tp.size else ())
            shifts = [start_shift(tensor, tp, tag) for tag, tensor in sent]
            owner = (tp.rank - step) % tp.size
            # [s/tp, b, out] of the rank `step` behind
            outputs[owner], chunks[owner] = gemm(chunk), chunk
            chunk = tuple(shift.wait() for shift in shifts)
        gathered = tuple(map(torch.cat, zip(*chunks))) if keep else ()
        return torch.cat(outputs), gathered

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Reduces chunk by chunk.

        Comm: tp-1 shifts of 1/tp of the output.
        """
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        shift = None
        for step in range(tp.size):
            owner = (tp.rank - step - 1) % tp.size
            chunk = tuple(tensor.narrow(0, owner * rows, rows) for tensor in operand)
            partial_sum = gemm(chunk).contiguous()
            if shift is not None:
                partial_sum += shift.wait()
            # [s/tp, b, out]  shift tp
            shift = start_shift(partial_sum, tp) if step + 1 < tp.size else None
        return partial_sum


NO_OVERLAP = Overlap()


def overlap_of(weight: Tensor) -> Overlap:
    """How the GEMMs of a weight overlap with their collectives; model/gpt.py sets it."""
    return state_of(weight).overlap or NO_OVERLAP

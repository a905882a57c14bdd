"""A linear layer's GEMM and its collective: one after the other, or in chunks, so that one hides the other.

                         whole (`none`)                   in chunks of one rank's tokens (`chunked`, `fused`)
    all_gather_gemm      all_gather x, then one GEMM      GEMMs of own x, the previous rank's, ... as they arrive
    gemm_reduce_scatter  one GEMM, then reduce_scatter    GEMMs for the other ranks first, own chunk last; their sums

In chunks there are tp GEMMs, each of 1/tp of the rows. Either way (tp-1)/tp of the whole travels. `chunked` passes
chunks around a ring of ranks and adds up in that order. With `fused` ranks write into each other's memory:

    all_gather_gemm      chunks are pushed to all ranks; one kernel multiplies each chunk once its flag is set
    gemm_reduce_scatter  one kernel stores each tile in its owner's memory, where it is added up; the last tile of a
                         chunk sets the flag

On a GPU, in 16-bit floats, each is one launch; other GEMMs run chunk by chunk through the same buffers and flags.
On the CPU the buffers lie in shared memory (comm/symmetric_memory.py).
Source: Wang et al. 2022, "Overlap communication with dependent computation via decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_gather, reduce_scatter, start_shift
from megatron5d.comm.symmetric_memory import BufferExchange, SymmetricBuffers
from megatron5d.kernels.all_gather_gemm import all_gather_gemm
from megatron5d.kernels.gemm_reduce_scatter import PeerBuffers, gemm_reduce_scatter, sum_arrived
from megatron5d.precision.gemm import PLAIN, Operand, gemms_of
from megatron5d.topology.axis import Axis


@dataclass(frozen=True)
class Gemm:
    """A linear layer's GEMM for some of the tokens, forward or backward.

    Args:
        weight: `[out, in]`.
        backward: False computes outputs, `[..., in]` -> `[..., out]`; True gradients of inputs, `[..., out]` ->
            `[..., in]`.
    """

    weight: Tensor
    backward: bool = False

    def __call__(self, operand: Operand) -> Tensor:
        gemms = gemms_of(self.weight)
        return gemms.input_grad(operand, self.weight) if self.backward else gemms.forward(operand, self.weight)

    @property
    def is_plain(self) -> bool:
        """Whether it multiplies with the weight as it is, not in FP8, so that a fused kernel can do it."""
        return gemms_of(self.weight) is PLAIN


class Overlap:
    """Combines a GEMM and its collective; `parallel.tp_overlap=none`: one after the other."""

    buffer_bytes = 0  # of this rank's memory that other ranks write into

    def all_gather_gemm(self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
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
        """Raises if an exchange failed; called once the device has computed results, before they are used for good.

        Raises:
            TimeoutError: a rank has not sent its share; names it. Collectives time out by themselves.
        """


class Chunked(Overlap):
    """`parallel.tp_overlap=chunked`: chunks go around the ring of ranks."""

    def all_gather_gemm(self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Gathers chunk by chunk. Comm: tp-1 shifts of the operand."""
        outputs: list[Tensor] = [operand[0]] * tp.size
        chunks: list[Operand] = [operand] * tp.size
        chunk = tuple(part.contiguous() for part in operand)
        for step in range(tp.size):
            last = step + 1 == tp.size
            shifts = [] if last else [start_shift(part, tp, tag) for tag, part in enumerate(chunk)]
            owner = (tp.rank - step) % tp.size
            outputs[owner], chunks[owner] = gemm(chunk), chunk  # [s/tp, b, out] of the rank `step` behind
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
            travelling = start_shift(term, tp) if step + 1 < tp.size else None  # [s/tp, b, out]  shift tp
        return term


NO_OVERLAP = Overlap()


def overlap_of(weight: Tensor) -> Overlap:
    """Returns how this weight's GEMMs and their collectives are combined; model/options.py sets it."""
    return getattr(weight, "overlap", NO_OVERLAP)


class Fused(Overlap):
    """The symmetric-memory buffers of one axis, and the GEMMs that use them.

    Args:
        tp: ranks that share linear layers; together they make the same GEMMs in the same order.
        device: of the activations.
        timeout_s: `parallel.timeout_s`.

    Raises:
        ValueError: on every rank, where its ranks cannot write into each other's memory.
    """

    def __init__(self, tp: Axis, device: torch.device, timeout_s: float) -> None:
        self._buffers = SymmetricBuffers(tp, device, timeout_s)

    @property
    def buffer_bytes(self) -> int:  # type: ignore[override]
        """As large as the largest exchange so far has asked for."""
        return self._buffers.num_bytes

    def check(self) -> None:
        """Checks what the device has done so far."""
        self._buffers.patience.check()

    def all_gather_gemm(self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Gathers inside the GEMM. Comm: tp-1 puts of the operand."""
        exchange = self._buffers.exchange([(part.shape, part.dtype) for part in operand])
        exchange.push(operand)
        if gemm.is_plain:
            s, b, width = operand[0].shape
            gathered = exchange.receive_buffer(0).view(tp.size, s * b, width)
            weight, arrivals = gemm.weight.detach(), exchange.arrivals
            y = all_gather_gemm(gathered, weight, arrivals, tp.rank, transposed=gemm.backward).view(tp.size * s, b, -1)
        else:
            outputs: list[Tensor] = [operand[0]] * tp.size
            for step in range(tp.size):
                source = (tp.rank - step) % tp.size
                outputs[source] = gemm(exchange.wait(source))
            y = torch.cat(outputs)
        return y, tuple(_joined(exchange.receive_buffer(part)) for part in range(len(operand) if keep else 0))

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Reduces inside the GEMM. Comm: tp-1 puts of 1/tp of the output."""
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        scatter = self._scatter_tiles if gemm.is_plain else self._scatter_chunks
        exchange = scatter(operand, gemm, tp, rows)
        return sum_arrived(exchange.receive_buffer(0), exchange.arrivals)

    def _scatter_tiles(self, operand: Operand, gemm: Gemm, tp: Axis, rows: int) -> BufferExchange:
        x = operand[0].unflatten(0, (tp.size, rows)).flatten(1, 2)  # [tp, s/tp·b, features]
        width = gemm.weight.shape[1 if gemm.backward else 0]
        shape = torch.Size((rows, operand[0].shape[1], width))
        exchange = self._buffers.exchange([(shape, operand[0].dtype)])
        exchange.count(0)
        buffers = [buffer.flatten(0, 1) for buffer in exchange.send_buffers(0)]
        places = exchange.send_buffer_addresses(0), exchange.signal_addresses(), self._buffers.finished
        out = PeerBuffers(buffers, exchange.signals(), *places)
        gemm_reduce_scatter(x, gemm.weight.detach(), out, exchange.epoch, tp.rank, transposed=gemm.backward)
        return exchange

    def _scatter_chunks(self, operand: Operand, gemm: Gemm, tp: Axis, rows: int) -> BufferExchange:
        def term(step: int) -> tuple[int, Tensor]:
            owner = (tp.rank + 1 + step) % tp.size
            return owner, gemm(tuple(part.narrow(0, owner * rows, rows) for part in operand))

        owner, first = term(0)
        exchange = self._buffers.exchange([(first.shape, first.dtype)])
        exchange.send([first], owner)
        for step in range(1, tp.size):
            owner, later = term(step)
            exchange.send([later], owner)
        return exchange


def _joined(chunks: Tensor) -> Tensor:
    """Returns `[tp, s/tp, ...]` in the buffers as a contiguous `[s, ...]`."""
    return chunks.clone(memory_format=torch.contiguous_format).flatten(0, 1)

"""`parallel.tp_overlap=fused`: the ranks of a linear layer write into each other's memory
(overlap.py has the others).

    all_gather_gemm      chunks are pushed to all ranks; one kernel multiplies each chunk once its flag is set
    gemm_reduce_scatter  one kernel stores each tile in its owner's memory, where it is added up; the last tile of a
                         chunk sets the flag

On a GPU, in 16-bit floats, each is one launch; other GEMMs run chunk by chunk through the same
buffers and flags. On the CPU the buffers lie in shared memory (comm/symmetric_memory.py).
"""

import torch
from torch import Tensor

from megatron5d.comm.symmetric_memory import BufferExchange, SymmetricBuffers
from megatron5d.kernels.overlapped_gemm import (
    PeerBuffers,
    all_gather_gemm,
    gemm_reduce_scatter,
    sum_arrived,
)
from megatron5d.precision.gemm import Operand
from megatron5d.tensor_parallel.overlap import Gemm, Overlap
from megatron5d.topology.axis import Axis


class Fused(Overlap):
    """The symmetric-memory buffers of one axis, and the GEMMs that use them.

    Args:
        tp: ranks that share linear layers; together they make the same GEMMs in the same order.
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

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Gathers inside the GEMM. Comm: tp-1 puts of the operand."""
        exchange = self._buffers.exchange([(part.shape, part.dtype) for part in operand])
        exchange.send_to_all(operand)
        if gemm.is_plain:
            s, b, width = operand[0].shape
            gathered = exchange.receive_buffer(0).view(tp.size, s * b, width)
            weight, arrivals = gemm.weight.detach(), exchange.arrivals
            y = all_gather_gemm(gathered, weight, arrivals, tp.rank, transposed=gemm.backward).view(
                tp.size * s, b, -1
            )
        else:
            outputs: list[Tensor] = [operand[0]] * tp.size
            for step in range(tp.size):
                source = (tp.rank - step) % tp.size
                outputs[source] = gemm(exchange.wait(source))
            y = torch.cat(outputs)
        return y, tuple(
            _joined(exchange.receive_buffer(part)) for part in range(len(operand) if keep else 0)
        )

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
        exchange.record_put(0)
        buffers = [buffer.flatten(0, 1) for buffer in exchange.send_buffers(0)]
        places = (
            exchange.send_buffer_addresses(0),
            exchange.signal_addresses(),
            self._buffers.finished,
        )
        out = PeerBuffers(buffers, exchange.signals(), *places)
        gemm_reduce_scatter(
            x, gemm.weight.detach(), out, exchange.epoch, tp.rank, transposed=gemm.backward
        )
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

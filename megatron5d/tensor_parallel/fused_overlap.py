"""`parallel.tp_overlap=fused`: GEMMs that read and write other tp ranks' memory.

    all_gather_gemm      each rank pushes its chunk to all others; one kernel multiplies each chunk
                         as soon as its flag is set
    gemm_reduce_scatter  one kernel stores each tile in its owner's memory and sets a chunk's flag
                         with its last tile; the owner then sums what it received

On a GPU, in 16-bit floats, each is a single launch. Other GEMMs run chunk by chunk through the same
buffers and flags. On the CPU the buffers are in shared memory (comm/symmetric_memory.py). The other
values of `parallel.tp_overlap` are in overlap.py.
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
    """GEMMs that exchange their operands through symmetric memory.

    Args:
        tp: ranks that share linear layers; all run the same GEMMs in the same order.
        device: of the buffers.
        timeout_s: `parallel.timeout_s`.

    Raises:
        ValueError: the ranks cannot write into each other's memory; raised on every rank.
    """

    def __init__(self, tp: Axis, device: torch.device, timeout_s: float) -> None:
        self._buffers = SymmetricBuffers(tp, device, timeout_s)

    @property
    def buffer_bytes(self) -> int:  # type: ignore[override]
        """Size of the largest exchange so far."""
        return self._buffers.num_bytes

    def check(self) -> None:
        """Raises TimeoutError if an exchange that the device has run failed."""
        self._buffers.timeout.check()

    def all_gather_gemm(
        self, operand: Operand, gemm: Gemm, tp: Axis, keep: bool
    ) -> tuple[Tensor, Operand]:
        """Gathers inside the GEMM.

        Comm: tp-1 puts of the operand.
        """
        exchange = self._buffers.exchange([(tensor.shape, tensor.dtype) for tensor in operand])
        exchange.send_to_all(operand)
        if gemm.is_plain:
            s, b, width = operand[0].shape
            gathered = exchange.receive_buffer(0).view(tp.size, s * b, width)
            weight, arrivals = gemm.weight.detach(), exchange.arrivals
            y = all_gather_gemm(gathered, weight, arrivals, tp.rank, transposed=gemm.backward)
            y = y.view(tp.size * s, b, -1)
        else:
            outputs: list[Tensor] = [operand[0]] * tp.size
            for step in range(tp.size):
                source = (tp.rank - step) % tp.size
                outputs[source] = gemm(exchange.wait(source))
            y = torch.cat(outputs)
        indices = range(len(operand)) if keep else ()
        return y, tuple(_copy_chunks(exchange.receive_buffer(index)) for index in indices)

    def gemm_reduce_scatter(self, operand: Operand, gemm: Gemm, tp: Axis) -> Tensor:
        """Reduces inside the GEMM.

        Comm: tp-1 puts of 1/tp of the output.
        """
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
        out = PeerBuffers(
            buffers,
            exchange.signals(),
            exchange.send_buffer_addresses(0),
            exchange.signal_addresses(),
            self._buffers.finished,
        )
        gemm_reduce_scatter(
            x, gemm.weight.detach(), out, exchange.epoch, tp.rank, transposed=gemm.backward
        )
        return exchange

    def _scatter_chunks(self, operand: Operand, gemm: Gemm, tp: Axis, rows: int) -> BufferExchange:
        def term(step: int) -> tuple[int, Tensor]:
            owner = (tp.rank + 1 + step) % tp.size
            return owner, gemm(tuple(tensor.narrow(0, owner * rows, rows) for tensor in operand))

        owner, product = term(0)
        exchange = self._buffers.exchange([(product.shape, product.dtype)])
        exchange.send([product], owner)
        for step in range(1, tp.size):
            owner, product = term(step)
            exchange.send([product], owner)
        return exchange


def _copy_chunks(chunks: Tensor) -> Tensor:
    """Copies `[tp, s/tp, ...]` out of the buffers, as a contiguous `[s, ...]`."""
    return chunks.clone(memory_format=torch.contiguous_format).flatten(0, 1)

"""`parallel.tp_overlap=fused`: ranks write into each other's memory, and products work on whatever has arrived.

    gather_product   chunks are pushed to all ranks; one kernel multiplies each chunk once its flag is set
    product_scatter  one kernel stores each tile in its owner's memory, where it is added up; the last tile of a chunk
                     sets the flag

On a GPU, in 16-bit floats, each is one launch; other products are made chunk by chunk through the same boxes and flags.
On the CPU the boxes lie in shared memory (comm/segments.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.all_gather_gemm import gather_matmul
from kernels.gemm_reduce_scatter import Outboxes, matmul_scatter, sum_arrived
from megatron5d.comm.symmetric_memory import BoxExchange, Mailbox
from megatron5d.precision.gemm import Operand
from megatron5d.tensor_parallel.overlap import Product
from megatron5d.topology.axis import Axis


class Fused:
    """The mailbox of one axis, and the products that go through it.

    Args:
        tp: ranks that share linear layers; together they make the same products in the same order.
        device: of the activations.
        timeout_s: `parallel.timeout_s`.

    Raises:
        ValueError: on every rank, where its ranks cannot write into each other's memory.
    """

    def __init__(self, tp: Axis, device: torch.device, timeout_s: float) -> None:
        self._mailbox = Mailbox(tp, device, timeout_s)

    @property
    def box_bytes(self) -> int:
        """As large as the largest exchange so far has asked for."""
        return self._mailbox.num_bytes

    def check(self) -> None:
        """Checks what the device has done so far."""
        self._mailbox.patience.check()

    def gather_product(self, operand: Operand, product: Product, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Comm: tp-1 puts of the operand."""
        exchange = self._mailbox.exchange([(part.shape, part.dtype) for part in operand])
        exchange.push(operand)
        if product.is_plain:
            s, b, width = operand[0].shape
            inbox = exchange.inbox(0).view(tp.size, s * b, width)
            weight, arrivals = product.weight.detach(), exchange.arrivals
            y = gather_matmul(inbox, weight, arrivals, tp.rank, turned=product.backward).view(tp.size * s, b, -1)
        else:
            outputs: list[Tensor] = [operand[0]] * tp.size
            for step in range(tp.size):
                source = (tp.rank - step) % tp.size
                outputs[source] = product(exchange.wait(source))
            y = torch.cat(outputs)
        return y, tuple(_joined(exchange.inbox(part)) for part in range(len(operand) if keep else 0))

    def product_scatter(self, operand: Operand, product: Product, tp: Axis) -> Tensor:
        """Comm: tp-1 puts of 1/tp of the product."""
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        scatter = self._scatter_tiles if product.is_plain else self._scatter_chunks
        exchange = scatter(operand, product, tp, rows)
        return sum_arrived(exchange.inbox(0), exchange.arrivals)

    def _scatter_tiles(self, operand: Operand, product: Product, tp: Axis, rows: int) -> BoxExchange:
        x = operand[0].unflatten(0, (tp.size, rows)).flatten(1, 2)  # [tp, s/tp·b, features]
        width = product.weight.shape[1 if product.backward else 0]
        shape = torch.Size((rows, operand[0].shape[1], width))
        exchange = self._mailbox.exchange([(shape, operand[0].dtype)])
        exchange.count(0)
        boxes = [box.flatten(0, 1) for box in exchange.outboxes(0)]
        places = exchange.outbox_addresses(0), exchange.signal_addresses(), self._mailbox.finished
        out = Outboxes(boxes, exchange.signals(), *places)
        matmul_scatter(x, product.weight.detach(), out, exchange.epoch, tp.rank, turned=product.backward)
        return exchange

    def _scatter_chunks(self, operand: Operand, product: Product, tp: Axis, rows: int) -> BoxExchange:
        def term(step: int) -> tuple[int, Tensor]:
            owner = (tp.rank + 1 + step) % tp.size
            return owner, product(tuple(part.narrow(0, owner * rows, rows) for part in operand))

        owner, first = term(0)
        exchange = self._mailbox.exchange([(first.shape, first.dtype)])
        exchange.send([first], owner)
        for step in range(1, tp.size):
            owner, later = term(step)
            exchange.send([later], owner)
        return exchange


def _joined(chunks: Tensor) -> Tensor:
    """`[tp, s/tp, ...]` in a mailbox as `[s, ...]` of its own."""
    return chunks.clone(memory_format=torch.contiguous_format).flatten(0, 1)

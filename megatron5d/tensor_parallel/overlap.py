"""A linear layer's product and its collective: one after the other, or in chunks, so that one hides the other.

                     whole (`none`)                     in chunks of one rank's tokens (`chunked`, `fused`)
    gather_product   all_gather x, then one product     products of own x, the previous rank's, ... as they arrive
    product_scatter  one product, then reduce_scatter   products for the other ranks first, own chunk last; their sums

In chunks there are tp products, each of 1/tp of the rows. Either way (tp-1)/tp of the whole travels. `chunked` passes
chunks around a ring of ranks and adds up in that order; `fused` (overlap.py) writes them into the memory of the rank
that wants them. Source: Wang et al. 2022, "Overlap communication with dependent computation via decomposition" (ASPLOS
2023).

`parallel.tp_overlap=fused`: ranks write into each other's memory, and products work on whatever has arrived.

    gather_product   chunks are pushed to all ranks; one kernel multiplies each chunk once its flag is set
    product_scatter  one kernel stores each tile in its owner's memory, where it is added up; the last tile of a chunk
                     sets the flag

On a GPU, in 16-bit floats, each is one launch; other products are made chunk by chunk through the same boxes and flags.
On the CPU the boxes lie in shared memory (comm/symmetric_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.all_gather_gemm import all_gather_gemm
from kernels.gemm_reduce_scatter import PeerBuffers, gemm_reduce_scatter, sum_arrived
from megatron5d.comm.collectives import all_gather, reduce_scatter, start_shift
from megatron5d.comm.symmetric_memory import BufferExchange, SymmetricBuffers
from megatron5d.precision.gemm import PLAIN, Operand, gemms_of
from megatron5d.topology.axis import Axis


@dataclass(frozen=True)
class Product:
    """A linear layer's product for some of the tokens, forward or backward.

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
        """Whether it is one product with the weight as it is, not in 8 bits, so that a fused kernel can make it."""
        return gemms_of(self.weight) is PLAIN


class Overlap(Protocol):
    """How a product and its collective are combined."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of this rank's memory that other ranks write into."""
        ...

    def gather_product(self, operand: Operand, product: Product, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """product(all_gather(operand)), and what was gathered.

        Args:
            operand: tensors `[s/tp, ...]`, this rank's tokens.
            product: `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that hold a share of the tokens each, in their order.
            keep: also return what was gathered.

        Returns:
            `[s, b, out]`, and with keep the operand of all tokens.

        Comm: (tp-1)·numel elements of the operand.
        """
        ...

    def product_scatter(self, operand: Operand, product: Product, tp: Axis) -> Tensor:
        """reduce_scatter(product(operand)).

        Args:
            operand: tensors `[s, ...]`, all tokens.
            product: a term of the sum over tp; `[n, b, ...]` -> `[n, b, out]`.
            tp: ranks that hold a term each.

        Returns:
            `[s/tp, b, out]`, this rank's tokens summed.

        Comm: (tp-1)/tp·numel elements of the product.
        """
        ...

    def check(self) -> None:
        """To be called before results are used for good, once the device has computed them.

        Raises:
            TimeoutError: a rank has not sent its share; names it.
        """
        ...


class Whole:
    """`parallel.tp_overlap=none`: the collective before or after the product."""

    buffer_bytes = 0

    def gather_product(self, operand: Operand, product: Product, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Comm: all_gather tp of the operand."""
        whole = tuple(all_gather(part, tp) for part in operand)
        return product(whole), whole if keep else ()

    def product_scatter(self, operand: Operand, product: Product, tp: Axis) -> Tensor:
        """Comm: reduce_scatter tp of the product."""
        return reduce_scatter(product(operand), tp)

    def check(self) -> None:
        """Nothing to do: collectives time out by themselves."""


class Chunked:
    """`parallel.tp_overlap=chunked`: chunks go around the ring of ranks."""

    buffer_bytes = 0

    def gather_product(self, operand: Operand, product: Product, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Comm: tp-1 shifts of the operand."""
        outputs: list[Tensor] = [operand[0]] * tp.size
        chunks: list[Operand] = [operand] * tp.size
        chunk = tuple(part.contiguous() for part in operand)
        for step in range(tp.size):
            last = step + 1 == tp.size
            shifts = [] if last else [start_shift(part, tp, tag) for tag, part in enumerate(chunk)]
            owner = (tp.rank - step) % tp.size
            outputs[owner], chunks[owner] = product(chunk), chunk  # [s/tp, b, out] of the rank `step` behind
            chunk = tuple(shift.wait() for shift in shifts)
        return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*chunks)) if keep else ()

    def product_scatter(self, operand: Operand, product: Product, tp: Axis) -> Tensor:
        """Comm: tp-1 shifts of 1/tp of the product."""
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        travelling = None
        for step in range(tp.size):
            owner = (tp.rank - step - 1) % tp.size
            term = product(tuple(part.narrow(0, owner * rows, rows) for part in operand)).contiguous()
            if travelling is not None:
                term += travelling.wait()
            travelling = start_shift(term, tp) if step + 1 < tp.size else None  # [s/tp, b, out]  shift tp
        return term

    def check(self) -> None:
        """Nothing to do: shifts time out by themselves."""


WHOLE = Whole()


def overlap_of(weight: Tensor) -> Overlap:
    """How the products of this weight and their collectives are combined; model/options.py chooses."""
    return getattr(weight, "overlap", WHOLE)


class Fused:
    """The symmetric-memory buffers of one axis, and the GEMMs that use them.

    Args:
        tp: ranks that share linear layers; together they make the same products in the same order.
        device: of the activations.
        timeout_s: `parallel.timeout_s`.

    Raises:
        ValueError: on every rank, where its ranks cannot write into each other's memory.
    """

    def __init__(self, tp: Axis, device: torch.device, timeout_s: float) -> None:
        self._buffers = SymmetricBuffers(tp, device, timeout_s)

    @property
    def buffer_bytes(self) -> int:
        """As large as the largest exchange so far has asked for."""
        return self._buffers.num_bytes

    def check(self) -> None:
        """Checks what the device has done so far."""
        self._buffers.patience.check()

    def gather_product(self, operand: Operand, product: Product, tp: Axis, keep: bool) -> tuple[Tensor, Operand]:
        """Comm: tp-1 puts of the operand."""
        exchange = self._buffers.exchange([(part.shape, part.dtype) for part in operand])
        exchange.push(operand)
        if product.is_plain:
            s, b, width = operand[0].shape
            gathered = exchange.receive_buffer(0).view(tp.size, s * b, width)
            weight, arrivals = product.weight.detach(), exchange.arrivals
            y = all_gather_gemm(gathered, weight, arrivals, tp.rank, transposed=product.backward).view(
                tp.size * s, b, -1
            )
        else:
            outputs: list[Tensor] = [operand[0]] * tp.size
            for step in range(tp.size):
                source = (tp.rank - step) % tp.size
                outputs[source] = product(exchange.wait(source))
            y = torch.cat(outputs)
        return y, tuple(_joined(exchange.receive_buffer(part)) for part in range(len(operand) if keep else 0))

    def product_scatter(self, operand: Operand, product: Product, tp: Axis) -> Tensor:
        """Comm: tp-1 puts of 1/tp of the product."""
        rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
        scatter = self._scatter_tiles if product.is_plain else self._scatter_chunks
        exchange = scatter(operand, product, tp, rows)
        return sum_arrived(exchange.receive_buffer(0), exchange.arrivals)

    def _scatter_tiles(self, operand: Operand, product: Product, tp: Axis, rows: int) -> BufferExchange:
        x = operand[0].unflatten(0, (tp.size, rows)).flatten(1, 2)  # [tp, s/tp·b, features]
        width = product.weight.shape[1 if product.backward else 0]
        shape = torch.Size((rows, operand[0].shape[1], width))
        exchange = self._buffers.exchange([(shape, operand[0].dtype)])
        exchange.count(0)
        boxes = [box.flatten(0, 1) for box in exchange.send_buffers(0)]
        places = exchange.send_buffer_addresses(0), exchange.signal_addresses(), self._buffers.finished
        out = PeerBuffers(boxes, exchange.signals(), *places)
        gemm_reduce_scatter(x, product.weight.detach(), out, exchange.epoch, tp.rank, transposed=product.backward)
        return exchange

    def _scatter_chunks(self, operand: Operand, product: Product, tp: Axis, rows: int) -> BufferExchange:
        def term(step: int) -> tuple[int, Tensor]:
            owner = (tp.rank + 1 + step) % tp.size
            return owner, product(tuple(part.narrow(0, owner * rows, rows) for part in operand))

        owner, first = term(0)
        exchange = self._buffers.exchange([(first.shape, first.dtype)])
        exchange.send([first], owner)
        for step in range(1, tp.size):
            owner, later = term(step)
            exchange.send([later], owner)
        return exchange


def _joined(chunks: Tensor) -> Tensor:
    """`[tp, s/tp, ...]` in the buffers as a contiguous `[s, ...]`."""
    return chunks.clone(memory_format=torch.contiguous_format).flatten(0, 1)

"""A linear layer's product and its collective in chunks, so that one chunk travels while another is multiplied.

                     whole (`none`)                     in chunks of one rank's tokens (`chunked`)
    gather_product   all_gather x, then one product     products of own x, the previous rank's, ... as they come round
    product_scatter  one product, then reduce_scatter   products for the ranks ahead; sums travel on, own chunk last

With tp ranks there are tp products of 1/tp of the rows. Either way (tp-1)/tp of the whole travels. In chunks it goes to
the next rank, again and again, and sums over ranks are added up in the order of the ring.
Source: Wang et al. 2022, "Overlap communication with dependent computation via decomposition" (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron5d.comm.collectives import all_gather, reduce_scatter
from megatron5d.comm.ring import start_shift
from megatron5d.precision.gemms import Operand
from megatron5d.topology.axis import Axis

Product = Callable[[Operand], Tensor]


def is_chunked(weight: Tensor) -> bool:
    """Whether the collectives around this weight's products go in chunks (`parallel.tp_overlap`)."""
    return getattr(weight, "chunked", False)


def gather_product(operand: Operand, product: Product, tp: Axis, chunked: bool) -> tuple[Tensor, Operand]:
    """product(all_gather(operand)), and what was gathered.

    Args:
        operand: tensors `[s/tp, ...]`, this rank's tokens.
        product: of some tokens; `[n, ...]` -> `[n, b, out]`.
        tp: in whose order the tokens are joined.
        chunked: in chunks.

    Returns:
        `[s, b, out]`, and the operand of all tokens.

    Comm: all_gather tp of the operand; in chunks tp-1 shifts of it.
    """
    if not chunked:
        whole = tuple(all_gather(part, tp) for part in operand)
        return product(whole), whole
    outputs: list[Tensor] = [operand[0]] * tp.size
    chunks: list[Operand] = [operand] * tp.size
    chunk = tuple(part.contiguous() for part in operand)
    for step in range(tp.size):
        last = step + 1 == tp.size
        shifts = [] if last else [start_shift(part, tp, tag) for tag, part in enumerate(chunk)]
        owner = (tp.rank - step) % tp.size
        outputs[owner], chunks[owner] = product(chunk), chunk
        chunk = tuple(shift.wait() for shift in shifts)
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*chunks))


def product_scatter(operand: Operand, product: Product, tp: Axis, chunked: bool) -> Tensor:
    """reduce_scatter(product(operand)).

    Args:
        operand: tensors `[s, ...]`, all tokens.
        product: of some tokens, a term of the sum over tp; `[n, ...]` -> `[n, b, out]`.
        tp: ranks that hold a term each.
        chunked: in chunks.

    Returns:
        `[s/tp, b, out]`, this rank's tokens summed.

    Comm: reduce_scatter tp of the product; in chunks tp-1 shifts of 1/tp of it.
    """
    if not chunked:
        return reduce_scatter(product(operand), tp)
    rows = tp.divide(operand[0].shape[0], "tokens of a linear layer")
    travelling = None
    for step in range(tp.size):
        owner = (tp.rank - step - 1) % tp.size
        term = product(tuple(part.narrow(0, owner * rows, rows) for part in operand)).contiguous()
        if travelling is not None:
            term += travelling.wait()
        travelling = start_shift(term, tp) if step + 1 < tp.size else None
    return term

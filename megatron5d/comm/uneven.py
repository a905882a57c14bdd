"""All-gather and reduce-scatter along dim 0 whose shares differ in size, each the other's transpose.

Both run as one all-to-all, and are recorded as that: it takes uneven shares on every backend, and the terms are added
up in one fixed order. A rank sends as many bytes as a ring would.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from megatron5d.comm.all_to_all import start_all_to_all
from megatron5d.comm.collectives import differentiable
from megatron5d.topology.axis import Axis


def gather_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """`[counts[rank], ...]` -> `[sum(counts), ...]`, rows of rank 0 first.

    Comm: all_gather / reduce_scatter, each as an all_to_all.
    """
    return differentiable(x, axis, partial(_gather, counts=counts), partial(_reduce_scatter, counts=counts))


def reduce_scatter_rows(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    """Partial `[sum(counts), ...]` -> summed `[counts[rank], ...]`.

    Comm: reduce_scatter / all_gather, each as an all_to_all.
    """
    return differentiable(x, axis, partial(_reduce_scatter, counts=counts), partial(_gather, counts=counts))


def _gather(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    copies = x.repeat(axis.size, *(1,) * (x.ndim - 1))
    return start_all_to_all(copies, axis, [x.shape[0]] * axis.size, counts).wait()


def _reduce_scatter(x: Tensor, axis: Axis, counts: list[int]) -> Tensor:
    own = counts[axis.rank]
    terms = start_all_to_all(x, axis, counts, [own] * axis.size).wait()
    return terms.view(axis.size, own, *x.shape[1:]).sum(0)

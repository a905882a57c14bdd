"""A row of the table of speeds: what one call does, and everybody who can do it."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

Calls = dict[str, Callable[[], object]]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Benchmark:
    """One row of the table.

    Args:
        make: called as `make(device, **sizes)`: provider name -> call, on fresh random inputs; "ours" is always there.
            A call of ours returns all it makes, also in place, so that results can be compared. What only one provider
            needs, its first call makes: it may be missing, or take long.
        work: floating-point operations, or bytes that must move, of one call, from the same sizes.
        unit: "TFLOP/s" or "GB/s".
        sizes: those of real training.
        tiny: the same in small, for a run without a GPU.
    """

    make: Callable[..., Calls]
    work: Callable[..., float]
    unit: str
    sizes: Sizes
    tiny: Sizes

    @property
    def work_of_a_call(self) -> float:
        """At the sizes of real training."""
        return self.work(**self.sizes)

    def calls(self, device: str = "cuda", tiny: bool = False) -> Calls:
        """Every provider's call, on new inputs."""
        return self.make(device, **(self.tiny if tiny else self.sizes))


def random(device: str, *shape: int, grad: bool = False, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def writing(call: Callable[[], object], *written: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call that returns what it has written."""

    def run() -> tuple[Tensor, ...]:
        call()
        return written

    return run


def failing(error: Exception) -> Callable[[], object]:
    """The call of a provider that could not be made ready: it says why."""

    def run() -> object:
        raise error

    return run


def liger(name: str) -> Callable[..., Any]:
    """A function of Liger-Kernel, or, where it is not installed or has none of that name, one that says so."""
    try:
        return getattr(importlib.import_module("liger_kernel.transformers.functional"), name)
    except (ImportError, AttributeError) as error:
        reason = error
    return lambda *inputs, **options: failing(reason)()


Forward = tuple[Callable[[], Any], tuple[Tensor, ...]]
"""A call, and the leaves whose gradients its backward makes."""


def one_way(forwards: Mapping[str, Forward], backward: bool) -> Calls:
    """The forwards as they are, or the backwards of graphs that the first call records."""
    return {name: _backward(*each) if backward else each[0] for name, each in forwards.items()}


def _backward(run: Callable[[], Any], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    graph: list[tuple[Tensor, ...]] = []

    def call() -> tuple[Tensor, ...]:
        if not graph:
            out = run()
            outputs = out if isinstance(out, tuple) else (out,)
            graph.extend((outputs, tuple(torch.randn_like(y) for y in outputs)))
        outputs, grads = graph
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return call


def beside_compiled(
    ours: Callable[..., Any], reference: Callable[..., Any], leaves: tuple[Tensor, ...], backward: bool, **others
) -> Calls:
    """Our operation, the compiler's version of its plain one, and others by name; all take the leaves."""
    every = {"ours": ours, "torch.compile": torch.compile(reference), **others}
    return one_way({name: (partial(run, *leaves), leaves) for name, run in every.items()}, backward)

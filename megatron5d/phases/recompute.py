"""Selective recomputation and offloading of the activations that a phase keeps for its backward.

A part is a section of a phase, such as its norm. A recomputed part saves its inputs, but neither
its outputs nor what it computes in between. Its outputs are marked: an operation that needs one in
its own backward (a GEMM needs its input for its weight gradient) saves the mark instead. The first
one to read the value recomputes the part, with a graph that the part's own backward then uses. So
every recomputed part runs, and communicates, once more per micro-batch, in B or I and never in W.

What each part saves per micro-batch and layer, in elements of the model's dtype, and what it costs.
t = s/cp·b tokens, u = t/tp with sp (else t), r rows of this rank's experts; h, a, g, d, dv, f as
everywhere, a·d, g·d and f over tp:

    part         not kept                                      recomputed
    norm         u·h a norm, and its statistics in fp32        the norms
    qkv          q, k, v: t·(a+2g)·d (MLA t·a·(2(dn+dr)+dv))   the projection (MLA: up-projections), rope; all_gather tp
    attention    its output: t·a·dv, and t·a in fp32           softmax(q·kᵀ)·v; its communication over cp
    activation   t·f dense or shared, r·f routed               swiglu or gelu
    mlp          t·3f (gelu 2f) dense or shared                the up GEMM, the activation; all_gather tp
    experts      r·3f (gelu 2f)                                the grouped up GEMM, the activation
    permute      r·h, the rows that the experts read           sorting; all_to_all ep, all_gather etp

Source: selective recomputation Korthikanti et al. 2022 (arXiv:2205.05198), section 5; DeepSeek-V3
    (arXiv:2412.19437),
section 3.2.3 recomputes norms and MLA's up-projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron5d.kernels.dispatch import FirstOrderFunction
from megatron5d.phases.offload import HostCopy

_ENGINE = torch.autograd.Variable._execution_engine


def run_backward(
    roots: tuple[Any, ...],
    gradients: tuple[Tensor, ...],
    inputs: tuple[Any, ...] = (),
    *,
    accumulate: bool = False,
) -> tuple[Tensor | None, ...]:
    """Runs a backward as torch.autograd does in the end, without its checks, which import sympy and
    check edges twice.

    On the calling thread: the engine would hand a graph on a GPU to a thread of its own, and a
    phase is so short that the way there and back takes the host a fifth of its time.

    Args:
        roots: tensors or edges where `gradients` enter the graph.
        inputs: leaves or edges whose gradients are returned; None for those that are not reached.
        accumulate: gradients are added up in the leaves' `.grad` instead.
    """
    before = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        return _ENGINE.run_backward(
            roots,
            gradients,
            False,
            False,
            inputs,
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
    finally:
        torch._C._set_multithreading_enabled(before)


class RecomputedParts:
    """Which parts of a layer are recomputed, as in `recompute.parts`. Layers run each of their
    parts through it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._rerunning = False  # inside a part that is recomputed, no other is

    def run(self, name: str, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        """Runs a part, which will be recomputed if `name` is among the names and there will be a
        backward.

        Args:
            fn: returns one tensor or a tuple, none of them an input; a closure over parameters and
                everything else.
            inputs: the tensors that the part saves.

        Returns:
            `fn(*inputs)`.
        """
        if name not in self.names or self._rerunning or not torch.is_grad_enabled():
            return fn(*inputs)
        return _Part.apply(self, fn, *inputs)

    def source(self, name: str, x: Tensor) -> Source | None:
        """Returns what a part that ends in a later phase is recomputed from (`computed_from`); None
        if it is kept."""
        if name not in self.names or not torch.is_grad_enabled():
            return None
        return _mark_of(x) or x.detach()

    def keeps(self, name: str) -> bool:
        """Says whether a part is not recomputed, so that its inputs may be overwritten in its
        backward."""
        return name not in self.names

    def rerun(self, fn: Callable[..., Any], inputs: Iterable[Tensor]) -> Any:
        """Runs `fn(*inputs)` with a graph, in which no part is recomputed."""
        self._rerunning = True
        try:
            with torch.enable_grad():
                return fn(*inputs)
        finally:
            self._rerunning = False


KEEP_ALL = RecomputedParts()


@runtime_checkable
class HasRecomputedParts(Protocol):
    """A module that runs its parts through `parts`, which model/gpt.py chooses."""

    parts: RecomputedParts


class _Part(FirstOrderFunction):
    @staticmethod
    def forward(ctx, parts: RecomputedParts, fn, *inputs):
        ctx.parts, ctx.fn, ctx.leaves, ctx.outputs = parts, fn, None, None
        ctx.asks = [x.requires_grad for x in inputs]
        ctx.save_for_backward(*inputs)
        y = fn(*inputs)
        for index, output in enumerate(_plain(y if isinstance(y, tuple) else (y,))):
            output.untyped_storage().made_by = (ctx, index)  # type: ignore[attr-defined]
        return y

    @staticmethod
    def backward(ctx, *grads):
        pairs = [
            (y, grad)
            for y, grad in zip(_outputs_again(ctx), grads)
            if grad is not None and y.requires_grad
        ]
        roots, given = tuple(y for y, _ in pairs), tuple(grad for _, grad in pairs)
        run_backward(roots, given, accumulate=True)
        leaves = ctx.leaves
        ctx.fn = ctx.leaves = ctx.outputs = None
        return None, None, *(leaf.grad for leaf in leaves)


def _outputs_again(ctx) -> tuple[Tensor, ...]:
    """Returns the outputs of a part, recomputed at the first call."""
    if ctx.outputs is None:
        ctx.leaves = [
            x.detach().requires_grad_(asks) for x, asks in zip(ctx.saved_tensors, ctx.asks)
        ]
        y = ctx.parts.rerun(ctx.fn, ctx.leaves)
        ctx.outputs = y if isinstance(y, tuple) else (y,)
    return ctx.outputs


def _inner(tensor: Tensor) -> dict[str, Tensor]:
    """Returns the tensors inside a wrapper subclass (Fp8Tensor); empty for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def _plain(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Lists plain tensors, those inside wrapper subclasses among them."""
    return [each for tensor in tensors for each in (_inner(tensor).values() or (tensor,))]


class _Mark:
    """Saved instead of a tensor that is a view of a recomputed part's output, or of what was
    derived from one."""

    __slots__ = ("source", "index", "geometry")

    def __init__(self, made_by: tuple[Any, int], tensor: Tensor) -> None:
        self.source, self.index = made_by
        self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset()

    def value(self) -> Tensor:
        outputs = (
            self.source.outputs_again()
            if isinstance(self.source, _Derived)
            else _outputs_again(self.source)
        )
        return _plain(outputs)[self.index].detach().as_strided(*self.geometry)


class _Wrapper:
    """Saved instead of a wrapper subclass whose inner tensors are marked or wait on the host."""

    def __init__(self, tensor: Any, inner: Mapping[str, Kept]) -> None:
        self.made_from = type(tensor), tensor.__tensor_flatten__()[1], tensor.shape, tensor.stride()
        self.inner = inner

    def value(self) -> Tensor:
        kind, context, *geometry = self.made_from
        return kind.__tensor_unflatten__(
            {name: _unpack(kept) for name, kept in self.inner.items()}, context, *geometry
        )


Source: TypeAlias = Tensor | _Mark | _Wrapper
Kept: TypeAlias = Source | HostCopy


def _unpack(kept: Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.value()


def _mark_of(tensor: Tensor) -> _Mark | _Wrapper | None:
    """Returns what is saved instead of a tensor that is recomputed; None for others."""
    if inner := _inner(tensor):
        marks = {name: mark for name, each in inner.items() if (mark := _mark_of(each)) is not None}
        return _Wrapper(tensor, marks) if len(marks) == len(inner) else None
    made_by = getattr(tensor.untyped_storage(), "made_by", None)
    return None if made_by is None else _Mark(made_by, tensor)


class _Derived:
    """The results of a function of a tensor, such as a recomputed part's output, which are
    recomputed from it."""

    def __init__(self, source: Source, fn: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        self.source, self.fn = source, fn
        self.outputs: tuple[Tensor, ...] | None = None

    def outputs_again(self) -> tuple[Tensor, ...]:
        if self.outputs is None:
            with torch.no_grad():
                self.outputs = self.fn(_unpack(self.source))
        return self.outputs


def recomputable(x: Tensor, fn: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns `fn(x)`; if x is an output of a recomputed part, its results are recomputed as well,
    not saved.

    Args:
        x: for example the input of a GEMM.
        fn: has no gradient. Its results, such as FP8 values and scales, are what the GEMM saves. If
            it communicates, it does so again.
    """
    mark, results = _mark_of(x), fn(x)
    if mark is not None:
        derived = _Derived(mark, fn)
        for index, result in enumerate(results):
            storage = result.untyped_storage()
            if not hasattr(storage, "made_by"):  # x itself, or a view of it, has
                storage.made_by = (derived, index)  # type: ignore[attr-defined]
    return results


def computed_from(source: Source, fn: Callable[[Tensor], Tensor], y: Tensor) -> None:
    """Has `y` recomputed as `fn(source)` where a backward needs it. Its gradient is not affected.

    Args:
        source: from `RecomputedParts.source`.
        fn: has no gradient. If it communicates, it does so again.
        y: the only tensor in its storage.
    """
    y.untyped_storage().made_by = (_Derived(source, lambda x: (fn(x),)), 0)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ActivationPolicy:
    """The activations that a phase keeps for its backward, and where
    (`phase.activation_policy`)."""

    # of its layer, those that are recomputed (recompute.mode=selective) neighbouring phases of one
    # group keep only the input of the first, and are recomputed as a whole
    parts: RecomputedParts = KEEP_ALL
    # (recompute.mode=full); None = this phase is not
    group: int | None = None
    # saved floating-point tensors of at least this many bytes are offloaded to the host; None =
    # none
    host_bytes: int | None = None
    input_host_bytes: int | None = None  # the same for the input of a group

    @property
    def keeps_all(self) -> bool:
        """Whether the phase's graph keeps what autograd saves, as it is."""
        return not self.parts.names and self.host_bytes is None

    @contextmanager
    def saving(self, weights: Iterable[Tensor]) -> Iterator[list[HostCopy]]:
        """Wraps the phase's forward: outputs of recomputed parts are not saved, and large tensors
        offloaded.

        Args:
            weights: of the phase, which are not offloaded.

        Yields:
            The copies on the host; the list is complete when the context ends.
        """
        found: list[HostCopy] = []
        # holds the tensors, so that no id of a storage is used again
        copies: dict[Any, tuple[HostCopy, Tensor]] = {}
        # ids of storages: on the meta device all of them have the same address
        weight_storages: set[int] = set()
        if self.host_bytes is not None:
            weight_storages = {id(weight.untyped_storage()) for weight in weights}

        def place(tensor: Tensor) -> Tensor | HostCopy:
            storage, least = tensor.untyped_storage(), self.host_bytes
            size = tensor.numel() * tensor.element_size()
            if (
                least is None
                or size < least
                or not tensor.is_floating_point()
                or id(storage) in weight_storages
            ):
                return tensor
            key = id(storage), tensor.shape, tensor.stride(), tensor.storage_offset()
            if key not in copies:
                copies[key] = HostCopy(tensor), tensor
                found.append(copies[key][0])
            return copies[key][0]

        # does not call itself: the cycle would keep the copies until gc finds it
        def pack(tensor: Tensor) -> Kept:
            if inner := _inner(tensor):
                return _Wrapper(
                    tensor, {name: _mark_of(each) or place(each) for name, each in inner.items()}
                )
            return _mark_of(tensor) or place(tensor)

        with saved_tensors_hooks(pack, _unpack):
            yield found
        copies.clear()

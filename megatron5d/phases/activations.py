"""The activations that a phase keeps for its backward: selective recomputation and offloading.

A part is a section of a phase, such as its norm. A recomputed part saves its inputs, but neither
its outputs nor its intermediate results. Its outputs carry their origin: an operation that needs
one in its own backward (a GEMM needs its input for its weight gradient) saves a placeholder
instead. The first placeholder to be read recomputes the part, with a graph that the part's own
backward then uses. So every recomputed part runs, and communicates, once more per micro-batch, in B
or I and never in W.

What each part would save per micro-batch and layer, in elements of the model's dtype, and what is
recomputed instead. t = s/cp·b tokens, u = t/tp with sp (else t), r rows of this rank's experts; h,
a, g, d, dv, f as everywhere, a·d, g·d and f over tp:

    part        not kept                                     recomputed
    norm        u·h a norm, and its statistics in fp32       the norms
    qkv         q, k, v: t·(a+2g)·d; MLA t·a·(2(dn+dr)+dv)   projection (MLA: up-projections),
                                                             rope; all_gather tp
    attention   its output: t·a·dv, and t·a in fp32          softmax(q·kᵀ)·v; communication over cp
    activation  t·f dense or shared, r·f routed              swiglu or gelu
    mlp         t·3f (gelu 2f) dense or shared               up GEMM, activation; all_gather tp
    experts     r·3f (gelu 2f)                               grouped up GEMM, activation
    permute     r·h, the rows that the experts read          sorting; all_to_all ep, all_gather etp

An offloaded tensor's copy to the host is queued on a separate CUDA stream when an operation saves
the tensor; the device memory is freed when nothing else refers to it. `fetch` starts the copy back,
one phase before its use, and `value` makes the compute stream wait for it. On a CPU the copy is a
second buffer, so that only the streams differ; on the meta device there is no copy. A tensor of n
bytes moves n bytes each way, once per micro-batch.

Source: selective recomputation Korthikanti et al. 2022 (arXiv:2205.05198), section 5; DeepSeek-V3
    (arXiv:2412.19437), section 3.2.3, recomputes norms and MLA's up-projections.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron5d.kernels.dispatch import FirstOrderFunction

_ENGINE = torch.autograd.Variable._execution_engine


def run_backward(
    roots: tuple[Any, ...],
    gradients: tuple[Tensor, ...],
    inputs: tuple[Any, ...] = (),
    *,
    accumulate: bool = False,
) -> tuple[Tensor | None, ...]:
    """Runs a backward through torch's autograd engine, on the calling thread.

    It skips the checks of torch.autograd, which import sympy and check edges twice. The engine
    would pass a graph on a GPU to another thread, and a phase is so short that switching threads
    takes a fifth of the host's time.

    Args:
        roots: tensors or edges where `gradients` enter the graph.
        gradients: one for each root.
        inputs: leaves or edges whose gradients are returned.
        accumulate: add up gradients in the leaves' `.grad` instead.

    Returns:
        The gradient of each input; None for inputs that the backward does not reach.
    """
    before = torch._C._is_multithreading_enabled()
    torch._C._set_multithreading_enabled(False)
    try:
        return _ENGINE.run_backward(
            roots,
            gradients,
            False,  # keep_graph
            False,  # create_graph
            inputs,
            allow_unreachable=True,
            accumulate_grad=accumulate,
        )
    finally:
        torch._C._set_multithreading_enabled(before)


# Called with the bytes of every copy that begins; the memory forecast sets it.
COPY_CALLBACK: ContextVar[Callable[[int], None] | None] = ContextVar("COPY_CALLBACK", default=None)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class HostCopy:
    """A copy of a tensor on the host, started by the constructor after all work queued so far."""

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self._device_copy: Tensor | None = None
        self._fetch_event: torch.cuda.Event | None = None
        self._layout: dict[str, Any] = {"size": tensor.shape, "dtype": tensor.dtype}
        if (callback := COPY_CALLBACK.get()) is not None:
            callback(self.num_bytes)
        if not tensor.is_cuda:
            self.host = tensor.new_empty(0) if tensor.is_meta else tensor.clone()
            return
        stream = _side_stream(self.device)
        self.host = torch.empty(**self._layout, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        # The allocator must not reuse the tensor's memory before the copy has read it.
        tensor.record_stream(stream)

    @property
    def num_bytes(self) -> int:
        # `host` is empty on the meta device
        return math.prod(self._layout["size"]) * self._layout["dtype"].itemsize

    def fetch(self) -> None:
        """Starts the copy back to the device; a second call does nothing."""
        if self._device_copy is not None:
            return
        if self.device.type != "cuda":
            is_cpu = self.device.type == "cpu"
            self._device_copy = (
                self.host.clone() if is_cpu else torch.empty(**self._layout, device="meta")
            )
            return
        stream = _side_stream(self.device)
        self._device_copy = torch.empty(**self._layout, device=self.device)
        # Queued kernels may still use the memory that the allocator has just reused.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._device_copy.copy_(self.host, non_blocking=True)
            self._fetch_event = stream.record_event()
        self._device_copy.record_stream(stream)

    def value(self) -> Tensor:
        """The tensor on its device, readable by all work queued after this call."""
        self.fetch()
        assert self._device_copy is not None
        if self._fetch_event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._fetch_event)
        return self._device_copy


class RecomputedParts:
    """The parts to recompute, named in `recompute.parts`; layers run all their parts through it."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names = frozenset(names)
        self._is_rerunning = False  # inside a recomputed part no other part is recomputed

    def run(self, name: str, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        """Runs a part, which is recomputed if `names` has it and there will be a backward.

        Args:
            name: of the part.
            fn: returns one tensor or a tuple, none of them an input; a closure over parameters and
                everything else.
            inputs: the tensors that the part saves.

        Returns:
            `fn(*inputs)`.
        """
        if name not in self.names or self._is_rerunning or not torch.is_grad_enabled():
            return fn(*inputs)
        return _Part.apply(self, fn, *inputs)

    def source(self, name: str, x: Tensor) -> Source | None:
        """What a part that ends in a later phase is recomputed from; None if it is kept."""
        if name not in self.names or not torch.is_grad_enabled():
            return None
        return _placeholder_of(x) or x.detach()

    def keeps(self, name: str) -> bool:
        """Whether a part is not recomputed, so that its backward may overwrite its inputs."""
        return name not in self.names

    def rerun(self, fn: Callable[..., Any], inputs: Iterable[Tensor]) -> Any:
        """Runs `fn(*inputs)` with a graph, in which no part is recomputed."""
        self._is_rerunning = True
        try:
            with torch.enable_grad():
                return fn(*inputs)
        finally:
            self._is_rerunning = False


KEEP_ALL = RecomputedParts()


@runtime_checkable
class HasRecomputedParts(Protocol):
    """A module that runs its parts through `parts`, which model/gpt.py chooses."""

    parts: RecomputedParts


class _Part(FirstOrderFunction):
    @staticmethod
    def forward(ctx, parts: RecomputedParts, fn, *inputs):
        ctx.parts, ctx.fn, ctx.leaves, ctx.outputs = parts, fn, None, None
        ctx.inputs_require_grad = [x.requires_grad for x in inputs]
        ctx.save_for_backward(*inputs)
        y = fn(*inputs)
        for index, output in enumerate(_plain_tensors(y if isinstance(y, tuple) else (y,))):
            _set_origin(output.untyped_storage(), partial(_recomputed_outputs, ctx), index)
        return y

    @staticmethod
    def backward(ctx, *grads):
        pairs = [
            (y, grad)
            for y, grad in zip(_recomputed_outputs(ctx), grads)
            if grad is not None and y.requires_grad
        ]
        roots, gradients = tuple(y for y, _ in pairs), tuple(grad for _, grad in pairs)
        run_backward(roots, gradients, accumulate=True)
        leaves = ctx.leaves
        ctx.fn = ctx.leaves = ctx.outputs = None
        return None, None, *(leaf.grad for leaf in leaves)


def _recomputed_outputs(ctx) -> tuple[Tensor, ...]:
    """Outputs of a part, recomputed at the first call."""
    if ctx.outputs is None:
        ctx.leaves = [
            x.detach().requires_grad_(requires_grad)
            for x, requires_grad in zip(ctx.saved_tensors, ctx.inputs_require_grad)
        ]
        y = ctx.parts.rerun(ctx.fn, ctx.leaves)
        ctx.outputs = y if isinstance(y, tuple) else (y,)
    return ctx.outputs


Outputs: TypeAlias = Callable[[], tuple[Tensor, ...]]
"""Recomputes outputs at the first call."""


def _set_origin(storage: torch.UntypedStorage, outputs: Outputs, index: int) -> None:
    """Notes which output a storage holds; a view shares the storage of its base."""
    storage.origin = outputs, index  # type: ignore[attr-defined]


def _inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """The tensors inside a wrapper subclass (Fp8Tensor); empty for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def _plain_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, each wrapper subclass replaced by the tensors inside it."""
    return [plain for tensor in tensors for plain in (_inner_tensors(tensor).values() or (tensor,))]


class _Placeholder:
    """Saved instead of a tensor that is a view of a recomputed output."""

    __slots__ = ("outputs", "index", "geometry")

    def __init__(self, origin: tuple[Outputs, int], tensor: Tensor) -> None:
        self.outputs, self.index = origin
        self.geometry = tensor.shape, tensor.stride(), tensor.storage_offset()

    def value(self) -> Tensor:
        plain = _plain_tensors(self.outputs())[self.index]
        return plain.detach().as_strided(*self.geometry)


class _Wrapper:
    """Saved instead of a wrapper subclass whose inner tensors are placeholders or host copies."""

    def __init__(self, tensor: Any, inner: Mapping[str, Saved]) -> None:
        context = tensor.__tensor_flatten__()[1]
        self.constructor = type(tensor), context, tensor.shape, tensor.stride()
        self.inner = inner

    def value(self) -> Tensor:
        subclass, context, *geometry = self.constructor
        return subclass.__tensor_unflatten__(
            {name: _unpack(saved) for name, saved in self.inner.items()}, context, *geometry
        )


Source: TypeAlias = Tensor | _Placeholder | _Wrapper
Saved: TypeAlias = Source | HostCopy


def _unpack(saved: Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.value()


def _placeholder_of(tensor: Tensor) -> _Placeholder | _Wrapper | None:
    """What is saved instead of a tensor that is recomputed; None for other tensors."""
    if inner := _inner_tensors(tensor):
        placeholders = {
            name: placeholder
            for name, plain in inner.items()
            if (placeholder := _placeholder_of(plain)) is not None
        }
        return _Wrapper(tensor, placeholders) if len(placeholders) == len(inner) else None
    origin = getattr(tensor.untyped_storage(), "origin", None)
    return None if origin is None else _Placeholder(origin, tensor)


def _derived(source: Source, fn: Callable[[Tensor], tuple[Tensor, ...]]) -> Outputs:
    """Results of a function of a tensor, which are recomputed from it."""

    @cache
    def outputs() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return fn(_unpack(source))

    return outputs


def recomputable(x: Tensor, fn: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Runs `fn(x)`; if x is recomputed, the results are recomputed from it instead of saved.

    Args:
        x: for example the input of a GEMM.
        fn: has no gradient. Its results, such as FP8 values and scales, are what the GEMM saves. If
            it communicates, it does so again.
    """
    placeholder, results = _placeholder_of(x), fn(x)
    if placeholder is not None:
        outputs = _derived(placeholder, fn)
        for index, result in enumerate(results):
            storage = result.untyped_storage()
            if not hasattr(storage, "origin"):  # x itself, or a view of it, has one
                _set_origin(storage, outputs, index)
    return results


def recompute_from(source: Source, fn: Callable[[Tensor], Tensor], y: Tensor) -> None:
    """Recomputes `y` as `fn(source)` where a backward needs it; its gradient is not affected.

    Args:
        source: from `RecomputedParts.source`.
        fn: has no gradient. If it communicates, it does so again.
        y: the only tensor in its storage.
    """
    _set_origin(y.untyped_storage(), _derived(source, lambda x: (fn(x),)), 0)


@dataclass(frozen=True)
class ActivationPolicy:
    """Which activations a phase keeps for its backward, and where."""

    parts: RecomputedParts = KEEP_ALL  # of its layer (recompute.mode=selective)
    # Adjacent phases of one group keep only the input of the first, and the whole group is
    # recomputed (recompute.mode=full); None = this phase is not
    group: int | None = None
    # saved floating-point tensors of at least this many bytes are offloaded to the host; None =
    # none
    host_bytes: int | None = None
    input_host_bytes: int | None = None  # the same for the input of a group

    @property
    def keeps_all(self) -> bool:
        """Whether the phase's graph keeps what autograd saves, unchanged and on the device."""
        return not self.parts.names and self.host_bytes is None

    @contextmanager
    def saving(self, weights: Iterable[Tensor]) -> Iterator[list[HostCopy]]:
        """Wraps a phase's forward, so that autograd saves placeholders and host copies.

        Args:
            weights: of the phase, which are not offloaded.

        Yields:
            The copies on the host; the list is complete when the context ends.
        """
        host_copies: list[HostCopy] = []
        # holds the tensors, so that no id of a storage is used again
        copies: dict[Any, tuple[HostCopy, Tensor]] = {}
        # ids of storages: on the meta device all of them have the same address
        weight_storages: set[int] = set()
        if self.host_bytes is not None:
            weight_storages = {id(weight.untyped_storage()) for weight in weights}

        def offload(tensor: Tensor) -> Tensor | HostCopy:
            storage, min_bytes = tensor.untyped_storage(), self.host_bytes
            num_bytes = tensor.numel() * tensor.element_size()
            if (
                min_bytes is None
                or num_bytes < min_bytes
                or not tensor.is_floating_point()
                or id(storage) in weight_storages
            ):
                return tensor
            key = id(storage), tensor.shape, tensor.stride(), tensor.storage_offset()
            if key not in copies:
                copies[key] = HostCopy(tensor), tensor
                host_copies.append(copies[key][0])
            return copies[key][0]

        # Not recursive: a closure that refers to itself is a cycle, which would keep the copies
        # until the garbage collector runs.
        def pack(tensor: Tensor) -> Saved:
            if inner := _inner_tensors(tensor):
                return _Wrapper(
                    tensor,
                    {
                        name: _placeholder_of(plain) or offload(plain)
                        for name, plain in inner.items()
                    },
                )
            return _placeholder_of(tensor) or offload(tensor)

        with saved_tensors_hooks(pack, _unpack):
            yield host_copies
        copies.clear()

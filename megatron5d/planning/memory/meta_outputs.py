"""Outputs of a model's operations on the meta device, computed from sizes.

torch computes them in Python functions that take about ten times as long, and some of which import
its compiler, a second of every start. For element-wise operations, torch only gives the dtype, on
the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Layout = tuple[Sequence[int], Sequence[int]]
"""Shape and strides."""
_CONTIGUOUS = (
    torch.ops.aten.masked_fill.Scalar,
    torch.ops.aten.masked_fill.Tensor,
    torch.ops.aten.pow.Scalar,
)


@dataclass(frozen=True)
class Operation:
    """Properties of one of torch's operations.

    Args:
        outputs: function from positional and keyword arguments to the outputs on the meta device.
            It returns None where torch must run the operation, and the first argument where the
            operation changes that. None = torch always runs the operation.
        views: whether all outputs are views of arguments.
        fresh: whether no output shares memory with an argument.
    """

    outputs: Callable[[Sequence[Any], Mapping[str, Any]], Any] | None
    views: bool
    fresh: bool


# By id, because torch hashes operations in Python; operations are never freed.
_operations: dict[int, Operation] = {}


def operation_of(func: Any) -> Operation:
    """Properties of an operation that `__torch_dispatch__` receives."""
    operation = _operations.get(id(func))
    if operation is None:
        aliases = [value.alias_info is not None for value in func._schema.returns]
        # _unsafe_view returns a view that its schema does not declare.
        undeclared = func.namespace != "aten" or "unsafe" in func._schema.name
        fresh = not (any(aliases) or undeclared)
        operation = _operations[id(func)] = Operation(_outputs(func), all(aliases), fresh)
    return operation


def _outputs(func: Any) -> Callable[[Sequence[Any], Mapping[str, Any]], Any] | None:
    if func in _ON_ANY_DEVICE:
        make = _ON_ANY_DEVICE[func]
        return lambda args, kwargs: make(*args, **kwargs)
    if func in _WITH_RULE:
        rule = _WITH_RULE[func]
        return lambda args, kwargs: rule(*args, **kwargs) if args[0].is_meta else None
    if not _is_simple(func):
        return None
    if func._schema.is_mutable:
        return lambda args, _: (
            args[0] if type(args[0]) in (Tensor, nn.Parameter) and args[0].is_meta else None
        )
    return partial(_element_wise, functools.lru_cache(1 << 10)(partial(_output, func)))


def _element_wise(
    output: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Output of an element-wise operation, for which `output` gives shape, strides and dtype."""
    keys, on_meta = list[tuple](), False
    for value in args:
        if isinstance(value, Tensor):
            on_meta |= value.is_meta
            if type(value) not in (Tensor, nn.Parameter) or not (value.is_meta or value.ndim == 0):
                return None
            keys.append((value.dtype, value.shape, value.stride()))
        else:
            keys.append((type(value), value, ()))
    if not on_meta or type(args[0]) not in (Tensor, nn.Parameter, float, int):
        return None
    shape, strides, dtype = output(tuple(kwargs.items()), *keys)
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _joined(stacked: bool, tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Output of torch.stack or torch.cat; None where dtypes, devices or numbers of dims differ."""
    first = tensors[0]
    kinds = {(type(x) is Tensor, x.is_meta, x.dtype, x.ndim) for x in tensors}
    if kinds != {(True, True, first.dtype, first.ndim)}:
        return None
    shape = list(first.shape)
    if stacked:
        shape.insert(dim % (len(shape) + 1), len(tensors))
    else:
        shape[dim] = sum(x.shape[dim] for x in tensors)
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _counted(
    *bounds: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> Tensor | None:
    """Output of torch.arange for integers."""
    if torch.device(device or "cpu").type != "meta":
        return None
    if not all(type(bound) is int for bound in bounds):
        return None
    return torch.empty(len(range(*bounds)), dtype=dtype or torch.int64, device="meta")


def _rolled(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _like(x: Tensor, memory_format: Any = None, **named: Any) -> Tensor | None:
    if memory_format is not None:
        return None
    dtype, strides = named.get("dtype") or x.dtype, _strides(x.shape, _order(x.shape, [x.stride()]))
    return torch.empty_strided(x.shape, strides, dtype=dtype, device="meta")


def _reduced(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **more: Any
) -> Tensor | None:
    """Sum, mean, largest element or log-sum-exp of floats."""
    if more or not x.is_floating_point():
        return None
    reduced = {dim % x.ndim for dim in dims} if dims else range(x.ndim)
    shape = [
        1 if dim in reduced else size
        for dim, size in enumerate(x.shape)
        if keepdim or dim not in reduced
    ]
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _copied(x: Tensor, *, device: Any = None, **named: Any) -> Tensor | None:
    return _like(x, **named) if device is None or torch.device(device).type == "meta" else None


def _any(x: Tensor, dim: int, keepdim: bool = False) -> Tensor | None:
    if x.dtype == torch.uint8 or not x.ndim:
        return None
    dim %= x.ndim
    return torch.empty(
        (*x.shape[:dim], *(1,) * keepdim, *x.shape[dim + 1 :]), dtype=torch.bool, device="meta"
    )


def _best(x: Tensor, k: int, dim: int = -1, *_: bool) -> tuple[Tensor, Tensor] | None:
    if not 0 <= k <= x.shape[dim]:
        return None  # torch raises an error with a message
    dim %= x.ndim
    values = x.new_empty((*x.shape[:dim], k, *x.shape[dim + 1 :]))
    return values, torch.empty(values.shape, dtype=torch.int64, device="meta")


def _multiplied(x: Tensor, y: Tensor) -> Tensor | None:
    if x.shape[:-2] != y.shape[:-2] or x.shape[-1] != y.shape[-2] or x.dtype != y.dtype:
        return None  # torch raises an error with a message
    return torch.empty((*x.shape[:-1], y.shape[-1]), dtype=x.dtype, device="meta")


def _normed(x: Tensor, normalized: Sequence[int], *_: Any) -> tuple[Tensor, ...] | None:
    """LayerNorm, means and reciprocal deviations of x in a dtype that its statistics share."""
    if x.dtype not in (torch.float32, torch.float64):
        return None
    statistics = (*x.shape[: x.ndim - len(normalized)], *(1,) * len(normalized))
    return _rolled(x), x.new_empty(statistics), x.new_empty(statistics)


def _normed_backward(dy: Tensor, x: Tensor, *rest_of_args: Any) -> tuple[Tensor | None, ...]:
    *_, weight, bias, mask = rest_of_args
    return tuple(_rolled(t) if is_needed else None for t, is_needed in zip((x, weight, bias), mask))


def _attended(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor | None, Tensor]:
    """Output of torch's CPU flash kernel, and its log-sum-exp."""
    lse = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, seq_len = q.shape[:3]
    return _like(q), torch.empty(batch, seq_len, heads, dtype=lse, device="meta").transpose(1, 2)


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor | None:
    """Output of x[rows] and x[:, rows]; None for masks and for several indices."""
    *before, rows = indices
    if rows is None or rows.dtype not in (torch.int64, torch.int32):
        return None
    if any(index is not None for index in before):
        return None
    dim, strides = len(before), x.stride()
    after = len(strides) - dim - 1
    shape = (*x.shape[:dim], *rows.shape, *x.shape[dim + 1 :])
    read = [*strides[:dim], *(0,) * rows.ndim, *strides[dim + 1 :]]
    order = _order(shape, [read, [0] * dim + list(rows.stride()) + [0] * after])
    return torch.empty_strided(shape, _strides(shape, order), dtype=x.dtype, device="meta")


_ON_ANY_DEVICE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.cat.default: partial(_joined, False),
    torch.ops.aten.stack.default: partial(_joined, True),
    torch.ops.aten.arange.default: _counted,
    torch.ops.aten.arange.start: _counted,
    torch.ops.aten.arange.start_step: _counted,
}
_WITH_RULE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.roll.default: _rolled,
    torch.ops.aten.tril.default: _rolled,
    torch.ops.aten.empty_like.default: _like,
    torch.ops.aten.zeros_like.default: _like,
    torch.ops.aten.ones_like.default: _like,
    torch.ops.aten.topk.default: _best,
    torch.ops.aten._softmax.default: lambda x, _, half: None if half else _rolled(x),
    torch.ops.aten._softmax_backward_data.default: lambda dy, _, __, dtype: torch.empty(
        dy.shape, dtype=dtype, device="meta"
    ),
    torch.ops.aten.gather.default: lambda x, _, index: torch.empty(
        index.shape, dtype=x.dtype, device="meta"
    ),
    torch.ops.aten.sum.dim_IntList: _reduced,
    torch.ops.aten.amax.default: _reduced,
    torch.ops.aten.mean.dim: _reduced,
    torch.ops.aten.logsumexp.default: _reduced,
    torch.ops.aten.bmm.default: _multiplied,
    torch.ops.aten.mm.default: _multiplied,
    torch.ops.aten.any.dim: _any,
    torch.ops.aten._to_copy.default: _copied,
    torch.ops.aten.index.Tensor: _indexed,
    torch.ops.aten.flip.default: lambda x, _: _like(x),
    torch.ops.aten.index_put.default: lambda x, *_: _like(x),
    torch.ops.aten.sort.stable: lambda x, **_: (_like(x), _like(x, dtype=torch.int64)),
    torch.ops.aten.searchsorted.Tensor: lambda x, y, **more: (
        None if more or x.ndim > 1 else _like(y, dtype=torch.int64)
    ),
    torch.ops.aten.take.default: lambda x, index: torch.empty(
        index.shape, dtype=x.dtype, device="meta"
    ),
    torch.ops.aten.slice_backward.default: lambda dy, sizes, *_: torch.empty(
        sizes, dtype=dy.dtype, device="meta"
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    torch.ops.aten.native_layer_norm.default: _normed,
    torch.ops.aten.native_layer_norm_backward.default: _normed_backward,
}
"""Operations that torch computes in Python; some of them import its compiler."""


def _is_simple(func: Any) -> bool:
    """Whether an operation changes its first argument in place, or is element-wise."""
    schema = func._schema
    if schema.is_mutable:
        aliases = [argument.alias_info for argument in schema.arguments]
        first, *remaining = [alias is not None and alias.is_write for alias in aliases]
        in_place = schema.name.endswith("_") and len(schema.returns) == 1
        in_place = in_place and first and not any(remaining)
        return in_place and torch.Tag.inplace_view not in func.tags
    untagged = func is torch.ops.aten.floor_divide.default
    return untagged or (torch.Tag.pointwise in func.tags and len(schema.returns) == 1)


def _output(
    func: Any, named: tuple, *keys: tuple
) -> tuple[Sequence[int], Sequence[int], torch.dtype]:
    """Shape, strides and dtype of the output.

    Args:
        func: an element-wise operation.
        named: names and values of keyword arguments.
        keys: dtype, shape and strides of each tensor; type, value and () of other values.
    """
    tensors = [(shape, strides) for kind, shape, strides in keys if isinstance(kind, torch.dtype)]
    tiny = [
        torch.ones((1,) * len(value), dtype=kind) if isinstance(kind, torch.dtype) else value
        for kind, value, _ in keys
    ]
    rank = max(len(shape) for shape, _ in tensors)
    sizes = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape, _ in tensors))
    # torch.broadcast_shapes would import sympy.
    shape = [next((size for size in of_dim if size != 1), 1) for of_dim in sizes]
    contiguous = func in _CONTIGUOUS or ("memory_format", torch.contiguous_format) in named
    order: Sequence[int] = range(len(shape))
    if not contiguous:
        order = _order(shape, [_expanded(layout, shape) for layout in tensors])
    return shape, _strides(shape, order), func(*tiny, **dict(named)).dtype


def _strides(shape: Sequence[int], order: Sequence[int]) -> list[int]:
    """Strides without gaps, given the dims from the outermost in memory to the innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(shape[dim], 1)
    return strides


def _expanded(layout: Layout, shape: Sequence[int]) -> list[int]:
    """Strides of a tensor that is broadcast to a shape."""
    padding = len(shape) - len(layout[0])
    dims = zip(*layout, shape[padding:])
    return [0] * padding + [stride if size == target else 0 for size, stride, target in dims]


def _order(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Dims from the outermost in memory to the innermost, sorted as by torch's TensorIterator."""

    def compare(first: int, second: int) -> int:
        for of_tensor in strides:
            one, two = of_tensor[first], of_tensor[second]
            if one and two and one != two:
                return 1 if one > two else -1
            if one and two and shape[first] > shape[second]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for end in range(1, len(order)):
        index = end
        for before in reversed(range(end)):
            result = compare(order[before], order[index])
            if result > 0:
                order[before], order[index], index = order[index], order[before], before
            elif result < 0:
                break
    return order[::-1]

"""Make Triton's interpreter notice what a GPU would silently get wrong.

- a load or store outside every tensor argument raises (on a GPU it reads a neighbour or kills the
    context);
- a masked load without `other` yields NaN, or the largest integer, where it is masked (a GPU:
    anything);
- `device_assert` fires, and so does 32-bit integer overflow in address arithmetic;
- a scalar may be used as an index with NumPy 2.4 and later.
"""

import numpy as np
import triton.language as tl
from kernel_lab.bounds import allowed, storages
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
)

_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_POISON = {8: 0x7F, 16: 0x7E00, 32: 0x7FC00000, 64: 0x7FF8 << 48}


def _check(pointers: TensorHandle, mask: TensorHandle, what: str) -> None:
    # a block's condition and a scalar's: the interpreter makes integers of it
    masked = np.asarray(mask.data, bool)
    live = pointers.data.reshape(-1)
    if not masked.all():
        live = pointers.data[np.broadcast_to(masked, pointers.data.shape)]
    if live.size == 0:
        return
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    lowest, highest = int(live.min()), int(live.max()) + width
    if any(start <= lowest and highest <= stop for start, stop in allowed):
        return
    inside = np.zeros(live.shape, bool)
    for start, stop in allowed:
        inside |= (live >= np.uint64(start)) & (live + np.uint64(width) <= np.uint64(stop))
    if not inside.all():
        first = int(live[~inside][0])
        start, stop = min(
            allowed, key=lambda r: min(abs(r[0] - first), abs(r[1] - first)), default=(0, 0)
        )
        raise IndexError(
            f"{what} out of bounds: {int((~inside).sum())} of {live.size} lanes, the first at byte {first - start} "
            f"of an argument of {stop - start} bytes, in program {interpreter.interpreter_builder.grid_idx}"
        )


def _poisoned(pointers: TensorHandle) -> TensorHandle:
    dtype = pointers.get_element_ty()
    np_dtype = interpreter._get_np_dtype(dtype)
    if not dtype.is_floating():
        return TensorHandle(
            np.full(
                pointers.data.shape,
                True if np_dtype.kind == "b" else np.iinfo(np_dtype).max,
                np_dtype,
            ),
            dtype,
        )
    bits = 0x7FC0 if dtype == tl.bfloat16 else _POISON[dtype.primitive_bitwidth]
    raw = np.full(pointers.data.shape, bits, getattr(np, f"uint{dtype.primitive_bitwidth}"))
    return TensorHandle(raw.view(np_dtype), dtype)


def _check_overflow(self, a, b, operation) -> None:
    """Triton's own check, which takes ten operations of the interpreter, in one of NumPy."""
    kind = a.type.scalar
    if kind.int_bitwidth < 64:
        exact = _EXACT[operation.__name__](a.handle.data, b.handle.data, dtype=np.int64)
        if exact.min() < kind.get_int_min_value() or exact.max() > kind.get_int_max_value():
            raise AssertionError(
                f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
            )


def _checked_call(original):
    def call(self, *args, **kwargs):
        ranges = list(storages(args)) + list(storages(tuple(kwargs.values())))
        allowed.extend(ranges)
        try:
            return original(self, *args, **kwargs)
        finally:
            del allowed[len(allowed) - len(ranges) :]

    return call


def _checked_load(original):
    def load(self, pointers, mask, other, *hints, **named):
        _check(pointers, mask, "load")
        # The frontend drops a scalar load's `other` when it is zero: an interpreted scalar has a
        # truth value.
        if other is None and pointers.data.size > 1 and not np.all(mask.data):
            other = _poisoned(pointers)
        return original(self, pointers, mask, other, *hints, **named)

    return load


def _checked_store(original):
    def store(self, pointers, value, mask, *hints):
        _check(pointers, mask, "store")
        return original(self, pointers, value, mask, *hints)

    return store


def _checked_atomic(original):
    def atomic(self, operation, pointers, value, mask, *hints):
        _check(pointers, mask, "atomic")
        return original(self, operation, pointers, value, mask, *hints)

    return atomic


def _indexable(original):
    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(
            tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])
        )

    return patch


def install_checks() -> None:
    """Adds the checks to the interpreter; call once, after `repair_numbers`."""
    builder = InterpreterBuilder
    GridExecutor.__call__ = _checked_call(GridExecutor.__call__)
    builder.create_masked_load = _checked_load(builder.create_masked_load)
    builder.create_masked_store = _checked_store(builder.create_masked_store)
    builder.create_atomic_rmw = _checked_atomic(builder.create_atomic_rmw)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter._patch_lang_tensor = _indexable(interpreter._patch_lang_tensor)
    interpreter.interpreter_builder.options = InterpreterOptions(debug=True)

"""Makes Triton's interpreter detect what a GPU would silently get wrong.

- A load or store outside every tensor argument raises (a GPU reads other data, or loses its
  context).
- A masked load without `other` gives NaN, or the largest integer, where it is masked (a GPU:
  anything).
- `device_assert` raises, and so does 32-bit integer overflow in address arithmetic.
- A scalar can be an index with NumPy 2.4 and later.
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


def _boolean(mask: TensorHandle) -> TensorHandle:
    """The mask as Triton 3.9 requires it: the interpreter turns the condition of a block and of a
    scalar into integers."""
    return TensorHandle(np.asarray(mask.data, bool), tl.int1)


def _check(pointers: TensorHandle, mask: TensorHandle, what: str) -> None:
    masked = mask.data
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
        distance = lambda bounds: min(abs(edge - first) for edge in bounds)  # noqa: E731
        start, stop = min(allowed, key=distance, default=(0, 0))
        raise IndexError(
            f"{what} out of bounds: {int((~inside).sum())} of {live.size} lanes, the first at byte "
            f"{first - start} of an argument of {stop - start} bytes, in program "
            f"{interpreter.interpreter_builder.grid_idx}"
        )


def _poisoned(pointers: TensorHandle) -> TensorHandle:
    dtype = pointers.get_element_ty()
    np_dtype = interpreter._get_np_dtype(dtype)
    if not dtype.is_floating():
        largest = True if np_dtype.kind == "b" else np.iinfo(np_dtype).max
        return TensorHandle(np.full(pointers.data.shape, largest, np_dtype), dtype)
    bits = 0x7FC0 if dtype == tl.bfloat16 else _POISON[dtype.primitive_bitwidth]
    raw = np.full(pointers.data.shape, bits, getattr(np, f"uint{dtype.primitive_bitwidth}"))
    return TensorHandle(raw.view(np_dtype), dtype)


def _check_overflow(self, a, b, operation) -> None:
    """Triton's own check, in one operation of NumPy instead of ten of the interpreter."""
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
        mask = _boolean(mask)
        _check(pointers, mask, "load")
        # The frontend drops a scalar load's `other` if it is zero, because an interpreted scalar
        # has a truth value.
        if other is None and pointers.data.size > 1 and not np.all(mask.data):
            other = _poisoned(pointers)
        return original(self, pointers, mask, other, *hints, **named)

    return load


def _checked_write(original, what: str):
    """Checks (pointers, value, mask, …) of a store, or (operation, pointers, …) of an atomic."""

    def write(self, *args):
        at = 3 if what == "atomic" else 2
        mask = _boolean(args[at])
        _check(args[at - 2], mask, what)
        return original(self, *args[:at], mask, *args[at + 1 :])

    return write


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
    builder.create_masked_store = _checked_write(builder.create_masked_store, "store")
    builder.create_atomic_rmw = _checked_write(builder.create_atomic_rmw, "atomic")
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter._patch_lang_tensor = _indexable(interpreter._patch_lang_tensor)
    interpreter.interpreter_builder.options = InterpreterOptions(debug=True)

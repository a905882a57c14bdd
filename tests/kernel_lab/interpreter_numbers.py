"""Makes Triton's interpreter compute with narrow floats as a GPU does.

The interpreter stores bfloat16 and float8 as unsigned integers, then adds, compares and multiplies
those integers. Its casts truncate or lose the carry of the mantissa. A correct kernel looks wrong,
and a wrong one can look correct. Here
- every cast is torch's own, to nearest even; float8 saturates at its largest value, as the GPU's
  conversion does;
- arithmetic, comparison, reduction, scan, dot and atomics on narrow floats widen to float32 and
  round once after;
- float16 dots accumulate in float32;
- of a number and NaN, `tl.maximum` and `tl.minimum` give the number, unless NaN is to propagate.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NARROW = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_UNARY = "fneg cos sin exp exp2 floor ceil log log2 precise_sqrt sqrt erf rsqrt"
_BINARY = "fadd fsub fmul fdiv frem precise_divf minimumf minnumf maximumf maxnumf"
_TERNARY = "fma clampf"
_original_cast = InterpreterBuilder.cast_impl
_original_convert = interpreter._convert_float
_original_atomic = InterpreterBuilder.create_atomic_rmw
_original_dot = InterpreterBuilder.create_dot


def _as_torch(data: np.ndarray, dtype) -> torch.Tensor:
    flat = np.ascontiguousarray(data).reshape(-1).copy()
    return torch.from_numpy(flat.view(_SIGNED[flat.itemsize])).view(_TORCH[dtype])


def convert_float(data: np.ndarray, source, target, rounding) -> np.ndarray:
    """The bits of `data` converted from one Triton float type to another."""
    if source not in _TORCH or target not in _TORCH:
        return _original_convert(data, source, target, rounding)
    value = _as_torch(data, source)
    if target.primitive_bitwidth == 8:
        largest = torch.finfo(_TORCH[target]).max
        value = value.float()
        value = torch.where(value.isnan(), value, value.clamp(-largest, largest))
    if target == tl.bfloat16 and rounding == interpreter._ir.ROUNDING_MODE.RTZ:
        value = (value.float().view(torch.int32) & -65536).view(torch.float32)
    bits = value.to(_TORCH[target]).view(getattr(torch, f"int{target.primitive_bitwidth}"))
    return bits.numpy().view(_UNSIGNED[target.primitive_bitwidth]).reshape(np.shape(data))


def is_narrow(handle) -> bool:
    return (
        isinstance(handle, TensorHandle)
        and not isinstance(handle.dtype, tl.pointer_type)
        and handle.dtype.scalar in NARROW
        and handle.data.dtype.kind == "u"
    )


def widen(handle):
    """A narrow float handle as float32; anything else as it is."""
    if not is_narrow(handle):
        return handle
    data = convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
    return TensorHandle(data, tl.float32)


def narrow(handle: TensorHandle, dtype) -> TensorHandle:
    """A handle rounded to a narrow float type."""
    rounding = interpreter._ir.ROUNDING_MODE.RTNE
    return TensorHandle(
        convert_float(handle.data.astype(np.float32), tl.float32, dtype, rounding), dtype
    )


def _through_float32(original, returns_bool: bool):
    def repaired(self, *operands):
        if not any(is_narrow(x) for x in operands):
            return original(self, *operands)
        dtype = next(x.dtype.scalar for x in operands if is_narrow(x))
        result = original(self, *(widen(x) for x in operands))
        return result if returns_bool else narrow(result, dtype)

    return repaired


def _cast(self, source, target_type):
    source_dtype, target = source.dtype.scalar, target_type.scalar
    if source_dtype in _TORCH and target in _TORCH and (source_dtype in NARROW or target in NARROW):
        bits = convert_float(source.data, source_dtype, target, None)
        return TensorHandle(bits.view(interpreter._get_np_dtype(target)), target)
    if source_dtype in NARROW:
        return _original_cast(self, widen(source), target_type)
    if target in NARROW:
        return narrow(source, target)
    return _original_cast(self, source, target_type)


def _dot(self, a, b, accumulator, *options):
    left, right = widen(a).data, widen(b).data
    if left.dtype.kind != "f":
        return _original_dot(self, a, b, accumulator, *options)
    if left.dtype == np.float16:
        left, right = left.astype(np.float32), right.astype(np.float32)
    wide = widen(accumulator)
    product = TensorHandle(
        (np.matmul(left, right) + wide.data).astype(wide.data.dtype), wide.dtype.scalar
    )
    return narrow(product, accumulator.dtype.scalar) if is_narrow(accumulator) else product


def _repair_reduction(cls) -> None:
    original = cls.apply_impl

    def apply(self, inputs):
        narrow_dtypes = [t.dtype if is_narrow(t.handle) else None for t in inputs]
        if not any(narrow_dtypes):
            return original(self, inputs)
        wide = tuple(
            self.to_tensor(widen(t.handle).data, tl.float32) if d else t
            for t, d in zip(inputs, narrow_dtypes)
        )
        result = original(self, wide)
        is_list = isinstance(result, (list, tuple))
        tensors = list(result) if is_list else [result]
        for i, (tensor, dtype) in enumerate(zip(tensors, narrow_dtypes)):
            if dtype and tensor.dtype == tl.float32:
                handle = narrow(tensor.handle, dtype)
                shape = list(handle.data.shape)
                kind = tl.block_type(dtype, shape) if tensor.type.is_block() else dtype
                tensors[i] = tl.core.tensor(handle, kind)
        return tensors if is_list else tensors[0]

    cls.apply_impl = apply


def _atomic(self, operation, pointer, value, mask, sem, scope):
    if not is_narrow(value):
        return _original_atomic(self, operation, pointer, value, mask, sem, scope)
    assert operation == interpreter._ir.ATOMIC_OP.FADD, operation
    dtype, raw = value.dtype.scalar, value.data.dtype
    addresses = pointer.data.reshape(-1)
    live = np.broadcast_to(mask.data, pointer.data.shape).reshape(-1)
    added, old = widen(value).data.reshape(-1), np.zeros(pointer.data.size, raw)
    one = np.ones(1, bool)
    for i in np.flatnonzero(live):  # one by one, because two lanes may have the same address
        address = addresses[i : i + 1]
        old[i] = interpreter._interpreter.load(address, one, np.zeros(1, raw), raw)[0]
        total = widen(TensorHandle(old[i : i + 1], dtype)).data + added[i : i + 1]
        rounded = narrow(TensorHandle(total, tl.float32), dtype).data
        interpreter._interpreter.store(address, rounded, one)
    return TensorHandle(old.reshape(pointer.data.shape), dtype)


def _bfloat16_constant(self, value):
    return narrow(TensorHandle(np.array([value], np.float32), tl.float32), tl.bfloat16)


def repair_numbers() -> None:
    """Replaces the interpreter's arithmetic; call once, before the first kernel runs."""
    builder = InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    interpreter._convert_float = convert_float
    for name in f"{_UNARY} {_BINARY} {_TERNARY}".split():
        name = f"create_{name}"
        if hasattr(builder, name):
            setattr(builder, name, _through_float32(getattr(builder, name), returns_bool=False))
    for name in [n for n in dir(builder) if n.startswith("create_fcmp")]:
        setattr(builder, name, _through_float32(getattr(builder, name), returns_bool=True))
    builder.cast_impl = _cast
    builder.create_dot = _dot
    builder.create_atomic_rmw = _atomic
    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = _bfloat16_constant
    _repair_reduction(interpreter.ReduceOps)
    _repair_reduction(interpreter.ScanOps)

"""Spares Triton's interpreter what it recreates for every operation, which takes most of its time.

An operation creates the type of its result, a tuple for its shape, a constant for each size, and
for each tuple a type that is rendered as text and never read. Every call of a device function lists
all members of the language again, and replaces what its kernel has replaced already. Here types of
the same shape are created once, types of tuples when they are read, lists of members once; members
are replaced once per kernel; and operands of one type are not checked twenty times for a conversion
between them. What was refused still is: whatever does not consist of plain integers takes the
interpreter's own path.
"""

import inspect
import math
import warnings
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import triton.language as tl
from triton.compiler import code_generator
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_make_block_type = core.block_type.__init__
_find_np_dtype = interpreter._get_np_dtype
_equal = core.dtype.__eq__
_computation_type = TritonSemantic.computation_type_impl
_broadcast = TritonSemantic.broadcast_impl_value
_PLAIN = {tl.float32, tl.float64}
_PLAIN |= {getattr(tl, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
# The first type of each shape; other types share its tuple.
_shapes: dict[tuple[int, ...] | None, core.block_type] = {}
_patch_lang, _patched = interpreter._patch_lang, set()  # packages that are patched at present
_np_dtypes: dict[str, object] = {}


def _block_type(self, element_ty, shape) -> None:
    first, sizes = vars(shape).get("first") if isinstance(shape, core.tuple) else None, None
    # Triton's own tuple, because a Python one is refused
    if first is None and isinstance(shape, list | core.tuple):
        sizes = tuple(s.value if isinstance(s, core.constexpr) else s for s in shape)
        # 4.0 == 4 would select the type of 4
        sizes = sizes if all(type(size) is int for size in sizes) else None
        first = _shapes.get(sizes)
    if first is not None:
        self.element_ty, self.shape, self.numel = element_ty, first.shape, first.numel
        self.name = f"<{first.shape.text}, {element_ty}>"
    else:
        _make_block_type(self, element_ty, shape)
        if sizes is not None:
            _shapes[sizes] = self.shape.first = self
            self.shape.text = str(self.shape)


@cache
def _constants(sizes: tuple[int, ...]) -> tuple[core.constexpr, core.tuple]:
    return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])


def _tensor(self, handle, type) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _constants(tuple(type.shape) if type.is_block() else ())


def _tuple(self, args, type=None) -> None:
    self.values = list(args)
    if type is not None:
        self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)


def _type_of_tuple(self):
    if "_type" not in vars(self):
        self._type = core._type_for_tuple_values(self.values)
    return self._type


def _np_dtype(dtype):
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _find_np_dtype(dtype)
    return _np_dtypes[name]


@cache
def _builtins(package) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package, builder, scope) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        # Otherwise the kernel that calls this function has patched it.
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _languages(function) -> frozenset:
    return frozenset(one for one in function.__globals__.values() if one is tl or one is core)


def _patch_for_kernel(function):
    """Patches until the kernel ends, or for good for a device function of another package, which is
    never restored."""
    scope, languages = _patch_lang(function), _languages(function)
    _patched.update(languages)
    restore = scope.restore

    def restored() -> None:
        restore()
        _patched.difference_update(languages)

    scope.restore = restored
    return scope


def _call_device_function(self, *args, **kwargs):
    if not _languages(self.fn) <= _patched:
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _is_equal(self, other) -> bool:
    return self is other or _equal(self, other)


def _type_of_result(self, a, a_is_scalar, b, b_is_scalar, div_or_mod):
    """The type of two operands of one plain type is that type, for any operation."""
    if a is b and a in _PLAIN:
        return a
    return _computation_type(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)


def _broadcast_once(self, a, b):
    """Types of one shape share its tuple: nothing has to be repeated."""
    same = a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape
    return (a, b) if same else _broadcast(self, a, b)


def translate_faster() -> None:
    """Saves a third of a kernel's translation: types, signatures and filters that are recreated."""
    core.block_type.__init__ = _block_type
    core.tensor.__init__ = _tensor
    core.dtype.__eq__ = _is_equal
    TritonSemantic.computation_type_impl = _type_of_result
    TritonSemantic.broadcast_impl_value = _broadcast_once
    core.tuple.__init__ = _tuple
    core.tuple.type = property(_type_of_tuple, lambda self, type: vars(self).update(_type=type))
    code_generator.inspect = SimpleNamespace(
        **vars(inspect) | {"signature": cache(inspect.signature)}
    )
    quiet = {"catch_warnings": nullcontext, "simplefilter": lambda *_: None}
    code_generator.warnings = SimpleNamespace(**vars(warnings) | quiet)


def make_types_once() -> None:
    """Replaces how the interpreter creates types; call once, before the first kernel runs."""
    translate_faster()
    interpreter._get_np_dtype = _np_dtype
    for package in (tl, tl.math, core, core.tensor, core.tensor_descriptor_base):
        # Now, because a kernel that runs in another thread would hide what it has patched for good.
        _builtins(package)
    interpreter._patch_builtin = _patch_builtin
    interpreter._patch_lang = _patch_for_kernel
    interpreter.InterpretedFunction.__call__ = _call_device_function

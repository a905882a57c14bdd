"""Compile a function with numba where it is installed, and run it as plain Python where it is not."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

_njit: Any
try:
    from numba import njit as _njit
except ImportError:
    _njit = None

Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = _njit is not None
"""Whether a list schedule takes milliseconds (numba) or most of a second (plain Python)."""


def compiled(function: Function) -> Function:
    """Returns the function, compiled on its first call and kept on disk; it releases the interpreter lock."""
    return _compiled(function)


def compiled_part(function: Function) -> Function:
    """Returns a function that compiled ones call and that allocates no array.

    Without the runtime for allocation, arrays are not reference-counted on the way in and out, and that counting took
    four fifths of the time of a list schedule.
    """
    return _compiled(function, _nrt=False)


def _compiled(function: Function, **options: bool) -> Any:
    return function if _njit is None else _njit(cache=True, nogil=True, **options)(function)


class Records:
    """A structured array for plain Python as compiled code sees it: the fields of its records are attributes.

    numpy's own records hide fields behind attributes that they have themselves, such as size.
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return _Record(self._array, index)


class _Record:
    __slots__ = ("_array", "_index")

    def __init__(self, array: np.ndarray, index: Any) -> None:
        object.__setattr__(self, "_array", array)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, field: str) -> Any:
        return self._array[field][self._index]

    def __setattr__(self, field: str, value: Any) -> None:
        self._array[field][self._index] = value

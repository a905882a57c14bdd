"""Tensors of a Megatron checkpoint that are read when they are needed, and files that are read without executing them.

Of the classes that a file names only known ones are admitted, and those become records without behaviour.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class _Record:
    """Stands for an object of a class of another package: it keeps nothing and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Record:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_ADMITTED: list[Any] = [Namespace] + [(_Record, name) for name in (
    "megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope", "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig", "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode", "megatron.core.rerun_state_machine.RerunState",
    "types.SimpleNamespace", "pathlib.PosixPath", "pathlib._local.PosixPath", "signal.Signals", "_io.BytesIO",
    "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype",
    "numpy.dtypes.UInt32DType", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "_codecs.encode",
)]  # fmt: skip


def load_inert(path: Path) -> dict[str, Any]:
    """Returns the dict in a file of torch.save, its tensors mapped from the file.

    Raises:
        ValueError: it is damaged, or names a class that no checkpoint of Megatron-LM consists of.
    """
    try:
        with torch.serialization.safe_globals(_ADMITTED):
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        told = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise ValueError(f"{path} is refused, since it may run any code when it is opened: {told}") from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or no file of torch.save: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, and no checkpoint")
    return found


@dataclass(frozen=True)
class Source:
    """A tensor to be read by rectangle."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[tuple[int, ...], tuple[int, ...]], Tensor]  # (offset, shape) -> values

    def element(self, i: int) -> Source:
        """Returns tensor i of a stack."""
        return Source(self.shape[1:], self.dtype, lambda at, size: self.read((i, *at), (1, *size))[0])

    def rows(self, start: int, stop: int) -> Source:
        """Reads some of the rows."""
        shape = (stop - start, *self.shape[1:])
        return Source(shape, self.dtype, lambda at, size: self.read((start + at[0], *at[1:]), size))


def held(values: Tensor) -> Source:
    """Returns a tensor that lies in memory, or is mapped there from a file."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return values[tuple(slice(start, start + size) for start, size in zip(offset, shape))]

    return Source(tuple(values.shape), values.dtype, read)


def concatenated(parts: Sequence[Source], dim: int) -> Source:
    """Tensors beside each other in one dim."""

    def read(offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        whole = torch.cat([part.read((0,) * len(part.shape), part.shape) for part in parts], dim)
        return held(whole).read(offset, shape)

    first = parts[0].shape
    size = sum(part.shape[dim] for part in parts)
    return Source((*first[:dim], size, *first[dim + 1 :]), parts[0].dtype, read)


def saved_args(state: dict[str, Any], path: Path) -> Namespace:
    """Returns the arguments in a checkpoint's state; raises ValueError where it holds none."""
    args = state.get("args")
    if not isinstance(args, Namespace):
        raise ValueError(f"{path} holds no arguments (args): the architecture cannot be told")
    return args

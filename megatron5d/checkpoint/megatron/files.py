"""Files of torch.save and the tensors in them, for Megatron-LM's checkpoints.

Files are loaded without executing what they name: known classes of Megatron-LM become records
without behavior, and all others are refused. Tensors are read by rectangle.
"""

from __future__ import annotations

import pickle
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.layout import Dims, slices


class _Record:
    """Stands for an object of a class of another package: it keeps nothing and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Record:
        return object.__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


_ACCEPTED: list[Any] = [Namespace] + [
    (_Record, name)
    for name in (
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.AttnMaskType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "types.SimpleNamespace",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "signal.Signals",
        "_io.BytesIO",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray._reconstruct",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.dtypes.UInt32DType",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray.scalar",
        "_codecs.encode",
        # as Python 3.10 and older wrote them
        *(f"signal.{name}" for name in signal.Signals.__members__),
    )
]


@contextmanager
def _only_accepted() -> Iterator[None]:
    """Lets torch.load use only our records: of two classes with one name, one that this process has
    registered elsewhere might be taken."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals(_ACCEPTED)
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(registered)


def load_inert(path: Path) -> dict[str, Any]:
    """Loads the dict in a file of torch.save, with its tensors mapped from the file.

    Raises:
        ValueError: the file is damaged, or names a class that is in no checkpoint of Megatron-LM.
    """
    try:
        with _only_accepted():
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise ValueError(f"{path} is refused, because it may run any code: {reason}") from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or no file of torch.save: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, and no checkpoint")
    return state


def saved_args(state: dict[str, Any], path: Path) -> Namespace:
    """Arguments in a checkpoint's state; raises ValueError where it holds none."""
    args = state.get("args")
    if not isinstance(args, Namespace):
        raise ValueError(f"{path} holds no arguments (args), which describe the architecture")
    return args


@dataclass(frozen=True)
class Source:
    """A tensor to be read by rectangle."""

    shape: Dims
    dtype: torch.dtype
    read: Callable[[Dims, Dims], Tensor]  # (offset, shape) -> values

    def element(self, i: int) -> Source:
        """Tensor i of a stack."""
        return Source(
            self.shape[1:],
            self.dtype,
            lambda offset, shape: self.read((i, *offset), (1, *shape))[0],
        )

    def rows(self, start: int, stop: int) -> Source:
        """Rows from `start` to `stop`."""
        return Source(
            (stop - start, *self.shape[1:]),
            self.dtype,
            lambda offset, shape: self.read((start + offset[0], *offset[1:]), shape),
        )


def in_memory(values: Tensor) -> Source:
    """A tensor in memory, or mapped there from a file."""

    def read(offset: Dims, shape: Dims) -> Tensor:
        return values[slices(offset, shape)]

    return Source(tuple(values.shape), values.dtype, read)


def concatenated(sources: Sequence[Source], dim: int) -> Source:
    """Tensors joined along one dim."""

    def read(offset: Dims, shape: Dims) -> Tensor:
        values = [source.read((0,) * len(source.shape), source.shape) for source in sources]
        return in_memory(torch.cat(values, dim)).read(offset, shape)

    first = sources[0]
    size = sum(source.shape[dim] for source in sources)
    return Source((*first.shape[:dim], size, *first.shape[dim + 1 :]), first.dtype, read)

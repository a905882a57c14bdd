"""Which implementation computes an operation on a GPU: ours, in Triton, or that of a library.

A library has a file in `providers/`: `missing` says what it lacks on this machine, `takes` which
requests it serves, and its calls keep the contract of the operation, so that what is built on one
works with any. What no library takes is Triton's; on the CPU nothing is chosen.

Asked for by name, a library serves all that it takes. `auto` goes by what was measured for a
similar request on this architecture (`configs/providers/<architecture>.json`, written by
tools/bench_kernels.py), or else by ORDER: the first that is there and takes the request computes
it. The file has the form of the tables of tiles; `config` is an `order`.
"""

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron5d.kernels import tuning

TRITON = "triton"
ORDER = {
    "attention_forward": ("cudnn", "fa4"),
    "attention_backward": ("cudnn", "fa4"),
    "fp8_matmul": ("torch",),
    "fp8_accumulate": (),  # torch's cannot add to what is there: one pass more over float32
    "grouped_matmul": ("torch",),
    "norm_forward": (),  # torch's do not add the residual: passes more over memory, each way
    "norm_backward": (),
}
"""By way: the libraries that `auto` tries before Triton where nothing has been measured."""


@dataclass(frozen=True)
class Settings:
    """The group `kernels` of a configuration.

    Args:
        attention, fp8, grouped, norm: auto, triton, or a library.
        deterministic: only what gives the same bits each time.
        strict: a library that is named and does not serve a request is an error, as when it is
            measured.
    """

    attention: str = "auto"
    fp8: str = "auto"
    grouped: str = "auto"
    norm: str = "auto"
    deterministic: bool = True
    strict: bool = False


AUTO = Settings()


class Request(Protocol):
    """What a choice depends on: sizes and kinds, and no tensor. `capability` is 90 for sm_90."""

    @property
    def capability(self) -> int: ...

    @property
    def way(self) -> str:
        """A key of ORDER, the family before its first underscore."""

    @property
    def key(self) -> dict[str, int]:
        """The shape keys that entries of a table bound."""


class AttentionRequest(NamedTuple):
    """Attention of `[s, b, a, d]` to `[t, b, g, d | dv]`; `positions` are given ones."""

    capability: int
    backward: bool
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    value_dim: int
    causal: bool = True
    window: int | None = None
    softcap: float = 0.0
    documents: bool = False
    positions: bool = False
    sinks: bool = False

    @property
    def way(self) -> str:
        return "attention_backward" if self.backward else "attention_forward"

    @property
    def key(self) -> dict[str, int]:
        s, b, a, d = self.q_shape
        return {
            "head_dim": max(d, self.value_dim),
            "window": self.window or 0,
            "heads": a * b,
            "queries": s,
        }


class Fp8Request(NamedTuple):
    """`[m, k]` times `[n, k]` transposed; `rows` are the rows that share a scale in either
    (`Quantized`)."""

    capability: int
    sizes: tuple[int, int, int]  # m, n, k
    rows: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    accumulate: bool = False

    @property
    def way(self) -> str:
        return "fp8_accumulate" if self.accumulate else "fp8_matmul"

    @property
    def key(self) -> dict[str, int]:
        return {"rows_per_scale": max(self.rows), **dict(zip("mnk", self.sizes))}


class GroupedRequest(NamedTuple):
    """`[rows, k]` by experts' `[n, k]`, forward or input gradient."""

    capability: int
    dtype: torch.dtype
    rows: int
    experts: int
    n: int
    k: int
    way: str = "grouped_matmul"

    @property
    def key(self) -> dict[str, int]:
        return {"rows_per_expert": self.rows // self.experts, "n": self.n, "k": self.k}


class NormRequest(NamedTuple):
    """RMSNorm, or with `centered` LayerNorm, of rows of `width`."""

    capability: int
    backward: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int
    centered: bool

    @property
    def way(self) -> str:
        return "norm_backward" if self.backward else "norm_forward"

    @property
    def key(self) -> dict[str, int]:
        return {"centred": int(self.centered), "width": self.width}


def capability_of(x: Tensor) -> int:
    """Returns the capability of an NVIDIA GPU that holds x, 90 for sm_90; 0 elsewhere, where
    nothing is chosen."""
    return _capability(x.get_device()) if x.is_cuda and torch.version.hip is None else 0


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def library(family: str, name: str) -> ModuleType:
    """Returns the file of a provider other than Triton."""
    file = {
        "fa4": "flash_attention_4",
        "torch": "torch_norm" if family == "norm" else "torch_gemm",
    }.get(name, name)
    return importlib.import_module(f"megatron5d.kernels.providers.{file}")  # which few runs need


@functools.lru_cache(4096)
def provider(request: Request, settings: Settings) -> ModuleType | None:
    """Returns the file of what serves a request; None = Triton. Raises ValueError:
    `settings.strict`, and the library that is named does not serve it."""
    name = chosen(request, settings)
    asked = getattr(settings, family_of(request))
    if settings.strict and asked not in ("auto", name):
        why = library(family_of(request), asked).missing() or f"it does not take {request}"
        raise ValueError(f"{asked}: {why}")
    return None if name == TRITON else library(family_of(request), name)


def family_of(request: Request) -> str:
    """Returns the key of `kernels` that a request belongs to."""
    return request.way.partition("_")[0]


def chosen(request: Request, settings: Settings, here: bool = True) -> str:
    """Returns the name of what serves a request.

    Args:
        here: False for a GPU that is planned for: what comes with torch counts as there.
    """
    family = family_of(request)
    asked = getattr(settings, family)
    for name in _order(request) if asked == "auto" else (asked,):
        if name == TRITON:
            break
        file = library(family, name)
        absent = file.missing() is not None and (here or name == "fa4")
        if not absent and file.takes(request, settings.deterministic):
            return name
    return TRITON


def _order(request: Request) -> Sequence[str]:
    """Returns the measured order, or ORDER; libraries that were not there to be measured precede a
    Triton that lost."""
    default, measured = ORDER[request.way], order_of(request)
    if measured is None or measured[0] == TRITON:
        return measured or default
    place = measured.index(TRITON) if TRITON in measured else len(measured)
    return [
        *measured[:place],
        *(name for name in default if name not in measured),
        *measured[place:],
    ]


def order_of(request: Request) -> list[str] | None:
    """Returns the order that was measured for a similar request on this architecture; None where
    none was."""
    table = f"providers/sm_{request.capability}"
    if not (tuning.DIRECTORY / f"{table}.json").exists():
        return None
    for entry in tuning.table(table).get(request.way, ()):
        if all(request.key[name] <= bound for name, bound in entry.get("up_to", {}).items()):
            return entry["config"]["order"]
    return None


def norm(
    x: Tensor, weight: Tensor, centered: bool, settings: Settings, backward: bool = False
) -> ModuleType | None:
    """Returns the file of the library that computes the norm of x; None = ours."""
    if not (capability := capability_of(x)) or not x.numel():
        return None
    return provider(
        NormRequest(capability, backward, x.dtype, weight.dtype, x.shape[-1], centered), settings
    )

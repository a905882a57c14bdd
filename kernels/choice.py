"""Which implementation computes an operation on a GPU: ours, in Triton, or a library's.

A library has a module in `providers/`: `missing` gives the reason why this machine lacks it,
`supports` says which requests it serves, and its functions keep the contract of the operation, so
that callers need not know which one runs. Triton serves what no library supports; on the CPU
nothing is chosen.

A library named in the settings serves all requests that it supports. `auto` follows what was
measured for a similar request on this architecture (`configs/providers/<architecture>.json`,
written by tools/bench_kernels.py), or else DEFAULT_ORDER: the first provider that is installed and
supports the request. The file has the form of the tables of tiles; `config` is an `order`.
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
DEFAULT_ORDER = {
    "attention_forward": ("cudnn", "fa4"),
    "attention_backward": ("cudnn", "fa4"),
    "fp8_matmul": ("torch",),
    # torch's cannot add to a tensor, which costs one more pass over float32.
    "fp8_accumulate": (),
    "grouped_matmul": ("torch",),
    # torch's do not add the residual, which costs more passes over memory each way.
    "norm_forward": (),
    "norm_backward": (),
}
"""By operation: libraries that `auto` tries before Triton where nothing has been measured."""


@dataclass(frozen=True)
class Settings:
    """The group `kernels` of a configuration.

    Args:
        attention, fp8, grouped, norm: auto, triton, or a library.
        deterministic: only what gives the same bits each time.
        strict: raise if the named library does not support a request (for benchmarks).
    """

    attention: str = "auto"
    fp8: str = "auto"
    grouped: str = "auto"
    norm: str = "auto"
    deterministic: bool = True
    strict: bool = False


AUTO = Settings()


class Request(Protocol):
    """What a choice depends on: sizes and dtypes, no tensor. `capability` is 90 for sm_90."""

    @property
    def capability(self) -> int: ...

    @property
    def operation(self) -> str:
        """Key of DEFAULT_ORDER; its family precedes the first underscore."""

    @property
    def key(self) -> dict[str, int]:
        """Shape keys that entries of a table bound."""


class AttentionRequest(NamedTuple):
    """Attention of `[s, b, a, d]` to `[t, b, g, d | dv]`; `positions`: they are given."""

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
    def operation(self) -> str:
        return "attention_backward" if self.backward else "attention_forward"

    @property
    def head_dims(self) -> tuple[int, int]:
        return self.q_shape[3], self.value_dim

    @property
    def key(self) -> dict[str, int]:
        s, b, a, _ = self.q_shape
        window = self.window or 0
        return {"head_dim": max(self.head_dims), "window": window, "heads": a * b, "queries": s}


class Fp8Request(NamedTuple):
    """`[m, k]` times `[n, k]` transposed; `rows` that share a scale in each (`Quantized`)."""

    capability: int
    sizes: tuple[int, int, int]  # m, n, k
    rows: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    out_dtype: torch.dtype
    accumulate: bool = False

    @property
    def operation(self) -> str:
        return "fp8_accumulate" if self.accumulate else "fp8_matmul"

    @property
    def key(self) -> dict[str, int]:
        return {"rows_per_scale": max(self.rows), **dict(zip("mnk", self.sizes))}


class GroupedRequest(NamedTuple):
    """`[rows, k]` times the experts' `[n, k]`, forward or input gradient."""

    capability: int
    dtype: torch.dtype
    rows: int
    experts: int
    n: int
    k: int
    operation: str = "grouped_matmul"

    @property
    def key(self) -> dict[str, int]:
        return {"rows_per_expert": self.rows // self.experts, "n": self.n, "k": self.k}


class NormRequest(NamedTuple):
    """RMSNorm, or LayerNorm if `centered`, of rows of `width`."""

    capability: int
    backward: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    width: int
    centered: bool

    @property
    def operation(self) -> str:
        return "norm_backward" if self.backward else "norm_forward"

    @property
    def key(self) -> dict[str, int]:
        return {"centred": int(self.centered), "width": self.width}


def capability_of(x: Tensor) -> int:
    """Compute capability of the NVIDIA GPU that holds x, 90 for sm_90; 0 elsewhere."""
    return _capability(x.get_device()) if x.is_cuda and torch.version.hip is None else 0


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def library(family: str, name: str) -> ModuleType:
    """Module of a provider other than Triton, imported where it is first needed."""
    by_torch = "torch_norm" if family == "norm" else "torch_gemm"
    module = {"fa4": "flash_attention_4", "torch": by_torch}.get(name, name)
    return importlib.import_module(f"megatron5d.kernels.providers.{module}")


def family_of(request: Request) -> str:
    """Key of the settings that a request belongs to."""
    return request.operation.partition("_")[0]


@functools.lru_cache(4096)
def provider(request: Request, settings: Settings) -> ModuleType | None:
    """Module of the library that serves a request; None = Triton.

    Raises:
        ValueError: `settings.strict`, and the named library does not serve it.
    """
    family, name = family_of(request), provider_name(request, settings)
    setting = getattr(settings, family)
    if settings.strict and setting not in ("auto", name):
        reason = library(family, setting).missing() or f"it does not support {request}"
        raise ValueError(f"{setting}: {reason}")
    return None if name == TRITON else library(family, name)


def provider_name(request: Request, settings: Settings, on_this_machine: bool = True) -> str:
    """Name of what serves a request.

    Args:
        on_this_machine: False for a GPU that is planned for: what comes with torch counts as
            installed.
    """
    family = family_of(request)
    setting = getattr(settings, family)
    for name in _order(request) if setting == "auto" else (setting,):
        if name == TRITON:
            break
        module = library(family, name)
        missing = module.missing() is not None and (on_this_machine or name == "fa4")
        if not missing and module.supports(request, settings.deterministic):
            return name
    return TRITON


def _order(request: Request) -> Sequence[str]:
    """The measured order, or the default one.

    Libraries that could not be measured rank directly before Triton if Triton lost to another one.
    """
    default, measured = DEFAULT_ORDER[request.operation], measured_order(request)
    if measured is None or measured[0] == TRITON:
        return measured or default
    rank = measured.index(TRITON) if TRITON in measured else len(measured)
    unmeasured = [name for name in default if name not in measured]
    return [*measured[:rank], *unmeasured, *measured[rank:]]


def measured_order(request: Request) -> list[str] | None:
    """Order measured for a similar request on this architecture, if any."""
    table = f"providers/sm_{request.capability}"
    if not (tuning.DIRECTORY / f"{table}.json").exists():
        return None
    config = tuning.first_fitting(tuning.table(table).get(request.operation, ()), request.key)
    return None if config is None else config["order"]


def norm_provider(
    x: Tensor, weight: Tensor, centered: bool, settings: Settings, backward: bool = False
) -> ModuleType | None:
    """Module of the library that computes the norm of x; None = ours."""
    if not (capability := capability_of(x)) or not x.numel():
        return None
    request = NormRequest(capability, backward, x.dtype, weight.dtype, x.shape[-1], centered)
    return provider(request, settings)

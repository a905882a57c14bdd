"""What a configuration requires of its GPU, and which libraries compute its operations.

The library (`kernels`) is chosen for every call, by its sizes. The checks and the log use the
typical calls of a step: attention to a block of keys as long as this rank's, the largest GEMM of a
layer, a norm of the hidden state.
"""

from dataclasses import asdict

import torch

from megatron5d.config.convert import value_of
from megatron5d.config.derived import split_of
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config
from megatron5d.kernels import tuning
from megatron5d.kernels.choice import (
    TRITON,
    AttentionRequest,
    Fp8Request,
    GroupedRequest,
    NormRequest,
    Request,
    Settings,
    family_of,
    library,
    measured_order,
    provider_name,
)
from megatron5d.kernels.dispatch import HAS_TRITON
from megatron5d.model.block_inputs import DTYPES

E4M3 = torch.float8_e4m3fn


def capability_here() -> int:
    """Compute capability of this process's NVIDIA GPU, 90 for sm_90; 0 without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def requests_of(config: Config, capability: int) -> list[Request]:
    """Typical calls of a step of one rank, on a GPU of this capability (90 for sm_90)."""
    m, dtype = config.model, DTYPES[config.precision.dtype]
    centered = m.norm == "layernorm"
    return [
        *_attention_requests(config, capability),
        *_gemm_requests(config, capability),
        *(
            NormRequest(capability, backward, dtype, dtype, m.hidden_size, centered)
            for backward in (False, True)
        ),
    ]


def _attention_requests(config: Config, capability: int) -> list[Request]:
    m, (outer, inner) = config.model, split_of(config)
    s, b = config.train.seq_len // outer, config.train.mbs
    heads, kv_heads, dim, v_dim = m.num_heads, m.num_kv_heads, m.head_dim, m.head_dim
    if m.attention == "mla":
        kv_heads, dim, v_dim = heads, m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
    num_cuts = config.parallel.tp * inner
    q = (s, b, max(1, heads // num_cuts), dim)
    k = (s, b, max(1, kv_heads // num_cuts), dim)
    window = m.attention_window if m.window_layers is None else None
    return [
        AttentionRequest(
            capability,
            backward,
            DTYPES[config.precision.dtype],
            q,
            k,
            v_dim,
            m.attention_causal,
            window,
            m.attention_softcap,
            config.data.document_mask,
            bool(window and outer > 1),
            m.attention_sinks,
        )
        for backward in (False, True)
    ]


def _gemm_requests(config: Config, capability: int) -> list[Request]:
    m, p, dtype = config.model, config.parallel, DTYPES[config.precision.dtype]
    outer, inner = split_of(config)
    tokens, k = config.train.seq_len // outer * config.train.mbs // inner, m.hidden_size
    num_projections = 1 + m.gated
    if config.precision.fp8 != "none":
        n = num_projections * m.ffn_hidden_size // p.tp
        scales = ((0, 0), (0, 0))
        if config.precision.fp8 == "blockwise":
            scales = ((1, 128), (1, 1))
        formats = (E4M3, E4M3)
        return [
            Fp8Request(capability, (tokens, n, k), scales[0], formats, dtype),
            Fp8Request(capability, (n, k, tokens), scales[1], formats, torch.float32, True),
        ]
    if m.num_experts:
        n = num_projections * m.expert_hidden_size // (p.etp or p.tp)
        rows, experts = tokens * m.top_k, m.num_experts // p.ep
        return [GroupedRequest(capability, dtype, rows, experts, n, k)]
    return []


def names_of(config: Config, capability: int, on_this_gpu: bool = True) -> dict[str, str]:
    """What computes each operation of a run: operation -> triton, or a library.

    Args:
        here: False for a planned run, where everything that comes with torch counts as installed.
    """
    settings = Settings(**asdict(config.kernels))
    requests = requests_of(config, capability)
    return {
        request.operation: provider_name(request, settings, on_this_gpu) for request in requests
    }


def choice_text(config: Config, capability: int, on_this_gpu: bool = True) -> str:
    """Line for the log and the plan about `names_of`, with the same arguments."""
    if not capability:
        return ""
    names = names_of(config, capability, on_this_gpu)
    is_measured = all(measured_order(r) is not None for r in requests_of(config, capability))
    source = "as measured" if is_measured else "in the order of docs/kernels.md"
    choices = ", ".join(
        f"{operation.replace('_', ' ')} {name}" for operation, name in names.items()
    )
    return f"kernels on sm_{capability}, {source}: {choices}"


def kernel_faults(config: Config, capability: int) -> list[Fault]:
    """Libraries that the configuration names and that cannot be used."""
    settings = Settings(**asdict(config.kernels))
    faults: dict[str, Fault] = {}
    for request in requests_of(config, capability):
        family = family_of(request)
        name = getattr(settings, family)
        # Another library may compute the backward (kernels.deterministic).
        if name in ("auto", TRITON) or family in faults or request.operation.endswith("backward"):
            continue
        reason = library(family, name).missing()
        if reason is None and not library(family, name).supports(request, settings.deterministic):
            reason = f"it does not support {request} on sm_{capability}"
        if reason is not None:
            faults[family] = Fault(
                "kernels-provider",
                (f"kernels.{family}",),
                f"kernels.{family} = {name}: {reason}",
                f"kernels.{family}=auto, which uses it for the calls that it supports",
                local=True,
            )
    return list(faults.values())


# Keys that need FP8 kernels: the value without them, and the operation that they require.
FP8_OPTIONS: dict[str, tuple[object, str]] = {
    "precision.fp8": ("none", "fp8_matmul"),
    "moe.fp8_dispatch": (False, "fp8_quantize"),
}


def fp8_faults(config: Config, architecture: str) -> list[Fault]:
    """FP8 options for which the GPU's table of kernel configurations has no operation.

    Args:
        architecture: for example sm_80; the newest older one with a table stands for it.
    """
    served = tuning.nearest(architecture)
    keys = [
        key
        for key, (off, operation) in FP8_OPTIONS.items()
        if value_of(config, key) != off and operation not in tuning.table(served)
    ]
    if not keys:
        return []
    values = " and ".join(f"{key} = {str(value_of(config, key)).lower()}" for key in keys)
    reason = (
        f"{values} requires FP8 kernels, compute capability 9.0 or newer on NVIDIA GPUs; "
        f"{architecture} uses kernels/configs/{served}.json, which has none"
    )
    fix = " ".join(f"{key}={str(FP8_OPTIONS[key][0]).lower()}" for key in keys)
    return [Fault("fp8-needs-its-kernels", tuple(keys), reason, fix, local=True)]


def device_faults(config: Config, world: int) -> list[Fault]:
    """What this process's GPU cannot run; nothing without a GPU."""
    if not torch.cuda.is_available():
        return []
    key, dtype = "precision.dtype", config.precision.dtype
    if not HAS_TRITON and dtype != "fp64":
        reason = f"{key} = {dtype} requires triton on a GPU (not installed)"
        return [Fault("gpu-needs-triton", (key,), reason, "pip install triton", local=True)]
    architecture = tuning.architecture(torch.device("cuda"))
    return fp8_faults(config, architecture) + kernel_faults(config, capability_here())

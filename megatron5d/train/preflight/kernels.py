"""What a configuration asks of its GPU, and which libraries compute its operations (`kernels`).

The choice is made for every call, by its sizes. What is told here are the calls that a step
consists of: attention to a block of keys as long as this rank's, the largest GEMM of a layer,
a norm of the hidden state.
"""

from dataclasses import asdict

import torch

from megatron5d.config.convert import value_of
from megatron5d.config.derived import (
    split_of,
)
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
    chosen,
    family_of,
    library,
    order_of,
)
from megatron5d.kernels.dispatch import HAS_TRITON
from megatron5d.model.block_inputs import DTYPES

E4M3 = torch.float8_e4m3fn


def capability_here() -> int:
    """Returns that of this process's NVIDIA GPU, 90 for sm_90; 0 without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def requests_of(config: Config, capability: int) -> list[Request]:
    """Returns what a step of one rank asks of libraries, on a GPU of this capability (90 for
    sm_90)."""
    m, p, dtype = config.model, config.parallel, DTYPES[config.precision.dtype]
    outer, inner = split_of(config)
    s, b = config.train.seq_len // outer, config.train.mbs
    a, g, d, dv = m.num_heads, m.num_kv_heads, m.head_dim, m.head_dim
    if m.attention == "mla":
        g, d, dv = a, m.qk_nope_head_dim + m.qk_rope_head_dim, m.v_head_dim
    a, g = (max(1, heads // (p.tp * inner)) for heads in (a, g))
    window = m.attention_window if m.window_layers is None else None
    rule = (
        m.attention_causal,
        window,
        m.attention_softcap,
        config.data.document_mask,
        bool(window and outer > 1),
    )
    shapes = ((s, b, a, d), (s, b, g, d), dv)
    found: list[Request] = [
        AttentionRequest(capability, way, dtype, *shapes, *rule, m.attention_sinks)  # type: ignore[arg-type]
        for way in (False, True)
    ]
    tokens, up = s * b // inner, 1 + m.gated
    if config.precision.fp8 != "none":
        n, k, tensorwise = (
            up * m.ffn_hidden_size // p.tp,
            m.hidden_size,
            config.precision.fp8 == "tensorwise",
        )
        sizes, rows = (
            ((tokens, n, k), (n, k, tokens)),
            ((0, 0), (0, 0)) if tensorwise else ((1, 128), (1, 1)),
        )
        found.append(Fp8Request(capability, sizes[0], rows[0], (E4M3, E4M3), dtype))
        found.append(Fp8Request(capability, sizes[1], rows[1], (E4M3, E4M3), torch.float32, True))
    elif m.num_experts:
        n = up * m.expert_hidden_size // (p.etp or p.tp)
        found.append(
            GroupedRequest(
                capability, dtype, tokens * m.top_k, m.num_experts // p.ep, n, m.hidden_size
            )
        )
    centered = m.norm == "layernorm"
    return found + [
        NormRequest(capability, way, dtype, dtype, m.hidden_size, centered) for way in (False, True)
    ]


def names_of(config: Config, capability: int, here: bool = True) -> dict[str, str]:
    """Returns what computes each operation of a run: its way -> triton, or a library.

    Args:
        here: False: it is planned for, and what comes with torch counts as installed.
    """
    return {
        each.way: chosen(each, Settings(**asdict(config.kernels)), here)
        for each in requests_of(config, capability)
    }


def choice_text(config: Config, capability: int, here: bool = True) -> str:
    """Returns the line that the log and the plan have about it; arguments as in `names_of`."""
    if not capability:
        return ""
    names = names_of(config, capability, here)
    measured = [each.way for each in requests_of(config, capability) if order_of(each) is not None]
    source = "as measured" if len(measured) == len(names) else "in the order of docs/kernels.md"
    return f"kernels on sm_{capability}, {source}: " + ", ".join(
        f"{way.replace('_', ' ')} {name}" for way, name in names.items()
    )


def kernel_faults(config: Config, capability: int) -> list[Fault]:
    """Returns what keeps libraries that are asked for by name from being used."""
    settings, found = Settings(**asdict(config.kernels)), {}
    for request in requests_of(config, capability):
        family = family_of(request)
        asked = getattr(settings, family)
        if asked in ("auto", TRITON) or family in found or request.way.endswith("backward"):
            continue  # a backward may be left to another: kernels.deterministic
        reason = library(family, asked).missing()
        if reason is None and not library(family, asked).takes(request, settings.deterministic):
            reason = f"it does not take what this run asks of it on sm_{capability}: {request}"
        if reason is not None:
            fix = f"kernels.{family}=auto, which takes it where it can be used"
            found[family] = Fault(
                "kernels-provider",
                (f"kernels.{family}",),
                f"kernels.{family} = {asked}: {reason}",
                fix,
                local=True,
            )
    return list(found.values())


# what asks for FP8 kernels: its value without them, and the operation that it cannot do without
FP8_OPTIONS: dict[str, tuple[object, str]] = {
    "precision.fp8": ("none", "fp8_matmul"),
    "moe.fp8_dispatch": (False, "fp8_quantize"),
}


def fp8_faults(config: Config, architecture: str) -> list[Fault]:
    """Returns what a GPU's table of kernel configurations has no FP8 operations for.

    Args:
        architecture: for example sm_80; the newest older one with a table stands for it.
    """
    served = tuning.nearest(architecture)
    lacking = [
        knob
        for knob, (idle, operation) in FP8_OPTIONS.items()
        if value_of(config, knob) != idle and operation not in tuning.table(served)
    ]
    if not lacking:
        return []
    asked = " and ".join(f"{knob} = {str(value_of(config, knob)).lower()}" for knob in lacking)
    reason = (
        f"{asked} needs FP8 kernels, and {architecture} is served by kernels/configs/{served}.json, which has "
        "none for that; sm_90 (compute capability 9.0) and newer ones of NVIDIA have them"
    )
    fix = " ".join(f"{knob}={str(FP8_OPTIONS[knob][0]).lower()}" for knob in lacking)
    return [Fault("fp8-needs-its-kernels", tuple(lacking), reason, fix, local=True)]


def device_faults(config: Config, world: int) -> list[Fault]:
    """Returns what this process's GPU cannot do; nothing where there is none."""
    if not torch.cuda.is_available():
        return []
    if not HAS_TRITON and config.precision.dtype != "fp64":
        reason = f"precision.dtype = {config.precision.dtype} runs kernels on a GPU, and triton is not installed"
        return [
            Fault(
                "gpu-needs-triton", ("precision.dtype",), reason, "pip install triton", local=True
            )
        ]
    return fp8_faults(config, tuning.architecture(torch.device("cuda"))) + kernel_faults(
        config, capability_here()
    )

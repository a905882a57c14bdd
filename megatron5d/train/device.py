"""What a configuration asks of the kind of GPU that it is to run on."""

from __future__ import annotations

import torch

from kernels import tuning
from kernels.language import HAS_TRITON
from megatron5d.config.convert import value_of
from megatron5d.config.errors import Fault
from megatron5d.config.schema import Config

# what asks for 8-bit kernels: its value without them, and the operation that it cannot do without
EIGHT_BITS: dict[str, tuple[object, str]] = {
    "precision.fp8": ("none", "fp8_matmul"),
    "moe.fp8_dispatch": (False, "fp8_quantize"),
}


def eight_bit_faults(config: Config, architecture: str) -> list[Fault]:
    """What a GPU's table of kernel configurations has no 8-bit operations for.

    Args:
        config: a lawful configuration.
        architecture: for example sm_80; the newest older one with a table stands for it.
    """
    served = tuning.nearest(architecture)
    lacking = [
        knob
        for knob, (idle, operation) in EIGHT_BITS.items()
        if value_of(config, knob) != idle and operation not in tuning.table(served)
    ]
    if not lacking:
        return []
    asked = " and ".join(f"{knob} = {str(value_of(config, knob)).lower()}" for knob in lacking)
    reason = (
        f"{asked} needs 8-bit kernels, and {architecture} is served by kernels/configs/{served}.json, which has "
        "none for that; sm_90 (compute capability 9.0) and newer ones of NVIDIA have them"
    )
    fix = " ".join(f"{knob}={str(EIGHT_BITS[knob][0]).lower()}" for knob in lacking)
    return [Fault("fp8-needs-its-kernels", tuple(lacking), reason, fix, local=True)]


def device_faults(config: Config, world: int) -> list[Fault]:
    """What this process's GPU cannot do; nothing where there is none."""
    if not torch.cuda.is_available():
        return []
    if not HAS_TRITON and config.precision.dtype != "fp64":
        reason = f"precision.dtype = {config.precision.dtype} runs kernels on a GPU, and triton is not installed"
        return [Fault("gpu-needs-triton", ("precision.dtype",), reason, "pip install triton", local=True)]
    return eight_bit_faults(config, tuning.architecture(torch.device("cuda")))

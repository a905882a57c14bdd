"""Programs that launch/gpu_check.sh starts, each ended at a certain time; and the versions of what there is."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

PACKAGES = ("triton", "flash-attn-4", "transformers", "hydra-core", "liger-kernel")


def ended(command: Sequence[str], until: float, lines: int = 1) -> tuple[int | None, str]:
    """Runs a program in a session of its own.

    Args:
        until: of `time.monotonic()`; then it and what it has started are killed.
        lines: of its output, the last ones, that are returned.

    Returns:
        (its code or None if it was killed, lines).
    """
    left = until - time.monotonic()
    if left <= 0:
        return None, "not reached: the time is up"
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as program:
        try:
            said, code = program.communicate(timeout=left)[0], program.returncode
        except BaseException as error:
            os.killpg(program.pid, signal.SIGKILL)
            said, code = program.communicate()[0], None
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
    return code, "\n".join([line for line in said.splitlines() if line.strip()][-lines:])


def sanitizer(tool: str, command: Sequence[str], until: float) -> dict[str, Any]:
    """Runs a program under compute-sanitizer and counts what it finds."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return {"unavailable": "compute-sanitizer is not on the PATH"}
    _, said = ended([program, "--tool", tool, *command], min(until, time.monotonic() + 90), lines=20)
    # ERROR SUMMARY: 0 errors        RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)
    summary = re.search(r"SUMMARY: (\d+) (?:error|hazard)", said)
    return {"errors": int(summary[1])} if summary else {"unavailable": said[-200:] or "it has said nothing"}


def versions() -> dict[str, str]:
    """Returns those of torch, its libraries, the driver and what may be beside them."""
    found = {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "-"
    if (smi := shutil.which("nvidia-smi")) is not None:
        query = "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit"
        found["driver, clocks, power"] = ended([smi, query, "--format=csv,noheader"], time.monotonic() + 10)[1]
    return found

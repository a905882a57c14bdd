"""Programs that are started with a deadline; when it comes they and what they have started are
killed."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress


def started(command: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a program in a session of its own; its output is for `ended`."""
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(program: subprocess.Popen[str], until: float, lines: int = 1) -> tuple[int | None, str]:
    """Waits for a program.

    Args:
        until: of `time.monotonic()`; then it and what it has started are killed.
        lines: of its output, the last ones, that are returned.

    Returns:
        (its code or None if it was killed, lines).
    """
    try:
        said, code = (
            program.communicate(timeout=max(0.0, until - time.monotonic()))[0],
            program.returncode,
        )
    except BaseException as error:
        killed(program)
        said, code = program.communicate()[0], None
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return code, "\n".join([line for line in said.splitlines() if line.strip()][-lines:])


def killed(program: subprocess.Popen[str]) -> None:
    """Kills a program that may have ended, and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)

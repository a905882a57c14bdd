"""Run a function in a fork of this process: a process of its own without the seconds that its
imports take."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any


class Fork:
    """A child that runs a function, and ends with what it returns as exit code.

    Args:
        run: what SystemExit says counts as its result; another exception is told, and is code 1.
        folder: where it runs.
        env: its variables; None = ours.
    """

    def __init__(
        self, run: Callable[[], Any], folder: Path, env: dict[str, str] | None = None
    ) -> None:
        self._said, self._told = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - `wait` closes them
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._become(run, folder, os.environ.copy() if env is None else env))

    def _become(self, run: Callable[[], Any], folder: Path, env: dict[str, str]) -> int:
        code: Any = 1
        try:
            for number, file in ((1, self._said), (2, self._told)):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = self._said, self._told
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            code = run()
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
        self._said.flush()
        self._told.flush()
        return code if isinstance(code, int) else int(code is not None)

    def wait(self) -> CompletedProcess[str]:
        """Returns its exit code, and what it has written."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in (self._said, self._told):
            file.seek(0)
            texts.append(file.read())
            file.close()
        return CompletedProcess("fork", code, *texts)

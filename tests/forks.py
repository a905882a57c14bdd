"""Runs a function in a fork of this process: another process without the seconds of imports."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any


class Fork:
    """A child that runs a function and exits with its value as exit code.

    Args:
        run: a SystemExit counts as its value; another exception is printed and gives code 1.
        folder: where it runs.
        env: its variables; None = those of this process.
    """

    def __init__(
        self, run: Callable[[], Any], folder: Path, env: dict[str, str] | None = None
    ) -> None:
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115 - `wait` closes them
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._run(run, folder, os.environ.copy() if env is None else env))

    def _run(self, run: Callable[[], Any], folder: Path, env: dict[str, str]) -> int:
        code: Any = 1
        try:
            for descriptor, file in enumerate(self._files, 1):
                os.dup2(file.fileno(), descriptor)
            sys.stdout, sys.stderr = self._files
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            code = run()
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        for file in self._files:
            file.flush()
        return code if isinstance(code, int) else int(code is not None)

    def wait(self) -> CompletedProcess[str]:
        """Waits for the child and gives its exit code and output."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return CompletedProcess("fork", code, *texts)

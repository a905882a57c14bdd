"""Start N ranks of a program on this machine and end them together.

    python launch/fork.py [--spawn] [--program FILE] N [arguments of the program...]

By default the program is imported once and N ranks are forked from it: 8 ranks start in a tenth of
a second instead of each importing torch by itself. CUDA does not survive a fork, so ranks with GPUs
start as new interpreters (`--spawn`). The program is a file with `main(argv: list[str]) -> int`,
which reads its rank from torchrun's variables.

A rank that crashes ends the others. The exit code is that of the rank that failed first (128 + n
for signal n). 2 (configuration refused) and 75 (stopped with a checkpoint) are orderly: the others
finish on their own. SIGTERM, SIGINT and SIGUSR1 reach every rank; the third of them kills.
"""

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain.py"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CRASH_GRACE_S = 1.0  # for the other ranks to report their errors
# for the other ranks to refuse as well, or to close their files
ORDERLY_GRACE_S = {2: 10.0, 75: 300.0}
PR_SET_PDEATHSIG = 1
CAUSES = {  # of signals that end a rank before it can report why
    signal.SIGKILL: ": by a user, or by the kernel where memory ran out",
    signal.SIGBUS: ": a file that it read has shrunk, its disk has failed, or /dev/shm is full",
}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses the launcher's options, which precede N; all arguments after N are the program's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--spawn", action="store_true", help="new interpreters, as CUDA needs them")
    parser.add_argument("--program", type=Path, default=PROGRAM)
    parser.add_argument("num_ranks", type=int, metavar="N")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args(argv)
    if options.num_ranks < 1:
        parser.error(f"N must be at least 1 (got {options.num_ranks})")
    if not options.program.is_file():
        parser.error(f"no such program: {options.program}")
    return options, options.arguments


def load_main(program: Path, arguments: list[str], num_ranks: int) -> Callable[[list[str]], int]:
    """Imports the program as `python program` would, with its folder on the path.

    Calls its `before_fork(arguments, num_ranks)`, if there is one, which checks the arguments once
    for all ranks and imports what they need.

    Returns:
        `main` of the program.
    """
    sys.path.insert(0, str(program.parent))
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[program.stem] = module
    spec.loader.exec_module(module)
    getattr(module, "before_fork", lambda *_: None)(arguments, num_ranks)
    # needed by every save: imported once here instead of for a second in each rank
    importlib.import_module("torch.distributed.checkpoint")
    return module.main


def start(num_ranks: int, folder: Path, body: Callable[[Path], int]) -> dict[int, int]:
    """Forks the ranks with their environment variables.

    Returns:
        pid -> rank.
    """
    # signals wait until both sides can handle them
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    sys.stdout.flush()
    sys.stderr.flush()
    parent, pids = os.getpid(), {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, num_ranks, parent, folder, body)
        pids[pid] = rank
    return pids


def _run_rank(
    rank: int, num_ranks: int, parent: int, folder: Path, body: Callable[[Path], int]
) -> None:
    os.setsid()  # Ctrl-C reaches the launcher alone, which forwards it once
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MEGATRON5D_MEETING": f"file://{folder}/meeting",
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = 1
    try:
        code = body(folder / f"error{rank}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # without clean-up: peers see the connections close after this rank has reported its error
        os._exit(code)


def forked(main: Callable[[list[str]], int], arguments: list[str]) -> Callable[[Path], int]:
    """Body of a rank that calls the imported program.

    Its message or traceback goes to a file, so that those of N ranks do not mix.
    """

    def body(error: Path) -> int:
        faulthandler.enable()
        try:
            return main(arguments) or 0
        except SystemExit as raised:
            if isinstance(raised.code, str):  # Python's way to exit with code 1 and a message
                error.write_text(raised.code + "\n")
            return raised.code if isinstance(raised.code, int) else int(raised.code is not None)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except BaseException:
            error.write_text(traceback.format_exc())
            return 1

    return body


def spawned(program: Path, arguments: list[str]) -> Callable[[Path], int]:
    """Body of a rank that becomes a new interpreter."""

    def body(_: Path) -> int:
        os.execv(sys.executable, [sys.executable, str(program), *arguments])

    return body


class Supervisor:
    """Watches the ranks until all have ended."""

    def __init__(self, pids: dict[int, int], folder: Path) -> None:
        self.alive = pids
        self.folder = folder
        self.failures: list[tuple[float, int, int]] = []  # time, rank, code
        self.signals: list[int] = []  # that were forwarded
        self.has_killed = False  # ranks killed by the launcher have not failed

    def watch(self) -> int:
        """Waits for all ranks and gives the launcher's exit code."""
        for number in FORWARDED:
            signal.signal(number, self.forward)
        signal.signal(signal.SIGALRM, self.kill)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        while self.alive:
            pid, status = os.waitpid(-1, 0)
            # as process 1 of a container the launcher also inherits the children of ranks
            if pid in self.alive:
                self.note(self.alive.pop(pid), os.waitstatus_to_exitcode(status))
        signal.alarm(0)
        return self.verdict()

    def forward(self, number: int, _frame: object) -> None:
        self.signals.append(number)
        if len(self.signals) < 3:
            self.send(number)
        else:
            self.kill()

    def kill(self, *_: object) -> None:
        self.has_killed = bool(self.failures)
        self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        for pid in self.alive:
            # a rank may have ended before `watch` has taken it out
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def note(self, rank: int, code: int) -> None:
        """Records a failure; the first one starts the grace period of the other ranks."""
        if code == 0 or (self.has_killed and code == -signal.SIGKILL):
            return
        if not self.failures:
            signal.setitimer(signal.ITIMER_REAL, ORDERLY_GRACE_S.get(code, CRASH_GRACE_S))
        error = self.folder / f"error{rank}"
        failed_at = error.stat().st_mtime if error.exists() else time.time()
        # a killed rank comes first: the ranks that lose it raise and are not killed
        self.failures.append((0.0 if code < 0 else failed_at, rank, code))

    def verdict(self) -> int:
        """Prints the first failure and gives its exit code."""
        if not self.failures:
            return 0
        _, rank, code = min(self.failures)
        if code in ORDERLY_GRACE_S:
            return code  # the program has printed the reason
        error = self.folder / f"error{rank}"
        text = error.read_text() if error.exists() else ""
        print(
            f"{text}launch: {self.reason(rank, code)}; all ranks are stopped",
            file=sys.stderr,
            flush=True,
        )
        return code if code > 0 else 128 - code

    def reason(self, rank: int, code: int) -> str:
        """Why the ranks have ended; SIGINT ends a rank before its loop reads signals, or if it
        comes twice."""
        if len(self.signals) >= 3 or -code in self.signals or code - 128 in self.signals:
            name = signal.Signals(self.signals[-1]).name
            return f"ended by {name}; all steps since the last checkpoint are lost"
        cause = f"exit code {code}"
        if code < 0:
            cause = f"killed by {signal.Signals(-code).name}{CAUSES.get(-code, '')}"
        return f"rank {rank} failed first ({cause})"


def main(argv: list[str]) -> int:
    options, arguments = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    program = options.program.resolve()
    if options.spawn:
        body = spawned(program, arguments)
    else:
        body = forked(load_main(program, arguments, options.num_ranks), arguments)
    with tempfile.TemporaryDirectory(prefix="megatron5d_launch_") as folder:
        return Supervisor(start(options.num_ranks, Path(folder), body), Path(folder)).watch()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # before there are ranks to forward it to
        print("launch: ended by SIGINT before it has started any rank", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)

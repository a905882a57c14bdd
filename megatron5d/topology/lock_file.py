"""A lock file: only one run at a time writes to a directory or a log; the file names that run and
shows that it is alive.

File locks of the operating system are not used: over NFS and Lustre they are often disabled, or
hold on one node only. Every file system can create a file only if it does not exist (O_EXCL),
rename a file, and tell when it was modified.

A run that is killed leaves its lock file behind. Whoever restarts it should neither wait long nor
clean up, so the file names its owner's process. Whether that process is alive is known at once on
the same machine, and for a SLURM job that was requeued, because SLURM ends a job before it starts
it again. Otherwise the new run watches the file for STALE_S: a living owner touches it every
HEARTBEAT_S, whatever the clocks of the nodes say.

A run that was suspended for longer than STALE_S counts as dead and loses its lock. It notices
before it writes again (`check`).
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path

from megatron5d.config.json_file import read_json
from megatron5d.topology.launcher import slurm_job

HEARTBEAT_S = 10.0  # between two touches of the file by its owner
# an owner on another machine that does not touch the watched file for this long counts as dead
STALE_S = 60.0
# an owner that last touched the file this long ago, by the file system's clock, counts as dead
# without a watch
LONG_STALE_S = 600.0
POLL_S = 0.5  # between two reads of a watched file's time
# after replacing a dead run's file: of several runs that do so at once, the last one has the lock
SETTLE_S = 0.5


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock, as its file says."""

    host: str = ""  # name of the machine, for messages
    pid: int = 0
    # kernel and process namespace that the pid belongs to; "" where they are unknown
    system: str = ""
    started: str = ""  # when the process started, in ticks of that kernel, because pids are reused
    job: str = ""  # id of the SLURM job; "" outside SLURM
    restarts: int = 0  # how often SLURM has requeued the job
    since: str = ""  # local time at which the lock was taken, for messages
    token: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique to this lock

    def __str__(self) -> str:
        if not self.pid:
            return "an unknown process"
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"


def this_process() -> Owner:
    """This process as an owner."""
    system, pid = _system(), os.getpid()
    started = (_state_and_start(pid) or ("", ""))[1]
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return Owner(socket.gethostname(), pid, system, started, *slurm_job(), since)


def is_alive(owner: Owner, process: Owner) -> bool | None:
    """Whether an owner's process still runs; None where this process cannot know.

    Args:
        process: `this_process()`.
    """
    if owner.job and owner.job == process.job and owner.restarts < process.restarts:
        return False  # SLURM ended the job before it started it again
    if not owner.system or owner.system != process.system:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # the process belongs to another user
    state, started = _state_and_start(owner.pid) or ("", owner.started)
    return state not in ("Z", "X") and started == owner.started


def _system() -> str:
    """This machine's boot and this process's pid namespace, within which a pid means the same
    process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _state_and_start(pid: int) -> tuple[str, str] | None:
    """State letter and start time of a process, from /proc; None where it is gone or there is no
    /proc."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return after_name[0], after_name[19]


class LockFile:
    """A lock that this process holds from its construction until `release`; a thread touches the
    file meanwhile.

    Args:
        file: the lock file; its folder is created where it does not exist.
        target: what is locked, for messages: a config key and its value.

    Raises:
        OSError: another run holds the lock, or the file cannot be written.
    """

    def __init__(self, file: Path, target: str) -> None:
        self.file, self.target, self.owner = file, target, this_process()
        self._acquire()
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._heartbeat, name=f"heartbeat of {file}", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Makes sure that this run still holds the lock; takes it again if the file was removed.

        Raises:
            OSError: another run has taken the lock, because this one did not touch the file for
                too long.
        """
        owner = _read(self.file)
        if owner is None:
            self._acquire()
        elif owner.token != self.owner.token:
            raise OSError(
                f"{self.target} was taken over by another run, {owner}, because this one had given "
                f"no sign of life for {STALE_S:g} s (suspended?); it writes nothing more there"
            )

    def release(self) -> None:
        """Ends the heartbeat and removes the file, unless another run has taken it."""
        self._released.set()
        # not longer: the thread may hang in a file system that does not answer
        self._thread.join(HEARTBEAT_S)
        if self._is_ours():
            with suppress(OSError):
                self.file.unlink()

    def _acquire(self) -> None:
        while not self._try_to_acquire():
            pass

    def _try_to_acquire(self) -> bool:
        """Creates the file, or replaces that of a dead run.

        Returns:
            False where another process was faster; the next attempt then examines that process.
        """
        owner = _read(self.file)
        if owner is not None:
            self._refuse_living(owner)
        written = self.file.with_name(f"{self.file.name}.{self.owner.token}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(self.owner), indent=1) + "\n")
            overtaken = not self._create(written) if owner is None else _read(self.file) != owner
            if overtaken:
                return False
            written.replace(self.file)
        except OSError as error:
            raise OSError(f"{self.target} cannot be locked: {error}") from error
        finally:
            with suppress(OSError):
                written.unlink()
        if owner is None:
            return True
        time.sleep(SETTLE_S)
        return self._is_ours()

    def _create(self, written: Path) -> bool:
        """Creates the file; False where it exists by now.

        Args:
            written: has the content.
        """
        try:
            # with its content at once: an empty file would hide its owner
            os.link(written, self.file)
        except FileExistsError:
            return False
        except OSError:  # this file system has no hard links
            try:
                os.close(os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                return False
        return True

    def _refuse_living(self, owner: Owner) -> None:
        """Raises OSError where the owner is alive."""
        alive = is_alive(owner, self.owner)
        if self._is_touched_within_watch(owner) if alive is None else alive:
            raise OSError(
                f"{self.target} belongs to a run that is still going: {owner}. Two writers "
                "would overwrite each other's files: stop that one, or give this one another place "
                f"({self.file.name} need not be removed by hand: a dead run is "
                "recognized)"
            )

    def _is_touched_within_watch(self, owner: Owner) -> bool:
        """Watches the file for STALE_S; True as soon as it is touched."""
        first, deadline = _last_touched(self.file), time.monotonic() + STALE_S
        if first is None or self._now() - first > LONG_STALE_S:
            return False
        print(
            f"{self.target} was left by {owner}, or is still in use: watching for up to "
            f"{STALE_S:g} s",
            file=sys.stderr,
            flush=True,
        )
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            touched = _last_touched(self.file)
            if touched != first:
                return touched is not None
        return False

    def _now(self) -> float:
        """Time in seconds by the clock of the file system, which may differ from this machine's."""
        probe = self.file.with_name(f"{self.file.name}.{self.owner.token}")
        probe.touch()
        try:
            return _last_touched(probe) or time.time()
        finally:
            probe.unlink()

    def _heartbeat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            if self._is_ours():
                with suppress(OSError):
                    os.utime(self.file)

    def _is_ours(self) -> bool:
        with suppress(OSError):
            owner = _read(self.file)
            return owner is not None and owner.token == self.owner.token
        return False


def _read(file: Path) -> Owner | None:
    """The owner that a lock file names: None without a file, an unknown one where it is damaged."""
    try:
        record = read_json(file)
        return Owner(**{entry.name: record[entry.name] for entry in fields(Owner)})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return Owner(token="")


def _last_touched(file: Path) -> float | None:
    """When a file was last modified, in seconds; None where it is gone.

    The file is opened because network file systems then query the server instead of their cache.
    """
    try:
        with file.open() as opened:
            return os.fstat(opened.fileno()).st_mtime
    except FileNotFoundError:
        return None

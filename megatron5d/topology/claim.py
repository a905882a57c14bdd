"""A place on disk that one run at a time writes to: a small file that says who does, and shows that it still lives.

The locks of file systems are not asked: over NFS and Lustre they are often off, or known to one node alone. What all
file systems do is to make a file that is not there yet (O_EXCL), to replace one, and to tell when one was touched.

A run that was killed leaves its file behind, and who starts it again must neither wait long nor clean up. So the file
says which process it belongs to. Where that can be looked up (the same machine), or follows from SLURM (a job that was
requeued has only one life at a time), the answer is there at once. Otherwise whoever wants the place watches the file,
which its owner touches every BEAT_S, for SILENT_S: a living owner is seen, whatever the clocks of the nodes say.

Nothing is certain: a run that was suspended for longer than that is taken for dead. It finds out before it writes again
(`check`).
"""

from __future__ import annotations

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

from megatron5d.topology.process import slurm_job

BEAT_S = 10.0  # between two touches
SILENT_S = 60.0  # without a touch, after which an owner on another machine counts as dead
LONG_AGO_S = 600.0  # since the last touch, by the file system's clock: dead without being watched
POLL_S = 0.5
SETTLE_S = 0.5  # of several that replace the file of a dead run at once, the last one has the place


@dataclass(frozen=True)
class Owner:
    """Who has claimed a place.

    Args:
        host: name of the machine, for the reader.
        pid: of the process.
        system: kernel and process namespace that the pid belongs to; "" where they are not known.
        started: when the process started, in ticks of that kernel: pids are used again.
        job: SLURM's number of the job, "" without.
        restarts: how often SLURM has requeued the job.
        since: local time, for the reader.
        token: of this claim alone.
    """

    host: str = ""
    pid: int = 0
    system: str = ""
    started: str = ""
    job: str = ""
    restarts: int = 0
    since: str = ""
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}" if self.pid else "an unknown process"


def this_process() -> Owner:
    """This process as an owner."""
    system, pid = _system(), os.getpid()
    started = (_state_and_start(pid) or ("", ""))[1]
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    return Owner(socket.gethostname(), pid, system, started, *slurm_job(), since)


def lives(owner: Owner, here: Owner) -> bool | None:
    """Whether an owner's process still runs; None where this process cannot know.

    Args:
        owner: who has claimed.
        here: `this_process()`.
    """
    if owner.job and owner.job == here.job and owner.restarts < here.restarts:
        return False  # SLURM has ended the job before it started it again
    if not owner.system or owner.system != here.system:
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's
    state, started = _state_and_start(owner.pid) or ("", owner.started)
    return state not in ("Z", "X") and started == owner.started


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _state_and_start(pid: int) -> tuple[str, str] | None:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return after_name[0], after_name[19]


class Claim:
    """One place, claimed until `release`.

    Args:
        file: says who has the place; its folder is made if need be.
        place: what is claimed, for messages: a knob and its value.

    Raises:
        OSError: another run has it; or the file cannot be written.
    """

    def __init__(self, file: Path, place: str) -> None:
        self.file, self.place, self.owner = file, place, this_process()
        self._take()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"beat of {file}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """That the place is still this run's.

        Raises:
            OSError: another one has taken it, this one having been silent for too long.
        """
        owner = _read(self.file)
        if owner is None:
            self._take()  # somebody has removed the file, or all of the folder
        elif owner.token != self.owner.token:
            raise OSError(
                f"{self.place} was taken over by another run, {owner}, because this one had given no sign of life for "
                f"{SILENT_S:g} s (suspended?); it writes nothing more there"
            )

    def release(self) -> None:
        """Leaves the place to others."""
        self._released.set()
        self._thread.join(BEAT_S)  # it may hang in a file system that does
        if self._is_ours():
            with suppress(OSError):
                self.file.unlink()

    def _take(self) -> None:
        while not self._taken():
            pass

    def _taken(self) -> bool:
        """Makes the file, or replaces that of a dead run; False where another was quicker, to be asked again."""
        owner = _read(self.file)
        if owner is not None and not self._is_dead(owner):
            return False
        written = self.file.with_name(f"{self.file.name}.{self.owner.token}")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(self.owner), indent=1) + "\n")
            overtaken = not self._is_first() if owner is None else _read(self.file) != owner
            if overtaken:
                return False
            written.replace(self.file)
        except OSError as error:
            raise OSError(f"{self.place} cannot be claimed: {error}") from error
        finally:
            with suppress(OSError):
                written.unlink()
        if owner is None:
            return True
        time.sleep(SETTLE_S)
        return self._is_ours()

    def _is_first(self) -> bool:
        """Of all who see no file, one makes it."""
        try:
            os.close(os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        return True

    def _is_dead(self, owner: Owner) -> bool:
        """Raises where it lives; False where its file went away while it was watched."""
        alive = lives(owner, self.owner)
        if alive is None:
            alive = self._seen_alive(owner)
            if _touched(self.file) is None:
                return False
        if alive:
            raise OSError(
                f"{self.place} belongs to a run that is still going: {owner}. Two runs in one place would overwrite "
                f"each other's files: stop that one, or give this one a place of its own ({self.file.name} need not be "
                "removed by hand: a run that has died is recognised)"
            )
        return True

    def _seen_alive(self, owner: Owner) -> bool:
        """Watches whether the file is touched."""
        first, deadline = _touched(self.file), time.monotonic() + SILENT_S
        if first is None or self._now() - first > LONG_AGO_S:
            return False
        print(
            f"{self.place} was left by {owner}, or is still in use: watching for up to {SILENT_S:g} s",
            file=sys.stderr,
            flush=True,
        )
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            touched = _touched(self.file)
            if touched != first:
                return touched is not None
        return False

    def _now(self) -> float:
        """By the clock that dates this folder's files."""
        probe = self.file.with_name(f"{self.file.name}.{self.owner.token}")
        probe.touch()
        try:
            return _touched(probe) or time.time()
        finally:
            probe.unlink()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            if self._is_ours():
                with suppress(OSError):
                    os.utime(self.file)

    def _is_ours(self) -> bool:
        with suppress(OSError):
            owner = _read(self.file)
            return owner is not None and owner.token == self.owner.token
        return False


def _read(file: Path) -> Owner | None:
    """What a file says; an owner of whom nothing is known where it is empty or damaged, None where there is none."""
    try:
        found = json.loads(file.read_text())
        return Owner(**{each.name: found[each.name] for each in fields(Owner)})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError):
        return Owner(token="")


def _touched(file: Path) -> float | None:
    """When a file was touched last, in seconds; None where it is gone.

    Opened, because network file systems then ask the server and do not answer from memory.
    """
    try:
        with file.open() as opened:
            return os.fstat(opened.fileno()).st_mtime
    except FileNotFoundError:
        return None

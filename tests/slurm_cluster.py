"""A real SLURM on one machine for a test: a controller, several node daemons and their keys in one
private folder."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROGRAMS = [
    *("munged", "slurmctld", "slurmd", "sbatch", "srun"),
    *("scontrol", "scancel", "sinfo", "squeue"),
]
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
HOSTS = Path("/etc/hosts")
# states of a job that has not ended
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}

CONF = """\
ClusterName=test
FirstJobId={port}0
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
ReturnToService=2
KillWait=5
MinJobAge=3600
JobRequeue=1
PropagateResourceLimits=NONE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 Sockets=2 "
    "CoresPerSocket=8 ThreadsPerCore=1 RealMemory=100000 Gres=gpu:8 State=UNKNOWN\n"
)


def why_not() -> str | None:
    """Why this machine cannot run a private cluster; None where it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"SLURM is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a private SLURM needs root"
    if not os.access(HOSTS, os.W_OK):
        return f"{HOSTS} is not writable: the nodes' names would not resolve"
    return None


class SlurmCluster:
    """Daemons in the foreground as children of this process, which die with it.

    Args:
        folder: for all files; a short path, because sockets live there.
        num_nodes: slurmd daemons, node1 ... nodeN, each with 16 imaginary cores and 8 imaginary
            GPUs.
    """

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self.folder = folder
        self.nodes = [f"node{i + 1}" for i in range(num_nodes)]
        self.port = _free_ports(num_nodes + 1)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self.daemons: list[subprocess.Popen] = []
        self._hosts_mark = f"# slurm test {self.port}"

    def start(self) -> None:
        """Starts the daemons and waits until all nodes are idle."""
        self._write_files()
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid"}
        names |= {"log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{name}" for option, name in names.items()]
        self._start_daemon("munged", "--foreground", "--force", *files)
        until(lambda: (self.folder / "munge.socket").exists(), 20, "munged opens its socket")
        conf = ("-f", f"{self.folder}/slurm.conf")
        self._start_daemon("slurmctld", "-D", *conf)
        for name in self.nodes:
            self._start_daemon("slurmd", "-D", "-N", name, *conf)
        until(self._all_idle, 60, "all nodes are idle")

    def _all_idle(self) -> bool:
        for daemon in self.daemons:
            assert daemon.poll() is None, f"{daemon.args[0]} ended:\n{self.logs()}"
        with suppress(AssertionError):  # the controller does not answer yet
            states = self.run("sinfo", "-h", "-N", "-o", "%T").split()
            return states == ["idle"] * len(self.nodes)
        return False

    def _write_files(self) -> None:
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        # a link to /dev/null counts as a device; without one, SLURM registers no GPU
        for gpu in range(8):
            (self.folder / f"gpu{gpu}").symlink_to("/dev/null")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        (self.folder / "gres.conf").write_text(
            f"NodeName=node[1-{len(self.nodes)}] Name=gpu File={self.folder}/gpu[0-7]\n"
        )
        host = socket.gethostname().split(".")[0]
        conf = CONF.format(host=host, port=self.port, folder=self.folder)
        for i, node in enumerate(self.nodes):
            conf += NODE.format(name=node, host=host, port=self.port + 1 + i)
        (self.folder / "slurm.conf").write_text(conf)
        with HOSTS.open("a") as hosts:
            hosts.writelines(f"127.0.0.1 {node} {self._hosts_mark}\n" for node in self.nodes)

    def _start_daemon(self, *command: str) -> None:
        log = (self.folder / f"daemon{len(self.daemons)}.log").open("wb")
        self.daemons.append(
            subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,
            )
        )

    def submit(self, *arguments: str, cwd: Path) -> int:
        """Submits a job and returns its number."""
        out = self.run("sbatch", "--parsable", *arguments, cwd=cwd)
        return int(out.split(";")[0])

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: int) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.run("scontrol", "show", "job", "-o", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def wait(self, number: int, timeout: float) -> dict[str, str]:
        """The job once it has ended; `sbatch --wait` would notice half a minute later."""
        until(lambda: self.job(number)["JobState"] not in RUNNING, timeout, f"job {number} ends")
        return self.job(number)

    def logs(self) -> str:
        return "\n".join(
            f"{log.name}: {log.read_text(errors='replace')[-1500:]}"
            for log in self.folder.glob("daemon*.log")
        )

    def stop(self) -> None:
        """Ends jobs, daemons and remaining tasks."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--hurry", "--user=root")
            until(lambda: not self.run("squeue", "-h"), 15, "all jobs have ended")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for pid in self._tasks():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        lines = HOSTS.read_text().splitlines(keepends=True)
        # rewritten, not replaced, because it may be a mount
        HOSTS.write_text("".join(line for line in lines if self._hosts_mark not in line))

    def _tasks(self) -> Iterator[int]:
        """Processes that this cluster's jobs have left, known by their environment."""
        conf = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if conf in variables and any(v.startswith(b"SLURMD_NODENAME=") for v in variables):
                    yield int(process.name)


@contextmanager
def slurm_cluster(folder: Path, num_nodes: int) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder, num_nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_ports(count: int) -> int:
    """The first of `count` neighboring ports without a listener."""
    for first in range(17000, 19000, 16):
        with suppress(OSError):
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
    raise AssertionError("no free ports between 17000 and 19000")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def until(condition: Callable[[], bool], timeout: float, description: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {description}"
        time.sleep(0.2)

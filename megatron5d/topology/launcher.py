"""What the launcher tells this process: its rank, the world size, and where the ranks meet.

Imports no torch. Understands every launcher of `LAUNCHERS`, and a single process without one. The
tasks of a SLURM step meet at an address made of the step's node list and the job's number; under
mpirun MASTER_ADDR and MASTER_PORT give it. Where the variables of two launchers disagree, one of
them did not start this process, so they are rejected.
"""

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

INITIALIZED = "met"  # an init_method: the process group exists already
# below the ephemeral range, so no outgoing connection holds one of these ports
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_MAX_WORLD = 2**20
_MAX_PORT = 2**16 - 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Environment:
    """Place of this process among all ranks of the job."""

    rank: int = 0  # of this process, 0 ... world-1
    world: int = 1
    local_rank: int = 0  # index among the processes of this node, which selects the GPU
    # where all ranks meet: "tcp://host:port", "file:///path", "env://" (torchrun's address), "" at
    # world 1, or INITIALIZED where the launcher makes and destroys the group (local_ranks.py)
    init_method: str = ""


@dataclass(frozen=True)
class _Launcher:
    """Environment variables of a launcher; of several names for one value the first set counts."""

    name: str
    rank: tuple[str, ...]
    world: tuple[str, ...] = ()  # () = it sets the rank alone
    local_rank: tuple[str, ...] = ()


_TORCHRUN = _Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",))
_SLURM = _Launcher(
    "srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_LOCALID",)
)
LAUNCHERS = (
    _TORCHRUN,  # and launch/fork.py
    _SLURM,
    _Launcher(
        "mpirun",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ),
    _Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
    ),
    _Launcher(
        "jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",)
    ),
    _Launcher("flux run", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    _Launcher(
        "PMI (MPICH, Intel MPI)",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ),
    _Launcher("PMIx", ("PMIX_RANK",)),
    _Launcher("PALS or ALPS", ("PALS_RANKID", "ALPS_APP_PE"), (), ("PALS_LOCAL_RANKID",)),
)


@dataclass(frozen=True)
class _Settings:
    """Values that one launcher has set; None where it has not."""

    launcher: _Launcher
    rank: int | None
    world: int | None
    local_rank: int | None
    text: str  # the variables of rank and world as NAME=value, for messages


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Reads rank, world size and rendezvous from the launcher's variables, without any GPU or
    network.

    Raises:
        ValueError: the variables of a launcher are incomplete, out of range, or contradict each
            other or those of another launcher.
    """
    settings = [item for launcher in LAUNCHERS if (item := _settings(launcher, variables))]
    settings = _innermost(settings, variables)
    if not settings:
        return Environment()
    for first in settings:
        for second in settings:
            if _differ(first.rank, second.rank) or _differ(first.world, second.world):
                raise ValueError(_disagreement(first, second))

    for item in settings:
        if item.rank is not None and item.world is not None:
            rank, world, text = item.rank, item.world, item.text
            break
    else:
        raise ValueError(_incomplete(settings[0]))
    local_ranks = [item.local_rank for item in settings if item.local_rank is not None]
    local_rank = local_ranks[0] if local_ranks else rank
    for name, value in (("rank", rank), ("local rank", local_rank)):
        if value >= world:
            raise ValueError(f"{text}: {name} {value} of a world of {world} (ranks begin at 0)")
    launchers = {item.launcher for item in settings}
    return Environment(
        rank, world, local_rank, _init_method(launchers, world, variables) if world > 1 else ""
    )


def is_first_on_node(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this process should print what each node prints once: no launcher gives it another
    local rank than 0."""
    names = [name for launcher in LAUNCHERS for name in launcher.local_rank]
    return all(variables.get(name, "0") == "0" for name in names)


def _innermost(settings: list[_Settings], variables: Mapping[str, str]) -> list[_Settings]:
    """Drops launchers that only started the launcher of this process.

    torchrun and fork.py mark their processes. mpirun starts a daemon on each node through srun,
    whose variables its ranks inherit.
    """
    if "TORCHELASTIC_RUN_ID" in variables or "MEGATRON5D_MEETING" in variables:
        return [item for item in settings if item.launcher is _TORCHRUN] or settings
    worlds = {item.launcher: item.world for item in settings}
    slurm_world = worlds.pop(_SLURM, None)
    worlds.pop(_TORCHRUN, None)
    mpi_world = next(filter(None, worlds.values()), None)
    one_daemon_per_node = variables.get("SLURM_STEP_NUM_NODES", "1") == str(slurm_world)
    if mpi_world and _differ(mpi_world, slurm_world) and one_daemon_per_node:
        return [item for item in settings if item.launcher is not _SLURM]
    return settings


def _settings(launcher: _Launcher, variables: Mapping[str, str]) -> _Settings | None:
    names = [
        name
        for aliases in (launcher.rank, launcher.world)
        if (name := next(filter(variables.__contains__, aliases), None))
    ]
    if launcher is _SLURM:
        if "SLURM_STEP_ID" not in variables:
            return None  # a batch script or an salloc shell, which runs as one process
        for name in ("SLURM_PROCID", "SLURM_LOCALID"):
            if name not in variables:
                raise ValueError(f"SLURM_STEP_ID is set, but {name} is not set; start with srun")
    elif not names:
        return None
    return _Settings(
        launcher,
        _integer(variables, *launcher.rank, high=_MAX_WORLD - 1),
        _integer(variables, *launcher.world, high=_MAX_WORLD),
        _integer(variables, *launcher.local_rank, high=_MAX_WORLD - 1),
        " ".join(f"{name}={variables[name]}" for name in names),
    )


def _integer(variables: Mapping[str, str], *names: str, high: int, low: int = 0) -> int | None:
    """Value of the first of these variables that is set; None where none is."""
    for name in filter(variables.__contains__, names):
        text = variables[name]
        if not re.fullmatch(r"[0-9]+", text):
            raise ValueError(f"environment variable {name} must be a whole number (got {text!r})")
        if len(text) > 20 or not low <= int(text) <= high:
            raise ValueError(f"environment variable {name} must be {low} to {high} (got {text})")
        return int(text)
    return None


def _differ(first: int | None, second: int | None) -> bool:
    return first is not None and second is not None and first != second


def _disagreement(first: _Settings, second: _Settings) -> str:
    launcher = first.launcher
    names = " ".join((*launcher.rank, *launcher.world, *launcher.local_rank))
    return (
        f"{first.text} ({launcher.name}) and {second.text} ({second.launcher.name}) disagree; "
        f"unset the one that did not start this process, for example: unset {names}"
    )


def _incomplete(settings: _Settings) -> str:
    launcher = settings.launcher
    missing = launcher.rank if settings.rank is None else launcher.world
    return (
        f"{settings.text} is set ({launcher.name}), but {(*missing, 'the number of ranks')[0]} is "
        f"not set; for one process: unset {settings.text.split('=')[0]}; for N on this machine: "
        "bash launch/local.sh N; otherwise: "
        "export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    )


def _init_method(launchers: set[_Launcher], world: int, variables: Mapping[str, str]) -> str:
    """Where the ranks meet, as `Environment.init_method`."""
    port = _integer(variables, "MASTER_PORT", low=1, high=_MAX_PORT)
    host = variables.get("MASTER_ADDR")
    if _TORCHRUN in launchers and "MEGATRON5D_MEETING" in variables:
        return variables["MEGATRON5D_MEETING"]
    if host and port is not None:
        return "env://" if _TORCHRUN in launchers else f"tcp://{host}:{port}"
    if _SLURM not in launchers:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise ValueError(
            f"{world} ranks cannot find each other, because {missing} is not set; before the "
            "launcher: export MASTER_ADDR=$(hostname) MASTER_PORT=29500 (Open MPI passes them "
            "with mpirun -x MASTER_ADDR -x MASTER_PORT)"
        )
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    host = host or (first_host(nodes) if nodes else None)
    if host is None:
        raise ValueError(
            f"{world} ranks cannot find each other, because neither SLURM_STEP_NODELIST nor "
            "SLURM_JOB_NODELIST is set; set MASTER_ADDR"
        )
    if port is None:
        job = _integer(variables, "SLURM_JOB_ID", high=2**63)
        step = _integer(variables, "SLURM_STEP_ID", high=2**63) or 0
        if job is None:
            raise ValueError(
                f"{world} ranks cannot find each other, because neither MASTER_PORT nor "
                "SLURM_JOB_ID is set; set MASTER_PORT"
            )
        port = _FIRST_PORT + (job + step) % _NUM_PORTS
    return f"tcp://{host}:{port}"


def store_url(environment: Environment) -> str:
    """URL at which the ranks meet, with torchrun's address in place of env://."""
    if environment.init_method != "env://":
        return environment.init_method
    return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def rank_0_listens(environment: Environment, timeout_s: float = 20.0) -> bool:
    """Whether rank 0, which is another process, opens the port at which the ranks meet."""
    url = store_url(environment)
    if environment.rank == 0 or not url.startswith("tcp://"):
        return False
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return True
        time.sleep(0.2)
    return False


def first_host(node_list: str) -> str:
    """First node of SLURM's compressed list: "gpu[07-11,20],login1" gives "gpu07".

    Raises:
        ValueError: the list names no node.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise ValueError(f"SLURM's node list {node_list!r} names no host")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def slurm_job(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The SLURM job's id ("" outside SLURM), and how often SLURM has requeued it."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    num_restarts = int(restarts) if re.fullmatch(r"[0-9]{1,9}", restarts) else 0
    return variables.get("SLURM_JOB_ID", ""), num_restarts


def restarted_job(variables: Mapping[str, str] = os.environ) -> str:
    """The SLURM job's id if SLURM or torchrun has restarted its ranks; else ""."""
    job, num_restarts = slurm_job(variables)
    by_torchrun = variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return job if num_restarts or by_torchrun else ""


def variable(name: str) -> str:
    """Value of an environment variable that belongs to no launcher; "" where it is not set."""
    return os.environ.get(name, "")


def ensure_home() -> None:
    """Sets HOME where it is missing, as in some containers, for programs that this one starts."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))


def die_with_parent(parent: int) -> None:
    """Makes Linux kill this process when `parent`, which forked it, dies; ends it at once if the
    parent is dead already."""
    with suppress(AttributeError):  # other systems lack prctl and leave orphans
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

"""What the launcher says about this process: its rank, the world size, and where the ranks meet.
Imports no torch.

Every launcher of `LAUNCHERS` is understood, and none at all, which is one process. The nodes of a
SLURM step find each other by the step's node list and the job's number; under mpirun MASTER_ADDR
and MASTER_PORT say where. Where two launchers have set their variables and disagree, one of them is
not the one that started this process: that is refused.
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

MET = "met"
# below the ephemeral range, so no outgoing connection holds it
_FIRST_PORT, _NUM_PORTS = 12000, 20000
_MAX_WORLD = 2**20
_MAX_PORT = 2**16 - 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process."""

    rank: int = 0  # of this process, 0 ... world-1
    world: int = 1
    local_rank: int = 0  # index among the processes of this node, which chooses the GPU
    # where all ranks meet: "tcp://host:port", "file:///path", "env://" (torchrun's own), "" at
    # world 1, or "met" where the launcher has made the process group already and will destroy it
    # (local_ranks.py)
    meeting: str = ""


@dataclass(frozen=True)
class _Launcher:
    """The variables of a launcher; of several names for one thing the first that is set counts."""

    name: str
    rank: tuple[str, ...]
    world: tuple[str, ...] = ()  # () = it tells the rank alone
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
class _Place:
    """What one launcher says; None where it does not. `text` names its variables."""

    launcher: _Launcher
    rank: int | None
    world: int | None
    local_rank: int | None
    text: str


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Reads rank, world size and meeting point from the launcher's variables; needs no GPU and
    talks to nobody. Raises
    ValueError: a launcher's variables are incomplete, out of range or contradict each other or
        another launcher's."""
    places = _innermost(
        [place for each in LAUNCHERS if (place := _place(each, variables))], variables
    )
    if not places:
        return Environment()
    for one, other in ((one, other) for one in places for other in places):
        if _differ(one.rank, other.rank) or _differ(one.world, other.world):
            raise ValueError(_disagreement(one, other))
    whole = next(
        (place for place in places if place.rank is not None and place.world is not None), None
    )
    if whole is None or whole.rank is None or whole.world is None:
        raise ValueError(_incomplete(places[0]))
    if whole.rank >= whole.world:
        raise ValueError(
            f"{whole.text}: rank {whole.rank} of a world of {whole.world}, and ranks begin at 0"
        )
    local = next((place.local_rank for place in places if place.local_rank is not None), whole.rank)
    if local >= whole.world:
        raise ValueError(
            f"{whole.text}: local rank {local} of a world of {whole.world}, and local ranks begin at 0"
        )
    meeting = (
        _meeting({place.launcher for place in places}, whole.world, variables)
        if whole.world > 1
        else ""
    )
    return Environment(whole.rank, whole.world, local, meeting)


def is_first_on_node(variables: Mapping[str, str] = os.environ) -> bool:
    """Says if no launcher calls this process another than the first of its node, for what must be
    printed once."""
    locals_ = [name for launcher in LAUNCHERS for name in launcher.local_rank]
    return all(variables.get(name, "0") == "0" for name in locals_)


def _innermost(places: list[_Place], variables: Mapping[str, str]) -> list[_Place]:
    """Leaves out launchers that only started the one that started this process.

    torchrun and fork.py mark what they start. mpirun starts a daemon on each node through srun,
    whose variables its ranks inherit.
    """
    if "TORCHELASTIC_RUN_ID" in variables or "MEGATRON5D_MEETING" in variables:
        return [place for place in places if place.launcher is _TORCHRUN] or places
    slurm = next((place for place in places if place.launcher is _SLURM), None)
    mpi = next(
        (place for place in places if place.launcher not in (_SLURM, _TORCHRUN) and place.world),
        None,
    )
    if (
        slurm
        and mpi
        and variables.get("SLURM_STEP_NUM_NODES", "1") == str(slurm.world)
        and mpi.world != slurm.world
    ):
        return [place for place in places if place is not slurm]
    return places


def _place(launcher: _Launcher, variables: Mapping[str, str]) -> _Place | None:
    if launcher is _SLURM and "SLURM_STEP_ID" not in variables:
        return None  # a batch script or an salloc shell, where nobody else was started
    told = [
        name for names in (launcher.rank, launcher.world) for name in names if name in variables
    ]
    if not told and launcher is not _SLURM:
        return None
    if launcher is _SLURM and not all(
        map(variables.__contains__, ("SLURM_PROCID", "SLURM_LOCALID"))
    ):
        raise ValueError(
            "SLURM_STEP_ID is set, and SLURM_PROCID is not set or SLURM_LOCALID is not; start with srun"
        )
    rank, world, local = (
        _integer(variables, *names, high=high)
        for names, high in (
            (launcher.rank, _MAX_WORLD - 1),
            (launcher.world, _MAX_WORLD),
            (launcher.local_rank, _MAX_WORLD - 1),
        )
    )
    shown = [
        next((name for name in names if name in variables), None)
        for names in (launcher.rank, launcher.world)
    ]
    return _Place(
        launcher,
        rank,
        world,
        local,
        " ".join(f"{name}={variables[name]}" for name in shown if name),
    )


def _integer(variables: Mapping[str, str], *names: str, high: int, low: int = 0) -> int | None:
    """Returns the value of the first of these variables that is set; None where none is."""
    for name in (name for name in names if name in variables):
        written = variables[name]
        if not re.fullmatch(r"[0-9]+", written):
            raise ValueError(f"environment variable {name}={written!r} is not a whole number")
        if len(written) > 20 or not low <= int(written) <= high:
            raise ValueError(f"environment variable {name}={written} is not from {low} to {high}")
        return int(written)
    return None


def _differ(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def _disagreement(one: _Place, other: _Place) -> str:
    names = (*one.launcher.rank, *one.launcher.world, *one.launcher.local_rank)
    return (
        f"{one.text} ({one.launcher.name}) and {other.text} ({other.launcher.name}) disagree; unset what did not start "
        f"this process, for example: unset {' '.join(names)}"
    )


def _incomplete(place: _Place) -> str:
    launcher = place.launcher
    lacking = (launcher.rank if place.rank is None else launcher.world)[:1] or (
        "the number of ranks",
    )
    names = place.text.split("=")[0]
    return (
        f"{place.text} is set ({launcher.name}), and {lacking[0]} is not set; for one process: unset {names}; for N on "
        "this machine: bash launch/local.sh N; otherwise export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"
    )


def _meeting(launchers: set[_Launcher], world: int, variables: Mapping[str, str]) -> str:
    """Returns where the ranks meet."""
    port = _integer(variables, "MASTER_PORT", low=1, high=_MAX_PORT)
    host = variables.get("MASTER_ADDR")
    if _TORCHRUN in launchers and "MEGATRON5D_MEETING" in variables:
        return variables["MEGATRON5D_MEETING"]
    if host and port is not None:
        return "env://" if _TORCHRUN in launchers else f"tcp://{host}:{port}"
    if _SLURM not in launchers:
        lacking = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise ValueError(
            f"{world} ranks, and {lacking} is not set: they cannot find each other; before the launcher: "
            "export MASTER_ADDR=$(hostname) MASTER_PORT=29500 (Open MPI passes them on with mpirun -x MASTER_ADDR -x "
            "MASTER_PORT)"
        )
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    host = host or (first_host(nodes) if nodes else None)
    if host is None:
        raise ValueError(
            f"{world} ranks, and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says where they meet; "
            "set MASTER_ADDR"
        )
    if port is None:
        job, step = (
            _integer(variables, name, high=2**63) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")
        )
        if job is None:
            raise ValueError(
                f"{world} ranks, and neither MASTER_PORT nor SLURM_JOB_ID is set; set MASTER_PORT"
            )
        port = _FIRST_PORT + (job + (step or 0)) % _NUM_PORTS
    return f"tcp://{host}:{port}"


def rank_0_listens(
    environment: Environment, patience_s: float = 20.0, variables: Mapping[str, str] = os.environ
) -> bool:
    """Returns whether rank 0 opens the port at which the ranks are to meet."""
    where = environment.meeting
    if where == "env://":
        where = f"tcp://{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    if environment.rank == 0 or not where.startswith("tcp://"):
        return False
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return True
        time.sleep(0.2)
    return False


def first_host(node_list: str) -> str:
    """Returns the first node of SLURM's compressed list: "gpu[07-11,20],login1" gives "gpu07".
    Raises ValueError: the list names no node."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise ValueError(f"SLURM's node list is {node_list!r}: no host in it")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def slurm_job(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Returns the id of the SLURM job ("" outside SLURM), and how often it was requeued."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    return variables.get("SLURM_JOB_ID", ""), int(restarts) if re.fullmatch(
        r"[0-9]{1,9}", restarts
    ) else 0


def restarted_job(variables: Mapping[str, str] = os.environ) -> str:
    """Returns the id of the SLURM job if SLURM or torchrun has restarted its ranks; else ""."""
    job, restarts = slurm_job(variables)
    again = variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return job if restarts or again else ""


def variable(name: str) -> str:
    """Value of an environment variable that belongs to no launcher; "" where it is not set."""
    return os.environ.get(name, "")


def ensure_home() -> None:
    """Sets HOME where it is missing, as in some containers, for programs that this one starts."""
    os.environ.setdefault("HOME", os.path.expanduser("~"))


def die_with_parent(parent: int) -> None:
    """Makes Linux kill this process when `parent`, which forked it, dies; ends it where that has
    happened already."""
    with suppress(AttributeError):  # another system, which leaves orphans
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

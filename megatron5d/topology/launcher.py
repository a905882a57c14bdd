"""What the launcher says about this process: its rank, the world size, and where the ranks meet.

Three launchers are understood, in this order: torchrun (and `launch/fork.py`, which sets the same variables), a SLURM
job step, and none at all, which is one process. The nodes of a SLURM step find each other by the step's node list and
the job's number; the user exports nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

MET = "met"
_FIRST_PORT, _NUM_PORTS = 12000, 20000  # below the ephemeral range, so no outgoing connection holds it


@dataclass(frozen=True)
class Environment:
    """What the launcher says about this process.

    Args:
        rank: of this process, 0 ... world-1.
        world: number of processes.
        local_rank: index among the processes of this node, which chooses the GPU.
        meeting: where all ranks meet: "tcp://host:port", "file:///path", "env://" (torchrun's own), "" at world 1, or
            "met" where the launcher has made the process group already and will destroy it (forked_ranks.py).
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    meeting: str = ""


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Reads rank, world size and meeting point from the launcher's variables; needs no GPU and talks to nobody.

    Args:
        variables: the process environment.

    Raises:
        ValueError: a launcher's variables are incomplete or contradict each other.
    """
    if "RANK" in variables or "WORLD_SIZE" in variables:
        found = _from_torchrun(variables)
    elif "SLURM_STEP_ID" in variables:  # absent in a batch script or an salloc shell, where nobody else was started
        found = _from_slurm(variables)
    else:
        found = Environment()
    if not 0 <= found.rank < found.world:
        raise ValueError(f"rank {found.rank} of a world of {found.world}: RANK or SLURM_PROCID must be below the size")
    return found


def _integer(variables: Mapping[str, str], *names: str) -> int:
    """The value of the first of these variables that is set.

    Raises:
        ValueError: it is not a whole number, or none of them is set.
    """
    for name in names:
        if name in variables:
            if not re.fullmatch(r"\d+", variables[name]):
                raise ValueError(f"environment variable {name}={variables[name]!r} is not a whole number")
            return int(variables[name])
    raise ValueError(f"environment variable {' or '.join(names)} is not set, though others of the same launcher are")


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    rank, world = _integer(variables, "RANK"), _integer(variables, "WORLD_SIZE")
    local_rank = _integer(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank
    if world == 1:
        return Environment(rank, world, local_rank)
    if "MEGATRON5D_MEETING" in variables:
        return Environment(rank, world, local_rank, variables["MEGATRON5D_MEETING"])
    if "MASTER_ADDR" not in variables:
        raise ValueError(f"WORLD_SIZE={world} but MASTER_ADDR is not set: the ranks cannot find each other")
    _integer(variables, "MASTER_PORT")
    return Environment(rank, world, local_rank, "env://")


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    rank = _integer(variables, "SLURM_PROCID")
    world = _integer(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    local_rank = _integer(variables, "SLURM_LOCALID")
    if world == 1:
        return Environment(rank, world, local_rank)
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST")
    host = variables.get("MASTER_ADDR") or (first_host(nodes) if nodes else None)
    if host is None:
        raise ValueError(
            f"{world} ranks, and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST says where they meet; "
            "set MASTER_ADDR"
        )
    if "MASTER_PORT" in variables:
        port = _integer(variables, "MASTER_PORT")
    else:
        number = _integer(variables, "SLURM_JOB_ID") + _integer(variables, "SLURM_STEP_ID")
        port = _FIRST_PORT + number % _NUM_PORTS
    return Environment(rank, world, local_rank, f"tcp://{host}:{port}")


def first_host(node_list: str) -> str:
    """The first node of SLURM's compressed list: "gpu[07-11,20],login1" gives "gpu07".

    Raises:
        ValueError: the list names no node.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", node_list)
    if first is None:
        raise ValueError(f"SLURM's node list is {node_list!r}: no host in it")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def slurm_job(variables: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The id of the SLURM job that this process belongs to ("" outside SLURM), and how often the job was requeued."""
    restarts = variables.get("SLURM_RESTART_COUNT", "")
    return variables.get("SLURM_JOB_ID", ""), int(restarts) if restarts.isdigit() else 0


def restarted_job(variables: Mapping[str, str] = os.environ) -> str:
    """The id of the SLURM job if its ranks were started again with the same command, by SLURM or torchrun; else ""."""
    job, restarts = slurm_job(variables)
    again = variables.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return job if restarts or again else ""

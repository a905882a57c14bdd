"""Compares losses of several ranks over NCCL with those of one rank, by running pretrain.py.

Where there are fewer GPUs than ranks, ranks share them: each is given another host id, because NCCL
refuses two ranks on one GPU of a host, and they communicate over the loopback interface. This says
nothing about speed. It shows whether ranks wait for each other in the right order, and whether
a run meets the demands of CUDA and NCCL.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.tools.bench.processes import (
    OUT_OF_TIME,
    finish_program,
    kill_program,
    start_program,
)
from megatron5d.tools.bench.results import Figures

PRETRAIN = Path(__file__).resolve().parents[2] / "pretrain.py"
TOLERANCE = 2e-3  # of the loss: bfloat16 sums in another order, after four steps
SMALL = (
    "train.steps=4 train.gbs=4 train.seq_len=1024 precision.dtype=bf16 optim.lr=1e-4 "
    "model.num_layers=4 model.hidden_size=1024 model.num_heads=16 model.vocab_size=512 "
    "train.cuda_graph=phases log.every=1"
)
DENSE = "model=llama3_1b model.num_kv_heads=8 model.ffn_hidden_size=2048"
EXPERTS = "model=qwen3_30b_a3b model.num_kv_heads=4 model.num_experts=16 moe.planned_imbalance=2.0"
TP_2 = "parallel.tp=2 parallel.sp=true"
LAYOUTS = {  # number of ranks, overrides
    "dense": {
        "pp 2": (2, "parallel.pp=2 pipeline.schedule=zb_h1"),
        "ZeRO-3": (2, "parallel.zero=3"),
        "tp 2, sp": (2, TP_2),
        "cp 2": (2, "parallel.cp=2"),
        "DualPipe": (2, "parallel.pp=2 pipeline.schedule=dualpipe"),
        "tp 2, fused": (2, f"{TP_2} parallel.tp_overlap=fused train.cuda_graph=none"),
    },
    "experts": {
        "ep 2": (2, "parallel.ep=2 moe.exchange=planned"),
        "pp 2, ep 2": (4, "parallel.pp=2 parallel.ep=2 pipeline.schedule=zb_h1"),
    },
}


def compared(folder: Path, deadline: float) -> Iterator[tuple[str, Figures]]:
    """Trains on one rank and on each layout, and yields how far their losses differ.

    Args:
        folder: for tokens and logs.
        deadline: in `time.monotonic()`.
    """
    tokens = _write_tokens(folder / "tokens")
    for kind, model in (("dense", DENSE), ("experts", EXPERTS)):
        one_rank = [*f"{model} {SMALL}".split(), tokens]
        expected = _losses(one_rank, 1, folder, deadline)
        if isinstance(expected, str):
            yield f"{kind}, one rank", {"unavailable": expected}
            continue
        for name, (ranks, overrides) in LAYOUTS[kind].items():
            if time.monotonic() > deadline:
                return
            losses = _losses([*one_rank, *overrides.split()], ranks, folder, deadline)
            if isinstance(losses, str):
                yield f"{kind}, {name}", {"unavailable": losses}
            else:
                off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
                right = off <= TOLERANCE * expected[0]
                yield f"{kind}, {name}", {"right": right, "difference": off}


def _write_tokens(prefix: Path) -> str:
    """Writes a dataset, and returns the override that names it."""
    writer, generator = IndexedWriter(prefix, np.dtype(np.uint16)), np.random.default_rng(0)
    for _ in range(64):
        writer.add_document(generator.integers(1, 500, 1024))
    writer.finalize()
    return f"data.train=[{prefix}]"


def _losses(
    overrides: Sequence[str], ranks: int, folder: Path, deadline: float
) -> list[float] | str:
    """Losses of all steps, or the reason why there are none."""
    log = folder / "steps.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(PRETRAIN), *overrides, f"log.jsonl={log}"]
    programs = [start_program(["env", *variables, *command]) for variables in _environments(ranks)]
    failed = None
    try:
        # the other ranks would wait endlessly for one that has failed
        while time.monotonic() < deadline:
            failed = next((program for program in programs if program.poll()), None)
            if failed or all(program.poll() is not None for program in programs):
                break
            time.sleep(0.1)
    finally:
        for program in programs:
            kill_program(program)
    results = {program: finish_program(program, time.monotonic() + 10) for program in programs}
    if failed:
        return results[failed][1]
    if any(code != 0 for code, _ in results.values()):
        return OUT_OF_TIME
    records = map(json.loads, log.read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def _environments(ranks: int) -> list[list[str]]:
    """Variables of each rank, as NAME=value."""
    if ranks == 1:
        return [[]]
    gpus = torch.cuda.device_count()
    # the system gives a free port
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = [
            "MASTER_ADDR=127.0.0.1",
            f"MASTER_PORT={server.getsockname()[1]}",
            f"WORLD_SIZE={ranks}",
        ]
    if gpus < ranks:
        # NCCL takes ranks of different hosts for ranks on different GPUs
        shared += [
            "NCCL_NET=Socket",
            "NCCL_SOCKET_IFNAME=lo",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
        ]
    host_ids = [[f"NCCL_HOSTID=rank{rank}"] if gpus < ranks else [] for rank in range(ranks)]
    return [
        [*shared, f"RANK={rank}", f"LOCAL_RANK={rank % gpus}", *host_ids[rank]]
        for rank in range(ranks)
    ]

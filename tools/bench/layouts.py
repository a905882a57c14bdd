"""Whether several ranks train as one does: losses of layouts over NCCL, by pretrain.py.

Where there are fewer GPUs than ranks, they share them: NCCL, which refuses that within a host, is
told that each rank has a host of its own, and sends over the loopback. It says nothing about speed,
but whether they wait for each other in the right order, and whether what CUDA and NCCL demand of a
run is met.
"""

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.tools.bench.programs import ended, killed, started

PRETRAIN = Path(__file__).resolve().parents[2] / "pretrain.py"
CLOSE = 2e-3  # of the loss: bfloat16 sums in another order, after four steps
SMALL = [
    "train.steps=4",
    "train.gbs=4",
    "train.seq_len=1024",
    "precision.dtype=bf16",
    "optim.lr=1e-4",
    "model.num_layers=4",
    "model.hidden_size=1024",
    "model.num_heads=16",
    "model.vocab_size=512",
    "train.cuda_graph=phases",
    "log.every=1",
]
DENSE = ["model=llama3_1b", "model.num_kv_heads=8", "model.ffn_hidden_size=2048"]
EXPERTS = [
    "model=qwen3_30b_a3b",
    "model.num_kv_heads=4",
    "model.num_experts=16",
    "moe.planned_imbalance=2.0",
]
LAYOUTS = {
    "dense": {
        "pp 2": (2, ["parallel.pp=2", "pipeline.schedule=zb_h1"]),
        "ZeRO-3": (2, ["parallel.zero=3"]),
        "tp 2, sp": (2, ["parallel.tp=2", "parallel.sp=true"]),
        "cp 2": (2, ["parallel.cp=2"]),
        "DualPipe": (2, ["parallel.pp=2", "pipeline.schedule=dualpipe"]),
        "tp 2, fused": (
            2,
            [
                "parallel.tp=2",
                "parallel.sp=true",
                "parallel.tp_overlap=fused",
                "train.cuda_graph=none",
            ],
        ),
    },
    "experts": {
        "ep 2": (2, ["parallel.ep=2", "moe.exchange=planned"]),
        "pp 2, ep 2": (4, ["parallel.pp=2", "parallel.ep=2", "pipeline.schedule=zb_h1"]),
    },
}


def compared(folder: Path, until: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Trains one rank and each layout; returns how far the losses are apart.

    Args:
        folder: for tokens and logs.
        until: of `time.monotonic()`.
    """
    tokens = _write_tokens(folder / "tokens")
    for kind, model in (("dense", DENSE), ("experts", EXPERTS)):
        alone = _losses([*model, *SMALL, tokens], 1, folder, until)
        if isinstance(alone, str):
            yield f"{kind}, one rank", {"unavailable": alone}
            continue
        for name, (ranks, overrides) in LAYOUTS[kind].items():
            if time.monotonic() > until:
                return
            found = _losses([*model, *SMALL, tokens, *overrides], ranks, folder, until)
            if isinstance(found, str):
                yield f"{kind}, {name}", {"unavailable": found}
            else:
                off = max(abs(a - b) for a, b in zip(found, alone, strict=True))
                yield f"{kind}, {name}", {"right": off <= CLOSE * alone[0], "difference": off}


def _write_tokens(prefix: Path) -> str:
    """Writes a dataset, and returns the override that names it."""
    writer, drawn = IndexedWriter(prefix, np.dtype(np.uint16)), np.random.default_rng(0)
    for _ in range(64):
        writer.add_document(drawn.integers(1, 500, 1024))
    writer.finalize()
    return f"data.train=[{prefix}]"


def _losses(overrides: Sequence[str], ranks: int, folder: Path, until: float) -> list[float] | str:
    """Returns the loss of every step, or why there are none."""
    log = folder / "steps.jsonl"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(PRETRAIN), *overrides, f"log.jsonl={log}"]
    programs = [started(["env", *variables, *command]) for variables in _environments(ranks)]
    failed: list[Any] = []
    try:  # one that fails leaves the others waiting
        while (
            time.monotonic() < until
            and not failed
            and any(program.poll() is None for program in programs)
        ):
            time.sleep(0.1)
            failed = [program for program in programs if program.poll()]
    finally:
        for program in programs:
            killed(program)
    ends = {program: ended(program, time.monotonic() + 10) for program in programs}
    if failed:
        return ends[failed[0]][1]
    if any(code != 0 for code, _ in ends.values()):
        return "the time is up"
    return [
        line["loss"] for line in map(json.loads, log.read_text().splitlines()) if "loss" in line
    ]


def _environments(ranks: int) -> list[list[str]]:
    """Returns the variables that each rank has besides its own, NAME=value."""
    if ranks == 1:
        return [[]]
    gpus = torch.cuda.device_count()
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = [
            "MASTER_ADDR=127.0.0.1",
            f"MASTER_PORT={server.getsockname()[1]}",
            f"WORLD_SIZE={ranks}",
        ]
    if gpus < ranks:
        shared += [
            "NCCL_NET=Socket",
            "NCCL_SOCKET_IFNAME=lo",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
        ]
    apart = [[f"NCCL_HOSTID=rank{rank}"] if gpus < ranks else [] for rank in range(ranks)]
    return [
        [*shared, f"RANK={rank}", f"LOCAL_RANK={rank % gpus}", *apart[rank]]
        for rank in range(ranks)
    ]

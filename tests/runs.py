"""Whole training runs on forked ranks, from a Config to files, for tests of resuming and of the
loop itself."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from rank_pool import run_on_pool

from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import load_tensors
from megatron5d.checkpoint.reader import Reader
from megatron5d.config.schema import Config
from megatron5d.data.index_format import dtype_for_vocab
from megatron5d.data.indexed_dataset import IndexedWriter
from megatron5d.topology.process import Process
from pretrain import plan_and_train


def write_corpus(prefix: Path, *, vocab_size: int, documents: int = 60, seed: int = 0) -> str:
    """A dataset that can be learnt: each token has four successors. Documents end with token 0."""
    rng = np.random.default_rng(seed)
    successors = np.random.default_rng(1).integers(1, vocab_size, (vocab_size, 4))
    writer = IndexedWriter(prefix, dtype_for_vocab(vocab_size))
    for _ in range(documents):
        ids = [int(rng.integers(1, vocab_size))]
        for _ in range(int(rng.integers(5, 60))):
            ids.append(int(successors[ids[-1], rng.integers(4)]))
        writer.add_document(np.array([*ids, 0]))
    writer.finalize()
    return str(prefix)


def train_on_ranks(config: Config, world: int, timeout: float = 120) -> list[int]:
    """Runs the training loop; returns each rank's exit code."""
    return run_on_pool(_train, world, config, timeout=timeout)


def _train(rank: int, world: int, config: Config) -> int:
    return plan_and_train(config, Process(rank, world, rank, torch.device("cpu")))


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(path: Path) -> list[tuple[int, float, float, float]]:
    """(step, loss, grad_norm, lr) of every record."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records(path)]


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, read in this process."""
    entries = Reader(folder).tensors()
    full = {
        key: torch.full(entry.size, float("nan"), dtype=entry.dtype)
        for key, entry in entries.items()
    }
    parts = {key: ShardedTensor(t.shape, [((0,) * t.ndim, t)], t.dtype) for key, t in full.items()}
    load_tensors(folder, parts)
    return full

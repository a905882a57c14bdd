"""Tools run in this process, and random checkpoints for them."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.tools import logits
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.state import Progress

SIZES = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def run(tool: ModuleType, command: str) -> int:
    """Exit code of a tool on a command line."""
    return tool.main(shlex.split(command))


def computed_logits(
    checkpoint: Path, ids: np.ndarray, folder: Path, options: str = ""
) -> np.ndarray:
    """Logits that tools/logits.py computes of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "ids.npy", ids)
    out = folder / "logits.npy"
    command = f"--checkpoint {checkpoint} --tokens {folder}/ids.npy --out {out} {options}"
    assert run(logits, command) == 0
    return np.load(out)


def shards_of(tensors: Mapping[str, Tensor], rows: int | None = None) -> dict[str, ShardedTensor]:
    """Tensors in global coordinates: each one shard, or two, cut after some rows."""
    shards = {}
    for key, x in tensors.items():
        borders = [0, len(x)] if rows is None or not x.dim() else [0, rows, len(x)]
        parts = [
            ((first, *(0,) * (x.dim() - 1)), x[first:end])
            for first, end in zip(borders, borders[1:])
        ]
        shards[key] = ShardedTensor(x.shape, parts, x.dtype)
    return shards


def random_weights(config: Config, seed: int = 0, std: float = 1.0) -> dict[str, Tensor]:
    """Weights of a model by their keys, in its dtype."""
    torch.manual_seed(seed)
    return {
        f"model.{spec_of(parameter).name}": (std * torch.randn(spec_of(parameter).shape)).to(
            parameter.dtype
        )
        for parameter in GPT(config, build_mesh(resolve(1)), "cpu").parameters()
    }


def save(
    folder: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    rows: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Saves tensors as a checkpoint; returns the folder of its step."""
    return save_weights(folder, shards_of(tensors, rows), config, progress)

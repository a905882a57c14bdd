"""Checkpoints of step 0, made of weights from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron5d.checkpoint.folder import saved_steps
from megatron5d.checkpoint.load import whole_checkpoint
from megatron5d.checkpoint.save import Saver
from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.train.state import Progress, run_record

_STORED = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}  # FP8 without loss


def widest_dtype(kinds: Iterable[str]) -> str:
    """Returns the dtype that holds tensors of these kinds, spelled as safetensors does, without loss."""
    return max((_STORED.get(kind, "fp32") for kind in kinds), key=["bf16", "fp32", "fp64"].index)


def check_empty(out: Path) -> None:
    """Raises ValueError where a directory already holds checkpoints."""
    if steps := saved_steps(out):
        raise ValueError(f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any")


def save_weights(out: Path, tensors: dict[str, Any], config: Config, progress: Progress | None = None) -> Path:
    """Writes weights as the checkpoint of a step, by default 0; returns its folder."""
    progress = progress or Progress()
    Saver(out, keep=0).save(progress.step, tensors, run_record(progress, to_dict(config)))
    return whole_checkpoint(out, "--out")

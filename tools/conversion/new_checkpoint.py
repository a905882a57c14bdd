"""What every conversion needs to write a new checkpoint, and two that make one of other weights:
the mean of several, and experts from a dense model (upcycling)."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config, saved_steps, step_folder
from megatron5d.checkpoint.load import (
    WEIGHT_PREFIX,
    LazyTensor,
    SavedWeights,
    lazy_tensor,
    resolve_checkpoint,
)
from megatron5d.checkpoint.save import SaveFailed, Saver
from megatron5d.config.checks import run_checks
from megatron5d.config.convert import to_dict
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.model.block_inputs import DTYPES
from megatron5d.topology.init_weights import normal, stream_key
from megatron5d.train.state import Progress, run_record, twin_key

# FP8 without loss
_STORED = {"F64": "fp64", "F32": "fp32", "F16": "fp32", "BF16": "bf16", "F8_E4M3": "bf16"}


def widest_dtype(kinds: Iterable[str]) -> str:
    """Returns the dtype that holds tensors of these kinds, spelled as safetensors does, without
    loss."""
    return max((_STORED.get(kind, "fp32") for kind in kinds), key=["bf16", "fp32", "fp64"].index)


def check_empty(out: Path) -> None:
    """Raises ValueError where a directory already holds checkpoints."""
    if steps := saved_steps(out):
        raise ValueError(
            f"{out} already holds the checkpoint of step {steps[-1]}; give a directory without any"
        )


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Gives a folder within `out` to write to; what is in it moves to `out` at the end, weights
    last, and is removed where writing fails. One that a killed process has left is removed
    first."""
    half = out / "unfinished.tmp"
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    try:
        yield half
        for path in sorted(
            half.iterdir(),
            key=lambda path: (path.is_file(), path.match("*.safetensors*"), path.name),
        ):
            path.rename(out / path.name)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def save_weights(
    out: Path, tensors: dict[str, Any], config: Config, progress: Progress | None = None
) -> Path:
    """Writes weights as the checkpoint of a step, by default 0; returns its folder.

    Raises ConfigError: no model can be built of this configuration. Raises OSError: what is read is
    damaged, or a file cannot be written; names it.
    """
    faults = run_checks(config, 1, files=False)
    if wrong := [
        fault for fault in faults if all(knob.startswith("model.") for knob in fault.knobs)
    ]:
        raise ConfigError(wrong)
    progress = progress or Progress()
    try:
        Saver(out, keep=0).save(progress.step, tensors, run_record(progress, to_dict(config)))
    except SaveFailed as error:  # whose advice is a run's, which has checkpoints before this one
        raise OSError(f"{out} is not written: {error.__cause__}") from error
    return resolve_checkpoint(out, "--out")


def average(args: argparse.Namespace) -> int:
    """Writes the mean of the weights as a checkpoint of step 0, and prints its folder; returns 0.

    Of a run in bf16 the masters are averaged. Sums are in fp64, one part of a tensor at a time.

    Raises ValueError: no whole checkpoint, other tensors than in the first one, weights that do not
    fit the checkpoints, or `out` holds checkpoints.
    """
    check_empty(args.out)
    folders = _folders(args.path, args.last)
    shares = args.weights or [1.0] * len(folders)
    if len(shares) != len(folders) or sum(shares) <= 0:
        raise ValueError(
            f"--weights gives {shares} for {len(folders)} checkpoints; one each, with a sum above 0"
        )
    sources = [SavedWeights(folder, torch.float32, twin_key) for folder in folders]
    first = {name: tuple(each.size) for name, each in sources[0].tensors.items()}
    for folder, source in zip(folders, sources):
        sizes = {name: tuple(each.size) for name, each in source.tensors.items()}
        for name in sorted(first.keys() | sizes.keys()):
            if first.get(name) != sizes.get(name):
                raise ValueError(
                    f"{name} is {first.get(name)} in {folders[0]} and {sizes.get(name)} in {folder}"
                )
    factors = [share / sum(shares) for share in shares]
    tensors = {WEIGHT_PREFIX + name: _mean(name, sources, factors) for name in first}
    print(
        f"wrote {save_weights(args.out, dict(tensors), saved_config(folders[-1]))}: the mean of {len(folders)}"
    )
    return 0


def _folders(paths: list[Path], last: int | None) -> list[Path]:
    """Returns the checkpoints to average: the newest whole one of each path, or the last ones of a
    directory."""
    if last is None:
        return [resolve_checkpoint(path, "PATH") for path in paths]
    if len(paths) != 1:
        raise ValueError(f"--last {last} is of one directory, and {len(paths)} are given")
    steps = saved_steps(paths[0])[-last:]
    if len(steps) < last:
        raise ValueError(f"--last {last}: {paths[0]} holds {len(steps)} whole checkpoints")
    return [step_folder(paths[0], step) for step in steps]


def _mean(name: str, sources: list[SavedWeights], factors: list[float]) -> LazyTensor:
    """Returns the mean of a tensor, in the parts of the first source."""
    saved = sources[0].tensors[name]
    dtype = torch.promote_types(saved.dtype, torch.float32)
    parts = {offset: item.extent for offset, item in saved.items.items()}

    def make(offset: tuple[int, ...]) -> Tensor:
        total = torch.zeros(parts[offset], dtype=torch.float64)
        for source, factor in zip(sources, factors):
            total += factor * source.read(name, offset, parts[offset]).double()
        return total.to(dtype)

    return lazy_tensor(saved.size, parts, dtype, make)


PRINTED = ("num_experts", "top_k", "moe_ffn_hidden_size", "first_k_dense", "routed_scaling_factor")


def upcycle(args: argparse.Namespace) -> int:
    """Writes a checkpoint of step 0, and prints its folder and the overrides of its architecture;
    returns 0. Raises
    ValueError: no whole checkpoint, one that cannot become such a mixture, or `out` holds
        checkpoints."""
    check_empty(args.out)
    folder = resolve_checkpoint(args.checkpoint, "--checkpoint")
    config = saved_config(folder)
    sparse = upcycled(
        config.model, args.num_experts, args.top_k, args.granularity, args.first_k_dense
    )
    # of a run in bf16 its masters, with which training continues
    weights = SavedWeights(folder, DTYPES["fp32"], twin_key)
    tensors = upcycled_weights(weights, config.model, sparse, args.noise, args.seed)
    written = Config(model=sparse, precision=config.precision, data=config.data)
    folder = save_weights(args.out, dict(tensors), written)
    print(
        f"wrote {folder}: {' '.join(f'model.{name}={getattr(sparse, name)}' for name in PRINTED)}"
    )
    return 0


Shapes = dict[tuple[int, ...], tuple[int, ...]]  # offset -> shape


def upcycled(
    dense: ModelConfig, num_experts: int, top_k: int, granularity: int = 1, first_k_dense: int = 0
) -> ModelConfig:
    """Returns the architecture of the mixture.

    Args:
        num_experts, top_k: of every layer from `first_k_dense` on, slices counted one by one.
        granularity: slices that one copy of the MLP is cut into.
        first_k_dense: layers at the bottom that stay as they are.

    Raises:
        ValueError: there are experts already, or the numbers do not fit together; names the nearest
            that do.
    """
    f = dense.ffn_hidden_size
    troubles = []
    if dense.num_experts:
        troubles.append(f"the model has {dense.num_experts} experts already: give a dense one")
    if dense.mlp_bias:
        troubles.append("model.mlp_bias = true, and biases are not copied")
    if granularity < 1:
        raise ValueError(f"granularity = {granularity} is below 1")
    if f % granularity:
        troubles.append(f"granularity = {granularity} does not divide model.ffn_hidden_size = {f}")
    for name, value in (("num-experts", num_experts), ("top-k", top_k)):
        if value < 1:
            troubles.append(f"{name} = {value} is below 1")
        elif value % granularity:
            nearest = max(granularity, value // granularity * granularity)
            troubles.append(
                f"{name} = {value} is not a multiple of granularity = {granularity}; nearest: {nearest}"
            )
    if top_k > num_experts:
        troubles.append(f"top-k = {top_k} is more than num-experts = {num_experts}")
    if not 0 <= first_k_dense < dense.num_layers:
        troubles.append(
            f"first-k-dense = {first_k_dense} leaves none of {dense.num_layers} layers; at most "
            f"{dense.num_layers - 1}"
        )
    if troubles:
        raise ValueError("; ".join(troubles))
    return replace(
        dense,
        num_experts=num_experts,
        top_k=top_k,
        moe_ffn_hidden_size=f // granularity,
        first_k_dense=first_k_dense,
        moe_interval=1,
        moe_layers=None,
        router_score="softmax",
        norm_topk_prob=True,
        routed_scaling_factor=float(granularity),
        num_groups=1,
        top_groups=1,
        group_score="max",
    )


def upcycled_weights(
    saved: SavedWeights,
    dense: ModelConfig,
    sparse: ModelConfig,
    noise: float = 0.0,
    seed: int = 1234,
) -> dict[str, LazyTensor]:
    """Returns the mixture's weights as a checkpoint takes them, each part made when it is written.

    Args:
        saved: a whole checkpoint of the dense model.
        dense, sparse: its architecture, and what `upcycled` makes of it.
        noise: standard deviation of what is added to the experts' weights, in standard deviations
            of the MLP's own.
    """
    made = {}
    mlps = {
        f"layers.{i}.mlp.{part}.weight"
        for i in blocks(dense)
        if is_moe(sparse, i)
        for part in ("up", "down")
    }
    for name, entry in saved.tensors.items():
        if name not in mlps:
            shape, zero = tuple(entry.size), (0,) * len(entry.size)

            def same(offset: tuple[int, ...], name=name, shape=shape) -> Tensor:
                return saved.read(name, offset, shape)

            made[WEIGHT_PREFIX + name] = lazy_tensor(shape, {zero: shape}, entry.dtype, same)
    h, inner = sparse.hidden_size, sparse.expert_hidden_size
    slices, parts = dense.ffn_hidden_size // inner, 2 if dense.gated else 1
    shapes = {"up": (parts * inner, h), "down": (h, inner)}
    for i in (i for i in blocks(dense) if is_moe(sparse, i)):
        for part, shape in shapes.items():
            source, name = f"layers.{i}.mlp.{part}.weight", f"layers.{i}.experts.{part}.weight"
            dtype = saved.tensors[source].dtype

            def expert(
                offset: tuple[int, ...], source=source, name=name, shape=shape, part=part
            ) -> Tensor:
                e, matrix = offset[0], saved.read(source, (0, 0), tuple(saved.tensors[source].size))
                own = (
                    _slice(matrix, e % slices, slices, parts)
                    if part == "up"
                    else matrix.chunk(slices, 1)[e % slices]
                )
                if noise:
                    own = own + noise * matrix.std() * _normal(seed, f"{name}/{e}", own.shape).to(
                        own.dtype
                    )
                return own.reshape(1, *shape).contiguous()

            pieces: Shapes = {(e, 0, 0): (1, *shape) for e in range(sparse.num_experts)}
            made[WEIGHT_PREFIX + name] = lazy_tensor(
                (sparse.num_experts, *shape), pieces, dtype, expert
            )
        made[WEIGHT_PREFIX + f"layers.{i}.router.weight"] = _router(
            sparse, f"layers.{i}.router.weight", slices, seed, dtype
        )
    return made


def _slice(up: Tensor, s: int, slices: int, parts: int) -> Tensor:
    """Returns slice s of the gate rows, then of the up rows."""
    return torch.cat([rows.chunk(slices)[s] for rows in up.chunk(parts)])


def _router(
    sparse: ModelConfig, name: str, slices: int, seed: int, dtype: torch.dtype
) -> LazyTensor:
    """Returns `[E, h]`: a random row for each copy, the same for all slices of it."""
    shape = (sparse.num_experts, sparse.hidden_size)

    def rows(_: tuple[int, ...]) -> Tensor:
        copies = _normal(seed, name, (shape[0] // slices, shape[1]))
        return (sparse.init_std * copies).repeat_interleave(slices, 0).to(dtype)

    return lazy_tensor(shape, {(0, 0): shape}, dtype, rows)


def _normal(seed: int, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return normal(stream_key(seed, name), index).view(shape)

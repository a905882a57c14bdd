"""Upcycling: a mixture of experts that computes what a dense model does."""

from argparse import Namespace
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron5d.checkpoint.folder import saved_config
from megatron5d.checkpoint.layout import LazyTensor
from megatron5d.checkpoint.load import WEIGHT_PREFIX, SavedWeights, resolve_checkpoint
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import Config, ModelConfig
from megatron5d.tools.conversion.new_checkpoint import (
    print_written,
    save_weights,
    writes_checkpoint,
)
from megatron5d.topology.init_weights import normal, stream_key
from megatron5d.train.state import twin_key

Shape = tuple[int, ...]
PRINTED = ("num_experts", "top_k", "moe_ffn_hidden_size", "first_k_dense", "routed_scaling_factor")


@writes_checkpoint
def upcycle(args: Namespace) -> None:
    """Writes a checkpoint of step 0, and prints its folder and the overrides of its architecture.

    Raises:
        ValueError: there is no complete checkpoint, it cannot become such a mixture, or `out` has
            checkpoints.
    """
    folder = resolve_checkpoint(args.checkpoint, "--checkpoint")
    config = saved_config(folder)
    sparse = upcycled(
        config.model, args.num_experts, args.top_k, args.granularity, args.first_k_dense
    )
    # a run in bf16 continues with its master weights
    weights = SavedWeights(folder, torch.float32, twin_key)
    upcycling = Upcycling(weights, config.model, sparse, args.noise, args.seed)
    written = Config(model=sparse, precision=config.precision, data=config.data)
    folder = save_weights(args.out, dict(upcycling.tensors()), written)
    overrides = " ".join(f"model.{name}={getattr(sparse, name)}" for name in PRINTED)
    print_written(folder, written, f"a dense model, now with {overrides}", None)


def upcycled(
    dense: ModelConfig, num_experts: int, top_k: int, granularity: int, first_k_dense: int
) -> ModelConfig:
    """Architecture of the mixture.

    Args:
        num_experts, top_k: of every layer from `first_k_dense` on; each slice counts. Both, and
            the granularity, are at least 1.
        granularity: slices of each copy of the MLP.
        first_k_dense: first layers, which stay dense.

    Raises:
        ValueError: the model has experts, or the numbers do not fit together; names the nearest
            that do.
    """
    f = dense.ffn_hidden_size
    errors = []
    if dense.num_experts:
        errors.append(f"the model has {dense.num_experts} experts already: give a dense one")
    if f % granularity:
        errors.append(f"--granularity {granularity} does not divide model.ffn_hidden_size = {f}")
    for option, value in (("--num-experts", num_experts), ("--top-k", top_k)):
        if value % granularity:
            nearest = max(granularity, value // granularity * granularity)
            errors.append(
                f"{option} requires a multiple of --granularity {granularity} (got {value}); "
                f"nearest: {nearest}"
            )
    if top_k > num_experts:
        errors.append(f"--top-k {top_k} is above --num-experts {num_experts}")
    if first_k_dense >= dense.num_layers:
        errors.append(
            f"--first-k-dense {first_k_dense} leaves no layer for experts: "
            f"at most {dense.num_layers - 1}"
        )
    if errors:
        raise ValueError("; ".join(errors))
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


@dataclass(frozen=True)
class Upcycling:
    """The weights of a mixture, computed as they are written."""

    saved: SavedWeights  # of a complete checkpoint of the dense model
    dense: ModelConfig
    sparse: ModelConfig  # what `upcycled` makes of it
    noise: float  # added to the experts' weights, in standard deviations of the MLP's own
    seed: int

    @property
    def slices(self) -> int:
        """Slices of each copy of the MLP."""
        return self.dense.ffn_hidden_size // self.sparse.expert_hidden_size

    def tensors(self) -> dict[str, LazyTensor]:
        """All weights by key."""
        layers = [i for i in blocks(self.dense) if is_moe(self.sparse, i)]
        kinds = ("weight", "bias") if self.dense.mlp_bias else ("weight",)
        matrices = [f"{matrix}.{kind}" for matrix in ("up", "down") for kind in kinds]
        mlps = {f"layers.{i}.mlp.{matrix}" for i in layers for matrix in matrices}
        tensors = {name: self._copy(name) for name in self.saved.tensors if name not in mlps}
        for i in layers:
            for matrix in matrices:
                tensors[f"layers.{i}.experts.{matrix}"] = self._experts(i, matrix)
            tensors[f"layers.{i}.router.weight"] = self._router(i)
        return {WEIGHT_PREFIX + name: tensor for name, tensor in tensors.items()}

    def _copy(self, name: str) -> LazyTensor:
        entry = self.saved.tensors[name]
        shape = tuple(entry.size)
        shards = {(0,) * len(shape): shape}
        return LazyTensor(
            shape, shards, entry.dtype, lambda offset: self.saved.read(name, offset, shape)
        )

    def _experts(self, i: int, matrix: str) -> LazyTensor:
        """Experts `[E, ...]` of a layer: slices of the rows of `up`, of the columns of
        `down.weight`, and an equal share of `down.bias`, which a copy's slices add up."""
        source, name = f"layers.{i}.mlp.{matrix}", f"layers.{i}.experts.{matrix}"
        entry, slices = self.saved.tensors[source], self.slices
        dense_shape = tuple(entry.size)

        def expert(offset: Shape) -> Tensor:
            e, dense = offset[0], self.saved.read(source, (0,) * len(dense_shape), dense_shape)
            if matrix == "down.weight":
                values = dense.chunk(slices, 1)[e % slices]
            elif matrix == "down.bias":
                values = dense / slices
            else:  # gate rows, then up rows
                halves = dense.chunk(2 if self.dense.gated else 1)
                values = torch.cat([half.chunk(slices)[e % slices] for half in halves])
            if self.noise and matrix.endswith("weight"):
                noise = _normal(self.seed, f"{name}/{e}", values.shape).to(values.dtype)
                values = values + self.noise * dense.std() * noise
            return values[None].contiguous()

        shape = list(dense_shape)
        if matrix != "down.bias":
            shape[1 if matrix == "down.weight" else 0] //= slices
        num_experts, first = self.sparse.num_experts, (0,) * len(shape)
        shards: dict[Shape, Shape] = {(e, *first): (1, *shape) for e in range(num_experts)}
        return LazyTensor((num_experts, *shape), shards, entry.dtype, expert)

    def _router(self, i: int) -> LazyTensor:
        """Router `[E, h]`: a random row for each copy, the same for all of its slices."""
        name, shape = (
            f"layers.{i}.router.weight",
            (self.sparse.num_experts, self.sparse.hidden_size),
        )
        dtype = self.saved.tensors[f"layers.{i}.mlp.down.weight"].dtype

        def rows(_: Shape) -> Tensor:
            copies = _normal(self.seed, name, (shape[0] // self.slices, shape[1]))
            return (self.sparse.init_std * copies).repeat_interleave(self.slices, 0).to(dtype)

        return LazyTensor(shape, {(0, 0): shape}, dtype, rows)


def _normal(seed: int, name: str, shape: Shape | torch.Size) -> Tensor:
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return normal(stream_key(seed, name), index).view(shape)

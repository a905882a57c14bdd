"""A dense checkpoint as a mixture of experts that computes the same: every expert starts as a copy of the MLP.

With weights that sum to 1 the copies' weighted sum is the MLP's output, whichever are chosen. With a granularity of G
an expert is one of G slices of a copy's inner features: expert c·G + s is slice s of copy c. The G slices of a copy
share their row of the router, so their scores are equal and they are chosen together; each weighs 1/G of its copy's
weight, which model.routed_scaling_factor = G makes up for. Noise, where wanted, tells the copies apart.
Source: Komatsuzaki et al. 2022 (arXiv:2212.05055); slices, shared rows: He et al. 2024 (arXiv:2410.07524), section 3.
"""

from dataclasses import replace

import torch
from torch import Tensor

from megatron5d.checkpoint.load import PREFIX, LazyTensor, SavedWeights, lazy_tensor
from megatron5d.config.derived import blocks, is_moe
from megatron5d.config.schema import ModelConfig
from megatron5d.topology.init_weights import normal, stream_key

Shapes = dict[tuple[int, ...], tuple[int, ...]]  # offset -> shape


def upcycled(
    dense: ModelConfig, num_experts: int, top_k: int, granularity: int = 1, first_k_dense: int = 0
) -> ModelConfig:
    """Returns the architecture of the mixture.

    Args:
        dense: without experts.
        num_experts, top_k: of every layer from `first_k_dense` on, slices counted one by one.
        granularity: slices that one copy of the MLP is cut into.
        first_k_dense: layers at the bottom that stay as they are.

    Raises:
        ValueError: there are experts already, or the numbers do not fit together; names the nearest that do.
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
            troubles.append(f"{name} = {value} is not a multiple of granularity = {granularity}; nearest: {nearest}")
    if top_k > num_experts:
        troubles.append(f"top-k = {top_k} is more than num-experts = {num_experts}")
    if not 0 <= first_k_dense < dense.num_layers:
        troubles.append(f"first-k-dense = {first_k_dense} leaves none of {dense.num_layers} layers; at most "
                        f"{dense.num_layers - 1}")  # fmt: skip
    if troubles:
        raise ValueError("; ".join(troubles))
    return replace(
        dense, num_experts=num_experts, top_k=top_k, moe_ffn_hidden_size=f // granularity, first_k_dense=first_k_dense,
        moe_interval=1, moe_layers=None, router_score="softmax", norm_topk_prob=True,
        routed_scaling_factor=float(granularity), num_groups=1, top_groups=1, group_score="max",
    )  # fmt: skip


def upcycled_weights(
    saved: SavedWeights, dense: ModelConfig, sparse: ModelConfig, noise: float = 0.0, seed: int = 1234
) -> dict[str, LazyTensor]:
    """Returns the mixture's weights as a checkpoint takes them, each part made when it is written.

    Args:
        saved: a whole checkpoint of the dense model.
        dense, sparse: its architecture, and what `upcycled` makes of it.
        noise: standard deviation of what is added to the experts' weights, in standard deviations of the MLP's own.
    """
    made = {}
    mlps = {f"layers.{i}.mlp.{part}.weight" for i in blocks(dense) if is_moe(sparse, i) for part in ("up", "down")}
    for name, entry in saved.tensors.items():
        if name not in mlps:
            shape, zero = tuple(entry.size), (0,) * len(entry.size)

            def same(offset: tuple[int, ...], name=name, shape=shape) -> Tensor:
                return saved.read(name, offset, shape)

            made[PREFIX + name] = lazy_tensor(shape, {zero: shape}, entry.dtype, same)
    h, inner = sparse.hidden_size, sparse.expert_hidden_size
    slices, parts = dense.ffn_hidden_size // inner, 2 if dense.gated else 1
    shapes = {"up": (parts * inner, h), "down": (h, inner)}
    for i in (i for i in blocks(dense) if is_moe(sparse, i)):
        for part, shape in shapes.items():
            source, name = f"layers.{i}.mlp.{part}.weight", f"layers.{i}.experts.{part}.weight"
            dtype = saved.tensors[source].dtype

            def expert(offset: tuple[int, ...], source=source, name=name, shape=shape, part=part) -> Tensor:
                e, matrix = offset[0], saved.read(source, (0, 0), tuple(saved.tensors[source].size))
                own = _slice(matrix, e % slices, slices, parts) if part == "up" else matrix.chunk(slices, 1)[e % slices]
                if noise:
                    own = own + noise * matrix.std() * _normal(seed, f"{name}/{e}", own.shape).to(own.dtype)
                return own.reshape(1, *shape).contiguous()

            pieces: Shapes = {(e, 0, 0): (1, *shape) for e in range(sparse.num_experts)}
            made[PREFIX + name] = lazy_tensor((sparse.num_experts, *shape), pieces, dtype, expert)
        made[PREFIX + f"layers.{i}.router.weight"] = _router(sparse, f"layers.{i}.router.weight", slices, seed, dtype)
    return made


def _slice(up: Tensor, s: int, slices: int, parts: int) -> Tensor:
    """Returns slice s of the gate rows, then of the up rows."""
    return torch.cat([rows.chunk(slices)[s] for rows in up.chunk(parts)])


def _router(sparse: ModelConfig, name: str, slices: int, seed: int, dtype: torch.dtype) -> LazyTensor:
    """Returns `[E, h]`: a random row for each copy, the same for all slices of it."""
    shape = (sparse.num_experts, sparse.hidden_size)

    def rows(_: tuple[int, ...]) -> Tensor:
        copies = _normal(seed, name, (shape[0] // slices, shape[1]))
        return (sparse.init_std * copies).repeat_interleave(slices, 0).to(dtype)

    return lazy_tensor(shape, {(0, 0): shape}, dtype, rows)


def _normal(seed: int, name: str, shape: tuple[int, ...] | torch.Size) -> Tensor:
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return normal(stream_key(seed, name), index).view(shape)

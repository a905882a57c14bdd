"""Reads Megatron-LM's older format: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each
model-parallel rank."""

from __future__ import annotations

import itertools
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron5d.checkpoint.megatron.files import (
    Source,
    concatenated,
    in_memory,
    load_inert,
    saved_args,
)
from megatron5d.checkpoint.megatron.names import layer_name

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_NUMBERED_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
# TransformerEngine's grouped linear layers
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")
_COLUMN_PARALLEL = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$"
)
_ROW_PARALLEL = re.compile(r"(linear_proj|linear_fc2)\.weight$")


def read_rank_files(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and weights (kind "") of a folder.

    Raises:
        ValueError: a file is missing or damaged, or the layout is not supported.
    """
    states = {
        match.groups(): load_inert(path / "model_optim_rng.pt")
        for path in sorted(folder.iterdir())
        if (match := _RANK.match(path.name))
    }
    state = next(iter(states.values()))
    args = saved_args(state, folder)
    tp, pp, ep = (_parallel_size(args, dim) for dim in ("tensor", "pipeline", "expert"))
    etp = getattr(args, "expert_tensor_parallel_size", None) or tp
    if etp != tp:
        raise ValueError(
            f"{folder}: expert_tensor_parallel_size = {etp}: only tensor_model_parallel_size = "
            f"{tp} is supported; save it with --ckpt-format torch_dist"
        )
    if float(state.get("checkpoint_version", 0)) < 3:
        raise ValueError(
            f"{folder}: checkpoint_version below 3, of before Megatron-Core, is not supported"
        )
    ranks = {_rank_of(key, pp): state for key, state in states.items()}
    expected = itertools.product(range(tp), range(pp), range(ep))
    if missing := [rank for rank in expected if rank not in ranks]:
        raise ValueError(
            f"{folder} has no file of tensor, pipeline and expert rank {missing[0]} "
            f"({len(missing)} missing)"
        )
    sources = dict[str, Source]()
    for e in range(ep):
        shards = [_stage_tensors([ranks[t, p, e] for p in range(pp)], e, args) for t in range(tp)]
        for name in shards[0]:
            sources.setdefault(name, _join_shards(name, [shard[name] for shard in shards], args))
    return args, int(state.get("iteration", 0)), {"": sources}


def _parallel_size(args: Namespace, dim: str) -> int:
    return getattr(args, f"{dim}_model_parallel_size", 1) or 1


def _rank_of(key: tuple[str | None, ...], pp: int) -> tuple[int, int, int]:
    """Tensor, pipeline and expert rank of a folder's name, which omits the last two where there is
    only one."""
    tensor, *numbers = [int(number) for number in key if number is not None]
    pipeline = numbers.pop(0) if pp > 1 and numbers else 0
    return tensor, pipeline, numbers.pop(0) if numbers else 0


def _stage_tensors(
    stages: list[dict[str, Any]], expert_rank: int, args: Namespace
) -> dict[str, Source]:
    """One tensor rank's shards; layers are counted through all stages, experts through all
    ranks."""
    sources: dict[str, Source] = {}
    chunks = ["model"]
    if "model" not in stages[0]:
        chunks = [f"model{v}" for v in range(len(stages[0])) if f"model{v}" in stages[0]]
    first = 0
    for model in (stage[chunk] for chunk in chunks for stage in stages):
        layers = {int(match[1]) for name in model if (match := _NUMBERED_LAYER.match(name))}
        for name, value in model.items():
            if isinstance(value, Tensor):
                named = _named_sources(name, value, first, expert_rank, args)
                for full_name, source in named.items():
                    sources.setdefault(full_name, source)
        first += len(layers)
    return sources


def _named_sources(
    name: str, value: Tensor, first: int, expert_rank: int, args: Namespace
) -> dict[str, Source]:
    """A stored tensor under our spelling of its name; Megatron's old grouped experts one by one."""
    match = _NUMBERED_LAYER.match(name)
    if not match:
        return {name: in_memory(value)}
    layer, name = first + int(match[1]), match[2]
    num_local = (getattr(args, "num_experts", None) or 0) // _parallel_size(args, "expert")
    first_expert = expert_rank * num_local
    if expert := _LOCAL_EXPERT.match(name):
        name = f"mlp.experts.{first_expert + int(expert[1])}.{expert[2]}"
    elif expert := _GROUPED.match(name):
        name = f"mlp.experts.{first_expert + int(expert[2])}.{expert[1]}"
    elif name in ("mlp.experts.weight1", "mlp.experts.weight2"):
        h = args.hidden_size
        shape = (num_local, h, -1) if name.endswith("1") else (num_local, -1, h)
        matrices = value.view(shape).transpose(1, 2)  # ours are [out, in]
        prefix = f"decoder.layers.{layer}.mlp.experts"
        return {
            f"{prefix}.{first_expert + e}.linear_fc{name[-1]}.weight": in_memory(matrix)
            for e, matrix in enumerate(matrices)
        }
    return {layer_name(layer, name): in_memory(value)}


def _join_shards(name: str, shards: list[Source], args: Namespace) -> Source:
    """A whole tensor from what the tensor ranks hold; each holds its gate rows, then its up
    rows."""
    if len(shards) == 1:
        return shards[0]
    if _COLUMN_PARALLEL.search(name):
        if "linear_fc1" in name and getattr(args, "swiglu", False):
            half = shards[0].shape[0] // 2
            shards = [shard.rows(row, row + half) for row in (0, half) for shard in shards]
        return concatenated(shards, 0)
    return concatenated(shards, 1) if _ROW_PARALLEL.search(name) else shards[0]

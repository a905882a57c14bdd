"""Reads Megatron-LM's older checkpoints: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt` of each model-parallel rank."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron5d.checkpoint.megatron.names import layer_name
from megatron5d.checkpoint.megatron.sources import Source, concatenated, held, load_inert, saved_args

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?$")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)$")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")  # TransformerEngine's grouped linear layers
_ROWS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")  # column-parallel
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")  # row-parallel
_State = dict[str, Tensor]


def read_rank_files(folder: Path) -> tuple[Namespace, int, dict[str, dict[str, Source]]]:
    """Arguments, iteration and whole weights (kind "") of a folder with a file for each model-parallel rank.

    Raises:
        ValueError: a file is missing or damaged, or the layout is one that is not read.
    """
    paths = {match.groups(): path / "model_optim_rng.pt" for path in sorted(folder.iterdir())
             if (match := _RANK.match(path.name))}  # fmt: skip
    states = {key: load_inert(path) for key, path in paths.items()}
    first = next(iter(paths))
    args = saved_args(states[first], paths[first])
    sizes = [getattr(args, f"{dim}_model_parallel_size", 1) or 1 for dim in ("tensor", "pipeline", "expert")]
    tp = getattr(args, "expert_tensor_parallel_size", None) or sizes[0]
    if tp != sizes[0]:
        raise ValueError(f"{folder}: expert_tensor_parallel_size = {tp}: only tensor_model_parallel_size = {sizes[0]} "
                         "is read; save it with --ckpt-format torch_dist")  # fmt: skip
    if float(states[first].get("checkpoint_version", 0)) < 3:
        raise ValueError(f"{paths[first]}: checkpoint_version below 3, of before Megatron-Core, is not read")
    ranks = {_place(key, sizes): state for key, state in states.items()}
    wanted = {(t, p, e) for t in range(sizes[0]) for p in range(sizes[1]) for e in range(sizes[2])}
    if missing := sorted(wanted - set(ranks)):
        raise ValueError(
            f"{folder} has no file of tensor, pipeline and expert rank {missing[0]} ({len(missing)} missing)"
        )
    whole: dict[str, Source] = {}
    for e in range(sizes[2]):
        shards = [_stage_tensors([ranks[t, p, e] for p in range(sizes[1])], e, args) for t in range(sizes[0])]
        for name in shards[0]:
            whole.setdefault(name, _joined(name, [shard[name] for shard in shards], args))
    return args, int(states[first].get("iteration", 0)), {"": whole}


def _place(key: tuple[str | None, ...], sizes: list[int]) -> tuple[int, int, int]:
    """Returns tensor, pipeline and expert rank; a name leaves out the pipeline or the expert rank where there is
    only one."""
    rest = [int(part) for part in key[1:] if part is not None]
    pipeline = rest.pop(0) if sizes[1] > 1 and rest else 0
    return int(key[0] or 0), pipeline, rest.pop(0) if rest else 0


def _stage_tensors(stages: list[dict[str, Any]], expert_rank: int, args: Namespace) -> dict[str, Source]:
    """Returns one tensor rank's shards, whose layers are counted through all stages and whose experts through all
    ranks."""
    found: dict[str, Source] = {}
    chunks = (
        ["model"] if "model" in stages[0] else [f"model{v}" for v in range(len(stages[0])) if f"model{v}" in stages[0]]
    )
    first = 0
    for model in (stage[chunk] for chunk in chunks for stage in stages):
        layers = {int(match[1]) for name in model if (match := _LAYER.match(name))}
        for name, value in model.items():
            if isinstance(value, Tensor):
                for own, source in _named(name, value, first, expert_rank, args).items():
                    found.setdefault(own, source)
        first += len(layers)
    return found


def _named(name: str, value: Tensor, first: int, expert_rank: int, args: Namespace) -> dict[str, Source]:
    """Returns a stored tensor under our spelling of its name; of Megatron's old grouped experts one for each."""
    match = _LAYER.match(name)
    if not match:
        return {name: held(value)}
    layer, rest = first + int(match[1]), match[2]
    experts = (getattr(args, "num_experts", None) or 0) // (getattr(args, "expert_model_parallel_size", 1) or 1)
    at = expert_rank * experts
    if own := _LOCAL_EXPERT.match(rest):
        rest = f"mlp.experts.{at + int(own[1])}.{own[2]}"
    elif own := _GROUPED.match(rest):
        rest = f"mlp.experts.{at + int(own[2])}.{own[1]}"
    elif rest in ("mlp.experts.weight1", "mlp.experts.weight2"):
        shape = (experts, args.hidden_size, -1) if rest.endswith("1") else (experts, -1, args.hidden_size)
        prefix = f"decoder.layers.{layer}.mlp.experts"
        matrices = value.view(shape).transpose(1, 2)  # ours are [out, in]
        return {f"{prefix}.{at + e}.linear_fc{rest[-1]}.weight": held(matrix) for e, matrix in enumerate(matrices)}
    return {layer_name(layer, rest): held(value)}


def _joined(name: str, shards: list[Source], args: Namespace) -> Source:
    """Returns a whole tensor from what the tensor ranks hold; each holds gate rows, then up rows, of its own."""
    if len(shards) > 1 and _ROWS.search(name):
        if "linear_fc1" in name and getattr(args, "swiglu", False):
            half = shards[0].shape[0] // 2
            return concatenated([shard.rows(at, at + half) for at in (0, half) for shard in shards], 0)
        return concatenated(shards, 0)
    return concatenated(shards, 1) if len(shards) > 1 and _COLUMNS.search(name) else shards[0]

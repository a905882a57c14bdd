"""Runs `plan.py memory`: bytes of every pipeline rank, and the nearest layout that fits."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time

from megatron5d.config.schema import Config
from megatron5d.planning.clusters import CLUSTERS, cluster_called, is_cluster
from megatron5d.planning.fit import fit_text, nearest_fit, shortage
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import RankMemory, gigabytes, table
from megatron5d.planning.other_codebases import (
    CONVENTIONS,
    MEGATRON_OPTIONS,
    megatron_terms,
    nanotron_rank,
    with_terms,
)
from megatron5d.tools.planning.options import check_fp8, device_bytes, run_text
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import micro_batch_counts


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the table or the record; the result is the exit code."""
    imbalance = config.moe.planned_imbalance if options.imbalance is None else options.imbalance
    target, available = _device(options, imbalance)
    if target.architecture is not None:
        check_fp8(config, target.architecture)
    started = time.perf_counter()
    ranks = _ranks(config, options.world, target, options.convention)
    missing = None if available is None else shortage(ranks, available)
    if options.json:
        record = {
            "world": options.world,
            "device": options.device,
            "as": options.convention,
            "imbalance": imbalance,
            "shortage": missing,
            "ranks": {rank: memory.record() for rank, memory in ranks.items()},
        }
        print(json.dumps(record, indent=2))
        return 1 if missing else 0
    sizes = sizes_of(config, options.world)
    axes = ", ".join(f"{name} {getattr(sizes, name)}" for name in ("dp", "tp", "cp", "pp", "ep"))
    details = f"train.mbs {config.train.mbs}, recompute {config.recompute.mode}"
    print(
        f"{run_text(config)}, {details}; {options.world} ranks: {axes}, zero {config.parallel.zero}"
    )
    print(table(ranks))
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    moment = ranks[worst].moment and f", {ranks[worst].moment}"
    print(
        f"* pipeline rank {worst} needs most: {gigabytes(ranks[worst].needed)}{moment}. "
        f"Counted in {time.perf_counter() - started:.1f} s for {options.device}."
    )
    if available is not None:
        print(f"WARNING: {missing}" if missing else f"It fits {gigabytes(available)}.")
    if missing and available is not None and options.convention == "megatron5d":
        print("searching for a layout that fits ...", file=sys.stderr)
        nearest = nearest_fit(config, options.world, target, available)
        print(f"Nearest fit: {fit_text(nearest)}.")
    return 1 if missing else 0


def _device(options: argparse.Namespace, imbalance: float) -> tuple[Target, int | None]:
    """Device to plan for, and its bytes if they are known."""
    device, memory_bytes = options.device, None
    if is_cluster(device):
        cluster = cluster_called(device)
        device, memory_bytes = cluster.architecture, cluster.memory_bytes
    elif not re.fullmatch("cpu|(sm_|gfx)[0-9a-f]+", device):
        raise ValueError(
            f"--device must be cpu, an architecture such as sm_90, or a device: "
            f"{', '.join(CLUSTERS)} (got {device}); for another device give its architecture and "
            "its --device-gb"
        )
    target = Target(None if device == "cpu" else device, imbalance)
    try:
        with target.paths():
            return target, device_bytes(options, memory_bytes)
    except ValueError as error:
        raise ValueError(
            f"--device {device}: {error}, cpu, or a device: {', '.join(CLUSTERS)}"
        ) from error


def _ranks(config: Config, world: int, target: Target, convention: str) -> dict[int, RankMemory]:
    """Memory of every pipeline rank under the conventions of a code base."""
    name, *features = convention.split(",")
    if name not in ("megatron5d", *CONVENTIONS) or (
        features and (name != "megatron" or set(features) - set(MEGATRON_OPTIONS))
    ):
        raise ValueError(
            f"--as {convention} is not known: use nanotron, or "
            "megatron[,te_fused_loss][,dropout][,unfused_attention]"
        )
    sizes = sizes_of(config, world)
    if name == "nanotron":
        if target.architecture is None:
            raise ValueError("--as nanotron requires a GPU as --device, such as sm_90 (got cpu)")
        count = micro_batch_counts(config, world)[-1]
        return {
            rank: nanotron_rank(config, sizes, rank, count, target.architecture)
            for rank in range(sizes.pp)
        }
    forecaster = Forecaster(config, world, target)
    ranks = forecaster.ranks()
    if name == "megatron":
        stages = forecaster.layout.placement
        for rank, memory in ranks.items():
            last = any(stage == stages.num_stages - 1 for _, stage in stages.stages_of(rank))
            terms = megatron_terms(config, memory, stages.num_stages, last=last, options=features)
            ranks[rank] = with_terms(memory, terms)
    return ranks

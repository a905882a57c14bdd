"""Answer plan.py memory: bytes of every pipeline rank, and what would fit."""

from __future__ import annotations

import argparse
import json
import sys
import time

from megatron5d.config.schema import Config
from megatron5d.planning.clusters import CLUSTERS, SHORT_NAMES, cluster_called
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
from megatron5d.tools.planning.asked import bytes_given, check_fp8, what
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import micro_batch_counts


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the table or the record, and returns the exit code."""
    imbalance = config.moe.planned_imbalance if options.imbalance is None else options.imbalance
    target, have = _machine(options, imbalance)
    if target.architecture is not None:
        check_fp8(config, target.architecture)
    since = time.perf_counter()
    ranks = _ranks(config, options.world, target, options.convention)
    lack = None if have is None else shortage(ranks, have)
    if options.json:
        record = {
            "world": options.world,
            "device": options.device,
            "as": options.convention,
            "imbalance": imbalance,
            "shortage": lack,
            "ranks": {rank: memory.record() for rank, memory in ranks.items()},
        }
        print(json.dumps(record, indent=2))
        return 1 if lack else 0
    sizes = sizes_of(config, options.world)
    axes = ", ".join(f"{name} {getattr(sizes, name)}" for name in ("dp", "tp", "cp", "pp", "ep"))
    more = f"train.mbs {config.train.mbs}, recompute {config.recompute.mode}"
    print(f"{what(config)}, {more}; {options.world} ranks: {axes}, zero {config.parallel.zero}")
    print(table(ranks))
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    moment = ranks[worst].moment and f", {ranks[worst].moment}"
    print(
        f"* pipeline rank {worst} needs most: {gigabytes(ranks[worst].needed)}{moment}. "
        f"Counted in {time.perf_counter() - since:.1f} s for {options.device}."
    )
    if have is not None:
        print(f"WARNING: {lack}" if lack else f"It fits {gigabytes(have)}.")
    if lack and have is not None and options.convention == "megatron5d":
        print("looking for what would fit ...", file=sys.stderr)
        print(f"What would fit: {fit_text(nearest_fit(config, options.world, target, have))}.")
    return 1 if lack else 0


def _machine(options: argparse.Namespace, imbalance: float) -> tuple[Target, int | None]:
    """Returns the device that is planned for, and its bytes where they are known."""
    device, known = options.device, None
    if device in CLUSTERS or device in SHORT_NAMES:
        named = cluster_called(device)
        device, known = named.architecture, named.memory_bytes
    target, have = (
        Target(None if device == "cpu" else device, imbalance),
        bytes_given(options, known),
    )
    try:
        with target.paths():
            return target, have
    except ValueError as error:
        raise ValueError(
            f"--device {device}: {error}, and cpu; by name there are {', '.join(CLUSTERS)}"
        ) from error


def _ranks(config: Config, world: int, target: Target, convention: str) -> dict[int, RankMemory]:
    """Returns memory of every pipeline rank, as one code base or another keeps it."""
    name, *said = convention.split(",")
    if name not in ("megatron5d", *CONVENTIONS) or (
        said and (name != "megatron" or set(said) - set(MEGATRON_OPTIONS))
    ):
        raise ValueError(
            f"--as {convention} is not known: nanotron, or megatron[,te_fused_loss][,dropout][,unfused_attention]"
        )
    sizes = sizes_of(config, world)
    if name == "nanotron":
        if target.architecture is None:
            raise ValueError(
                "--as nanotron --device cpu: nanotron trains on GPUs alone, such as sm_90"
            )
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
            terms = megatron_terms(config, memory, stages.num_stages, last=last, options=said)
            ranks[rank] = with_terms(memory, terms)
    return ranks

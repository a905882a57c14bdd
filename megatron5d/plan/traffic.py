"""How many bytes a rank sends in a step, on every axis: what the run's ledger will count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from megatron5d.config.schema import ELEMENT_BYTES, Config
from megatron5d.pipeline_parallel.program import OPS, Program
from megatron5d.plan.gathers import gathered_bytes
from megatron5d.plan.update import assembled
from megatron5d.planning.dp_traffic import Sharding
from megatron5d.planning.work import Unit, together


def message_bytes(config: Config) -> int:
    """Bytes of the hidden states that travel between stages, `[s/cp/tp, b, h]`, or `[s/cp, b, h]` without sp."""
    train, parallel = config.train, config.parallel
    rows = train.mbs * train.seq_len // parallel.cp // (parallel.tp if parallel.sp else 1)
    return rows * config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype]


def pass_counts(program: Program) -> np.ndarray:
    """`[num_ranks, len(OPS), num_stages]` how often a rank runs an operation of a stage."""
    table = program.table
    counts = np.zeros((program.num_ranks, len(OPS), program.num_stages), dtype=int)
    np.add.at(counts, (table.rank, table.op, table.stage), 1)
    return counts


def sent_bytes(
    config: Config, sharding: Sharding, program: Program, stages: Sequence[Sequence[Unit]]
) -> tuple[Mapping[str, int], ...]:
    """For each pipeline rank: axis -> bytes that it sends in a step.

    Args:
        config: of the run.
        sharding: of its weights and gradients.
        program: of a step.
        stages: units of every stage.
    """
    counts = pass_counts(program)
    ranks = []
    for rank in range(program.num_ranks):
        sums = _of_passes(config, sharding, program, stages, rank, counts[rank])
        units = [unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]]
        ends = (
            sharding.reduced(units),
            sharding.gathered(units),
            assembled(units, sharding),
        )
        for sent in ends:
            for (axis, _), num_bytes in sent.items():
                sums[axis] += round(num_bytes)
        ranks.append({axis: num_bytes for axis, num_bytes in sums.items() if num_bytes})
    return tuple(ranks)


def _of_passes(
    config: Config,
    sharding: Sharding,
    program: Program,
    stages: Sequence[Sequence[Unit]],
    rank: int,
    counts: np.ndarray,
) -> Counter[str]:
    """Axis -> bytes that a rank's passes send, whose `[len(OPS), num_stages]` counts are given."""
    sums, message, last = Counter[str](), message_bytes(config), program.num_stages - 1
    gathered = gathered_bytes(program, rank, stages, sharding) if sharding.gathers_each else {}
    for index, stage in np.argwhere(counts).tolist():
        op, times, units = OPS[index], int(counts[index, stage]), stages[stage]
        for (axis, _), each in together(unit.passes[op] for unit in units).sent.items():
            sums[axis] += times * each.num_bytes
        for (axis, _), num_bytes in sharding.beside(units, op, gathered.get((op, stage))).items():
            sums[axis] += round(times * num_bytes)
        neighbour = stage + 1 if op == "F" else stage - 1
        if op != "W" and 0 <= neighbour <= last:
            routes = [line for line in program.placement.route if line[stage] == rank]
            away = sum(line[neighbour] != rank for line in routes)
            sums["pp"] += message * away * times // len(routes)
    return sums

"""The path of a micro-batch through a layout: passes, messages, cuts, from the planner's objects.

The bytes are those of the units from which the planner predicts a step.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from megatron5d.config.derived import split_of
from megatron5d.config.schema import Config
from megatron5d.context_parallel.zigzag import Mask, SequenceLayout, even_layout
from megatron5d.model.partition import StageSpec
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.time.dp_traffic import Sharding, Transfers
from megatron5d.planning.time.work import Unit, message_bytes
from megatron5d.planning.time.workload import Workloads
from megatron5d.topology.mesh import planned_mesh
from megatron5d.train.build import sizes_of
from megatron5d.train.pipeline_layout import PipelineLayout

Message = tuple[str, str, int]
"""Axis, collective, and the bytes that one rank sends."""


def microbatch_record(config: Config, world: int, workloads: Workloads) -> dict[str, Any]:
    """Passes of one micro-batch, and what the end of the step sends.

    Args:
        config: a valid configuration.
        world: number of ranks.
        workloads: of the model.

    Returns:
        `units` (`_unit_record`); `stages`, for each stage its units as [name, index in `units`];
        `routes`, the pipeline ranks of the stages, in each direction; `hops`, the bytes that each
        stage sends to the next; `updates`, the messages of each pipeline rank at the end of a step;
        `pieces`, the parts of the sequence on each cp rank as [start, end] of 1.
    """
    layout = quick_layout(config, world)
    stages = workloads.stages(config, layout, "FB")
    sizes, placement = sizes_of(config, world), layout.placement
    mesh = planned_mesh(sizes, num_kv_heads=config.model.num_kv_heads, shared=layout.shared)
    sharding = Sharding(config, mesh, layout.shared)
    units: list[dict[str, Any]] = []
    named: list[list[tuple[str, int]]] = []
    for spec, stage in zip(layout.specs, stages):
        records = [_unit_record(unit, sharding) for unit in stage]
        units += [record for i, record in enumerate(records) if record not in units + records[:i]]
        named.append(list(zip(_names(spec), map(units.index, records))))
    return {
        "units": units,
        "stages": named,
        "routes": placement.route,
        "hops": message_bytes(config, layout.specs)[:-1],
        "updates": [
            _updates(layout, stages, sharding, rank) for rank in range(placement.num_ranks)
        ],
        "pieces": sequence_pieces(config),
        "inner": {"cp": sizes.cp_inner, "ep": sizes.ep_inner},
    }


def _unit_record(unit: Unit, sharding: Sharding) -> dict[str, Any]:
    """Passes of a unit: `F` and `B` with their phases in order, and what ZeRO sends in each.

    Recomputed phases come first in `B`, in the order of the forward. ZeRO-3 gathers all weights; in
    a step, a pass after another one of the same layers finds some of them.
    """
    backward = sorted(unit.passes["B"].steps, key=lambda step: step.kind != "recompute")
    num_recomputed = sum(step.kind == "recompute" for step in backward)
    return {
        "F": unit.passes["F"].steps,
        "B": [*backward[:num_recomputed], *backward[num_recomputed:][::-1]],
        "zero": {op: _messages(sharding.sent_in_pass([unit], op)) for op in "FB"},
    }


def _messages(sent: Transfers) -> list[Message]:
    return [(*key, round(num_bytes)) for key, num_bytes in sent.items() if num_bytes >= 1]


def _updates(
    layout: PipelineLayout, stages: list[list[Unit]], sharding: Sharding, rank: int
) -> list[Message]:
    units = [unit for _, stage in layout.placement.stages_of(rank) for unit in stages[stage]]
    return _messages(sharding.reduced(units)) + _messages(sharding.gathered(units))


def _names(spec: StageSpec) -> list[str]:
    """Names of the units of a stage, in the order of `Workloads.stages`."""
    return [
        *["embedding"] * spec.embedding,
        *(f"layer {layer}" for layer in spec.layers),
        *["head"] * spec.head,
        *(f"MTP {depth}" for depth in spec.mtp),
    ]


def sequence_pieces(config: Config) -> list[list[tuple[float, float]]]:
    """Parts of the sequence on each cp rank, as [start, end] of 1."""
    length = config.train.seq_len
    layout = SequenceLayout(length, *split_of(config))
    layout = even_layout(layout, Mask(causal=config.model.attention_causal))
    pieces = []
    for rank in range(layout.size):
        rows = np.sort(layout.rows(rank))
        edges = [0, *(np.flatnonzero(np.diff(rows) > 1) + 1).tolist(), len(rows)]
        pieces.append([(rows[a] / length, (rows[b - 1] + 1) / length) for a, b in pairwise(edges)])
    return pieces

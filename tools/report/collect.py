"""A layout as one JSON object: its memory, step time, layer, grid and pipeline, and the same
without each dimension.

Every number comes from the planner, the schedule simulator, or a layer that runs on the meta
device.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil
from typing import Any

from torch import Tensor, nn

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import Change, changed
from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.planning.clusters import GIB, Cluster
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.peak import Moment
from megatron5d.planning.memory.rank_memory import RankMemory, gigabytes
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults, quick_layout
from megatron5d.planning.time.predict import Estimator, bytes_on
from megatron5d.planning.time.work import Work
from megatron5d.planning.time.workload import Workloads
from megatron5d.tools.report.timeline import (
    estimator_on,
    memory_over_time,
    pipeline_record,
    workloads_of,
)
from megatron5d.topology.grid import Grid, dense_grid, expert_grid
from megatron5d.topology.shard_spec import spec_of
from megatron5d.train.build import sizes_of

SHOWN = ("F", "B")


def layer_record(config: Config, workloads: Workloads) -> list[dict[str, Any]]:
    """Returns the phases of a block under a layout: their weights, tensors, messages and work for
    one micro-batch.

    Returns:
        For each phase `name`; `weights` and `tensors`, each with the shape that a rank holds;
        `sent`, one entry for a collective of a pass (bytes of one rank); `kept_bytes` between
        forward and backward; and `flops` by pass.
    """
    phases, passes, tensors = workloads.block(config, _watch)
    record = []
    for number, phase in enumerate(phases):
        works = {
            op: passes[op][phase].times(config.train.mbs) for op in SHOWN if phase in passes[op]
        }
        forward = works.get("F", Work())
        record.append(
            {
                "name": getattr(phase, "kind", None) or type(phase).__name__,
                "type": type(phase).__name__,
                "weights": [_weight(name, weight) for name, weight in phase.named_parameters()],
                "tensors": _tensors_of(phase, number, tensors),
                "sent": [entry for op, work in works.items() for entry in _sent(op, work)],
                "kept_bytes": forward.kept_bytes,
                "flops": {op: work.flops for op, work in works.items()},
            }
        )
    return record


def _weight(name: str, weight: nn.Parameter) -> dict[str, Any]:
    spec = spec_of(weight)
    local = list(weight.shape)
    return {
        "name": name.removesuffix(".weight"),
        "whole": list(spec.shape),
        "local": local,
        "expert": spec.expert,
        "bytes": weight.numel() * weight.element_size(),
    }


def _sent(op: str, work: Work) -> list[dict[str, Any]]:
    return [
        {
            "pass": op,
            "axis": axis,
            "operation": operation,
            "calls": traffic.calls,
            "bytes": traffic.num_bytes,
        }
        for (axis, operation), traffic in work.sent.items()
        if traffic.num_bytes
    ]


def _watch(model: GPT) -> dict[str, tuple[int, ...]]:
    """Has the first call of every module of the model's blocks noted: module -> shape of its
    output."""
    tensors: dict[str, tuple[int, ...]] = {}
    for unit in model.units:
        for phase in unit:
            for module in phase.modules():
                if not list(module.children()) or module is phase:
                    _note_output(module, tensors)
    return tensors


def _note_output(module: nn.Module, tensors: dict[str, tuple[int, ...]]) -> None:
    forward, key = module.forward, str(id(module))

    def noted(*args, **kwargs):
        out = forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if isinstance(first, Tensor):
            tensors.setdefault(key, tuple(first.shape))
        return out

    module.forward = noted


def _tensors_of(
    phase: nn.Module, number: int, tensors: Mapping[str, tuple[int, ...]]
) -> list[dict[str, Any]]:
    return [
        {"name": f"output of {name or 'the phase'}", "local": list(tensors[str(id(module))])}
        for name, module in phase.named_modules()
        if str(id(module)) in tensors
    ]


SWITCHES: dict[str, Change] = {
    "zero": {"parallel.zero": 0},
    "tp": {"parallel.tp": 1, "parallel.sp": False, "parallel.tp_overlap": "none"},
    "sp": {"parallel.sp": False, "parallel.tp_overlap": "none"},
    "cp": {"parallel.cp": 1, "parallel.cp_method": "ring"},
    "pp": {
        "parallel.pp": 1,
        "parallel.vpp": 1,
        "pipeline.schedule": "1f1b",
        "pipeline.layout": None,
    },
    "ep": {"parallel.ep": 1, "parallel.etp": None},
}
"""Dimension -> the change that switches it off; its ranks then go to data parallelism."""
DIMENSIONS = (
    ("the pipeline", "bubble"),
    ("tensor parallelism", "tp"),
    ("expert parallelism", "ep"),
    ("context parallelism", "cp"),
    ("data parallelism", "dp"),
)
"""What may cost time, and its kind among a step's seconds."""
# combinations of two or more switches are tried until a layout has taken so long
MOST_VARIANTS_S = 12.0
# of predicted step times, on 71 published runs that were not fitted (docs/planning.md)
MEDIAN_ERROR = 0.06


@dataclass(frozen=True)
class Asked:
    """A layout to report on."""

    name: str  # shown for it
    config: Config
    world: int
    cluster: Cluster | None  # device and network; None = CPUs, of which no time is predicted

    @property
    def target(self) -> Target:
        return Target(
            self.cluster.architecture if self.cluster else None, self.config.moe.planned_imbalance
        )


def layout_record(asked: Asked) -> dict[str, Any]:
    """Returns a layout with its variants, grid and pipeline."""
    config, world, until = asked.config, asked.world, time.monotonic() + MOST_VARIANTS_S
    on = _switched_on(config)
    # ZeRO stage -> variant
    known = ({0: "zero"} if "zero" in on else {}) | {config.parallel.zero: ""}
    quietly = (signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C without a traceback; the parent tells
    with ProcessPoolExecutor(2, initializer=signal.signal, initargs=quietly) as pool:
        itself = pool.submit(_itself, asked)
        stages = {
            stage: pool.submit(zero_stage, asked, stage) for stage in range(4) if stage not in known
        }
        pipeline = pool.submit(pipeline_record, config, world, asked.cluster)
        variants = _variants(pool, asked, on, until)
        timelines, (variants[""], over_time) = pipeline.result(), itself.result()
    zero_stages = [
        stages[stage].result() if stage in stages else _without_layer(variants[known[stage]], stage)
        for stage in range(4)
    ]
    if "sent_bytes" not in variants[""]:  # where no time is predicted
        variants[""]["sent_bytes"] = [
            dict(sent) for sent in bytes_on(config, world, quick_layout(config, world))
        ]
    name_cuts(variants, on)
    sizes = sizes_of(config, world)
    dense = dense_grid(sizes)
    expert = expert_grid(sizes, dense)
    return {
        "name": asked.name,
        "sentence": _sentence(config, variants[""], timelines, asked.cluster),
        "world": world,
        "device": _device(asked.cluster),
        "model": _model(config),
        "sizes": {name: getattr(sizes, name) for name in ("dp", "tp", "cp", "pp", "ep", "etp")}
        | {"sp": config.parallel.sp, "zero": config.parallel.zero, "vpp": config.parallel.vpp},
        "switches": list(on),
        "variants": variants,
        "zero_stages": zero_stages,
        "grid": {
            "dense": grid_record(dense),
            "expert": grid_record(expert) if config.model.num_experts else None,
        },
        "pipeline": timelines,
        "memory_over_time": over_time,
    }


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Returns what differs between two layouts, in words."""
    words = [
        f"{name}: {value} → {second['sizes'][name]}"
        for name, value in first["sizes"].items()
        if value != second["sizes"][name]
    ]
    a, b = first["variants"][""], second["variants"][""]
    ratio = b["needed_bytes"] / a["needed_bytes"]
    words.append(
        f"{second['name']} needs {abs(1 - ratio):.0%} {'more' if ratio > 1 else 'less'} memory a rank"
    )
    if a.get("step_time_s") and b.get("step_time_s"):
        ratio = b["step_time_s"] / a["step_time_s"]
        words.append(f"its step takes {abs(1 - ratio):.0%} {'longer' if ratio > 1 else 'less'}")
        for kind, value in b["seconds"].items():
            change = (value - a["seconds"].get(kind, 0.0)) / a["step_time_s"]
            if abs(change) > 0.02:
                words.append(f"{kind}: {change:+.0%} of the first one's step")
    return words


def _sentence(
    config: Config,
    numbers: dict[str, Any],
    timelines: list[dict[str, Any]],
    cluster: Cluster | None,
) -> str:
    said = [f"Needs {gigabytes(numbers['needed_bytes'])} a rank"]
    if cluster is not None:
        spare = (cluster.memory_bytes - numbers["needed_bytes"]) / GIB
        said = [
            f"Fits with {spare:.1f} GiB to spare"
            if spare >= 0
            else f"Does not fit: {-spare:.1f} GiB too much"
        ]
    if "mfu" in numbers:
        unlike = (
            config.model.num_experts or config.parallel.cp > 1 or config.precision.fp8 != "none"
        )
        measured = not unlike and config.optim.name == "adamw"  # as those of MEDIAN_ERROR
        error = f"± {MEDIAN_ERROR:.0%} of it" if measured else "(such runs were never measured)"
        said.append(f"{numbers['mfu']:.0%} MFU {error}")
        name, kind = max(DIMENSIONS, key=lambda item: numbers["seconds"][item[1]])
        most = numbers["seconds"][kind] / numbers["step_time_s"]
        said.append(f"{name} costs {most:.0%}" if most >= 0.005 else "no dimension costs time")
    elif timelines and "bubble" in timelines[0]:
        said.append(f"the pipeline's bubble is {timelines[0]['bubble']:.0%}")
    return "; ".join(said) + "."


def _switched_on(config: Config) -> tuple[str, ...]:
    parallel = config.parallel
    on = {
        "zero": parallel.zero > 0,
        "tp": parallel.tp > 1,
        "sp": parallel.sp,
        "cp": parallel.cp > 1,
        "pp": parallel.pp > 1,
        "ep": parallel.ep > 1,
    }
    return tuple(name for name, is_on in on.items() if is_on)


def _variants(
    pool: ProcessPoolExecutor, asked: Asked, on: Sequence[str], until: float
) -> dict[str, dict[str, Any]]:
    """Returns a place for the layout, and what it becomes without each dimension and, until some
    time, without several.

    The key of a variant is the dimensions that are off, with blanks between them.
    """
    sets = [off for count in range(1, len(on) + 1) for off in combinations(on, count)]
    sure = [off for off in sets if len(off) == 1 or len(off) == len(on)]
    rest = [off for off in sets if off not in sure]
    found: dict[tuple[str, ...], dict[str, Any]] = {(): {}}
    found |= zip(sure, pool.map(variant, [asked] * len(sure), sure))
    while rest and time.monotonic() < until:
        some, rest = rest[:2], rest[2:]
        found |= zip(some, pool.map(variant, [asked] * len(some), some))
    return {" ".join(off): record for off, record in found.items()}


def _itself(asked: Asked) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the numbers of a layout, and its memory over time, from one forecast."""
    walked: list[list[Moment]] = []
    ranks = Forecaster(asked.config, asked.world, asked.target, moments=walked).ranks()
    over_time = memory_over_time(asked.config, asked.world, asked.cluster, ranks, walked)
    return {"off": []} | _numbers(asked.config, asked, ranks), over_time


def zero_stage(asked: Asked, stage: int) -> dict[str, Any]:
    """Returns the numbers of a layout under another ZeRO stage, without its layer."""
    return _without_layer(
        _numbers_of(changed(asked.config, {"parallel.zero": stage}), asked, {}), stage
    )


def _without_layer(record: dict[str, Any], stage: int) -> dict[str, Any]:
    return {"stage": stage} | {
        key: value for key, value in record.items() if key not in ("layer", "off")
    }


def variant(asked: Asked, off: Sequence[str]) -> dict[str, Any]:
    """Returns the numbers of a layout without some dimensions."""
    config = asked.config
    for name in off:
        config = changed(config, SWITCHES[name])
    return _numbers_of(config, asked, {"off": list(off)})


def _numbers_of(config: Config, asked: Asked, record: dict[str, Any]) -> dict[str, Any]:
    """Returns `record` and the numbers of a configuration, its batch raised where it no longer
    divides, or why not."""
    parallel, train = config.parallel, config.train
    at_once = train.mbs * asked.world // (parallel.tp * parallel.cp * parallel.pp)
    if train.gbs % at_once:
        gbs = ceil(train.gbs / at_once) * at_once
        config = changed(config, {"train.gbs": gbs, "train.gbs_ramp": None})
        record["changed"] = f"train.gbs={gbs}"
    if faults := run_checks(config, asked.world, files=False) or pipeline_faults(
        config, asked.world
    ):
        return record | {"refused": faults[0].reason}
    return record | _numbers(config, asked, Forecaster(config, asked.world, asked.target).ranks())


def _numbers(config: Config, asked: Asked, ranks: Mapping[int, RankMemory]) -> dict[str, Any]:
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    estimator = estimator_on(asked.cluster) if asked.cluster else None
    layer = layer_record(config, estimator.workloads if estimator else workloads_of(asked.target))
    return {
        "needed_bytes": ranks[worst].needed,
        "worst_rank": worst,
        "moment": ranks[worst].moment,
        "memory": [ranks[rank].kinds() for rank in sorted(ranks)],
        **(
            _step(estimator, config, asked.world)
            if estimator
            else {"unknown_time": "of CPUs no time is predicted"}
        ),
        "layer": layer,
    }


def _step(estimator: Estimator, config: Config, world: int) -> dict[str, Any]:
    try:
        cost = estimator.step(config, world)
    except ValueError as error:
        return {"unknown_time": str(error)}
    return cost.record()


def name_cuts(variants: dict[str, dict[str, Any]], on: Sequence[str]) -> None:
    """Notes at every weight and tensor what it is whole, and at those of the layout itself which
    dimension cuts it.

    A tensor's whole shape is the one that it has with every dimension off; a dimension cuts it
    where it is larger with that dimension off.
    """
    whole = variants[" ".join(on)].get("layer")
    without = {name: layer for name in on if (layer := variants[name].get("layer"))}
    for record in variants.values():
        for place, phase in enumerate(record.get("layer", [])):
            for kind in ("weights", "tensors"):
                for number, entry in enumerate(phase[kind]):
                    if "whole" not in entry and whole:
                        entry["whole"] = whole[place][kind][number]["local"]
                    entry["cut"] = [
                        [dim, name]
                        for name, layer in without.items()
                        for dim, (mine, other) in enumerate(
                            zip(entry["local"], layer[place][kind][number]["local"])
                        )
                        if mine < other and name not in record["off"]
                    ]


def grid_record(grid: Grid) -> dict[str, Any]:
    """Returns the axes of a grid, slowest first, and the rank at each of its places; None = rank i
    at place i."""
    in_order = grid.ranks == tuple(range(len(grid.ranks)))
    axes = [{"name": name, "size": size} for name, size in zip(grid.names, grid.sizes)]
    return {"axes": axes, "ranks": None if in_order else list(grid.ranks)}


def _device(cluster: Cluster | None) -> dict[str, Any]:
    if cluster is None:
        return {"name": "CPU", "node": 8}
    return {
        key: value for key, value in asdict(cluster).items() if isinstance(value, (int, float, str))
    }


def _model(config: Config) -> dict[str, Any]:
    model, train = config.model, config.train
    return {
        "name": model.name or "custom",
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_experts": model.num_experts,
        "seq_len": train.seq_len,
        "mbs": train.mbs,
        "gbs": train.gbs,
        "dtype": config.precision.dtype,
        "fp8": config.precision.fp8,
        "recompute": config.recompute.mode,
    }

"""What a layout cuts, keeps and sends of one transformer block, read off the block itself on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.planning.work import Work
from megatron5d.planning.workload import Workloads
from megatron5d.topology.shard_spec import spec_of

SHOWN = ("F", "B")


def layer_record(config: Config, workloads: Workloads) -> list[dict[str, Any]]:
    """Returns the phases of a block under a layout: their weights, tensors, messages and work for one micro-batch.

    Args:
        config: a valid configuration.
        workloads: of its model.

    Returns:
        For each phase `name`; `weights` and `tensors`, each with the shape that a rank holds; `sent`, one entry for a
        collective of a pass (bytes of one rank); `kept_bytes` between forward and backward; and `flops` by pass.
    """
    phases, passes, tensors = workloads.block(config, _watch)
    record = []
    for number, phase in enumerate(phases):
        works = {op: passes[op][phase].times(config.train.mbs) for op in SHOWN if phase in passes[op]}
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
        "name": name.removesuffix(".weight"), "whole": list(spec.shape), "local": local, "expert": spec.expert,
        "bytes": weight.numel() * weight.element_size(),
    }  # fmt: skip


def _sent(op: str, work: Work) -> list[dict[str, Any]]:
    return [
        {"pass": op, "axis": axis, "operation": operation, "calls": traffic.calls, "bytes": traffic.num_bytes}
        for (axis, operation), traffic in work.sent.items()
        if traffic.num_bytes
    ]


def _watch(model: GPT) -> dict[str, tuple[int, ...]]:
    """Has the first call of every module of the model's blocks noted: module -> shape of its output."""
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


def _tensors_of(phase: nn.Module, number: int, tensors: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {"name": f"output of {name or 'the phase'}", "local": list(tensors[str(id(module))])}
        for name, module in phase.named_modules()
        if str(id(module)) in tensors
    ]

"""The layer of a report: weights, activations, messages and work of one block under a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from megatron5d.config.schema import Config
from megatron5d.model.gpt import GPT
from megatron5d.model.norm import NoNorm
from megatron5d.planning.time.work import Work
from megatron5d.planning.time.workload import Workloads
from megatron5d.topology.shard_spec import spec_of

PASSES = ("F", "B")


def layer_record(config: Config, workloads: Workloads) -> list[dict[str, Any]]:
    """Weights, tensors, messages and work of each phase of a block, for one micro-batch.

    Returns:
        For each phase `name`; `weights` and `tensors`, each with its local shape; `sent`, one
        entry per collective of a pass (bytes of one rank); `kept_bytes` between forward and
        backward; and `flops` by pass.
    """
    phases, passes, shapes = workloads.block(config, _record_outputs)
    records = []
    for phase in phases:
        works = {
            op: passes[op][phase].times(config.train.mbs) for op in PASSES if phase in passes[op]
        }
        records.append(
            {
                "name": getattr(phase, "kind", None) or type(phase).__name__,
                "type": type(phase).__name__,
                "weights": [_weight(name, weight) for name, weight in phase.named_parameters()],
                "tensors": _tensors_of(phase, shapes),
                "sent": [entry for op, work in works.items() for entry in _sent(op, work)],
                "kept_bytes": works.get("F", Work()).kept_bytes,
                "flops": {op: work.flops for op, work in works.items()},
            }
        )
    return records


def _weight(name: str, weight: nn.Parameter) -> dict[str, Any]:
    spec = spec_of(weight)
    return {
        "name": name.removesuffix(".weight"),
        "whole": list(spec.shape),
        "local": list(weight.shape),
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


def _record_outputs(model: GPT) -> dict[str, tuple[int, ...]]:
    """Makes the first call of each phase and leaf module record the shape of its output.

    Returns:
        id of a module -> shape, filled while the model runs.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for unit in model.units:
        for phase in unit:
            for module in phase.modules():
                is_leaf = not list(module.children()) and not isinstance(module, NoNorm)
                if is_leaf or module is phase:
                    _record_output(module, shapes)
    return shapes


def _record_output(module: nn.Module, shapes: dict[str, tuple[int, ...]]) -> None:
    forward, key = module.forward, str(id(module))

    def recording_forward(*args, **kwargs):
        output = forward(*args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor):
            shapes.setdefault(key, tuple(first.shape))
        return output

    module.forward = recording_forward


def _tensors_of(phase: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {"name": f"output of {name or 'the phase'}", "local": list(shapes[str(id(module))])}
        for name, module in phase.named_modules()
        if str(id(module)) in shapes
    ]


def key_of(off: Sequence[str]) -> str:
    """Name of a variant: the dimensions that are off. Without tp there is no sp to mention."""
    return " ".join(name for name in off if name != "sp" or "tp" not in off)


def name_cuts(variants: dict[str, dict[str, Any]], switches: Sequence[str]) -> None:
    """Adds `whole`, the global shape, and `cut`, the dimensions that cut it, to each tensor.

    A tensor has its global shape in the variant with every dimension off. A dimension cuts it if
    the tensor is larger with that dimension off.

    Args:
        variants: of a layout, with their layers; the entries are changed in place.
        switches: dimensions that the layout uses.
    """
    undivided = variants[key_of(switches)].get("layer")
    layers_without = {name: layer for name in switches if (layer := variants[name].get("layer"))}
    for record in variants.values():
        for phase_index, phase in enumerate(record.get("layer", [])):
            for kind in ("weights", "tensors"):
                for index, entry in enumerate(phase[kind]):
                    if "whole" not in entry and undivided:
                        entry["whole"] = undivided[phase_index][kind][index]["local"]
                    shapes_without = {
                        name: layer[phase_index][kind][index]["local"]
                        for name, layer in layers_without.items()
                        if name not in record["off"]
                    }
                    entry["cut"] = [
                        [dim, name]
                        for name, shape in shapes_without.items()
                        for dim, (size, size_without) in enumerate(zip(entry["local"], shape))
                        if size < size_without
                    ]

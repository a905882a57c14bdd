"""Predicted step times and layouts, as tables and as JSON records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron5d.planning.clusters import GIB, Cluster
from megatron5d.planning.layout_search import Candidate
from megatron5d.planning.step_time import StepCost

_TOLD = {
    "products": "products of matrices",
    "attention": "attention between queries, keys and values",
    "memory": "what passes through memory: norms, activations, copies",
    "tp": "exposed communication of tp",
    "cp": "exposed communication of cp",
    "ep": "exposed all-to-alls of ep",
    "p2p": "waits for messages between stages",
    "bubble": "bubble of the pipeline",
    "dp": "exposed reductions and gathers of dp and ZeRO",
    "host": "exposed copies to the host and back",
    "optimizer": "optimiser",
    "muon": "Muon's iterations on whole matrices",
    "muon_sent": "Muon's all-to-alls, to whole matrices and back",
}


def step_record(cost: StepCost) -> dict[str, Any]:
    """The cost of a step as a JSON object, in seconds and bytes."""
    return {
        "step_time_s": cost.step_s,
        "tokens_per_s_per_gpu": cost.tokens_per_s_per_gpu,
        "tflops_per_gpu": cost.tflops_per_gpu,
        "mfu": cost.mfu,
        "seconds": dict(cost.seconds),
        "sent_bytes": [dict(sent) for sent in cost.sent],
    }


def step_table(cost: StepCost, cluster: Cluster) -> str:
    """The time of a step by kind on the busiest pipeline rank, and the bytes that a rank sends."""
    lines = [f"{'a step of':<56}{cost.step_s:>9.3f} s"]
    for kind, told in _TOLD.items():
        if cost.seconds[kind] > 0:
            lines.append(f"  {told:<54}{cost.seconds[kind]:>9.3f} s{cost.seconds[kind] / cost.step_s:>8.1%}")
    axes = sorted({axis for sent in cost.sent for axis in sent})
    if axes:
        lines.append(f"GB that a rank sends in a step, at most: {_most_sent(cost.sent, axes)}")
    lines.append(
        f"{cost.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {cost.tflops_per_gpu:,.0f} TFLOP/s/GPU, MFU {cost.mfu:.1%} of "
        f"{cluster.flops / 1e12:,.0f} TFLOP/s on {cluster.name}, {cluster.node} in a node"
    )
    return "\n".join(lines)


def layout_record(candidate: Candidate, overrides: str) -> dict[str, Any]:
    """A layout with a known cost as a JSON object."""
    assert candidate.cost is not None
    return {"overrides": overrides, "needed_bytes": candidate.needed, **step_record(candidate.cost)}


def layouts_table(layouts: Sequence[tuple[Candidate, str]]) -> str:
    """A table of layouts.

    Args:
        layouts: each with its overrides as one line; "" = the configuration as given.
    """
    lines = [f"{'step':>11}{'tokens/s/GPU':>14}{'MFU':>8}{'bubble':>8}{'memory':>10}  overrides"]
    for each, overrides in layouts:
        cost = each.cost
        assert cost is not None
        figures = f"{cost.step_s:>9.3f} s{cost.tokens_per_s_per_gpu:>14,.0f}{cost.mfu:>8.1%}"
        bubble = f"{cost.seconds['bubble'] / cost.step_s:>8.1%}"
        lines.append(f"{figures}{bubble}{each.needed / GIB:>7.1f} GiB  {overrides or '(as given)'}")
    return "\n".join(lines)


def _most_sent(sent: Sequence[Mapping[str, int]], axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {max(each.get(axis, 0) for each in sent) / 1e9:,.2f}" for axis in axes)

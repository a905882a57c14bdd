"""The first sentence of a report: whether a layout fits, its MFU, and how to improve it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron5d.config.schema import Config
from megatron5d.planning.clusters import GIB
from megatron5d.tools.report.layer import key_of

NAMES = {
    "zero": "ZeRO",
    "tp": "tensor parallelism",
    "sp": "sequence parallelism",
    "cp": "context parallelism",
    "pp": "pipeline parallelism",
    "ep": "expert parallelism",
}
COSTS = {"tp": "exposed tp", "cp": "exposed cp", "ep": "exposed ep", "dp": "exposed dp and ZeRO"}
KIND_NAMES = COSTS | {
    "products": "GEMMs",
    "memory": "norms, activations, copies",
    "host": "host copies",
    "p2p": "waits for messages",
    "muon": "Muon iterations",
    "muon_sent": "Muon all-to-alls",
}
"""Kind of step time -> its name on the page, where that is another."""
MIN_GAIN = 0.02  # below the error of the predictions, a change is no improvement
# Median error of predicted step times on 71 published runs not used for fitting (docs/planning.md).
MEDIAN_ERROR = 0.06

Record = Mapping[str, Any]
"""Numbers of a variant, or of a ZeRO stage."""


def headline(
    config: Config, numbers: Record, changes: Mapping[str, Record], capacity: int | None
) -> str:
    """Summary of a layout in one sentence.

    Args:
        config: of the layout, or of the one that it is a variant of.
        numbers: of the layout.
        changes: what may be changed, such as `turn ZeRO off` -> numbers of the result.
        capacity: bytes of a device; None = not limited.
    """
    if "refused" in numbers:
        return f"Not a valid layout: {numbers['refused']}."
    needed = numbers["needed_bytes"]
    clauses = [f"Needs {_size(needed)} per rank"]
    if capacity is not None:
        spare = capacity - needed
        fits = f"Fits with {_size(spare)} to spare"
        clauses = [fits if spare >= 0 else f"Does not fit: {_size(-spare)} too much"]
    if "mfu" in numbers:
        clauses += [
            f"{_percent(numbers['mfu'])} MFU {_error_text(config)}",
            improvement(numbers, changes, capacity) or largest_cost(numbers),
        ]
    elif timeline := numbers.get("pipeline"):
        clauses.append(f"the bubble is {_percent(timeline['bubble'])} of the passes")
    return "; ".join(clauses) + "."


def _size(num_bytes: int) -> str:
    """As `gib` of the page writes it."""
    if num_bytes < 2**28:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _error_text(config: Config) -> str:
    is_measured = not (
        config.model.num_experts
        or config.parallel.cp > 1
        or config.precision.fp8 != "none"
        or config.optim.name != "adamw"
    )
    return f"± {_percent(MEDIAN_ERROR)} of it" if is_measured else "(no such run was measured)"


def improvement(numbers: Record, changes: Mapping[str, Record], capacity: int | None) -> str | None:
    """The one change that makes a layout fastest, or fit if it does not; None if none does.

    Args:
        numbers, changes, capacity: as in `headline`.
    """

    def fits(record: Record) -> bool:
        return capacity is None or record["needed_bytes"] <= capacity

    candidates = {
        change: record
        for change, record in changes.items()
        if record.get("step_time_s") and fits(record)
    }
    if not candidates:
        return None
    change, record = max(candidates.items(), key=lambda item: item[1]["tokens_per_s_per_gpu"])
    # Time per token, as the global batch may have changed.
    ratio = numbers["tokens_per_s_per_gpu"] / record["tokens_per_s_per_gpu"]
    if fits(numbers) and ratio > 1 - MIN_GAIN:
        return None
    effect = f"{_percent(abs(1 - ratio))} {'more' if ratio > 1 else 'less'} time per token"
    if capacity is not None:
        still = "still fits" if fits(numbers) else "fits"
        effect += f", {record['needed_bytes'] / GIB:.1f} of {capacity / GIB:.1f} GiB, {still}"
    return f"{change}: {effect}"


def largest_cost(numbers: Record) -> str:
    """The largest share of the step that a parallel dimension costs, as a clause."""
    costs = {name: numbers["seconds"][kind] for kind, name in COSTS.items()}
    if timeline := numbers.get("pipeline"):
        costs["the bubble"] = timeline["bubble"] * timeline["step_time"]
    name, seconds = max(costs.items(), key=lambda item: item[1])
    share = seconds / numbers["step_time_s"]
    return f"{name} takes {_percent(share)}" if share >= 0.005 else "no dimension costs time"


def toggles(
    variants: Mapping[str, Record], switches: Sequence[str], off: Sequence[str]
) -> Iterator[tuple[str, Record]]:
    """Each switch that can be turned from a variant, as a change and the numbers of its result.

    Args:
        variants: of a layout, by `key_of` the dimensions that are off.
        switches: dimensions that the layout uses.
        off: those that are off in the variant.
    """
    for name in switches:
        if name == "sp" and "tp" in off:
            continue  # follows tp
        result = [other for other in switches if (other == name) != (other in off)]
        if name == "tp" and name in off and "sp" in result:
            result.remove("sp")
        turned = "on" if name in off else "off"
        yield f"turn {NAMES[name]} {turned}", variants[key_of(result)]

"""The result of a parity check: a record for programs, a text for people, and a certificate.

A certificate is a record that is kept, with hashes of the configuration and the code it is valid
for.
"""

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from math import isfinite
from typing import Any

from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.parity.differences import HIDDEN, SAMPLES, Difference
from megatron5d.train.provenance import source_hash

FORMAT = 1
_PASSIVE = ("init", "checkpoint", "log")  # groups that only say where a run's files are
_MASKS = ("document_mask", "eod_mask_loss")  # keys of data that change numbers, whatever the files


def configuration_hash(config: Config) -> str:
    """Hash of everything in a configuration that changes a run's numbers, except its files."""
    groups = {group: keys for group, keys in to_dict(config).items() if group not in _PASSIVE}
    groups["data"] = {key: groups["data"][key] for key in _MASKS}
    return hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).hexdigest()


def mismatches(certificate: dict[str, Any], config: Config, world: int) -> list[str]:
    """Reasons why a certificate is not valid for a configuration and this code; [] if it is.

    Raises:
        ValueError: it is not a certificate, or a newer version wrote it.
    """
    try:
        version, verdict = certificate["format"], certificate["verdict"]
        certified_world, code = certificate["world"], certificate["code"]
        hashes = certificate["configuration_hash"], code["source_hash"]
        commit = code["commit"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a parity certificate: {error} is missing") from error
    if version > FORMAT:
        raise ValueError(f"certificate of format {version}; this version reads up to {FORMAT}")
    reasons = []
    if verdict != "equal":
        reasons.append(f"its verdict is {verdict!r}")
    if certified_world != world:
        reasons.append(f"it was made on {certified_world} ranks (got {world})")
    if hashes[0] != configuration_hash(config):
        reasons.append("the configuration differs")
    if hashes[1] != source_hash():
        reasons.append(f"the code differs from the one that was checked (commit {commit})")
    return reasons


def plain(difference: Difference) -> dict[str, Any]:
    """A difference as JSON: numbers that are not finite become None."""
    return {
        key: None if isinstance(value, float) and not isfinite(value) else value
        for key, value in asdict(difference).items()
    }


def worst_by_quantity(differences: list[Difference]) -> dict[str, dict[str, Any]]:
    """The largest difference of each quantity."""
    worst: dict[str, Difference] = {}
    for difference in differences:
        quantity = difference.quantity
        if quantity not in worst or difference.relative > worst[quantity].relative:
            worst[quantity] = difference
    return {quantity: plain(difference) for quantity, difference in worst.items()}


def report_text(record: dict[str, Any]) -> str:
    """A record of the parity check as text."""
    bf16 = record["precision"] == "bf16"
    changes = ", ".join(
        f"{key} {_short(old)} -> {_short(new)}" for key, (old, new) in record["changed"].items()
    )
    lines = [f"changed for this check: {changes or 'nothing'}"]
    if record["left_out"]:
        lines.append(f"left out of this check: {', '.join(record['left_out'])}")
    lines.append("")
    if record["verdict"] == "failed":
        lines += [record["failure"], "", "FAILED: the ranks did not finish"]
    else:
        lines.append(f"{'quantity':<16}{'worst':>9}  where")
        for quantity, difference in record["quantities"].items():
            lines.append(f"{quantity:<16}{_values_text(difference, bf16)}")
        lines.append("")
    lines += [f"not tried: {note}" for note in record.get("untried", [])]
    if record["verdict"] == "equal":
        return "\n".join([*lines, _equal_text(record)])
    if record["verdict"] == "different":
        lines += _different_text(record)
    if None in (without := record["without"]).values():
        changes = ", ".join(without)
        return "\n".join([*lines, f"--bisect repeats the check with one of these: {changes}"])
    for verdict in ("equal", "different", "failed"):
        if changes := ", ".join(change for change, v in without.items() if v == verdict):
            lines.append(f"{verdict} with one of: {changes}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _equal_text(record: dict[str, Any]) -> str:
    compared, tolerance = record["compared"], f"{record['tolerance']:g}"
    limit = f"within {tolerance} of one process"
    if record["precision"] == "bf16":
        limit = f"at most {tolerance} times as far from fp64 as one process in bf16"
    return f"EQUAL: {compared} figures and tensors of {record['world']} ranks are {limit}"


def _values_text(difference: dict[str, Any], bf16: bool) -> str:
    name, position = difference["name"], difference["position"]
    if difference["rank"] is None:
        return f"{'-':>9}  no rank holds {name} {position}"
    relative = _number(difference["relative"], ".1e")
    if position:
        name = f"{name} {list(position)}"
    actual, expected = difference["got"], difference["expected"]
    values = ""
    if difference["ranks"] and bf16:
        values = (
            f": {_number(actual, '.2g')} away from fp64, one process {_number(expected, '.2g')}"
        )
    elif difference["ranks"]:
        values = f": {_number(actual, '.12g')}, in one process {_number(expected, '.12g')}"
    return f"{relative:>9}  {name} on rank {difference['rank']}{values}"


def _number(value: float | None, spec: str) -> str:
    return "not finite" if value is None else format(value, spec)


# What a step computes, in order: the quantity, and where to look if it is the first to differ.
_STAGES: tuple[tuple[str, str], ...] = (
    (SAMPLES, "Ranks read the wrong sequences: look at how dp divides the batch."),
    (
        "num_targets",
        "The number of targets differs: look at the masks, or at the count over dp and cp.",
    ),
    (
        HIDDEN,
        "The forward differs, first in the output of {place}: look there, or at its input.",
    ),
    (
        "routers",
        "The outputs of all phases are equal, figures of the routers differ: "
        "look at the counts, or their sum.",
    ),
    (
        "loss",
        "The outputs of all phases are equal, a loss differs: "
        "look at the head, or at the sum of the losses.",
    ),
    ("gradient", "Losses are equal, gradients differ: look at a backward, or a sum over ranks."),
    ("auxiliary", "Gradients are equal, an auxiliary loss differs: look at the sum of its values."),
    (
        "grad_norm",
        "Gradients are equal, their norm differs: "
        "look at which elements it counts, and over which ranks.",
    ),
    ("weight", "Gradients and their norm are equal, weights differ: look at the update."),
    (
        "bias",
        "Weights with gradients are equal, biases of routers differ: "
        "look at how balancing updates them.",
    ),
    ("moment", "Weights are equal, the optimizer's moments differ: look at the update."),
)
_UNSENT = (
    "The weights that ranks own are equal after the step before: "
    "look at how they reach the other ranks, or at state that one step leaves for the next."
)


def stage_of(difference: Difference) -> tuple[int, int]:
    """When a quantity is computed: its step, and the index of its stage in the step."""
    kind, name = difference.quantity, difference.name
    if (
        kind == "routers"
        and "bias_range" in name
        or kind == "weight"
        and name.endswith("router.bias")
    ):
        kind = "bias"
    elif kind.endswith("_loss") and kind not in ("z_loss", "mtp_loss"):
        kind = "auxiliary"
    elif kind.endswith("loss"):
        kind = "loss"
    names = [stage for stage, _ in _STAGES]
    return difference.step, names.index(kind if kind in names else "moment")


def advice(first: Difference) -> str:
    """Where to look for the error, given the first difference."""
    step, stage = stage_of(first)
    if step == 0:
        return "The weights before the first step differ: look at their initialization."
    kind, text = _STAGES[stage]
    text = f"Step {step}. {text.format(place=first.name.partition(',')[0])}"
    return f"{text} {_UNSENT}" if step > 1 and kind in (HIDDEN, "loss", "gradient") else text


def _different_text(record: dict[str, Any]) -> list[str]:
    """Lines that name the first differences and what they mean."""
    tensors, tolerance = record["tensors"], f"{record['tolerance']:g}"
    bf16 = record["precision"] == "bf16"
    limit = f"by more than {tolerance}"
    if bf16:
        limit = f"by more than rounding, over {tolerance} times one process's distance from fp64"
    counts = [f"{', '.join(record['first_step'])} of step 1"] if record["first_step"] else []
    for (quantity, step), count in Counter((t["quantity"], t["step"]) for t in tensors).items():
        plural, when = "s" if count > 1 else "", f"in step {step}" if step else "initially"
        counts.append(f"{quantity} of {count} parameter{plural} {when}")
    summary = "; ".join(counts) or "only figures of later steps"
    lines = [f"DIFFERENT {limit}: {summary}", record["advice"]]
    if tensors:
        first = tensors[0]
        kind = first["quantity"], first["step"]
        alike = [t for t in tensors if (t["quantity"], t["step"]) == kind]
        lines += _tensor_text("first in the model", first, bf16)
        if len(alike) > 1:
            title = "last in the model, where a backward begins"
            lines += _tensor_text(title, alike[-1], bf16)
    return lines


def _tensor_text(title: str, tensor: dict[str, Any], bf16: bool) -> list[str]:
    ranks = "no rank holds it"
    if tensor["rank"] is not None:
        ranks = f"ranks {', '.join(map(str, tensor['ranks']))}"
    cut, summed = ", ".join(tensor["cut_by"]) or "nothing", ", ".join(tensor["summed_over"])
    return [
        f"  {title}: {tensor['quantity']} of {tensor['name']}, {ranks}",
        f"    {_values_text(tensor, bf16).strip()}",
        f"    cut by {cut}; summed over {summed}",
    ]

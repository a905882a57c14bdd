"""A parity certificate: what the check has found, and whether it still holds for a configuration
and this code.

What has been found is a record for programs, and a text for people (`report_text`).
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
_PASSIVE = ("init", "checkpoint", "log")  # groups that say where a run's files are
_MASKS = ("document_mask", "eod_mask_loss")  # of data: what decides about numbers on any files


def configuration_hash(config: Config) -> str:
    """Returns a hash of everything that decides about a run's numbers except its files."""
    found = {group: keys for group, keys in to_dict(config).items() if group not in _PASSIVE}
    found["data"] = {key: found["data"][key] for key in _MASKS}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def strays_of(certificate: dict[str, Any], config: Config, world: int) -> list[str]:
    """Returns why a certificate says nothing about this configuration on this many ranks, run by
    this code; [] where it does. Raises ValueError: it is no certificate, or a newer version wrote
    it."""
    try:
        told = certificate["format"], certificate["verdict"], certificate["world"]
        hashes = certificate["configuration_hash"], certificate["code"]["source_hash"]
        commit = certificate["code"]["commit"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no parity certificate: it lacks {error}") from error
    if told[0] > FORMAT:
        raise ValueError(f"the certificate has format {told[0]}, this version reads up to {FORMAT}")
    faults = []
    if told[1] != "equal":
        faults.append(f"its verdict is {told[1]!r}")
    if told[2] != world:
        faults.append(f"it was made on {told[2]} ranks, not on {world}")
    if hashes[0] != configuration_hash(config):
        faults.append("the configuration is another one")
    if hashes[1] != source_hash():
        faults.append(f"the code is not the one that was checked (commit {commit})")
    return faults


def plain(each: Difference) -> dict[str, Any]:
    """Returns a difference without what JSON has no word for."""
    return {
        key: None if isinstance(v, float) and not isfinite(v) else v
        for key, v in asdict(each).items()
    }


def worst_of(found: list[Difference]) -> dict[str, dict[str, Any]]:
    """Returns the largest difference of each quantity."""
    worst: dict[str, Difference] = {}
    for each in found:
        if each.quantity not in worst or each.relative > worst[each.quantity].relative:
            worst[each.quantity] = each
    return {quantity: plain(each) for quantity, each in worst.items()}


def report_text(record: dict[str, Any]) -> str:
    """Returns a record of the parity check as text."""
    bf16 = record["precision"] == "bf16"
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in record["changed"].items())
    lines = [f"changed for this check: {changes or 'nothing'}", ""]
    if record["verdict"] == "failed":
        lines += [record["failure"], "", "FAILED: the ranks did not come to an end"]
    else:
        lines.append(f"{'quantity':<16}{'worst':>9}  where")
        lines += [
            f"{quantity:<16}{_place(each, bf16)}" for quantity, each in record["quantities"].items()
        ]
        lines.append("")
    lines += [f"not tried: {each}" for each in record.get("untried", [])]
    if record["verdict"] == "equal":
        what = f"{record['compared']} figures and tensors of {record['world']} ranks"
        near = f"within {record['tolerance']:g} of one process"
        if bf16:
            near = f"no further from fp64 than {record['tolerance']:g} times as far as one process in bf16"
        return "\n".join([*lines, f"EQUAL: {what} are {near}"])
    if record["verdict"] == "different":
        lines += _story(record)
    if None in (without := record["without"]).values():
        return "\n".join(
            [*lines, f"--bisect tries it with one of these at a time: {', '.join(without)}"]
        )
    for verdict in ("equal", "different", "failed"):
        if names := [change for change, each in without.items() if each == verdict]:
            lines.append(f"{verdict} with one of: {', '.join(names)}")
    return "\n".join(lines)


def _place(each: dict[str, Any], bf16: bool) -> str:
    if each["rank"] is None:
        return f"{'-':>9}  {each['name']} {each['position']} is held by nobody"
    relative = "not finite" if each["relative"] is None else f"{each['relative']:.1e}"
    name = f"{each['name']} {list(each['position'])}" if each["position"] else each["name"]
    got, expected = (
        "not finite" if value is None else f"{value:.12g}"
        for value in (each["got"], each["expected"])
    )
    values = f": {got}, and {expected} in one process" if each["ranks"] else ""
    if bf16 and values:
        got, expected = (
            "not finite" if v is None else f"{v:.2g}" for v in (each["got"], each["expected"])
        )
        values = f": {got} away from fp64, one process in bf16 {expected}"
    return f"{relative:>9}  {name} on rank {each['rank']}{values}"


# what a step does, in order: the quantities that tell of it, and where to look if they are the
# first to differ
_STAGES: tuple[tuple[str, str], ...] = (
    (
        SAMPLES,
        "Ranks read other sequences than the order of the data says: look at how dp divides the batch.",
    ),
    (
        "num_targets",
        "The number of targets differs: look at the masks, or at the count over dp and cp.",
    ),
    (
        HIDDEN,
        "The forward differs, first in the output of {place}: look there, or at what is read there.",
    ),
    (
        "routers",
        "The outputs of all phases are equal, what routers tell differs: look at the counts, or their sum.",
    ),
    (
        "loss",
        "The outputs of all phases are equal, a loss differs: look at the head, or at the sum of the losses.",
    ),
    ("gradient", "Losses are equal, gradients differ: look at a backward, or a sum over ranks."),
    ("auxiliary", "Gradients are equal, an auxiliary loss differs: look at the sum of its values."),
    (
        "grad_norm",
        "Gradients are equal, their norm differs: look at which elements it counts, and over which ranks.",
    ),
    ("weight", "Gradients and their norm are equal, weights differ: look at the update."),
    (
        "bias",
        "All weights with gradients are equal, biases of routers differ: look at how balancing moves them.",
    ),
    ("moment", "Weights are equal, the optimiser's moments differ: look at the update."),
)
_UNSENT = (
    "The weights that ranks own are equal after the step before: look at how they reach the others, or at what one "
    "step leaves behind for the next."
)


def stage_of(each: Difference) -> tuple[int, int]:
    """Returns when in a run a quantity is computed: the step, and the place in it."""
    kind = each.quantity
    if (
        kind == "routers"
        and "bias_range" in each.name
        or kind == "weight"
        and each.name.endswith("router.bias")
    ):
        kind = "bias"
    elif kind.endswith("_loss") and kind not in ("z_loss", "mtp_loss"):
        kind = "auxiliary"
    elif kind.endswith("loss"):
        kind = "loss"
    names = [name for name, _ in _STAGES]
    return each.step, names.index(kind if kind in names else "moment")


def advice(first: Difference) -> str:
    """Returns where to look for a fault, by what differs first."""
    step, stage = stage_of(first)
    if step == 0:
        return "The weights before the first step differ: look at how they begin."
    text = _STAGES[stage][1].format(place=first.name.partition(",")[0])
    text = f"Step {step}. {text}"
    return (
        f"{text} {_UNSENT}"
        if step > 1 and _STAGES[stage][0] in (HIDDEN, "loss", "gradient")
        else text
    )


def _story(record: dict[str, Any]) -> list[str]:
    """Returns what differs first, and what that says."""
    tensors, bf16 = record["tensors"], record["precision"] == "bf16"
    counts = [f"{', '.join(record['first_step'])} of step 1"] if record["first_step"] else []
    kinds = Counter((each["quantity"], each["step"]) for each in tensors)
    for (kind, step), count in kinds.items():
        counts.append(
            f"{kind} of {count} parameter{'s' if count > 1 else ''} {f'in step {step}' if step else 'at first'}"
        )
    limit = f"by more than {record['tolerance']:g}"
    if bf16:
        limit = f"by more than rounding, over {record['tolerance']:g} times as far from fp64 as one process in bf16"
    lines = [
        f"DIFFERENT {limit}: {'; '.join(counts) or 'figures of later steps alone'}",
        record["advice"],
    ]
    if not tensors:
        return lines
    first = tensors[0]
    same = [
        each
        for each in tensors
        if (each["quantity"], each["step"]) == (first["quantity"], first["step"])
    ]
    for title, each in (
        ("first in the model", first),
        ("last in the model, where a backward begins", same[-1]),
    ):
        ranks = (
            "none holds it"
            if each["rank"] is None
            else f"ranks {', '.join(map(str, each['ranks']))}"
        )
        lines += [
            f"  {title}: {each['quantity']} of {each['name']}, {ranks}",
            f"    {_place(each, bf16).strip()}",
            f"    cut by {', '.join(each['cut_by']) or 'nothing'}; summed over {', '.join(each['summed_over'])}",
        ]
    return lines if len(same) > 1 else lines[:-3]

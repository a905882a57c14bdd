"""What a parity certificate says about configuration and code, and whether it still belongs to them.

What the parity check has found, as a record for programs and as text for people.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from math import isfinite
from typing import Any

from megatron5d.config.convert import to_dict
from megatron5d.config.schema import Config
from megatron5d.parity.differences import Difference
from megatron5d.train.provenance import source_hash

FORMAT = 1
_PASSIVE = ("init", "checkpoint", "log")  # groups that say where a run's files are
_MASKS = ("document_mask", "eod_mask_loss")  # of data: what decides about numbers on any files


def configuration_hash(config: Config) -> str:
    """A hash of everything that decides about a run's numbers except its files: the same for a run on other data."""
    found = {group: keys for group, keys in to_dict(config).items() if group not in _PASSIVE}
    found["data"] = {key: found["data"][key] for key in _MASKS}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def strays_of(certificate: dict[str, Any], config: Config, world: int) -> list[str]:
    """Why a certificate says nothing about this configuration on so many ranks, run by this code; [] where it does.

    Raises:
        ValueError: it is no certificate, or a newer version wrote it.
    """
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
    """A difference without what JSON has no word for."""
    return {key: None if isinstance(v, float) and not isfinite(v) else v for key, v in asdict(each).items()}


def worst_of(found: list[Difference]) -> dict[str, dict[str, Any]]:
    """The largest difference of each quantity."""
    worst: dict[str, Difference] = {}
    for each in found:
        if each.quantity not in worst or each.relative > worst[each.quantity].relative:
            worst[each.quantity] = each
    return {quantity: plain(each) for quantity, each in worst.items()}


def report_text(record: dict[str, Any]) -> str:
    """A record of the parity check as text."""
    changes = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in record["changed"].items())
    lines = [f"changed for this check: {changes or 'nothing'}", ""]
    if record["verdict"] == "failed":
        lines += [record["failure"], "", "FAILED: the ranks did not come to an end"]
    else:
        lines.append(f"{'quantity':<16}{'worst':>9}  where")
        lines += [f"{quantity:<16}{_place(each)}" for quantity, each in record["quantities"].items()]
        lines.append("")
    if record["verdict"] == "equal":
        what = f"{record['compared']} figures and tensors of {record['world']} ranks"
        near = f"within {record['tolerance']:g} of one process"
        if record["precision"] == "bf16":
            near = f"no further from fp64 than {record['tolerance']:g} times as far as one process in bf16"
        return "\n".join([*lines, f"EQUAL: {what} are {near}"])
    if record["verdict"] == "different":
        lines += _story(record)
    if None in (without := record["without"]).values():
        return "\n".join([*lines, f"--bisect tries it with one of these at a time: {', '.join(without)}"])
    for verdict in ("equal", "different", "failed"):
        if names := [change for change, each in without.items() if each == verdict]:
            lines.append(f"{verdict} with one of: {', '.join(names)}")
    return "\n".join(lines)


def _place(each: dict[str, Any]) -> str:
    if each["rank"] is None:
        return f"{'-':>9}  {each['name']} {each['position']} is held by nobody"
    relative = "not finite" if each["relative"] is None else f"{each['relative']:.1e}"
    name = f"{each['name']} {list(each['position'])}" if each["position"] else each["name"]
    values = f": {each['got']:.12g}, and {each['expected']:.12g} in one process" if each["ranks"] else ""
    return f"{relative:>9}  {name} on rank {each['rank']}{values}"


def _story(record: dict[str, Any]) -> list[str]:
    """What differs first, and what that says."""
    tensors = record["tensors"]
    counts = [f"{figures} of step 1" for figures in [", ".join(record["first_step"])] if figures]
    kinds = Counter(each["quantity"] for each in tensors)
    counts += [f"{kind} of {count} parameter{'s' if count > 1 else ''}" for kind, count in kinds.items()]
    limit = f"by more than {record['tolerance']:g}"
    if record["precision"] == "bf16":
        limit = f"by more than rounding, over {record['tolerance']:g} times as far from fp64 as one process in bf16"
    lines = [f"DIFFERENT {limit}: {'; '.join(counts) or 'figures of later steps alone'}"]
    if not tensors:
        return lines
    first = tensors[0]
    same = [each for each in tensors if each["quantity"] == first["quantity"]]
    if any(name.endswith("loss") for name in record["first_step"]):
        lines.append("A loss of the first step differs: look at the forward, or the data.")
    elif first["quantity"] == "gradient":
        lines.append("Losses of the first step are equal, gradients differ: look at a backward, or a sum over ranks.")
    else:
        lines.append("The gradients of the first step are equal: look at the update, or weights that were not sent.")
    for title, each in (("first in the model", first), ("last in the model, where a backward begins", same[-1])):
        ranks = "none holds it" if each["rank"] is None else f"ranks {', '.join(map(str, each['ranks']))}"
        lines += [
            f"  {title}: {each['quantity']} of {each['name']}, {ranks}",
            f"    {_place(each).strip()}",
            f"    cut by {', '.join(each['cut_by']) or 'nothing'}; summed over {', '.join(each['summed_over'])}",
        ]
    return lines if len(same) > 1 else lines[:-3]

"""Holds a layout against one process, and says what differs: what tools/parity.py does with a
configuration."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any

import torch

from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config
from megatron5d.parity.certificate import (
    FORMAT,
    advice,
    configuration_hash,
    plain,
    report_text,
    stage_of,
    worst_of,
)
from megatron5d.parity.differences import (
    Difference,
    axes_of,
    differences,
    sample_differences,
    untried,
)
from megatron5d.parity.local_ranks import RankFailure
from megatron5d.parity.rounding import in_16_bits, rounding_differences, smooth
from megatron5d.parity.run import (
    ROWS_SEED,
    Choices,
    RankRecord,
    alone,
    make_rows,
    short_run,
    with_gaps,
)
from megatron5d.parity.variants import Ablation, ablations, differing, exact, faults_of, shrink
from megatron5d.train.build import sizes_of
from megatron5d.train.data import end_of_document, first_rows
from megatron5d.train.preflight.parameters import glob_faults
from megatron5d.train.provenance import code_here

TOLERANCES = {"fp64": 1e-10, "bf16": 2.0}
STEPS = {"fp64": 3, "bf16": 1}  # rounding adds up over steps
# of a row at most is padding, so that no two ranks have the same number of target tokens
IGNORED = 0.3


def compare(asked: Config, options: argparse.Namespace) -> int:
    """Checks one configuration on its layout, prints what was found, and returns the exit code.

    Args:
        asked: as it would train.
        options: of tools/parity.py.

    Raises:
        ConfigError: it cannot be tried here.
        RankFailure: one process fails by itself.
    """
    torch.set_num_threads(1)  # ranks are forked
    if options.steps is None:
        options.steps = STEPS[options.precision]
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.precision]
    config, exactly = _tried(asked, options)
    sizes = sizes_of(config, options.world)
    record: dict[str, Any] = {
        "format": FORMAT,
        "overrides": options.overrides,
        "world": options.world,
        "layout": asdict(sizes),
        "configuration_hash": configuration_hash(asked),
        "changed": differing(asked, config),
        "device": "cpu",
        "seeds": {"weights": config.train.seed, "tokens": None if options.data else ROWS_SEED},
        "steps": options.steps,
        "precision": options.precision,
        "tolerance": options.tolerance,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    _say(f"{config.model.name} on {options.world} ranks: {_layout(config, options.world)}")
    check = Check(config, exactly, options)
    try:
        records, found = check.run(config, options.world)
    except RankFailure as failure:
        record |= {"verdict": "failed", "failure": str(failure)}
    else:
        off = sorted((each for each in found if each.relative > options.tolerance), key=stage_of)
        record |= {
            "verdict": "different" if off else "equal",
            "compared": len(found),
            "quantities": worst_of(found),
        }
        record["untried"] = untried(config, check.truth, records, TOLERANCES["fp64"])
        if off:
            figures = [each.quantity for each in off if each.step == 1 and not each.position]
            record |= {"first_step": list(dict.fromkeys(figures)), "advice": advice(off[0])}
            tensors = [each for each in off if each.position and each.step == off[0].step]
            record["tensors"] = [plain(each) | _cut(each, records, sizes) for each in tensors]
    if record["verdict"] != "equal":
        record["without"] = (
            check.bisect() if options.bisect else {each.change: None for each in check.ablations()}
        )
    if options.certificate:
        options.certificate.write_text(json.dumps(record | {"code": code_here()}, indent=2) + "\n")
    print(json.dumps(record, indent=2) if options.json else report_text(record))
    return 0 if record["verdict"] == "equal" else 1


def _tried(asked: Config, options: argparse.Namespace) -> tuple[Config, Config]:
    """Returns what is run in its place, small unless that is forbidden: in its precision, and in
    fp64."""
    config = exact(asked, options.steps)
    if options.data:
        config = replace(config, data=replace(asked.data, eod=end_of_document(asked)))
    if faults := faults_of(config, options.world) or glob_faults(config, options.world):
        raise ConfigError(faults)
    if not options.no_shrink:
        config = shrink(config, options.world, keep=["model.vocab_size"] if options.data else [])
    exactly = config
    if options.precision == "bf16":
        exactly = smooth(config)
        config = in_16_bits(exactly, asked.precision)
        if faults := faults_of(config, options.world):
            raise ConfigError(faults)
    return config, exactly


class Check:
    """One process, which is asked once, and layouts to hold against it.

    Args:
        config: of the layout; one process has the same mathematics.
        exactly: the same in fp64.
        options: world, steps, precision, tolerance and timeout.
    """

    def __init__(self, config: Config, exactly: Config, options: argparse.Namespace) -> None:
        self.config, self.options = config, options
        steps = options.steps
        random = with_gaps(make_rows(config, steps, ignored=IGNORED), config.train.gbs)
        self.rows = first_rows(config, steps) if options.data else random
        self.coarse = options.precision == "bf16"
        self.choices: Choices | None = {} if self.coarse else None
        (self.truth,) = self._train(alone(exactly), 1)
        self.choices = self.truth.choices or None
        self.rounded = self._train(alone(config), 1)[0] if self.coarse else None

    def _train(self, config: Config, world: int) -> list[RankRecord]:
        since = time.perf_counter()
        records = short_run(
            config,
            world,
            self.rows,
            self.options.steps,
            coarse=self.coarse,
            choices=self.choices,
            timeout=self.options.timeout,
        )
        _say(f"{world} rank{'s' if world > 1 else ''}: {time.perf_counter() - since:.1f} s")
        return records

    def run(self, config: Config, world: int) -> tuple[list[RankRecord], list[Difference]]:
        """Returns what the ranks of a layout had, and how far it is from one process."""
        records = self._train(config, world)
        tolerance, found = (
            self.options.tolerance,
            list(sample_differences(records, self.truth, sizes_of(config, world))),
        )
        if self.rounded is not None:
            return records, found + rounding_differences(
                records, self.rounded, self.truth, tolerance
            )
        return records, found + differences(records, self.truth, tolerance)

    def ablations(self) -> Iterator[Ablation]:
        """Yields the configuration without one thing at a time."""
        return ablations(self.config, self.options.world)

    def bisect(self) -> dict[str, str]:
        """Returns the verdict without each thing that can be turned off."""
        found = {}
        for each in self.ablations():
            _say(f"with {each.change} ...")
            try:
                worst = max(each.relative for each in self.run(each.config, each.world)[1])
                found[each.change] = "equal" if worst <= self.options.tolerance else "different"
            except RankFailure:
                found[each.change] = "failed"
        return found


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _layout(config: Config, world: int) -> str:
    p, s = config.parallel, sizes_of(config, world)
    parts = [
        f"dp {s.dp}, zero {p.zero}",
        f"tp {s.tp}{' with sp' if p.sp else ''}",
        f"cp {s.cp}{f' {p.cp_method}' if s.cp > 1 else ''}",
        f"pp {s.pp}{f' {config.pipeline.schedule}' if s.pp > 1 else ''}",
    ]
    return ", ".join([*parts, f"ep {s.ep}, etp {s.etp}"] if config.model.num_experts else parts)


def _cut(each: Difference, records: list[RankRecord], sizes) -> dict[str, list[str]]:
    cut, summed = axes_of(each.name, records, sizes)
    return {"cut_by": cut, "summed_over": summed}

"""Compares a layout with one process: what tools/parity.py does with a configuration."""

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

from megatron5d.config.derived import (
    batch_schedule,
    left_out_steps,
    sample_len,
    samples_of_steps,
)
from megatron5d.config.errors import ConfigError
from megatron5d.config.schema import Config
from megatron5d.parity.certificate import (
    FORMAT,
    advice,
    configuration_hash,
    plain,
    report_text,
    stage_of,
    worst_by_quantity,
)
from megatron5d.parity.differences import (
    Difference,
    axes_of,
    differences,
    sample_differences,
    untried,
)
from megatron5d.parity.inputs import ROWS_SEED, Rows, make_rows, sample_ranges, with_gaps
from megatron5d.parity.local_ranks import RankFailure
from megatron5d.parity.rectangles import Vanishing
from megatron5d.parity.rounding import in_16_bits, rounding_differences, smooth
from megatron5d.parity.routing import Choices
from megatron5d.parity.run import RankRecord, short_run, single_process
from megatron5d.parity.variants import Ablation, ablations, changed_keys, exact, faults_of, shrink
from megatron5d.topology.grid import Sizes
from megatron5d.train.build import sizes_of
from megatron5d.train.data import end_of_document, samples_of_step, validation_sets
from megatron5d.train.preflight.parameters import glob_faults
from megatron5d.train.provenance import code_here

TOLERANCES = {"fp64": 1e-10, "bf16": 2.0}
STEPS = {"fp64": 3, "bf16": 1}  # rounding accumulates over steps
MAX_STEPS = 1000  # those of data.skip_steps cost next to nothing
# Largest share of a row that is padding, so that no two ranks have the same number of targets.
IGNORED = 0.3


def compare(config: Config, options: argparse.Namespace) -> int:
    """Checks one configuration on its layout and prints the result.

    Args:
        config: as it would train.
        options: of tools/parity.py.

    Returns:
        The exit code: 0 equal, 1 different or failed.

    Raises:
        ConfigError: the configuration cannot be checked here.
        RankFailure: the run in one process fails.
    """
    torch.set_num_threads(1)  # ranks are forked
    options.steps = _num_steps(config, options)
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.precision]
    checked, in_fp64 = _configs(config, options)
    record = {
        "format": FORMAT,
        "overrides": options.overrides,
        "world": options.world,
        "layout": asdict(sizes_of(checked, options.world)),
        "configuration_hash": configuration_hash(config),
        "changed": changed_keys(config, checked),
        "left_out": _left_out(config),
        "device": "cpu",
        "seeds": {"weights": checked.train.seed, "tokens": None if options.data else ROWS_SEED},
        "steps": options.steps,
        "precision": options.precision,
        "tolerance": options.tolerance,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    layout = _layout_text(checked, options.world)
    _print_progress(f"{checked.model.name} on {options.world} ranks: {layout}")
    check = Check(checked, in_fp64, options, _rows(config, checked, options))
    record |= check.verdict()
    if record["verdict"] != "equal":
        unknown = {ablation.change: None for ablation in check.ablations()}
        record["without"] = check.bisect() if options.bisect else unknown
    if options.certificate:
        options.certificate.write_text(json.dumps(record | {"code": code_here()}, indent=2) + "\n")
    print(json.dumps(record, indent=2) if options.json else report_text(record))
    return 0 if record["verdict"] == "equal" else 1


def _num_steps(config: Config, options: argparse.Namespace) -> int:
    """Steps of the check: the default number, plus those that data.skip_steps skips."""
    skipped, steps, num_trained = set(left_out_steps(config, 0)), 0, 0
    while num_trained < STEPS[options.precision] and steps < MAX_STEPS and not options.steps:
        steps += 1
        num_trained += steps not in skipped
    steps = options.steps or steps
    if skipped.issuperset(range(1, steps + 1)):
        raise ValueError(f"data.skip_steps skips all {steps} steps of the check; raise --steps")
    return steps


def _left_out(config: Config) -> list[str]:
    """What the training loop does between the steps, and the check does not."""
    checkpoint, log = config.checkpoint, config.log
    parts = {
        "evaluations": validation_sets(config),
        "checkpoints": checkpoint.dir,
        "logs": log.dir or log.jsonl or log.profile,
    }
    return [name for name, configured in parts.items() if configured]


def _rows(config: Config, checked: Config, options: argparse.Namespace) -> Rows:
    """Random rows, or with --data the first samples of each step of the run, cut to size."""
    steps = options.steps
    if not options.data:
        rows = make_rows(checked, steps, ignored=IGNORED)
        return Rows(with_gaps(checked, rows, steps))
    length = sample_len(checked)
    run = replace(config, train=replace(config.train, steps=max(config.train.steps, steps)))
    tokens = torch.zeros((samples_of_steps(steps, batch_schedule(checked)), length + 1)).long()
    starts = {}
    for step, numbers in sample_ranges(checked, steps).items():
        samples = samples_of_step(run, step, len(numbers))
        for number, (row, begins) in zip(numbers, samples):
            tokens[number], starts[number] = row[: length + 1], begins[begins <= length]
    return Rows(tokens, starts)


def _configs(config: Config, options: argparse.Namespace) -> tuple[Config, Config]:
    """What runs instead of a configuration, shrunk unless forbidden: as asked, and in fp64."""
    checked = exact(config, options.steps)
    if options.data:
        data = replace(config.data, eod=end_of_document(config), valid=[], valid_sets=[])
        checked = replace(checked, data=data)
    if faults := faults_of(checked, options.world) or glob_faults(checked, options.world):
        raise ConfigError(faults)
    if not options.no_shrink:
        keep = ["model.vocab_size"] if options.data else []
        checked = shrink(checked, options.world, keep=keep)
    if options.precision == "fp64":
        return checked, checked
    in_fp64 = smooth(checked)
    checked = in_16_bits(in_fp64, config.precision)
    if faults := faults_of(checked, options.world):
        raise ConfigError(faults)
    return checked, in_fp64


class Check:
    """One process, which runs once, and layouts that are compared with it.

    Args:
        config: of the layout; one process runs the same mathematics.
        in_fp64: the same in fp64.
        options: world, steps, precision, tolerance and timeout.
        rows: that they train on.
    """

    def __init__(
        self, config: Config, in_fp64: Config, options: argparse.Namespace, rows: Rows
    ) -> None:
        self.config, self.options, self.rows = config, options, rows
        self.coarse = options.precision == "bf16"
        # Rounding must not send a token to another expert: bf16 runs repeat the choices of fp64.
        # In fp64 every run chooses and drops by itself, which no other check compares.
        self.choices: Choices | None = {} if self.coarse else None
        self.vanishing: Vanishing = {}
        (self.truth,) = self._train(single_process(in_fp64), 1)
        self.choices, self.vanishing = self.truth.choices or None, self.truth.vanishing
        self.rounded = self._train(single_process(config), 1)[0] if self.coarse else None

    def _train(self, config: Config, world: int) -> list[RankRecord]:
        start = time.perf_counter()
        records = short_run(
            config,
            world,
            self.rows,
            self.options.steps,
            coarse=self.coarse,
            choices=self.choices,
            vanishing=self.vanishing,
            timeout=self.options.timeout,
        )
        seconds = time.perf_counter() - start
        _print_progress(f"{world} rank{'s' if world > 1 else ''}: {seconds:.1f} s")
        return records

    def run(self, config: Config, world: int) -> tuple[list[RankRecord], list[Difference]]:
        """Records of the ranks of a layout, and their differences from one process."""
        records, tolerance = self._train(config, world), self.options.tolerance
        of_samples = list(sample_differences(records, self.truth, sizes_of(config, world)))
        if self.rounded is None:
            return records, of_samples + differences(records, self.truth, tolerance)
        judged = rounding_differences(records, self.rounded, self.truth, tolerance)
        return records, of_samples + judged

    def verdict(self) -> dict[str, Any]:
        """Runs the layout: the verdict, and everything that supports it."""
        try:
            records, compared = self.run(self.config, self.options.world)
        except RankFailure as failure:
            return {"verdict": "failed", "failure": str(failure)}
        off = [d for d in compared if d.relative > self.options.tolerance]
        off.sort(key=stage_of)
        result: dict[str, Any] = {
            "verdict": "different" if off else "equal",
            "compared": len(compared),
            "quantities": worst_by_quantity(compared),
            "untried": untried(self.config, self.truth, records, TOLERANCES["fp64"]),
        }
        if off:
            sizes = sizes_of(self.config, self.options.world)
            figures = [d.quantity for d in off if d.step == 1 and not d.position]
            tensors = [d for d in off if d.position and d.step == off[0].step]
            result["first_step"] = list(dict.fromkeys(figures))
            result["advice"] = advice(off[0])
            result["tensors"] = [plain(d) | _axes(d, records, sizes) for d in tensors]
        return result

    def ablations(self) -> Iterator[Ablation]:
        """The configuration with one dimension or option turned off at a time."""
        return ablations(self.config, self.options.world)

    def bisect(self) -> dict[str, str]:
        """Verdict of each ablation."""
        verdicts = {}
        for ablation in self.ablations():
            _print_progress(f"with {ablation.change} ...")
            try:
                _, compared = self.run(ablation.config, ablation.world)
            except RankFailure:
                verdicts[ablation.change] = "failed"
            else:
                is_equal = max(d.relative for d in compared) <= self.options.tolerance
                verdicts[ablation.change] = "equal" if is_equal else "different"
        return verdicts


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _layout_text(config: Config, world: int) -> str:
    p, s = config.parallel, sizes_of(config, world)
    dimensions = [
        f"dp {s.dp}, zero {p.zero}",
        f"tp {s.tp}{' with sp' if p.sp else ''}",
        f"cp {s.cp}{f' {p.cp_method}' if s.cp > 1 else ''}",
        f"pp {s.pp}{f' {config.pipeline.schedule}' if s.pp > 1 else ''}",
    ]
    if config.model.num_experts:
        dimensions.append(f"ep {s.ep}, etp {s.etp}")
    return ", ".join(dimensions)


def _axes(difference: Difference, records: list[RankRecord], sizes: Sizes) -> dict[str, list[str]]:
    cut, summed = axes_of(difference.name, records, sizes)
    return {"cut_by": cut, "summed_over": summed}

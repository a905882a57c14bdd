"""Check that a configuration computes the same numbers on its layout as one process: on the CPU, in fp64, in seconds.

    python tools/parity.py --world 16 experiment=quickstart
    python tools/parity.py --world 8 model=tiny_moe parallel.tp=2 parallel.sp=true parallel.ep=4 parallel.zero=2
    python tools/parity.py --world 8 --bisect model=tiny parallel.tp=2 parallel.pp=2 pipeline.schedule=zb_h1
    python tools/parity.py --world 16 --certificate parity.json experiment=quickstart
    python tools/parity.py --world 16 --precision bf16 experiment=quickstart
    python tools/parity.py --check parity.json

Words without dashes are overrides as pretrain.py takes them. The configuration is trained for a few steps on random
tokens, on forked ranks and by one process without parallelism, and everything is compared: samples, hidden states,
losses, gradient norm, what routers did, every gradient and weight of every step, moments. Sizes are made small
first, with every feature kept; layout, schedule, ZeRO and recompute are the configured ones. Its data need not exist,
unless --data asks to use the first tokens of it. With --precision bf16 both run in bf16, and the ranks may be at most
twice as far from one process in fp64 as one process in bf16 is.
Exit code 0: equal; 1: different, or the ranks failed; 2: refused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

if not __package__:  # a script of a checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron5d.config.command_line import OptionParser, print_anywhere

TOLERANCES = {"fp64": 1e-10, "bf16": 2.0}
STEPS = {"fp64": 3, "bf16": 1}  # rounding adds up over steps


def _parser() -> OptionParser:
    parser = OptionParser(prog="parity.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps (default 3, in bf16 1)")
    parser.add_argument(
        "--precision", choices=list(TOLERANCES), default="fp64",
        help="fp64: nothing hides behind rounding (default); bf16: by more than rounding does?",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, metavar="X",
        help="largest relative difference (default 1e-10); in bf16 how many times as far from fp64 as one process "
        "(default 2)",
    )  # fmt: skip
    parser.add_argument("--no-shrink", action="store_true", help="sizes of model and batch as configured")
    parser.add_argument("--data", action="store_true", help="the first tokens of data.train instead of random ones")
    parser.add_argument("--bisect", action="store_true", help="on a difference: without which dimension is there none?")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one run (default 600)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--certificate", type=Path, metavar="FILE", help="write what was found, and of what, as JSON")
    parser.add_argument(
        "--check", type=Path, metavar="FILE", help="does this certificate belong to code and overrides?"
    )
    parser.add_overrides()
    return parser


if __name__ == "__main__":
    print_anywhere()
    _parser().parse_args()  # answers --help and refuses bad options before the seconds that the imports below take

import torch

from megatron5d.config.convert import parse_json
from megatron5d.config.errors import ConfigError, refuse
from megatron5d.config.schema import Config
from megatron5d.parity.certificate import (
    FORMAT,
    advice,
    configuration_hash,
    plain,
    report_text,
    stage_of,
    strays_of,
    worst_of,
)
from megatron5d.parity.differences import Difference, axes_of, differences, sample_differences, untried
from megatron5d.parity.local_ranks import RankFailure
from megatron5d.parity.rounding import in_16_bits, rounding_differences, smooth
from megatron5d.parity.run import ROWS_SEED, Choices, RankRecord, alone, make_rows, short_run, with_gaps
from megatron5d.parity.variants import Ablation, ablations, differing, exact, faults_of, shrink
from megatron5d.planning.predict import planned_config
from megatron5d.train.build import sizes_of
from megatron5d.train.data import end_of_document, first_rows
from megatron5d.train.preflight import glob_faults
from megatron5d.train.provenance import code_here

IGNORED = 0.3  # of a row at most is padding, so that no two ranks have the same number of target tokens


def main(arguments: list[str] | None = None) -> int:
    """Checks one configuration, or one certificate, and returns the exit code."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # ranks are forked
    try:
        if options.check:
            return _check(options)
        if options.world is None:
            raise ValueError("--world N: the number of ranks is needed")
        return _compare(options)
    except ConfigError as error:
        refuse(error.faults)
    except RankFailure as failure:
        print(f"parity.py: one process fails by itself:\n{failure}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"parity.py: error: {error}", file=sys.stderr)
        return 2


def _complete(options: argparse.Namespace) -> None:
    """Fills in what depends on the precision, and refuses amounts that are none."""
    if options.certificate and options.certificate.is_dir():
        raise ValueError(f"--certificate {options.certificate} is a folder; name a file")
    if options.certificate and not os.access(options.certificate.absolute().parent, os.W_OK):
        raise ValueError(f"--certificate {options.certificate}: no folder in which it could be written")
    if options.steps is None:
        options.steps = STEPS[options.precision]
    if options.steps < 1:
        raise ValueError(f"--steps {options.steps}: at least 1")
    if options.tolerance is None:
        options.tolerance = TOLERANCES[options.precision]
    if not 0 <= options.tolerance < math.inf:
        raise ValueError(f"--tolerance {options.tolerance}: a number from 0 on")
    if not 0 < options.timeout < math.inf:
        raise ValueError(f"--timeout {options.timeout}: seconds above 0")


def _compare(options: argparse.Namespace) -> int:
    _complete(options)
    asked = planned_config(options.overrides, options.world, files=bool(options.data))
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
    sizes = sizes_of(config, options.world)
    record: dict[str, Any] = {
        "format": FORMAT, "overrides": options.overrides, "world": options.world, "layout": asdict(sizes),
        "configuration_hash": configuration_hash(asked), "changed": differing(asked, config), "device": "cpu",
        "seeds": {"weights": config.train.seed, "tokens": None if options.data else ROWS_SEED}, "steps": options.steps,
        "precision": options.precision, "tolerance": options.tolerance,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
    _say(f"{config.model.name} on {options.world} ranks: {_layout(config, options.world)}")
    check = Check(config, exactly, options)
    try:
        records, found = check.run(config, options.world)
    except RankFailure as failure:
        record |= {"verdict": "failed", "failure": str(failure)}
    else:
        off = sorted((each for each in found if each.relative > options.tolerance), key=stage_of)
        record |= {"verdict": "different" if off else "equal", "compared": len(found), "quantities": worst_of(found)}
        record["untried"] = untried(config, check.truth, records, TOLERANCES["fp64"])
        if off:
            figures = [each.quantity for each in off if each.step == 1 and not each.position]
            record |= {"first_step": list(dict.fromkeys(figures)), "advice": advice(off[0])}
            tensors = [each for each in off if each.position and each.step == off[0].step]
            record["tensors"] = [plain(each) | _cut(each, records, sizes) for each in tensors]
    if record["verdict"] != "equal":
        record["without"] = check.bisect() if options.bisect else {each.change: None for each in check.ablations()}
    if options.certificate:
        options.certificate.write_text(json.dumps(record | {"code": code_here()}, indent=2) + "\n")
    print(json.dumps(record, indent=2) if options.json else report_text(record))
    return 0 if record["verdict"] == "equal" else 1


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
            config, world, self.rows, self.options.steps, coarse=self.coarse, choices=self.choices,
            timeout=self.options.timeout,
        )  # fmt: skip
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
            return records, found + rounding_differences(records, self.rounded, self.truth, tolerance)
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


def _check(options: argparse.Namespace) -> int:
    """Returns whether a certificate was made of this code, of the overrides that it names or of those given."""
    try:
        certificate = parse_json(options.check.read_bytes())
    except ValueError:  # not JSON, or not even text
        certificate = None
    if not isinstance(certificate, dict) or "overrides" not in certificate:
        raise ValueError(f"--check {options.check}: that is no parity certificate")
    world = options.world or certificate.get("world", 1)
    config = planned_config(options.overrides or certificate["overrides"], world)
    try:
        faults = strays_of(certificate, config, world)
    except ValueError as error:
        raise ValueError(f"--check {options.check}: {error}") from error
    if options.json:
        print(json.dumps({"belongs": not faults, "faults": faults, "date": certificate["date"]}))
    else:
        told = f"made on {certificate['date']} at commit {certificate['code']['commit']}"
        print(
            "\n".join(["it does not belong:", *faults])
            if faults
            else f"it belongs to this code and configuration, {told}"
        )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

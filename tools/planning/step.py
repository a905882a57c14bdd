"""Runs `plan.py step`: the time of a step by kind, on a device and its network."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron5d.config.schema import Config
from megatron5d.planning.time.predict import Estimator
from megatron5d.tools.planning.options import check_fp8, cluster_of
from megatron5d.train.preflight.kernels import choice_text, names_of


def run(options: argparse.Namespace, config: Config) -> int:
    """Prints the table or the record; the result is the exit code."""
    cluster = cluster_of(options)
    check_fp8(config, cluster.architecture)
    cost = Estimator(cluster, options.imbalance or 1.0).step(config, options.world)
    family, _, number = cluster.architecture.partition("_")
    capability = int(number) if family == "sm" else 0
    kernels = names_of(config, capability, on_this_gpu=False) if capability else {}
    if options.json:
        record = {
            "world": options.world,
            "device": asdict(cluster),
            "kernels": kernels,
            **cost.record(),
        }
        print(json.dumps(record, indent=2))
    else:
        print(cost.table(cluster))
        if kernels:
            print(choice_text(config, capability, on_this_gpu=False))
    return 0

"""What options of plan.py say of the machines, and what a configuration leaves to defaults; without
torch."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from megatron5d.config.errors import ConfigError
from megatron5d.config.load import CONF
from megatron5d.config.schema import Config
from megatron5d.model.flops import parameter_count
from megatron5d.planning.clusters import Cluster, cluster_called

LARGE = 500_000_000  # parameters that nobody trains in fp32
EXPERIMENTS = {file.stem for file in (CONF / "experiment").glob("*.yaml")}


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError: an option is wrong, whatever the configuration."""
    for name in ("node", "network_gbps", "link_gbps", "tflops", "count"):
        value = getattr(options, name, None)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value:g} is not above 0")
    imbalance = getattr(options, "imbalance", None)
    if imbalance is not None and not 1 <= imbalance < float("inf"):
        raise ValueError(
            f"--imbalance {imbalance:g}: the busiest rank is sent at least an even share, 1"
        )
    size = getattr(options, "device_gb", None)
    if size is not None and not 0 < size < 1e9:
        raise ValueError(f"--device-gb {size:g} is not above 0, or no device's")
    if options.command in ("step", "search"):
        cluster_called(options.device)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Returns the device that is named, with what the options say of it."""
    said = {
        "node": options.node,
        "network_rate": options.network_gbps and options.network_gbps * 1e9 / 8,
        "link_rate": options.link_gbps and options.link_gbps * 1e9 / 8,
        "flops": options.tflops and options.tflops * 1e12,
    }
    named = cluster_called(options.device)
    if said["flops"]:
        said["flops_8bit"] = said["flops"] * named.flops_8bit / named.flops
    return replace(named, **{name: value for name, value in said.items() if value})


def bytes_given(options: argparse.Namespace, known: Any) -> Any:
    """Returns what --device-gb says; without it what is known of the device."""
    return known if options.device_gb is None else round(options.device_gb * 1e9)


def check_fp8(config: Config, architecture: str) -> None:
    """Raises ConfigError where the architecture has no FP8 kernels, and the configuration wants
    them."""
    from megatron5d.train.preflight.kernels import fp8_faults

    if faults := fp8_faults(config, architecture):
        raise ConfigError(faults)


def what(config: Config) -> str:
    """Returns what is counted, for a user who did not give it."""
    train, precision = config.train, config.precision
    fp8 = "" if precision.fp8 == "none" else f" with fp8 {precision.fp8}"
    return f"{config.model.name} in {precision.dtype}{fp8}, train.gbs {train.gbs}, train.seq_len {train.seq_len:,}"


def note_defaults(config: Config) -> None:
    """Warns that a model alone leaves precision, batch and sequence at their defaults for a toy."""
    name = config.model.name
    if config.precision.dtype == "fp32" and parameter_count(config.model) > LARGE:
        experiment = (
            f"; experiment={name} brings what it is trained with" if name in EXPERIMENTS else ""
        )
        print(f"note: planned for {what(config)}{experiment}", file=sys.stderr)

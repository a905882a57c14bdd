"""Options of plan.py: checks, the device they describe, notes on defaults. Imports no torch."""

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

LARGE = 500_000_000  # parameters; larger models are not trained in fp32
EXPERIMENTS = {file.stem for file in (CONF / "experiment").glob("*.yaml")}


def check_options(options: argparse.Namespace) -> None:
    """Checks the options that do not depend on the configuration.

    Raises:
        ValueError: an option is out of range.
    """
    for name in ("node", "network_gbps", "link_gbps", "tflops", "count"):
        value = getattr(options, name, None)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0 (got {value:g})")
    imbalance = getattr(options, "imbalance", None)
    if imbalance is not None and imbalance < 1:
        raise ValueError(f"--imbalance must be at least 1, an even share (got {imbalance:g})")
    size = getattr(options, "device_gb", None)
    if size is not None and not 0 < size < 1e9:
        raise ValueError(f"--device-gb must be above 0 and below 10⁹ (got {size:g})")
    if options.command in ("step", "search"):
        cluster_called(options.device)


def cluster_of(options: argparse.Namespace) -> Cluster:
    """Named device, with the values that the options set."""
    overridden = {
        "node": options.node,
        "network_rate": options.network_gbps and options.network_gbps * 1e9 / 8,
        "link_rate": options.link_gbps and options.link_gbps * 1e9 / 8,
        "flops": options.tflops and options.tflops * 1e12,
    }
    cluster = cluster_called(options.device)
    if overridden["flops"]:
        overridden["flops_8bit"] = overridden["flops"] * cluster.flops_8bit / cluster.flops
    return replace(cluster, **{name: value for name, value in overridden.items() if value})


def device_bytes(options: argparse.Namespace, default: Any) -> Any:
    """Memory of a device from --device-gb, or else the default."""
    return default if options.device_gb is None else round(options.device_gb * 1e9)


def check_fp8(config: Config, architecture: str) -> None:
    """Checks that the architecture has the FP8 kernels of the configuration.

    Raises:
        ConfigError: it lacks them.
    """
    from megatron5d.train.preflight.kernels import fp8_faults

    if faults := fp8_faults(config, architecture):
        raise ConfigError(faults)


def run_text(config: Config) -> str:
    """Model, precision and batch of a run; the user may not have set them."""
    train, precision = config.train, config.precision
    fp8 = "" if precision.fp8 == "none" else f" with fp8 {precision.fp8}"
    batch = f"train.gbs {train.gbs}, train.seq_len {train.seq_len:,}"
    return f"{config.model.name} in {precision.dtype}{fp8}, {batch}"


def note_defaults(config: Config) -> None:
    """Notes that a large model is planned with default precision, batch and sequence length."""
    name = config.model.name
    if config.precision.dtype == "fp32" and parameter_count(config.model) > LARGE:
        experiment = (
            f"; experiment={name} sets its training configuration" if name in EXPERIMENTS else ""
        )
        print(f"note: planned for {run_text(config)}{experiment}", file=sys.stderr)

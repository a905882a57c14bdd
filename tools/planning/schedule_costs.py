"""Options of tools/schedule.py that describe the costs of stages."""

from __future__ import annotations

import argparse

from megatron5d.model.partition import BALANCES
from megatron5d.pipeline_parallel.costs import Costs, StageCosts, parse_costs
from megatron5d.pipeline_parallel.program import Program
from megatron5d.planning.schedule_search.stage_costs import LayerCosts


def add_costs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--costs", default="", help="F=1,I=1,W=1,comm=0,a2aF=0,a2aB=0 (these are the defaults)"
    )
    parser.add_argument(
        "--stage-scale",
        metavar="LIST",
        help="each stage's time relative to an even split, such as 0.3,1,1,1.5",
    )
    layers = parser.add_argument_group(
        "whole layers", "assigned to stages; --embedding, --head and --dense in layers"
    )
    layers.add_argument(
        "--layers", type=int, metavar="N", help="of the model (default: an even split)"
    )
    layers.add_argument(
        "--embedding",
        type=float,
        default=0.0,
        metavar="X",
        help="additional compute of the first stage",
    )
    layers.add_argument(
        "--head", type=float, default=0.0, metavar="X", help="additional compute of the last stage"
    )
    layers.add_argument(
        "--dense",
        type=float,
        default=0.0,
        metavar="X",
        help="first layers, without all-to-all",
    )
    layers.add_argument(
        "--balance", choices=BALANCES, help="what to balance (default: stages; search tries all)"
    )


def cost_models(options: argparse.Namespace) -> list[Costs | LayerCosts]:
    """Costs under each way of assigning layers to stages that the options allow."""
    ends = {name: getattr(options, name) for name in ("embedding", "head", "dense")}
    if options.layers is None:
        unused = [f"--{name}" for name in (*ends, "balance") if getattr(options, name)]
        if unused:
            raise ValueError(f"{', '.join(unused)} requires --layers, the number to assign")
        return [_costs(options)]
    if options.stage_scale:
        raise ValueError("--stage-scale and --layers both set the work of stages; leave one out")
    balances = [options.balance] if options.balance else BALANCES
    return [
        LayerCosts(_costs(options), options.layers, **ends, balance=balance) for balance in balances
    ]


def stage_costs(
    options: argparse.Namespace, program: Program
) -> tuple[StageCosts, list[int] | None]:
    """Costs of the stages of a Program, and their numbers of layers if --layers is set."""
    return costs_and_layout(cost_models(options)[0], program)


def costs_and_layout(
    model: Costs | LayerCosts, program: Program
) -> tuple[StageCosts, list[int] | None]:
    placement = program.placement
    return model.of(placement), model.layout(placement) if isinstance(model, LayerCosts) else None


def _costs(options: argparse.Namespace) -> Costs:
    scale = None
    if options.stage_scale:
        try:
            scale = [float(factor) for factor in options.stage_scale.split(",")]
        except ValueError:
            raise ValueError(
                f"--stage-scale must be numbers such as 0.3,1,1,1.5 (got {options.stage_scale!r})"
            ) from None
    return parse_costs(options.costs, scale)

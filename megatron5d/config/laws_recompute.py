"""Laws of recomputation and offloading."""

from __future__ import annotations

from megatron5d.config.checks.check import Law
from megatron5d.config.schema import Config, RecomputeConfig


def _num_stages(c: Config) -> int:
    return len(c.recompute.stage_layers or [])


MOE_PHASES = ("dispatch", "experts", "combine")
MOE_PARTS = ("experts", "permute")


def _moe_parts(c: Config) -> list[str]:
    return [each for each in c.recompute.parts if each in MOE_PARTS]


def _moe_phases(c: Config) -> list[str]:
    return [each for each in c.recompute.offload if each in MOE_PHASES]


RECOMPUTE_LAWS = (
    Law(
        "recompute-parts-need-selective",
        ("recompute.parts", "recompute.mode"),
        lambda c, w: c.recompute.mode != "selective" and c.recompute.parts != RecomputeConfig().parts,
        lambda c, w: f"recompute.parts = [{','.join(c.recompute.parts)}] are computed again within a layer, and "
        f"recompute.mode = {c.recompute.mode}",
        lambda c, w: "recompute.mode=selective",
    ),
    Law(
        "recompute-experts-exist",
        ("recompute.parts", "recompute.mode", "model.num_experts"),
        lambda c, w: c.recompute.mode == "selective" and not c.model.num_experts and _moe_parts(c) != [],
        lambda c, w: f"recompute.parts names {', '.join(_moe_parts(c))}, and model.num_experts = 0",
        lambda c, w: f"recompute.parts=[{','.join(sorted({*c.recompute.parts} - {*MOE_PARTS})) or 'mlp'}]",
    ),
    Law(
        "offload-inputs-need-full",
        ("recompute.offload", "recompute.mode"),
        lambda c, w: "inputs" in c.recompute.offload and c.recompute.mode != "full",
        lambda c, w: "recompute.offload names inputs, those of wholly recomputed layers, and recompute.mode = "
        f"{c.recompute.mode}",
        lambda c, w: "recompute.mode=full",
    ),
    Law(
        "offload-phases-keep",
        ("recompute.offload", "recompute.mode"),
        lambda c, w: c.recompute.mode == "full"
        and (c.recompute.num_layers, c.recompute.stage_layers) == (None, None)
        and not {*c.recompute.offload} <= {"inputs"},
        lambda c, w: f"recompute.offload = [{','.join(c.recompute.offload)}], and under recompute.mode = full a layer "
        "keeps its input alone",
        lambda c, w: "recompute.offload=[inputs], or recompute.mode=selective",
    ),
    Law(
        "offload-moves-masters",
        ("optim.offload", "precision.master_weights"),
        lambda c, w: c.optim.offload and not c.precision.master_weights,
        lambda c, w: "optim.offload = true keeps master weights on the host; precision.master_weights = false has none",
        lambda c, w: "precision.master_weights=true, or optim.offload=false",
    ),
    Law(
        "offload-phases-exist",
        ("recompute.offload", "model.num_experts"),
        lambda c, w: not c.model.num_experts and _moe_phases(c) != [],
        lambda c, w: f"recompute.offload names {', '.join(_moe_phases(c))}, and model.num_experts = 0",
        lambda c, w: f"recompute.offload=[{','.join(each for each in c.recompute.offload if each not in MOE_PHASES)}]",
    ),
    Law(
        "recompute-layers-need-a-mode",
        ("recompute.num_layers", "recompute.stage_layers", "recompute.mode"),
        lambda c, w: c.recompute.mode == "none" and (c.recompute.num_layers, c.recompute.stage_layers) != (None, None),
        lambda c, w: f"recompute.num_layers = {c.recompute.num_layers}, stage_layers = {c.recompute.stage_layers} "
        "count recomputed layers, and recompute.mode = none",
        lambda c, w: "recompute.mode=full, or recompute.num_layers=null recompute.stage_layers=null",
    ),
    Law(
        "recompute-layers-exist",
        ("recompute.num_layers", "model.num_layers"),
        lambda c, w: (c.recompute.num_layers or 0) > c.model.num_layers,
        lambda c, w: f"recompute.num_layers = {c.recompute.num_layers} is more than "
        f"model.num_layers = {c.model.num_layers}",
        lambda c, w: f"recompute.num_layers={c.model.num_layers}",
    ),
    Law(
        "recompute-layers-said-once",
        ("recompute.num_layers", "recompute.stage_layers"),
        lambda c, w: c.recompute.num_layers is not None and c.recompute.stage_layers is not None,
        lambda c, w: f"recompute.num_layers = {c.recompute.num_layers} of every stage, and "
        f"recompute.stage_layers = {c.recompute.stage_layers} stage by stage",
        lambda c, w: "recompute.num_layers=null",
    ),
    Law(
        "recompute-counts-stages",
        ("recompute.stage_layers", "parallel.pp", "parallel.vpp"),
        # how many chunks a rank has, its schedule knows (zb_v has two): the plan checks that
        lambda c, w: c.recompute.stage_layers is not None
        and _num_stages(c) % (c.parallel.pp * c.parallel.vpp) != 0,
        lambda c, w: f"recompute.stage_layers has {_num_stages(c)} stages, "
        f"parallel.pp·vpp = {c.parallel.pp}·{c.parallel.vpp} = {c.parallel.pp * c.parallel.vpp}",
        lambda c, w: "recompute.stage_layers=null",
    ),
    Law(
        "recompute-groups-need-full",
        ("recompute.group_layers", "recompute.mode"),
        lambda c, w: c.recompute.group_layers > 1 and c.recompute.mode != "full",
        lambda c, w: f"recompute.group_layers = {c.recompute.group_layers} wholly recomputed layers keep one input, "
        f"and recompute.mode = {c.recompute.mode}",
        lambda c, w: "recompute.mode=full, or recompute.group_layers=1",
    ),
)  # fmt: skip

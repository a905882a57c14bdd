"""Laws of precision: how 8-bit recipes, dtypes and matrices must fit together.

Laws of recomputation and offloading.
"""

from __future__ import annotations

import fnmatch

from megatron5d.config.checks.check import Law, spelled
from megatron5d.config.convert import value_of
from megatron5d.config.derived import cut_features, matrices, quantised_matrices
from megatron5d.config.schema import Config, RecomputeConfig

ROW_BYTES = 16  # a GPU's copy engine needs rows of a multiple of so many bytes
GROUP = 128  # features that share a scale with `blockwise`
# Keys that have an effect only with 8-bit products -> the value they must have without.
NEED_FP8: dict[str, object] = {
    "precision.fp8_skip_first": 0,
    "precision.fp8_skip_last": 0,
    "precision.fp8_exclude": [],
    "precision.fp8_gather": True,
}
MODEL = ("model.num_layers", "model.attention", "model.hidden_size", "model.ffn_hidden_size", "model.num_heads",
         "model.num_kv_heads", "model.head_dim", "model.q_lora_rank", "model.num_experts", "model.first_k_dense",
         "model.moe_interval", "model.moe_layers")  # fmt: skip
CHOICE = ("precision.fp8", *NEED_FP8)


def _unaligned_dims(c: Config) -> list[str]:
    """The dims of quantised matrices that are not a multiple of what their products need, as text."""
    found = {} if c.model.hidden_size % ROW_BYTES == 0 else {f"model.hidden_size = {c.model.hidden_size}": ROW_BYTES}
    for name in quantised_matrices(c):
        for knobs, (size, ranks) in cut_features(c, name).items():
            of = GROUP if c.precision.fp8 == "blockwise" and ranks > 1 else ROW_BYTES
            if size % of:
                found[f"{knobs} = {size}"] = of
    return [f"{text} is no multiple of {of}" for text, of in found.items()]


def _unmatched_globs(c: Config) -> list[str]:
    """Globs that match no matrix of the model."""
    names = matrices(c.model)
    return [glob for glob in c.precision.fp8_exclude if not fnmatch.filter(names, glob)]


def _unused_keys(c: Config) -> list[str]:
    return [key for key, idle in NEED_FP8.items() if c.precision.fp8 == "none" and value_of(c, key) != idle]


PRECISION_LAWS = (
    Law(
        "fp8-knobs-need-fp8",
        CHOICE,
        lambda c, w: _unused_keys(c) != [],
        lambda c, w: f"{_unused_keys(c)[0]} = {spelled(value_of(c, _unused_keys(c)[0]))} says which matrices are in "
        "8 bits, and when, and precision.fp8 = none multiplies none so",
        lambda c, w: " ".join(f"{key}={spelled(NEED_FP8[key])}" for key in _unused_keys(c)),
    ),
    Law(
        "fp8-exclude-matches",
        ("precision.fp8_exclude", *MODEL),
        lambda c, w: _unmatched_globs(c) != [],
        lambda c, w: f"precision.fp8_exclude = {spelled(c.precision.fp8_exclude)}: {_unmatched_globs(c)[0]} matches no "
        f"matrix; there are {', '.join(dict.fromkeys(name.split('.', 2)[2] for name in matrices(c.model)))} "
        f"of layers.0 to {c.model.num_layers - 1}",
        lambda c, w: "precision.fp8_exclude="
        + spelled([glob for glob in c.precision.fp8_exclude if glob not in _unmatched_globs(c)]),
        needs=("moe-layers-exist",),
    ),
    Law(
        "fp8-leaves-matrices",
        (*CHOICE, *MODEL),
        lambda c, w: c.precision.fp8 != "none" and not quantised_matrices(c),
        lambda c, w: f"precision.fp8 = {c.precision.fp8}, but fp8_skip_first = {c.precision.fp8_skip_first}, "
        f"fp8_skip_last = {c.precision.fp8_skip_last} and fp8_exclude = {spelled(c.precision.fp8_exclude)} leave no "
        f"matrix of {c.model.num_layers} layers to it",
        lambda c, w: "precision.fp8_skip_first=0 precision.fp8_skip_last=0 precision.fp8_exclude=[]",
        needs=("moe-layers-exist", "fp8-exclude-matches"),
    ),
    Law(
        "fp8-dims",
        (*CHOICE, *MODEL, "parallel.tp", "parallel.etp", "model.moe_ffn_hidden_size", "model.shared_ffn_hidden_size"),
        lambda c, w: _unaligned_dims(c) != [] and c.precision.fp8 != "none",
        lambda c, w: f"precision.fp8 = {c.precision.fp8} needs rows of whole {ROW_BYTES} bytes, and blockwise whole "
        f"groups of {GROUP} where a dim is cut: " + ", ".join(_unaligned_dims(c)),
        lambda c, w: "precision.fp8=none, or other sizes",
        needs=("moe-layers-exist",),
    ),
    Law(
        "fp8-needs-projected-kv",
        ("precision.fp8", "parallel.cp_compress_kv"),
        lambda c, w: c.precision.fp8 != "none" and c.parallel.cp_compress_kv,
        lambda c, w: f"parallel.cp_compress_kv = true projects keys and values block by block as they arrive, in "
        f"precision.dtype = {c.precision.dtype}, and precision.fp8 = {c.precision.fp8} would project them in 8 bits",
        lambda c, w: "parallel.cp_compress_kv=false",
    ),
    Law(
        "master-free-needs-bf16",
        ("precision.master_weights", "precision.dtype"),
        lambda c, w: not c.precision.master_weights and c.precision.dtype != "bf16",
        lambda c, w: "precision.master_weights = false saves the copies of bf16 weights, and precision.dtype = "
        f"{c.precision.dtype} has none",
        lambda c, w: "precision.master_weights=true, or precision.dtype=bf16",
    ),
    Law(
        "master-free-updates-itself",
        ("precision.master_weights", "optim.implementation"),
        lambda c, w: not c.precision.master_weights and c.optim.implementation != "auto",
        lambda c, w: f"optim.implementation = {c.optim.implementation} cannot round at random, as "
        "precision.master_weights = false asks",
        lambda c, w: "optim.implementation=auto, or precision.master_weights=true",
    ),
)  # fmt: skip


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

"""Checks of precision, recomputation and offloading: how recipes, dtypes, matrices and layers must
fit together."""

import fnmatch

from megatron5d.config.checks.check import Faults, check, fault
from megatron5d.config.convert import spelled, value_of
from megatron5d.config.derived import cut_features, matrices, quantised_matrices
from megatron5d.config.schema import Config, RecomputeConfig

ROW_BYTES = 16  # a GPU's copy engine needs rows of a multiple of this many bytes
GROUP = 128  # features that share a scale with `blockwise`
# Keys that have an effect only with FP8 GEMMs -> the value they must have without.
NEED_FP8: dict[str, object] = {
    "precision.fp8_skip_first": 0,
    "precision.fp8_skip_last": 0,
    "precision.fp8_exclude": [],
    "precision.fp8_gather": True,
}
MODEL = (
    "model.num_layers",
    "model.attention",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.num_heads",
    "model.num_kv_heads",
    "model.head_dim",
    "model.q_lora_rank",
    "model.num_experts",
    "model.first_k_dense",
    "model.moe_interval",
    "model.moe_layers",
)
CHOICE = ("precision.fp8", *NEED_FP8)


def _unaligned_dims(c: Config) -> list[str]:
    """Returns the dims of quantised matrices that are not a multiple of what their GEMMs need, as
    text."""
    found = (
        {}
        if c.model.hidden_size % ROW_BYTES == 0
        else {f"model.hidden_size = {c.model.hidden_size}": ROW_BYTES}
    )
    for name in quantised_matrices(c):
        for knobs, (size, ranks) in cut_features(c, name).items():
            of = GROUP if c.precision.fp8 == "blockwise" and ranks > 1 else ROW_BYTES
            if size % of:
                found[f"{knobs} = {size}"] = of
    return [f"{text} is no multiple of {of}" for text, of in found.items()]


MOE_PHASES = ("dispatch", "experts", "combine")
MOE_PARTS = ("experts", "permute")


@check("recompute.parts", "recompute.mode")
def recompute_parts_need_selective(c: Config, world: int) -> Faults:
    parts, mode = c.recompute.parts, c.recompute.mode
    if mode != "selective" and parts != RecomputeConfig().parts:
        yield fault(
            f"recompute.parts = {spelled(parts)} are recomputed within a layer, and recompute.mode = {mode}",
            "recompute.mode=selective",
        )


@check("recompute.parts", "recompute.mode", "model.num_experts")
def recompute_experts_exist(c: Config, world: int) -> Faults:
    parts = [each for each in c.recompute.parts if each in MOE_PARTS]
    if c.recompute.mode == "selective" and not c.model.num_experts and parts:
        yield fault(
            f"recompute.parts names {', '.join(parts)}, and model.num_experts = 0",
            f"recompute.parts=[{','.join(sorted({*c.recompute.parts} - {*MOE_PARTS})) or 'mlp'}]",
        )


@check("recompute.offload", "recompute.mode")
def offload_inputs_need_full(c: Config, world: int) -> Faults:
    if "inputs" in c.recompute.offload and c.recompute.mode != "full":
        yield fault(
            f"recompute.offload names inputs, those of wholly recomputed layers, and recompute.mode = "
            f"{c.recompute.mode}",
            "recompute.mode=full",
        )


@check("recompute.offload", "recompute.mode")
def offload_phases_keep(c: Config, world: int) -> Faults:
    r = c.recompute
    if (
        r.mode == "full"
        and (r.num_layers, r.stage_layers) == (None, None)
        and not {*r.offload} <= {"inputs"}
    ):
        yield fault(
            f"recompute.offload = {spelled(r.offload)}, and under recompute.mode = full a layer keeps its input alone",
            "recompute.offload=[inputs], or recompute.mode=selective",
        )


@check("optim.offload", "precision.master_weights")
def offload_moves_masters(c: Config, world: int) -> Faults:
    if c.optim.offload and not c.precision.master_weights:
        yield fault(
            "optim.offload = true keeps master weights on the host; precision.master_weights = false has none",
            "precision.master_weights=true, or optim.offload=false",
        )


@check("recompute.offload", "model.num_experts")
def offload_phases_exist(c: Config, world: int) -> Faults:
    phases = [each for each in c.recompute.offload if each in MOE_PHASES]
    if not c.model.num_experts and phases:
        yield fault(
            f"recompute.offload names {', '.join(phases)}, and model.num_experts = 0",
            f"recompute.offload={spelled([each for each in c.recompute.offload if each not in MOE_PHASES])}",
        )


@check("recompute.num_layers", "recompute.stage_layers", "recompute.mode")
def recompute_layers_need_a_mode(c: Config, world: int) -> Faults:
    r = c.recompute
    if r.mode == "none" and (r.num_layers, r.stage_layers) != (None, None):
        yield fault(
            f"recompute.num_layers = {r.num_layers}, stage_layers = {r.stage_layers} count recomputed layers, and "
            "recompute.mode = none",
            "recompute.mode=full, or recompute.num_layers=null recompute.stage_layers=null",
        )


@check("recompute.num_layers", "model.num_layers")
def recompute_layers_exist(c: Config, world: int) -> Faults:
    recomputed, layers = c.recompute.num_layers, c.model.num_layers
    if recomputed is not None and recomputed > layers:
        yield fault(
            f"recompute.num_layers = {recomputed} is more than model.num_layers = {layers}",
            f"recompute.num_layers={layers}",
        )


@check("recompute.num_layers", "recompute.stage_layers")
def recompute_layers_said_once(c: Config, world: int) -> Faults:
    r = c.recompute
    if r.num_layers is not None and r.stage_layers is not None:
        yield fault(
            f"recompute.num_layers = {r.num_layers} of every stage, and recompute.stage_layers = {r.stage_layers} "
            "stage by stage",
            "recompute.num_layers=null",
        )


@check("recompute.stage_layers", "parallel.pp", "parallel.vpp")
def recompute_counts_stages(c: Config, world: int) -> Faults:
    layers, pp, vpp = c.recompute.stage_layers, c.parallel.pp, c.parallel.vpp
    # how many chunks a rank has, its schedule knows (zb_v has two): the plan checks that
    if layers is not None and len(layers) % (pp * vpp):
        yield fault(
            f"recompute.stage_layers has {len(layers)} stages, parallel.pp·vpp = {pp}·{vpp} = {pp * vpp}",
            "recompute.stage_layers=null",
        )


@check("recompute.group_layers", "recompute.mode")
def recompute_groups_need_full(c: Config, world: int) -> Faults:
    if c.recompute.group_layers > 1 and c.recompute.mode != "full":
        yield fault(
            f"recompute.group_layers = {c.recompute.group_layers} wholly recomputed layers keep one input, and "
            f"recompute.mode = {c.recompute.mode}",
            "recompute.mode=full, or recompute.group_layers=1",
        )


@check(*CHOICE)
def fp8_knobs_need_fp8(c: Config, world: int) -> Faults:
    unused = {key: value_of(c, key) for key, idle in NEED_FP8.items() if value_of(c, key) != idle}
    if unused and c.precision.fp8 == "none":
        key, value = next(iter(unused.items()))
        yield fault(
            f"{key} = {spelled(value)} says which GEMMs run in fp8, and precision.fp8 = none runs none so",
            " ".join(f"{key}={spelled(NEED_FP8[key])}" for key in unused),
        )


@check("precision.fp8_exclude", *MODEL, needs=["moe-layers-exist"])
def fp8_exclude_matches(c: Config, world: int) -> Faults:
    names, globs = matrices(c.model), c.precision.fp8_exclude
    matching = [glob for glob in globs if fnmatch.filter(names, glob)]
    if matching != globs:
        yield fault(
            f"precision.fp8_exclude = {spelled(globs)}: {next(glob for glob in globs if glob not in matching)} matches "
            f"no matrix; there are {', '.join(dict.fromkeys(name.split('.', 2)[2] for name in names))} of layers.0 to "
            f"{c.model.num_layers - 1}",
            f"precision.fp8_exclude={spelled(matching)}",
        )


@check(*CHOICE, *MODEL, needs=["moe-layers-exist", "fp8-exclude-matches"])
def fp8_leaves_matrices(c: Config, world: int) -> Faults:
    p = c.precision
    if p.fp8 != "none" and not quantised_matrices(c):
        yield fault(
            f"precision.fp8 = {p.fp8}, but fp8_skip_first = {p.fp8_skip_first}, fp8_skip_last = {p.fp8_skip_last} and "
            f"fp8_exclude = {spelled(p.fp8_exclude)} leave no matrix of {c.model.num_layers} layers to it",
            "precision.fp8_skip_first=0 precision.fp8_skip_last=0 precision.fp8_exclude=[]",
        )


@check(
    *CHOICE,
    *MODEL,
    "parallel.tp",
    "parallel.etp",
    "model.moe_ffn_hidden_size",
    "model.shared_ffn_hidden_size",
    needs=["moe-layers-exist"],
)
def fp8_dims(c: Config, world: int) -> Faults:
    if c.precision.fp8 != "none" and (dims := _unaligned_dims(c)):
        yield fault(
            f"precision.fp8 = {c.precision.fp8} needs rows of whole {ROW_BYTES} bytes, and blockwise whole groups of "
            f"{GROUP} where a dim is cut: {', '.join(dims)}",
            "precision.fp8=none, or other sizes",
        )


@check("precision.fp8", "parallel.cp_compress_kv")
def fp8_needs_projected_kv(c: Config, world: int) -> Faults:
    if c.precision.fp8 != "none" and c.parallel.cp_compress_kv:
        yield fault(
            "parallel.cp_compress_kv = true projects keys and values block by block as they arrive, in "
            f"precision.dtype = {c.precision.dtype}, and precision.fp8 = {c.precision.fp8} would project them in "
            "fp8",
            "parallel.cp_compress_kv=false",
        )


@check("precision.master_weights", "precision.dtype")
def master_free_needs_bf16(c: Config, world: int) -> Faults:
    if not c.precision.master_weights and c.precision.dtype != "bf16":
        yield fault(
            "precision.master_weights = false saves the copies of bf16 weights, and precision.dtype = "
            f"{c.precision.dtype} has none",
            "precision.master_weights=true, or precision.dtype=bf16",
        )


@check("precision.master_weights", "optim.implementation")
def master_free_updates_itself(c: Config, world: int) -> Faults:
    if not c.precision.master_weights and c.optim.implementation != "auto":
        yield fault(
            f"optim.implementation = {c.optim.implementation} cannot round at random, as precision.master_weights = "
            "false asks",
            "optim.implementation=auto, or precision.master_weights=true",
        )

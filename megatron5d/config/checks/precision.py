"""Checks of precision, recomputation and offloading against dtypes, matrices and layers."""

import fnmatch

from megatron5d.config.checks.check import Faults, check, fault
from megatron5d.config.convert import spelled
from megatron5d.config.derived import local_dims, matrices, quantized_matrices
from megatron5d.config.schema import Config

ROW_BYTES = 16  # a GPU's copy engine needs rows of a multiple of this many bytes
GROUP_SIZE = 128  # features that share a scale with `blockwise`
FP8_KEYS = (
    "precision.fp8",
    "precision.fp8_skip_first",
    "precision.fp8_skip_last",
    "precision.fp8_exclude",
)
MODEL_KEYS = (
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


def _unaligned_dims(c: Config) -> list[str]:
    """Dims of quantized matrices that are not the multiple that their GEMMs need, as text."""
    dims = {f"model.hidden_size = {c.model.hidden_size}": (c.model.hidden_size, ROW_BYTES)}
    for name in quantized_matrices(c):
        for formula, (size, ranks) in local_dims(c, name).items():
            grouped = c.precision.fp8 == "blockwise" and ranks > 1
            dims[f"{formula} = {size}"] = size, GROUP_SIZE if grouped else ROW_BYTES
    return [
        f"{dim} is not a multiple of {base}" for dim, (size, base) in dims.items() if size % base
    ]


@check("recompute.offload", "recompute.mode")
def offload_phases_keep(c: Config, world: int) -> Faults:
    r = c.recompute
    all_layers = r.mode == "full" and r.num_layers is None and r.stage_layers is None
    if all_layers and not {*r.offload} <= {"inputs"}:
        yield fault(
            "recompute.mode=full saves only the inputs of layers and requires recompute.offload=[] "
            f"or [inputs] (got {spelled(r.offload)})",
            "recompute.offload=[inputs], or recompute.mode=selective",
        )


@check("recompute.stage_layers", "parallel.pp", "parallel.vpp")
def recompute_counts_stages(c: Config, world: int) -> Faults:
    layers, pp, vpp = c.recompute.stage_layers, c.parallel.pp, c.parallel.vpp
    # the schedule may have more chunks per rank (zb_v has two), which the plan checks
    if layers is not None and len(layers) % (pp * vpp):
        yield fault(
            f"recompute.stage_layers must have parallel.pp·vpp = {pp}·{vpp} = {pp * vpp} stages "
            f"(got {len(layers)})",
            "recompute.stage_layers=null",
        )


@check("precision.fp8_exclude", *MODEL_KEYS, needs=["moe-layers-exist"])
def fp8_exclude_matches(c: Config, world: int) -> Faults:
    names, globs = matrices(c.model), c.precision.fp8_exclude
    unmatched = [glob for glob in globs if not fnmatch.filter(names, glob)]
    if unmatched:
        known = dict.fromkeys(name.split(".", 2)[2] for name in names)
        yield fault(
            f"precision.fp8_exclude={spelled(globs)}: {unmatched[0]} matches no matrix; the "
            f"matrices are {', '.join(known)} of layers.0 to {c.model.num_layers - 1}",
            f"precision.fp8_exclude={spelled([glob for glob in globs if glob not in unmatched])}",
        )


@check(*FP8_KEYS, *MODEL_KEYS, needs=["moe-layers-exist", "fp8-exclude-matches"])
def fp8_leaves_matrices(c: Config, world: int) -> Faults:
    p = c.precision
    if p.fp8 != "none" and not quantized_matrices(c):
        yield fault(
            f"precision.fp8={p.fp8} requires a matrix that runs in fp8 (got none of "
            f"{c.model.num_layers} layers with fp8_skip_first={p.fp8_skip_first}, "
            f"fp8_skip_last={p.fp8_skip_last}, fp8_exclude={spelled(p.fp8_exclude)})",
            "precision.fp8_skip_first=0 precision.fp8_skip_last=0 precision.fp8_exclude=[]",
        )


@check(
    *FP8_KEYS,
    *MODEL_KEYS,
    "parallel.tp",
    "parallel.etp",
    "model.moe_ffn_hidden_size",
    "model.shared_ffn_hidden_size",
    needs=["moe-layers-exist"],
)
def fp8_dims(c: Config, world: int) -> Faults:
    if c.precision.fp8 != "none" and (dims := _unaligned_dims(c)):
        yield fault(
            f"precision.fp8={c.precision.fp8} requires aligned dims: {', '.join(dims)}",
            "precision.fp8=none, or other sizes",
        )

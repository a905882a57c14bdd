"""The memory that is predicted for FP8 training: copies of weights stay, activations are
smaller."""

import dataclasses

import pytest

from megatron5d.config.load import load_config
from megatron5d.config.schema import PrecisionConfig
from megatron5d.model.gpt import GPT
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.precision.fp8_recipes import is_quantized, quantized_copies
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh


@pytest.mark.parametrize(("recipe", "architecture"), [("blockwise", "sm_90"), ("tensorwise", None)])
def test_copies_stay_and_activations_shrink(recipe, architecture):
    sizes = ["model.num_layers=2", "train.seq_len=256", "train.gbs=1"]
    config = load_config(["model=tiny_moe", "precision.dtype=bf16", *sizes])
    known = {}
    for fp8 in ("none", recipe):
        run = dataclasses.replace(config, precision=PrecisionConfig(dtype="bf16", fp8=fp8))
        forecaster = Forecaster(run, 1, Target(architecture))
        known[fp8] = forecaster.rank(0), forecaster.activations(0)
    (plain, wide), (eight, narrow) = known["none"], known[recipe]
    model = GPT(run, build_mesh(resolve(1), 0, num_kv_heads=run.model.num_kv_heads), "meta")
    fp8 = list(filter(is_quantized, model.parameters()))
    copies = sum(part.nbytes for parameter in fp8 for part in quantized_copies(parameter).parts)
    matrices = sum(parameter.numel() for parameter in fp8)
    assert 2 * matrices < copies < 2.2 * matrices
    assert eight.weights - plain.weights == pytest.approx(copies, abs=4 * 512 * len(fp8))
    assert (eight.gradients, eight.optimizer) == (plain.gradients, plain.optimizer)
    assert sum(narrow.values()) < sum(wide.values())
    assert narrow["MoEExperts"] < wide["MoEExperts"]

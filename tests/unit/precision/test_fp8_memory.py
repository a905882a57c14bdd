"""The predicted memory of FP8 training: copies of weights are added, activations shrink."""

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
    forecasts = []
    for fp8 in ("none", recipe):
        config = dataclasses.replace(config, precision=PrecisionConfig(dtype="bf16", fp8=fp8))
        forecaster = Forecaster(config, 1, Target(architecture))
        forecasts.append((forecaster.rank(0), forecaster.activations(0)))
    (bf16, bf16_activations), (in_fp8, fp8_activations) = forecasts
    mesh = build_mesh(resolve(1), 0, num_kv_heads=config.model.num_kv_heads)
    weights = list(filter(is_quantized, GPT(config, mesh, "meta").parameters()))
    copies = sum(t.nbytes for weight in weights for t in quantized_copies(weight).tensors)
    matrices = sum(weight.numel() for weight in weights)
    assert 2 * matrices < copies < 2.2 * matrices
    assert in_fp8.weights - bf16.weights == pytest.approx(copies, abs=4 * 512 * len(weights))
    assert (in_fp8.gradients, in_fp8.optimizer) == (bf16.gradients, bf16.optimizer)
    assert sum(fp8_activations.values()) < sum(bf16_activations.values())
    assert fp8_activations["MoEExperts"] < bf16_activations["MoEExperts"]

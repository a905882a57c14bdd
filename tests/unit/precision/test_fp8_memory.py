"""The memory that is predicted for 8-bit training: copies of weights stay, activations are smaller."""

import dataclasses

import pytest

from megatron5d.config.load import load_config
from megatron5d.config.schema import PrecisionConfig
from megatron5d.model.gpt import Gpt
from megatron5d.precision.fp8 import quantized_copies_bytes
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.planning.forecast import Forecaster, Target


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
    model = Gpt(run, build_mesh(resolve(1), 0, num_kv_heads=run.model.num_kv_heads), "meta")
    copies = [quantized_copies_bytes(parameter) for parameter in model.parameters()]
    matrices = sum(parameter.numel() for parameter, copy in zip(model.parameters(), copies) if copy)
    assert 2 * matrices < sum(copies) < 2.2 * matrices
    assert sum(copies) <= eight.weights - plain.weights <= sum(copies) + 512 * len(copies)
    assert (eight.gradients, eight.optimizer) == (plain.gradients, plain.optimizer)
    assert sum(narrow.values()) < sum(wide.values())
    assert narrow["MoeExperts"] < wide["MoeExperts"]


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_the_copies_are_as_large_as_is_said(recipe):
    config = load_config(["model=tiny_moe", "precision.dtype=bf16", f"precision.fp8={recipe}"])
    model = Gpt(config, build_mesh(resolve(1), 0, num_kv_heads=config.model.num_kv_heads))
    for parameter in model.parameters():
        gemms = getattr(parameter, "gemms", None)
        if gemms is not None:
            experts = (config.model.num_experts,) if parameter.spec.expert else ()
            pair = gemms._weight(parameter, *experts)
            tensors = {t.data_ptr(): t for q in (pair.plain, pair.transposed) for t in (q.values, q.scales)}
            assert sum(t.nbytes for t in tensors.values()) == pytest.approx(quantized_copies_bytes(parameter), rel=0.01)

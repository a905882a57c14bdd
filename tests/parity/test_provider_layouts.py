"""Layouts with libraries behind the operations equal one process in plain torch, fp64 to 1e-10, as
with our kernels.

The libraries' calls are made on the CPU by `libraries_on_cpu.py`.
"""

import dataclasses

import pytest
from layouts import assert_parity
from libraries_on_cpu import counted, on_cpu
from parity_configs import config_of

from megatron5d.config.schema import DataConfig, KernelsConfig

pytestmark = pytest.mark.patches
CUDNN = {"attention": "cudnn", "deterministic": False}
FA4 = {"attention": "fa4"}
CASES = {
    "ring": ("llama_gqa", {"cp": 2, "tp": 2, "sp": True, "mbs": 4}, 4),
    "ulysses": ("llama_gqa", {"cp": 2, "cp_method": "ulysses", "mbs": 4}, 2),
    "documents": ("llama_gqa", {"cp": 2, "mbs": 4}, 2),
    "latent": ("mla", {"cp": 2, "tp": 2, "mbs": 4}, 4),
    "pipeline": ("gqa_sinks", {"tp": 2, "pp": 2, "zero": 1, "gbs": 4}, 4),
}
# what the model is besides: head dims that a library takes, documents, experts
MODEL = {
    "documents": {"vocab_size": 9},
    "latent": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "grouped": {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 24},
}


def changed(config, case, asked):
    model = dataclasses.replace(config.model, **MODEL.get(case, {}))
    data = DataConfig(document_mask=True, eod=3) if case == "documents" else config.data
    return dataclasses.replace(config, model=model, data=data, kernels=KernelsConfig(**asked))


@pytest.mark.parametrize("asked", [CUDNN, FA4], ids=["cudnn", "fa4"])
@pytest.mark.parametrize("case", CASES)
def test_attention(case, asked):
    model, layout, world = CASES[case]
    config = changed(config_of(model, **layout), case, asked)
    with on_cpu():
        assert_parity(config, world)
        name = asked["attention"]
        # sinks of a whole sequence are FlashAttention-4's alone; gradients of documents' edges are
        # never a library's
        expected = (
            set()
            if (case, name) == ("pipeline", "cudnn")
            else {f"{name} forward", f"{name} backward"}
        )
        assert {each for each in counted() if each.startswith(name)} >= expected


@pytest.mark.parametrize("operation", ["grouped", "norm"])
def test_other_operations(operation):
    asked = {operation: "torch"}
    config = config_of(
        "llama_gqa",
        tp=2,
        pp=2,
        sp=True,
        gbs=4,
        **({"ep": 2, "etp": 1} if operation == "grouped" else {}),
    )
    with on_cpu():
        assert_parity(changed(config, operation, asked), 4)
        wanted = {"grouped": {"grouped_mm"}, "norm": {"rms_norm forward", "rms_norm backward"}}[
            operation
        ]
        assert wanted <= set(counted())

"""What a GPU has no kernels for is refused at start-up, by every rank, before they meet."""

import dataclasses

import pytest
import torch
from libraries_on_cpu import on_cpu
from parity_configs import config_of

import pretrain
from megatron5d.config.schema import DataConfig, KernelsConfig, PrecisionConfig
from megatron5d.kernels import tuning
from megatron5d.tools import plan
from megatron5d.train.preflight import kernels as device
from megatron5d.train.preflight.kernels import device_faults, names_of

RUN = [
    "model=tiny",
    "model.ffn_hidden_size=256",
    "train.gbs=8",
    "log.memory_check=refuse",
    "log.device_memory_gb=80",
]
EIGHT = ["precision.dtype=bf16", "precision.fp8=blockwise"]


@pytest.fixture
def gpu(monkeypatch):
    """Makes this process believe that it has a GPU of a compute capability."""

    def pretend(*capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        tuning.architecture.cache_clear()

    yield pretend
    tuning.architecture.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9)])
def test_fp8_without_its_units(gpu, capability, monkeypatch, capsys):
    gpu(*capability)
    for name, value in {"WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as refused:
        pretrain.main([*RUN, *EIGHT])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "precision.fp8 = blockwise requires FP8 kernels" in said
    assert "fix: precision.fp8=none  [fp8-needs-its-kernels]" in said


def test_nothing_is_refused_where_the_kernels_are_or_are_not_asked_for(gpu):
    eight = dataclasses.replace(
        config_of(), precision=PrecisionConfig(dtype="bf16", fp8="blockwise")
    )
    assert device_faults(eight, 1) == [], "on a CPU"
    gpu(8, 0)
    assert device_faults(config_of(), 1) == [] and len(device_faults(eight, 1)) == 1
    for capability in ((9, 0), (10, 0), (12, 0)):
        gpu(*capability)
        assert device_faults(eight, 1) == []


def test_a_gpu_without_triton_is_refused(gpu, monkeypatch):
    gpu(9, 0)
    monkeypatch.setattr(device, "HAS_TRITON", False)
    assert device_faults(config_of(), 1) == [], "no kernel computes in float64"
    config = dataclasses.replace(config_of(), precision=PrecisionConfig(dtype="bf16"))
    assert [fault.id for fault in device_faults(config, 1)] == ["gpu-needs-triton"]


def test_a_library_that_cannot_be_used_is_refused_by_name(gpu):
    """What is not installed, and what takes nothing of this run; a backward may be left to
    another."""
    gpu(9, 0)
    config = dataclasses.replace(config_of(), precision=PrecisionConfig(dtype="bf16"))

    def faults(config=config, **asked):
        return [
            each.reason
            for each in device_faults(
                dataclasses.replace(config, kernels=KernelsConfig(**asked)), 1
            )
        ]

    assert faults() == [] and faults(attention="triton", norm="torch") == []
    assert "flash-attn-4 is not installed" in "".join(faults(attention="fa4"))
    assert len(faults(attention="fa4", norm="torch")) == 1
    with on_cpu():
        assert faults(attention="cudnn") == faults(attention="fa4") == faults(grouped="torch") == []
        documents = dataclasses.replace(config, data=DataConfig(document_mask=True, eod=3))
        assert "it does not support AttentionRequest" in "".join(
            faults(documents, attention="cudnn")
        )
        names = names_of(dataclasses.replace(config, kernels=KernelsConfig(attention="cudnn")), 90)
        assert names["attention_forward"] == "cudnn" and names["attention_backward"] == "triton"


def test_the_planner_refuses_alike(capsys):
    run = [
        "memory",
        "--world",
        "2",
        "model=tiny",
        "model.ffn_hidden_size=256",
        "train.gbs=8",
        *EIGHT,
    ]
    assert plan.main([*run, "--device", "sm_80"]) == 2
    assert "[fp8-needs-its-kernels]" in capsys.readouterr().err

"""A reader who steps from Trainer.step into a layer passes few of our functions, and none of them
is a generator."""

import inspect
import sys
from pathlib import Path

import pytest
import torch

from megatron5d.config.schema import Config, ModelConfig, RecomputeConfig, TrainConfig
from megatron5d.data.batch import make_micro_batch
from megatron5d.model.attention import SelfAttention
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.pipeline_layout import pipeline_layout

ROOT = Path(__file__).parents[3]
MOST = 6


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_layer_is_few_frames_below_a_step(monkeypatch, recompute):
    model = ModelConfig(
        num_layers=1,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=48,
        vocab_size=64,
    )
    config = Config(
        model=model,
        train=TrainConfig(gbs=1, mbs=1, seq_len=16),
        recompute=RecomputeConfig(recompute),
    )
    run = build_run(config, Process(0, 1, 0, torch.device("cpu")), pipeline_layout(config, 1))
    forward, chains = SelfAttention.forward, []

    def traced(*args):
        frame, names = sys._getframe(1), []
        while frame.f_code.co_name != "step":
            if frame.f_code.co_filename.startswith(
                (str(ROOT / "megatron5d"), str(ROOT / "kernels"))
            ):
                assert not frame.f_code.co_flags & inspect.CO_GENERATOR, frame.f_code
                names.append(
                    frame.f_code.co_qualname
                    if sys.version_info >= (3, 11)
                    else frame.f_code.co_name
                )
            frame = frame.f_back
        chains.append(names[::-1])
        return forward(*args)

    monkeypatch.setattr(SelfAttention, "forward", traced)
    run.trainer.step([make_micro_batch(torch.randint(64, (1, 17)))], 1e-3)
    assert len(chains) == (1 if recompute == "none" else 2)
    assert all(len(names) + 1 <= MOST for names in chains), chains  # and the layer's own

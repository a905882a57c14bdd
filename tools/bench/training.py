"""Training steps on one device: ours, and of the same model in transformers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron5d.checkpoint.hf.export_config import hf_config_from_model
from megatron5d.config.checks import run_checks
from megatron5d.config.errors import ConfigError
from megatron5d.config.load import load_config
from megatron5d.config.schema import Config
from megatron5d.data.batch import make_micro_batch
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.pipeline_layout import pipeline_layout

LEARNING_RATE = 1e-4

Step = Callable[[torch.Tensor], float]
"""Trains on rows `[b, s+1]` and returns the loss, for which it waits."""


def configured(overrides: list[str]) -> Config:
    """Configuration of one rank, in bfloat16.

    Raises:
        ConfigError: a check fails, other than those of the data.
    """
    config = load_config([*overrides, "precision.dtype=bf16", "optim.clip=1.0"])
    config = replace(config, train=replace(config.train, gbs=config.train.mbs))
    # tokens are drawn at random: no dataset is needed
    faults = [
        fault
        for fault in run_checks(config, 1)
        if not all(knob.startswith("data.") for knob in fault.knobs)
    ]
    if faults:
        raise ConfigError(faults)
    return config


def token_rows(config: Config) -> Iterator[torch.Tensor]:
    """Draws int64 `[b, s+1]`, the same for every provider."""
    generator = torch.Generator().manual_seed(0)
    shape = config.train.mbs, config.train.seq_len + 1
    while True:
        yield torch.randint(config.model.vocab_size, shape, generator=generator)


def our_step(config: Config, device: torch.device) -> Step:
    run = build_run(config, Process(0, 1, 0, device), pipeline_layout(config, 1))
    return lambda rows: run.trainer.step([make_micro_batch(rows)], LEARNING_RATE).losses["loss"]


def transformers_model(config: Config, device: torch.device) -> Any:
    """The same model in transformers, with fp32 weights and scaled dot-product attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = hf_config_from_model(config.model, "fp32")
    hf_config = AutoConfig.for_model(
        **{key: value for key, value in settings.items() if key != "architectures"}
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(hf_config, attn_implementation="sdpa")


def transformers_step(config: Config, device: torch.device, compiled: bool = True) -> Step:
    """A step of transformers' model, under autocast for bf16, with fused AdamW."""
    model = transformers_model(config, device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )

    def step(rows: torch.Tensor) -> float:
        rows = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision.dtype == "bf16"):
            logits = forward(rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step

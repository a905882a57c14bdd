"""One real step on a long sequence: eight ranks give what one rank gives."""

import dataclasses

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from rank_pool import run_on_pool
from whole_stage import WholeStage

from megatron5d.data.batch import SequenceSharding
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of


def long_config(seq_len, **parallel):
    """A model whose cost is its attention: one layer of one head."""
    config = config_of("llama_gqa", gbs=1, **parallel)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model,
            num_layers=1,
            hidden_size=16,
            ffn_hidden_size=16,
            num_heads=1,
            num_kv_heads=1,
            vocab_size=32,
        ),
        train=dataclasses.replace(config.train, seq_len=seq_len),
        precision=dataclasses.replace(config.precision, dtype="fp32"),
    )


def step_on_rank(rank: int, world: int, config):
    """(sum of the loss here, gradients by name, of this rank's tokens)."""
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads)
    model = GPT(config, mesh)
    model.initialize(1)
    batch = SequenceSharding(config, mesh)(micro_batch(config, make_rows(config, 1)))
    stage = WholeStage(model.phases)
    loss = stage.forward(0, None, batch)[0]
    stage.backward(0, torch.tensor([1.0, 0.0]))
    return loss.double(), {
        name: parameter.grad.double() for name, parameter in model.named_parameters()
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seq_len", [16_384, pytest.param(65_536, marks=pytest.mark.nightly)])
def test_a_long_step_equals_that_of_one_rank(seq_len):
    ((loss, grads),) = run_on_pool(step_on_rank, 1, long_config(seq_len), timeout=600)
    parts = run_on_pool(step_on_rank, 8, long_config(seq_len, cp=8, cp_method="ring"), timeout=600)
    torch.testing.assert_close(sum(part for part, _ in parts), loss, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        total = sum(part[name] for _, part in parts)
        assert (total - grad).norm() < 1e-4 * grad.norm(), name

"""Captured and replayed phases equal one process in fp64: the second step captures, the third
replays.

Collectives inside phases cannot be recorded on the CPU: tests/e2e/test_fake_cuda.py captures them.
"""

import pytest
import torch
from layouts import assert_parity, make_rows
from pipeline_configs import admitted_program, tiny_config
from recorded_graphs import RecordedGraphs

from megatron5d.config.schema import (
    Config,
    DataConfig,
    MoeConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megatron5d.data.batch import IGNORED, make_micro_batch
from megatron5d.data_parallel.temporary_buffer import FixedAddresses, TemporaryBuffer
from megatron5d.parity import run
from megatron5d.phases.phase import Phase
from megatron5d.phases.stage import Stage
from megatron5d.phases.wgrad import defer_weight_grad, grad_buffer, run_now
from megatron5d.pipeline_parallel.registry import schedule_names
from megatron5d.topology.shard_spec import state_of
from megatron5d.train import build

STEPS = 3


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(build, "_graphs", lambda config, mesh: RecordedGraphs())
    # it reads numbers inside phases
    monkeypatch.setattr(run, "_watch_hidden", lambda model, copies: list)


def config_of(
    schedule="1f1b", pp=1, m=4, *, model=None, mbs=1, dp=1, layout=None, **more
) -> Config:
    """A layer per stage, and at least two; `more` are sections, and fields of parallel."""
    num_stages = admitted_program(schedule, pp, m).num_stages
    sections = {name: more.pop(name) for name in ("recompute", "data", "moe") if name in more}
    return tiny_config(
        {"num_layers": max(2, num_stages)} | (model or {}),
        PipelineConfig(schedule, layout),
        m,
        mbs=mbs,
        dp=dp,
        parallel=ParallelConfig(pp=pp, **more),
        train={"cuda_graph": "phases"},
        **sections,
    )


@pytest.mark.parametrize("schedule", schedule_names())
def test_every_schedule(schedule):
    m = admitted_program(schedule, 2, 5).num_microbatches
    assert_parity(config_of(schedule, 2, m), 2, steps=STEPS)


MLA = {
    "attention": "mla",
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
# The CPU's grouped GEMMs read the number of rows of each expert on the host, so it must not change.
BALANCED = MoeConfig(balance=["aux", "bias"], z_coef=1e-3, force_balanced=True)
SEQ_AUX = MoeConfig(balance=["seq_aux"])
EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 8}
EXPERTS_MTP = EXPERTS | {"num_mtp_layers": 1}
LAYERS, MTP, TIED = {"num_layers": 5}, {"num_mtp_layers": 2}, {"tie_embeddings": True}
DOCUMENTS = DataConfig(document_mask=True, eod=3)
PAIRS = RecomputeConfig("full", group_layers=2)
PARTS = RecomputeConfig("selective", ["norm", "qkv", "activation"])
PER_STEP = {"grad_reduce": "per_step"}
ZERO_3 = {"dp": 2, "zero": 3}
CASES = {
    "zero_1": (4, config_of(dp=2, pp=2, zero=1)),
    "zero_2": (2, config_of(dp=2, zero=2, model=LAYERS)),
    "zero_2_per_step": (2, config_of(dp=2, zero=2, **PER_STEP)),
    "zero_3": (2, config_of(**ZERO_3, model=LAYERS)),
    "zero_3_per_step": (2, config_of(**ZERO_3, zero3_gather="per_step", **PER_STEP)),
    "zero_3_experts": (2, config_of(**ZERO_3, model=EXPERTS, moe=BALANCED)),
    "zero_3_tied": (2, config_of(**ZERO_3, model=LAYERS | TIED, recompute=PAIRS)),
    "zero_3_split": (4, config_of("zb_h1", 2, **ZERO_3)),
    "zero_3_interleaved": (4, config_of("interleaved", 2, **ZERO_3)),
    "zero_3_pair": (4, config_of("dualpipe", 2, **ZERO_3)),
    "documents": (1, config_of(mbs=2, data=DOCUMENTS)),
    "documents_of_experts": (2, config_of("zb_h1", 2, model=EXPERTS, moe=BALANCED, data=DOCUMENTS)),
    "recomputed": (2, config_of("zb_h1", 2, recompute=PAIRS)),
    "parts": (1, config_of(recompute=PARTS)),
    "tied": (1, config_of(model=TIED)),
    "predicting_before_the_head": (2, config_of("zb_h1", 2, model=MTP, layout=[4, 0])),
    "mla": (1, config_of(model=MLA)),
    "experts": (1, config_of(model=EXPERTS, moe=BALANCED)),
    "distributed_experts": (2, config_of(dp=2, model=EXPERTS, moe=SEQ_AUX, ep=2)),
    "predicting_with_distributed_experts": (2, config_of(dp=2, model=EXPERTS_MTP, ep=2)),
}


@pytest.mark.parametrize("world, config", CASES.values(), ids=CASES)
def test_layouts(world, config):
    assert_parity(config, world, steps=STEPS)


PADDED = {
    "at_the_end": (1, config_of(mbs=2), [(5, 9), (6, 9), (8, 9)]),  # which no token sees
    "in_the_middle": (1, config_of(mbs=2), [(1, 4), (3, 6), (4, 5)]),
    "experts": (2, config_of("zb_h1", 2, mbs=2, model=EXPERTS, moe=BALANCED), [(2, 4)]),
    "distributed_experts": (*CASES["distributed_experts"], [(1, 4), (3, 6)]),
}


@pytest.mark.parametrize("world, config, spans", PADDED.values(), ids=PADDED)
def test_padding(world, config, spans):
    """Rows are padded at these spans in turn."""
    rows = make_rows(config, STEPS)
    for number, row in enumerate(rows):
        row[slice(*spans[number % len(spans)])] = IGNORED
    assert_parity(config, world, steps=STEPS, rows=rows)


class Scaled(torch.autograd.Function):
    """x·w, whose weight gradient is added at once, and again by `defer`."""

    @staticmethod
    def forward(ctx, x, weight, defer):
        ctx.weight, ctx.defer = weight, defer
        ctx.save_for_backward(x)
        return x * weight.detach()

    @staticmethod
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight
        for defer in (run_now, ctx.defer):
            defer_weight_grad(weight, defer, lambda: grad_buffer(weight).add_((dy * x).sum()))
        return dy * weight.detach(), None, None


class AddsAtOnce(Phase):
    kind = "scaled"
    adds_grads_at_once = True

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((1,), 3.0, dtype=torch.float64))
        self.grads = TemporaryBuffer(1, torch.float64, torch.device("cpu"), self.bind)
        self.grads.free()
        state_of(self.weight).allocate_main_grad = self.allocate

    def bind(self, flat):
        state_of(self.weight).main_grad = flat

    def allocate(self):
        if not self.grads.is_allocated:
            self.grads.allocate()
            self.grads.flat.zero_()

    def forward(self, x, batch, defer):
        return Scaled.apply(x, self.weight, defer)


def test_gradients_that_a_backward_adds_at_once():
    """As those of latents that travel over cp: I allocates the gradient's buffer, and no replay
    zeroes it."""
    phase, graphs = AddsAtOnce(), RecordedGraphs()
    stage, addresses = Stage([phase], graphs=graphs), FixedAddresses([phase.grads])
    batch = make_micro_batch(torch.zeros(1, 9, dtype=torch.int64))
    x = torch.ones(4, dtype=torch.float64)
    for step in range(4):
        graphs.start_step(1)
        addresses.start_step({phase: 1})
        for op, state in (("F", x), ("I", x * (step + 1)), ("W", None)):
            action = stage.begin(op, 0, state, batch, split=True)
            while action.advance():
                pass
        assert state_of(phase.weight).main_grad.item() == 2 * 4 * (step + 1)
        phase.grads.free()

"""Memory of a step falls as 1/cp, and no tensor is as large as sequence times sequence."""

import dataclasses
import time
import weakref

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from rank_pool import run_on_pool
from whole_stage import WholeStage

from megatron5d.config.schema import DataConfig, RecomputeConfig
from megatron5d.context_parallel import attention as context_attention
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.context_parallel.block_attention import Planner
from megatron5d.context_parallel.zigzag import SequenceLayout
from megatron5d.data.batch import SequenceSharding
from megatron5d.model.gpt import GPT
from megatron5d.planning.memory.trace import MemoryWatch
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of

S = 2048
METHODS = {
    "ring": {},
    "allgather": {"cp_method": "allgather"},
    "ulysses": {"cp_method": "ulysses"},
    "two_level": {"cp_method": "two_level", "cp_inner": 2},
}


def test_the_watch_measures_live_and_peak_bytes_and_the_largest_tensor():
    with MemoryWatch() as watch:
        saved = torch.ones(10, dtype=torch.float64)
        view = saved.view(2, 5)[1:]
        saved.add_(1)
        temporary, largest = saved * 2, torch.zeros(100)
        del temporary, largest
        saved.mul_(2)
    assert (watch.live_bytes, watch.peak_bytes) == (80, 80 + 80 + 400)
    assert watch.largest[:2] == (100, (100,)) and view.numel() == 5


def step_on_rank(rank: int, world: int, config):
    """Bytes saved for the backward, peak bytes, and elements of the largest tensor of a step."""
    mesh = build_mesh(sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads)
    model = GPT(config, mesh)
    model.initialize(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = SequenceSharding(config, mesh)(micro_batch(config, make_rows(config, 1)))
    stage = WholeStage(model.phases)
    with MemoryWatch() as watch:
        sums = stage.forward(0, None, batch)
        time.sleep(0.1)  # gloo's threads free sent tensors a moment later
        saved = watch.live_bytes
        stage.backward(0, torch.tensor([1.0, 0.0]))
    assert sums.isfinite().all() and stage.num_in_flight == 0
    return saved, watch.peak_bytes, watch.largest


def measure(model: str, documents: bool = False, recompute: str = "none", **parallel):
    """The largest of each figure over the ranks."""
    config = config_of(model, gbs=1, recompute=RecomputeConfig(recompute), **parallel)
    data = DataConfig(document_mask=True, eod=3) if documents else DataConfig()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=32),
        train=dataclasses.replace(config.train, seq_len=S),
        precision=dataclasses.replace(config.precision, dtype="fp32"),
        data=data,
    )
    saved, peaks, largest = zip(*run_on_pool(step_on_rank, config.parallel.cp, config))
    return max(saved), max(peaks), max(largest)


@pytest.fixture(scope="module")
def saved_without_cp():
    return {model: measure(model)[0] for model in ("llama_gqa", "mla")}


@pytest.mark.parametrize("model", ["llama_gqa", "mla"])
@pytest.mark.parametrize("method", METHODS)
def test_saved_bytes_fall_as_one_over_cp(saved_without_cp, model, method):
    saved, peak, largest = measure(model, cp=4, **METHODS[method])
    # ulysses repeats two key-value heads for four ranks
    assert saved < 1.15 * saved_without_cp[model] / 4
    # with gathered keys and the blocks of a backward
    assert peak < 0.35 * saved_without_cp[model]
    assert largest[0] < S * S / 4, largest


@pytest.mark.parametrize("method", METHODS)
def test_no_mask_makes_a_square(method):
    """Packed documents and a window go through attention in blocks of queries."""
    for model, documents in (("llama_gqa", True), ("mla_window_softcap", False)):
        *_, largest = measure(model, documents=documents, cp=4, **METHODS[method])
        assert largest[0] < S * S / 4, largest


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_layers_save_only_their_input(method):
    """Two layers save a hidden state of h = 32 each; the head its logits of 32, its input and the
    norm's input; the layers share the cosines and sines of a head's 8 columns."""
    saved, _, _ = measure("llama_gqa", cp=4, recompute="full", **METHODS[method])
    assert saved < 1.1 * (S // 4) * 4 * (2 * 32 + 2 * 32 + 2 * 32 + 2 * 8)


def test_gradients_of_a_block_are_freed_before_those_of_the_next(monkeypatch):
    references, original = [], context_attention.block_gradients

    def checked_gradients(*args, **score):
        assert all(reference() is None for reference in references)
        dk_dv = original(*args, **score)
        references.extend(map(weakref.ref, dk_dv))
        return dk_dv

    monkeypatch.setattr(context_attention, "block_gradients", checked_gradients)
    attend = ContextAttention("allgather", Axis("cp_outer"), Axis("cp_inner"))
    q, k, v = (torch.randn(8, 1, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    attend(q, k, v, Planner(SequenceLayout(8), 0)(None), scale=1.0).sum().backward()
    assert len(references) == 2 * context_attention.HEAD_GROUPS

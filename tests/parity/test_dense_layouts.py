"""N ranks equal one: loss, every gradient, gradient norm and weights after two steps, in fp64 to
1e-10.

Two micro-batches a rank are enough to accumulate; test_gradient_accumulation has more, and so have
pipelines.
"""

import dataclasses

import pytest
from layouts import assert_parity
from parity_configs import MODELS, config_of

from megatron5d.config.schema import DataConfig, PipelineConfig, RecomputeConfig


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_tensor_parallel(model, tp, sp):
    assert_parity(config_of(model, tp=tp, sp=sp, gbs=4, mbs=2), world=tp)


@pytest.mark.parametrize("overlap", ["chunked", "fused"])
@pytest.mark.parametrize(("model", "tp"), [("odd_vocab_tied", 2), ("mla", 2), ("gpt2_style", 4)])
def test_tensor_parallel_in_chunks(model, tp, overlap):
    assert_parity(config_of(model, tp=tp, sp=True, tp_overlap=overlap, mbs=4), world=tp)


@pytest.mark.parametrize("overlap", ["chunked", "fused"])
def test_chunks_with_a_split_backward(overlap):
    config = config_of("llama_gqa", tp=2, sp=True, tp_overlap=overlap, pp=2, cp=2, zero=1, mbs=2)
    assert_parity(dataclasses.replace(config, pipeline=PipelineConfig("zb_h1")), world=8)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("model", ["odd_vocab_tied", "gpt2_style"])
def test_data_parallel(model, dp, zero):
    assert_parity(config_of(model, zero=zero, mbs=4 // dp), world=dp)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", [0, 1])
def test_tensor_and_data_parallel(model, zero):
    assert_parity(config_of(model, tp=2, sp=True, zero=zero, mbs=2), world=4)


def test_more_ranks_than_kv_heads_with_data_parallel():
    assert_parity(config_of("mqa_qk_norm", tp=4, sp=True, zero=1, gbs=4), world=8)


@pytest.mark.parametrize("zero", [0, 1])
def test_hybrid_sharding(zero):
    assert_parity(config_of("llama_gqa", dp_replicate=2, zero=zero, tp=2), world=8)


@pytest.mark.parametrize("order", [["tp", "dp", "cp", "pp"], ["dp", "tp", "pp", "cp"]])
def test_any_order_of_axes(order):
    assert_parity(config_of("llama_gqa", tp=2, sp=True, zero=1, order=order, mbs=2), world=4)


@pytest.mark.parametrize("mbs", [1, 2, 4])
def test_gradient_accumulation(mbs):
    """8 sequences in 4, 2 or 1 micro-batches on each of 2 ranks."""
    assert_parity(config_of("llama_gqa", mbs=mbs, zero=1), world=2)


def test_unequal_numbers_of_targets_per_rank():
    """The loss is a sum divided once: ranks and micro-batches with more padding weigh less."""
    assert_parity(config_of("odd_vocab_tied", tp=2, sp=True), world=4, ignored=0.8)


def test_z_loss():
    assert_parity(
        config_of("odd_vocab_tied", tp=2, sp=True, zero=1, mbs=2, train={"z_loss": 0.05}), world=4
    )


def test_documents_packed_in_one_sequence():
    data = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)
    config = config_of("llama_gqa", tp=2, sp=True, mbs=2, data=data)
    # many documents
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=11))
    assert_parity(config, world=4)


def test_full_recompute():
    config = config_of(
        "gpt2_style", tp=2, sp=True, zero=1, mbs=2, recompute=RecomputeConfig("full", 1)
    )
    assert_parity(config, world=4)


def test_decay_exclusion_and_no_clipping():
    config = config_of("llama_gqa", optim={"decay_exclude": ["embedding.*"]}, tp=2, zero=1, mbs=2)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, clip=0.0))
    assert_parity(config, world=4)

"""Multi-head latent attention equals one process: every mask, cp method and placing of the gather;
fp64 to 1e-10."""

import dataclasses

import pytest
from layouts import assert_parity
from parity_configs import config_of

from megatron5d.config.schema import DataConfig, RecomputeConfig

METHODS = {
    "ring": {"cp_method": "ring"},
    "allgather": {"cp_method": "allgather"},
    "ulysses": {"cp_method": "ulysses"},
    "two_level": {"cp_method": "two_level", "cp_inner": 2},
    "ring, compressed": {"cp_method": "ring", "cp_compress_kv": True},
    "ulysses, compressed": {"cp_method": "ulysses", "cp_compress_kv": True},
    "two_level, compressed": {"cp_method": "two_level", "cp_inner": 2, "cp_compress_kv": True},
}


def documents(config):
    """Few kinds of tokens, one of which ends a document: lengths from 1 to longer than a rank's
    share."""
    data = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=9), data=data
    )


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    "model", ["mla", "mla_wide_latents", "mla_plain_q", "mla_window_softcap", "gqa_sinks"]
)
def test_tensor_parallel(model, sp):
    assert_parity(config_of(model, tp=2, sp=sp, mbs=4), world=2)


@pytest.mark.parametrize("model", ["mla_plain_q", "mla_window_softcap"])
def test_one_rank(model):
    assert_parity(documents(config_of(model, mbs=4)), world=1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["mla", "mla_window_softcap"])
def test_context_parallel(model, method):
    assert_parity(config_of(model, cp=4, mbs=4, **METHODS[method]), world=4)


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_with_tensor_parallel(method):
    """tp = 2 leaves two heads a rank: Ulysses can then go over two ranks."""
    cp = 2 if METHODS[method]["cp_method"] == "ulysses" else 4
    assert_parity(
        documents(config_of("mla", cp=cp, tp=2, sp=True, mbs=4, **METHODS[method])),
        world=2 * cp,
        ignored=0.3,
    )


@pytest.mark.parametrize("sp", [False, True])
def test_packed_documents_on_two_and_two(sp):
    assert_parity(
        documents(config_of("mla_plain_q", cp=2, tp=2, sp=sp, mbs=4, cp_compress_kv=sp)), world=4
    )


def test_recomputed_sharded_accumulated():
    config = config_of(
        "mla",
        cp=2,
        tp=2,
        sp=True,
        zero=1,
        gbs=8,
        cp_compress_kv=True,
        recompute=RecomputeConfig("full"),
    )
    assert_parity(documents(config), world=8)


@pytest.mark.parametrize("method", ["ring", "two_level"])
def test_sinks_over_context(method):
    assert_parity(config_of("gqa_sinks", cp=4, mbs=4, **METHODS[method]), world=4)

"""Context parallelism equals one process: every method, mask and head count, with tp, dp and
ZeRO-1; fp64 to 1e-10."""

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
}


def documents(config):
    """Few kinds of tokens, one of which ends a document: lengths from 1 to longer than a rank's
    share."""
    data = DataConfig(document_mask=True, eod=3, eod_mask_loss=True)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, vocab_size=9), data=data
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", ["llama_gqa", "softcaps_window", "gpt2_style"])
def test_context_parallel_alone(method, model):
    assert_parity(config_of(model, cp=4, mbs=4, **METHODS[method]), world=4)


@pytest.mark.parametrize("method", METHODS)
def test_packed_documents_with_tensor_parallel(method):
    cp = 4 if method == "two_level" else 2
    assert_parity(
        documents(config_of("llama_gqa", cp=cp, tp=2, sp=True, mbs=4, **METHODS[method])),
        world=2 * cp,
        ignored=0.3,
    )


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("zero", [0, 1])
def test_with_data_parallel(method, zero):
    assert_parity(
        config_of("odd_vocab_tied", cp=2, zero=zero, mbs=2, **METHODS[method]), world=4, ignored=0.8
    )


def test_all_at_once():
    config = config_of(
        "mqa_qk_norm", cp=2, tp=2, sp=True, zero=1, gbs=4, recompute=RecomputeConfig("full")
    )
    assert_parity(documents(config), world=8, ignored=0.3)


@pytest.mark.parametrize(
    ("model", "method"), [("full", "ring"), ("full_window_sinks", "two_level")]
)
def test_masks_that_look_behind(model, method):
    config = documents(config_of(model, cp=4, mbs=4, **METHODS[method]))
    assert_parity(config, world=4, ignored=0.3)

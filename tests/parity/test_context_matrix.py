"""Context parallelism, the whole product: methods × masks × kinds of attention × cp × tp; fp64 to
1e-10.

MEGATRON5D_TESTS=nightly runs it; `test_context_layouts.py` and `test_mla_layouts.py` are what always runs
of it.
"""

import dataclasses

import pytest
from layouts import assert_parity
from parity_configs import MLA, config_of

from megatron5d.config.schema import DataConfig

pytestmark = pytest.mark.nightly

METHODS = ["ring", "allgather", "ulysses", "two_level"]
KINDS = {
    "gqa": {"num_kv_heads": 2},
    "mha": {"num_kv_heads": 8},
    "mla": {**MLA, "q_lora_rank": 8, "kv_lora_rank": 6, "rope_interleaved": True},
}
MASKS = {
    "causal": ({}, DataConfig()),
    "full": ({"attention_causal": False}, DataConfig()),
    "window": ({"attention_window": 5}, DataConfig()),
    # few kinds of tokens, one of which ends a document: lengths from 1 to longer than a rank's
    # share
    "documents": ({"vocab_size": 9}, DataConfig(document_mask=True, eod=3, eod_mask_loss=True)),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_the_whole_product(method, mask, kind, cp, tp):
    inner = {"cp_inner": 2} if method == "two_level" else {}
    config = config_of(
        "llama_gqa", gbs=2, mbs=2, cp=cp, tp=tp, sp=tp > 1, cp_method=method, **inner
    )
    changes, data = MASKS[mask]
    model = dataclasses.replace(config.model, num_heads=8, **KINDS[kind], **changes)
    config = dataclasses.replace(config, model=model, data=data)
    assert_parity(config, world=cp * tp, ignored=0.3)

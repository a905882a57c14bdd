"""What must hold of the time of any layout: faster machines never slow it down, and what sends less
sends less."""

import dataclasses
import random

import pytest
from parity_configs import config_of

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import changed
from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.planning.clusters import cluster_called
from megatron5d.planning.schedule_search.auto_schedule import quick_layout
from megatron5d.planning.time.predict import Estimator

WORLD, COUNT = 16, 8
H100 = dataclasses.replace(cluster_called("h100"), node=4)
RATES = ("flops", "memory_rate", "link_rate", "network_rate", "host_rate", "host_memory_rate")
DRAWN = {
    "parallel.tp": (1, 2, 4),
    "parallel.sp": (False, True),
    "parallel.cp": (1, 2),
    "parallel.pp": (1, 2, 4),
    "parallel.ep": (1, 2, 4),
    "parallel.zero": (0, 1, 2, 3),
    "parallel.dp_replicate": (1, 2),
    "train.mbs": (1, 2),
    "parallel.cp_method": ("ring", "allgather", "ulysses"),
    "parallel.tp_overlap": ("none", "chunked"),
    "recompute.mode": ("none", "selective", "full"),
    "optim.name": ("adamw", "muon"),
    "optim.offload": (False, True),
    "pipeline.schedule": ("1f1b", "zb_h1", "zb_v", "dualpipe"),
    "precision.fp8": ("none", "tensorwise"),
}


def model() -> Config:
    """Of wide layers, so that no kernel's own time is all there is."""
    given = config_of(gbs=32)
    fields = {
        "vocab_size": 4096,
        "num_layers": 8,
        "hidden_size": 1024,
        "ffn_hidden_size": 2048,
        "head_dim": 128,
        "num_heads": 8,
        "num_kv_heads": 8,
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 512,
        "tie_embeddings": True,
    }
    return dataclasses.replace(
        given,
        model=dataclasses.replace(given.model, **fields),
        train=dataclasses.replace(given.train, seq_len=4096),
        precision=PrecisionConfig(dtype="bf16"),
    )


def valid(config: Config) -> bool:
    if run_checks(config, WORLD, files=False):
        return False
    try:
        quick_layout(config, WORLD)
    except ValueError:
        return False
    return True


@pytest.fixture(scope="module")
def layouts() -> list[Config]:
    """Any valid ones, the same in every run."""
    draw, found = random.Random(1), list[Config]()
    while len(found) < COUNT:
        config = changed(model(), {key: draw.choice(values) for key, values in DRAWN.items()})
        found += [config] if valid(config) else []
    return found


@pytest.fixture(scope="module")
def price():
    """(configuration, cluster) -> the time of a step; layers are traced once."""
    estimator = Estimator(H100)

    def step(config, cluster=H100):
        estimator.cluster = cluster
        return estimator.step(config, WORLD)

    return step


def test_no_faster_part_slows_a_step_down(layouts, price):
    for config in layouts:
        plain = price(config)
        assert all(seconds >= 0 for seconds in plain.seconds.values())
        for rate in RATES:
            faster = dataclasses.replace(
                H100, **{rate: 2 * getattr(H100, rate)}, flops_8bit=2 * H100.flops_8bit
            )
            found = price(config, faster)
            assert found.step_s <= plain.step_s * (1 + 1e-9), (
                rate,
                plain.seconds,
                found.seconds,
                config,
            )
            assert found.sent == plain.sent


def test_reducing_each_micro_batch_sends_more_and_is_no_faster(price):
    """The last reduction of a step has nothing to hide under, however often gradients are
    reduced."""
    for zero in (2, 3):
        once, each = (
            price(changed(model(), {"parallel.zero": zero, "parallel.grad_reduce": reduce}))
            for reduce in ("per_step", "per_microbatch")
        )
        assert each.step_s >= once.step_s and each.seconds["dp"] > 0
        assert each.sent[0]["dp_shard_cp"] > once.sent[0]["dp_shard_cp"]


def test_fp8_gemms_make_wide_layers_faster(price):
    """What quantising costs in memory traffic is less than what the GEMMs gain."""
    fields = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_heads": 32, "num_experts": 0}
    wide = dataclasses.replace(model(), model=dataclasses.replace(model().model, **fields))
    sixteen, *eight = (
        price(changed(wide, {"parallel.zero": 3, "precision.fp8": recipe}))
        for recipe in ("none", "tensorwise", "blockwise")
    )
    assert all(each.step_s < 0.9 * sixteen.step_s for each in eight)


def test_more_chunks_send_more_between_stages(price):
    whole, *chunked = (
        price(
            changed(
                model(),
                {"parallel.pp": 4, "parallel.vpp": vpp, "pipeline.schedule": name, "train.gbs": 64},
            )
        )
        for name, vpp in (("1f1b", 1), ("interleaved", 2))
    )
    message = 4096 * 1024 * 2 * 64 // 4  # of every micro-batch, of a data-parallel rank
    assert [sent["pp"] / message for sent in whole.sent] == [1, 2, 2, 1]
    assert [sent["pp"] / message for sent in chunked[0].sent] == [3, 4, 4, 3]

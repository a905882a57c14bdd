"""What must hold of the memory of any layout: what is kept nowhere else is not counted, and sharing
more keeps less."""

import dataclasses
import random
from collections.abc import Callable

import pytest
from parity_configs import config_of

from megatron5d.config.checks import run_checks
from megatron5d.config.convert import changed
from megatron5d.config.schema import Config, PrecisionConfig
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.memory.rank_memory import RankMemory
from megatron5d.planning.schedule_search.auto_schedule import pipeline_faults

WORLD = 8
DRAWN = {
    "parallel.tp": (1, 2),
    "parallel.sp": (False, True),
    "parallel.cp": (1, 2),
    "parallel.pp": (1, 2),
    "parallel.ep": (1, 2),
    "parallel.zero": (0, 1, 2, 3),
    "parallel.zero3_gather": ("per_microbatch", "per_step"),
    "parallel.grad_reduce": ("per_microbatch", "per_step"),
    "train.mbs": (1, 2),
    "model.num_experts": (0, 4),
    "model.num_mtp_layers": (0, 1),
    "model.tie_embeddings": (False, True),
    "optim.name": ("adamw", "muon"),
    "pipeline.schedule": ("1f1b", "zb_h1", "zb_v", "dualpipe", "gpipe"),
    "precision.fp8": ("none", "tensorwise", "blockwise"),
    "recompute.logit_tokens": (None, 128),
}
AWAY = {"recompute.offload": ["attention", "mlp"], "recompute.offload_min_bytes": 1}


def model() -> Config:
    given = config_of(gbs=16)
    fields = {
        "vocab_size": 1024,
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "head_dim": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_experts": 4,
        "top_k": 2,
        "moe_ffn_hidden_size": 256,
    }
    return dataclasses.replace(
        given,
        model=dataclasses.replace(given.model, **fields),
        train=dataclasses.replace(given.train, seq_len=256),
        precision=PrecisionConfig(dtype="bf16"),
    )


def valid(config: Config, world: int = WORLD) -> bool:
    return not run_checks(config, world, files=False) and not pipeline_faults(config, world)


def drawn(seed: int) -> Config:
    """Any valid layout, the same for each seed."""
    draw = random.Random(seed)
    while True:
        config = changed(model(), {key: draw.choice(values) for key, values in DRAWN.items()})
        if valid(config):
            return config


def first_and_last(config: Config, world: int = WORLD) -> list[RankMemory]:
    forecaster = Forecaster(config, world, Target())
    return [forecaster.rank(rank) for rank in sorted({0, config.parallel.pp - 1})]


def not_more(
    less: list[RankMemory],
    more: list[RankMemory],
    of: Callable[[RankMemory], int] = lambda memory: memory.allocated,
) -> bool:
    return all(of(a) <= of(b) for a, b in zip(less, more, strict=True))


def state_bytes(memory: RankMemory) -> int:
    return memory.weights + memory.gradients + memory.optimizer


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 30))]
)
def test_what_is_computed_again_or_waits_on_the_host_takes_no_more(seed):
    """Partly and wholly recomputed layers are each held to none: one whole layer's may be more than
    many parts'.

    A phase's input, which the phase before holds too, comes back from the host beside it while the
    phase runs.
    """
    config = drawn(seed)
    plain, p = first_and_last(config), config.parallel
    rows = config.train.seq_len // p.cp // (p.tp if p.sp else 1)
    one_input = rows * config.train.mbs * config.model.hidden_size * 2
    for change in (
        {"recompute.mode": "selective"},
        {"recompute.mode": "full"},
        AWAY,
        {"optim.offload": True},
    ):
        assert valid(changed(config, change)), change
        slack = one_input if change is AWAY else 0
        for less, more in zip(first_and_last(changed(config, change)), plain, strict=True):
            assert less.allocated <= more.allocated + slack, change


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 30))]
)
def test_more_ranks_keep_no_more_each(seed):
    """More that share slices; and under tp, where slices do not get larger by it."""
    config = drawn(seed)
    sharded = changed(config, {"parallel.zero": 3})
    wider = changed(sharded, {"train.gbs": 32})
    if valid(sharded):
        assert not_more(first_and_last(wider, 2 * WORLD), first_and_last(sharded), of=state_bytes)
    cut = changed(
        config,
        {"parallel.tp": 2 * config.parallel.tp, "parallel.zero": min(2, config.parallel.zero)},
    )
    if valid(cut):
        whole = changed(cut, {"parallel.tp": config.parallel.tp})
        assert not_more(
            first_and_last(cut), first_and_last(whole), of=lambda memory: memory.weights
        )

"""The layouts of conf/experiment/published: their memory is planned, and what the papers say of
them is there."""

import re

import pytest

from megatron5d.config.load import CONF
from megatron5d.planning.clusters import cluster_called
from megatron5d.planning.memory.forecast import Forecaster, Target
from megatron5d.planning.planned_config import planned_config
from megatron5d.train.build import sizes_of

GIB = 1 << 30
# (world, tp, cp, pp, ep, dp, tokens a step in millions), from the papers.
LAYOUTS = {
    "deepseek_v2": (1024, 1, 1, 16, 8, 64, 37.7),
    "deepseek_v3": (2048, 1, 1, 16, 64, 128, 62.9),
    "gpt3_175b": (64, 8, 1, 8, 1, 1, 0.131),
    "gpt_1t": (3072, 8, 1, 64, 1, 6, 6.29),
    "kimi_k2": (1024, 1, 1, 16, 16, 64, 67.1),
    "llama3_405b": (16384, 8, 1, 16, 1, 128, 16.8),
    "llama3_405b_128k": (16384, 8, 16, 16, 1, 8, 16.8),
    "llama_65b": (2048, 8, 1, 1, 1, 256, 4.19),
    "mixtral_8x22b": (128, 2, 1, 8, 8, 8, 1.05),
    "mt_nlg_530b": (2240, 8, 1, 35, 1, 8, 3.93),
    "palm_540b": (6144, 12, 1, 1, 1, 512, 4.19),
    "qwen3_235b_a22b": (256, 2, 1, 8, 32, 16, 33.6),
}


def test_all_are_held_to_their_papers():
    assert {file.stem for file in (CONF / "experiment" / "published").glob("*.yaml")} == set(
        LAYOUTS
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_the_published_one_and_its_memory_is_planned(name):
    world, *axes, millions = LAYOUTS[name]
    config = planned_config([f"experiment=published/{name}"], world)
    sizes, train = sizes_of(config, world), config.train
    assert [sizes.tp, sizes.cp, sizes.pp, sizes.ep, sizes.dp] == axes
    assert train.gbs * train.seq_len / 1e6 == pytest.approx(millions, rel=0.01)
    text = (CONF / "experiment" / "published" / f"{name}.yaml").read_text()
    assert re.search(rf" on {world} (GPUs|TPUs) \(.*20\d\d", text)
    device = cluster_called("h100")
    first = Forecaster(
        config, world, Target(device.architecture, config.moe.planned_imbalance)
    ).rank(0)
    assert 2 * GIB < first.resident < first.needed < 81 * GIB

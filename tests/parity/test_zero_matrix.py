"""ZeRO 0 to 3, with and without replicas, beside each other dimension and each pair of them: fp64
to 1e-10."""

from itertools import combinations, product

import pytest
from layouts import assert_parity
from parity import test_moe_layouts as moe

DIMS = ({"tp": 2, "sp": True}, {"cp": 2}, {"ep": 2}, {"pp": 2})
BESIDE = [*DIMS, *(a | b for a, b in combinations(DIMS, 2))]


@pytest.mark.parametrize(
    ("zero", "replicate", "beside"), product(range(4), (1, 2), BESIDE), ids=str
)
def test_cell(zero, replicate, beside):
    """Slices are dealt out over two ranks at least: those of cp where there are any."""
    dp = replicate * (1 if "cp" in beside else 2)
    config = moe.config_of("mixtral", gbs=dp * 2, dp_replicate=replicate, zero=zero, **beside)
    config = moe.with_schedule(config, "1f1b") if "pp" in beside else config
    world = dp * beside.get("tp", 1) * beside.get("cp", 1) * beside.get("pp", 1)
    assert_parity(config, world, steps=2)

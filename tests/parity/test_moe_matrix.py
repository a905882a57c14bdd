"""Mixtures of experts, the whole product: ep × tp × cp × etp × capacity × balancing × padding; fp64 to 1e-10.

MEGATRON5D_FULL=1 runs it; `test_moe_layouts.py` is what always runs of it.
"""

import os

import pytest
from layouts import assert_parity
from test_moe_layouts import BALANCES, config_of

pytestmark = pytest.mark.skipif(os.environ.get("MEGATRON5D_FULL") != "1", reason="MEGATRON5D_FULL=1 runs it")


@pytest.mark.parametrize("padded", [0.0, 0.8])
@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("etp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_the_whole_product(ep, tp, cp, etp, capacity, balance, padded):
    world = max(ep * etp, tp * cp)
    model = "deepseek" if balance == "all" else "mixtral"
    parallel = {"ep": ep, "tp": tp, "sp": tp > 1 and cp == 1, "cp": cp, "etp": etp, "zero": int(world > tp * cp)}
    config = config_of(model, balance, gbs=16, mbs=1, moe={"capacity_factor": capacity}, **parallel)
    assert_parity(config, world=world, steps=2, ignored=padded)

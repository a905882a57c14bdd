"""Architectures and layouts drawn at random equal one process: loss, every gradient, norm and weights in fp64 to 1e-10.

MEGATRON5D_RANDOM=first:last runs the configurations of these numbers instead.
"""

import os

import pytest
from layouts import assert_parity
from random_configs import overrides, random_config

FIRST, LAST = map(int, os.environ.get("MEGATRON5D_RANDOM", "0:10").split(":"))


@pytest.mark.parametrize("number", range(FIRST, LAST))
def test_composition(number):
    config, world, ignored = random_config(number)
    print(f"{world} ranks, {ignored:.0%} of each row at most is padding: {overrides(config)}")  # shown on failure
    assert_parity(config, world, steps=2, ignored=ignored)

"""Architectures and layouts drawn at random equal one process: loss, every gradient, norm and
weights in fp64 to 1e-10.

MEGATRON5D_RANDOM=first:last runs the configurations of these numbers instead.
"""

import pytest
from layouts import assert_parity
from random_configs import numbers, overrides, random_config


@pytest.mark.parametrize("number", numbers("0:10"))
def test_composition(number):
    config, world, ignored = random_config(number)
    # shown on failure
    print(f"{world} ranks, {ignored:.0%} of each row at most is padding: {overrides(config)}")
    assert_parity(config, world, steps=2, ignored=ignored)

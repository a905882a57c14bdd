"""FP8 training stays as near to bf16 as promised; the whole 500 steps with MEGATRON5D_TESTS=nightly."""

import tiers
from fp8_quality import BOUNDS, compare

STEPS = 500 if tiers.NIGHTLY else 30


def test_every_recipe_follows_bf16():
    table = compare(STEPS)
    assert table["none"]["last"] < 0.95 * table["none"]["first"], "nothing was learnt"
    for recipe, bound in BOUNDS.items():
        assert table[recipe]["first"] != table["none"]["first"], "nothing was quantised"
        assert abs(table[recipe]["from_bf16"]) < bound, (recipe, table[recipe])

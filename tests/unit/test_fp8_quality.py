"""FP8 training stays within the documented bounds of bf16; the nightly suite takes 500 steps."""

import tiers
from fp8_quality import BOUNDS, compare

STEPS = 500 if tiers.NIGHTLY else 30


def test_every_recipe_stays_close_to_bf16():
    table = compare(STEPS)
    assert table["none"]["last"] < 0.95 * table["none"]["first"], "nothing was learned"
    for recipe, bound in BOUNDS.items():
        assert table[recipe]["first"] != table["none"]["first"], "nothing was quantized"
        assert abs(table[recipe]["from_bf16"]) < bound, (recipe, table[recipe])

"""How much of the suite runs: `sample`, `all` or `nightly` (docs/testing.md).

`launch/test.sh` sets MEGATRON5D_TESTS; pytest by itself runs `all`.
"""

import os
from collections import defaultdict

TIERS = ("sample", "all", "nightly")
TIER = os.environ.get("MEGATRON5D_TESTS", "all")
assert TIER in TIERS, f"MEGATRON5D_TESTS={TIER}; expected {', '.join(TIERS)}"
SAMPLE, NIGHTLY = TIER == "sample", TIER == "nightly"
SAMPLED_CASES = 3  # of a parametrized test
# Markers of tests that a tier leaves out. The verdict of `timing` depends on the machine's speed.
LEFT_OUT = {"sample": ("slow", "timing", "nightly"), "all": ("timing", "nightly"), "nightly": ()}


def split(items: list) -> tuple[list, list]:
    """The tests that this tier runs, and those that it leaves out.

    The sample keeps evenly spaced cases of each parametrized test, its first and its last included,
    and all cases of tests marked `every_case`: those that prove that other tests can fail.
    """
    runs = {item for item in items if not any(map(item.get_closest_marker, LEFT_OUT[TIER]))}
    if SAMPLE:
        cases_of = defaultdict(list)
        for item in items:
            if item in runs and not item.get_closest_marker("every_case"):
                cases_of[item.path, getattr(item, "originalname", item.name)].append(item)
        for cases in cases_of.values():
            last = len(cases) - 1
            picked = {round(n * last / (SAMPLED_CASES - 1)) for n in range(SAMPLED_CASES)}
            runs -= {case for n, case in enumerate(cases) if n not in picked}
    return [item for item in items if item in runs], [item for item in items if item not in runs]

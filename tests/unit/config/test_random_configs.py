"""What the random tests draw: every knob that decides on numbers or on layout, or one that says
here why not."""

import random
import re
from fnmatch import fnmatch

from random_configs import random_run, random_shape

from megatron5d.config.convert import leaves, value_of
from megatron5d.parity.variants import faults_of

ELSEWHERE = {
    "model.name": "a name",
    "model.from_hf": "a file: tests of Hugging Face models",
    "model.rope_scaling.*": "the model on one page has plain frequencies: tests of rope.py",
    "parallel.timeout_s": "of what hangs: tests/chaos",
    "pipeline.flops_per_byte": "of the search alone: its tests",
    "train.steps": "the schedule of the rate is counted by it: 10",
    "train.gbs_ramp": "of the loop: tests of the loop and of resuming",
    "train.eval_*": "as gbs_ramp",
    "train.stop_after": "as gbs_ramp",
    "optim.schedule_by": "as gbs_ramp",
    "optim.lr": "large enough that weights move: 0.01",
    "optim.on_nonfinite": "of steps that are not made: tests of the guard",
    "optim.skip_norm": "as on_nonfinite",
    "optim.max_skipped": "as on_nonfinite",
    "moe.planned_imbalance": "predicts memory and changes no number",
    "moe.exchange": "tests/parity/test_moe_layouts.py",
    "moe.fp8_dispatch": "rounds: tests/parity/test_fp8_layouts.py",
    "moe.record": "writes a file: tests of replaying routes",
    "moe.replay": "as record",
    "train.cuda_graph": "of GPUs: tests/parity/test_phase_graphs.py",
    "moe.log_every": "the short runs of the random tests watch every step",
}
GROUPS = ("model", "parallel", "pipeline", "train", "optim", "recompute", "moe")


def test_every_knob_is_drawn_or_tested_elsewhere():
    seen: dict[str, set[str]] = {
        key: set() for key in leaves() if key.startswith(tuple(f"{g}." for g in GROUPS))
    }
    dice = random.Random(0)
    for _ in range(400):
        config = random_run(dice, random_shape(dice)[0])
        for key, values in seen.items():
            values.add(str(value_of(config, key)))
    still = {key for key, values in seen.items() if len(values) == 1}
    excused = {key for key in seen if any(fnmatch(key, glob) for glob in ELSEWHERE)}
    assert still == excused


def test_every_fix_is_an_override_to_paste():
    dice = random.Random(0)
    for _ in range(60):
        shape, world = random_shape(dice)
        for fault in faults_of(random_run(dice, shape), world):
            assert re.match(r"([a-z0-9_.]+=(\S+)|use \d+ ranks)( |,|;|$)", fault.fix), fault
            assert ", " not in "".join(re.findall(r"\[[^]]*\]", fault.fix)), (
                f"a shell cuts the list of {fault}"
            )

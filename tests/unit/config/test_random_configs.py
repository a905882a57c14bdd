"""Random tests draw every knob that decides on numbers or layout, unless excused here."""

import random
import re
from fnmatch import fnmatch

from random_configs import random_run, random_shape

from megatron5d.config.convert import leaves, value_of
from megatron5d.parity.variants import faults_of

EXCUSES = {
    "model.name": "a name",
    "model.from_*": "reads a file: tests of Hugging Face models, and of load.py",
    "model.rope_scaling.*": "the reference model has plain frequencies: tests of rope.py",
    "parallel.timeout_s": "for hanging collectives: tests/chaos",
    "pipeline.flops_per_byte": "of the search: its tests",
    "train.steps": "sets the length of the learning-rate schedule: 10",
    "train.gbs_ramp": "of the loop: tests of the loop and of resuming",
    "train.eval_*": "as gbs_ramp",
    "train.stop_after": "as gbs_ramp",
    "optim.schedule_by": "as gbs_ramp",
    "optim.lr": "large enough that weights move: 0.01",
    "optim.on_nonfinite": "for skipped steps: tests of the guard",
    "optim.skip_norm": "as on_nonfinite",
    "optim.max_skipped": "as on_nonfinite",
    "moe.planned_imbalance": "for predicted memory: changes no number",
    "moe.exchange": "tests/parity/test_moe_layouts.py",
    "moe.fp8_dispatch": "rounds values: tests/parity/test_fp8_layouts.py",
    "moe.record": "writes a file: tests of replaying routes",
    "moe.replay": "as record",
    "train.cuda_graph": "needs a GPU: tests/parity/test_phase_graphs.py",
    "moe.log_every": "the short random runs log every step",
}
GROUPS = ("model", "parallel", "pipeline", "train", "optim", "recompute", "moe")


def test_every_knob_is_drawn_or_excused():
    prefixes = tuple(f"{group}." for group in GROUPS)
    drawn: dict[str, set[str]] = {key: set() for key in leaves() if key.startswith(prefixes)}
    dice = random.Random(0)
    for _ in range(400):
        config = random_run(dice, random_shape(dice)[0])
        for key, values in drawn.items():
            values.add(str(value_of(config, key)))
    constant = {key for key, values in drawn.items() if len(values) == 1}
    assert constant == {key for key in drawn if any(fnmatch(key, glob) for glob in EXCUSES)}


def test_every_fix_can_be_pasted():
    dice = random.Random(0)
    for _ in range(60):
        shape, world = random_shape(dice)
        for fault in faults_of(random_run(dice, shape), world):
            assert re.match(r"([a-z0-9_.]+=(\S+)|use \d+ ranks)( |,|;|$)", fault.fix), fault
            lists = "".join(re.findall(r"\[[^]]*\]", fault.fix))
            assert ", " not in lists, f"a shell splits the list of {fault}"

"""kill -9 of a process that saves, prunes and recovers without a pause, 200 times: what looks whole
is whole."""

import os
import random
import signal
import time

import pytest
import torch

from megatron5d.checkpoint.folder import Keep, newest_checkpoint, recover, saved_steps, step_folder
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.checkpoint.load import SavedWeights
from megatron5d.checkpoint.save import Saver

KILLS, SIZE, KEEP = 200, 1 << 16, Keep(last=2, every=50)

pytestmark = pytest.mark.timeout(600)


def save_until_killed(directory, report, background):
    """Saves step after step, each full of its own number, and reports those that are done."""
    recover(directory)
    done = newest_checkpoint(directory)
    step = int(done.name.removeprefix("step-")) if done else 0
    saver = Saver(directory, KEEP, background=background)
    while True:
        values = torch.full((SIZE,), float(step + 1))
        saver.save(
            step + 1, {"model.w": ShardedTensor((SIZE,), [((0,), values)], values.dtype)}, {}
        )
        # one in the background may go on
        os.write(report, f"{step if background else step + 1}\n".encode())
        step += 1


def killed(directory, delay_s, background):
    """Starts a process that saves, and kills it; returns the last step that it reported."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(directory, writes, background)
        finally:
            os._exit(1)
    os.close(writes)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reads) as reported:
        lines = reported.read().split()
    assert os.WIFSIGNALED(status), "it ended by itself"
    return int(lines[-1]) if lines else 0


def test_what_two_hundred_kills_leave_is_whole(tmp_path):
    chance, last, moved = random.Random(7), 0, 0
    Saver(tmp_path, keep=0)  # its imports, once for all
    for kill in range(KILLS):
        last = max(last, killed(tmp_path, chance.uniform(0.002, 0.12), background=kill % 2 == 1))
        found = newest_checkpoint(tmp_path)
        assert (found is None and last == 0) or int(found.name.removeprefix("step-")) >= last, (
            "a save was lost"
        )
        for step in saved_steps(tmp_path):
            weights = SavedWeights(step_folder(tmp_path, step)).read("w", (0,), (SIZE,))
            assert (weights == step).all(), f"step {step} after kill {kill}"
        moved += any("." in path.name for path in tmp_path.iterdir() if path.is_dir())
    recover(tmp_path)
    assert last > 20 and moved > 20, "most kills came during a save"
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and "." in path.name]
    end = saved_steps(tmp_path)[-1] + 1
    Saver(tmp_path, KEEP).save(end, {}, {})
    assert saved_steps(tmp_path) == sorted({*range(50, end, 50), end - 1, end}), (
        "pruning ends what it began"
    )

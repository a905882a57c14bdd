"""kill -9 of a process that saves, prunes and recovers without a pause, 200 times: every checkpoint
that looks complete is complete."""

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

NUM_KILLS, SIZE, KEEP = 200, 1 << 16, Keep(last=2, every=50)

pytestmark = pytest.mark.timeout(600)


def newest_step(directory):
    newest = newest_checkpoint(directory)
    return int(newest.name.removeprefix("step-")) if newest else 0


def save_until_killed(directory, report, background):
    """Saves step after step, each filled with its own number, and reports those that are done."""
    recover(directory)
    step = newest_step(directory)
    saver = Saver(directory, KEEP, background=background)
    while True:
        step += 1
        values = torch.full((SIZE,), float(step))
        tensor = ShardedTensor((SIZE,), [((0,), values)], values.dtype)
        saver.save(step, {"model.w": tensor}, {})
        # a background save may still be in progress
        os.write(report, f"{step - background}\n".encode())


def last_report_of_killed(directory, delay_s, background):
    """Starts a process that saves, and kills it; gives the last step that it reported."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_until_killed(directory, writer, background)
        finally:
            os._exit(1)
    os.close(writer)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as reports:
        steps = reports.read().split()
    assert os.WIFSIGNALED(status), "it ended by itself"
    return int(steps[-1]) if steps else 0


@pytest.mark.slow
def test_checkpoints_survive_two_hundred_kills(tmp_path):
    def incomplete():
        return [path for path in tmp_path.iterdir() if path.is_dir() and "." in path.name]

    chance, last, num_interrupted = random.Random(7), 0, 0
    Saver(tmp_path, keep=0)  # imports once what every save imports
    for kill in range(NUM_KILLS):
        background = kill % 2 == 1
        last = max(last, last_report_of_killed(tmp_path, chance.uniform(0.002, 0.12), background))
        assert newest_step(tmp_path) >= last, "a save was lost"
        for step in saved_steps(tmp_path):
            weights = SavedWeights(step_folder(tmp_path, step)).read("w", (0,), (SIZE,))
            assert (weights == step).all(), f"step {step} after kill {kill}"
        num_interrupted += bool(incomplete())
    recover(tmp_path)
    assert last > 20 and num_interrupted > 20, "most kills came during a save"
    assert not incomplete()
    # a later save completes interrupted pruning
    end = saved_steps(tmp_path)[-1] + 1
    Saver(tmp_path, KEEP).save(end, {}, {})
    assert saved_steps(tmp_path) == sorted({*range(50, end, 50), end - 1, end})

"""kill -9 of `convert.py reshard` at random moments: the next run ends it, and nothing is lost or
left over."""

import contextlib
import os
import random
import shutil
import signal
import time

import pytest
import torch
from random_configs import numbers
from runs import whole_tensors

from megatron5d.checkpoint.folder import checkpoint_error, recover, step_folder
from megatron5d.checkpoint.layout import ShardedTensor
from megatron5d.config.load import load_config
from megatron5d.planning.schedule_search.auto_schedule import searched_layout
from megatron5d.tools import convert
from megatron5d.tools.conversion.new_checkpoint import save_weights
from megatron5d.tools.conversion.reshard import rank_tensors

MODEL = [
    *("model=tiny", "model.num_layers=4", "model.hidden_size=256", "model.ffn_hidden_size=512"),
    *("model.num_heads=8", "model.num_kv_heads=4", "model.vocab_size=1024", "precision.dtype=bf16"),
]
TARGET = [
    "--world",
    "32",
    "--workers",
    "2",
    "parallel.tp=4",
    "parallel.pp=2",
    "parallel.zero=1",
    "train.gbs=32",
]


def resharded_until_killed(source, out, delay_s):
    """Reshards in a process of its own, and kills it with those that work for it; returns whether
    it had ended."""
    if (child := os.fork()) == 0:
        with open(os.devnull, "w") as nobody, contextlib.redirect_stdout(nobody):
            os._exit(convert.main(["reshard", str(source), str(out), *TARGET]))
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


@pytest.mark.timeout(7200)
def test_what_kills_leave_is_ended_by_the_next_run(tmp_path):
    torch.set_num_threads(1)
    config, tensors = load_config(MODEL), {}
    for key, tensor in rank_tensors(config, 1, searched_layout(config, 1), 0).items():
        values = torch.randn(tensor.shape).to(tensor.dtype)
        tensors[key] = ShardedTensor(tensor.shape, [((0,) * values.dim(), values)], tensor.dtype)
    source = save_weights(tmp_path / "source", tensors, config)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    start = time.monotonic()
    assert convert.main(["reshard", str(source), str(tmp_path / "unkilled"), *TARGET]) == 0
    took_s = time.monotonic() - start
    expected = {path.name for path in step_folder(tmp_path / "unkilled", 0).iterdir()}
    midway, runs = 0, numbers("0:6")
    chance = random.Random(runs.start)
    for number in runs:
        out = tmp_path / f"out{number}"
        # a run takes up what the last one left, and is killed, too
        for _ in range(chance.choice((1, 1, 2, 3))):
            if resharded_until_killed(source, out, chance.uniform(0, 1.2 * took_s)):
                break
            midway += any(step_folder(out, 0).with_suffix(".tmp").glob("*"))
        assert convert.main(["reshard", str(source), str(out), *TARGET]) == 0
        final = step_folder(out, 0)
        assert checkpoint_error(final) is None and recover(out) == []
        assert {path.name for path in out.iterdir() if not path.name.startswith("run.lock.")} == {
            final.name,
            "latest",
        }
        assert {path.name for path in final.iterdir()} == expected
        found = whole_tensors(final)
        assert all(
            torch.equal(found[key], tensor.shards[(0,) * len(tensor.shape)])
            for key, tensor in tensors.items()
        )
        shutil.rmtree(out)
    assert midway, "kills came while files were being written"
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before

"""kill -9 of `convert.py reshard` at random moments: the next run completes it, and nothing is lost
or left over."""

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
    "model=tiny",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.vocab_size=1024",
    "precision.dtype=bf16",
]
OPTIONS = [
    *("--world", "32", "--workers", "2"),
    *("parallel.tp=4", "parallel.pp=2", "parallel.zero=1", "train.gbs=32"),
]


def reshard(source, out):
    assert convert.main(["reshard", str(source), str(out), *OPTIONS]) == 0


def is_killed_while_resharding(source, out, delay_s):
    """Reshards in another process and kills it with its workers; False where it had ended."""
    if (child := os.fork()) == 0:
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                reshard(source, out)
            os._exit(0)
        finally:
            os._exit(1)
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def saved_random_weights(folder):
    """A checkpoint of random weights, and its tensors."""
    config, values, tensors = load_config(MODEL), {}, {}
    for key, tensor in rank_tensors(config, 1, searched_layout(config, 1), 0).items():
        values[key] = torch.randn(tensor.shape).to(tensor.dtype)
        shard = (0,) * values[key].dim(), values[key]
        tensors[key] = ShardedTensor(tensor.shape, [shard], tensor.dtype)
    return save_weights(folder, tensors, config), values


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.timeout(7200)
def test_the_next_run_completes_a_killed_one(tmp_path):
    torch.set_num_threads(1)
    source, values = saved_random_weights(tmp_path / "source")
    before = contents(source)
    start = time.monotonic()
    reshard(source, tmp_path / "undisturbed")
    duration_s = time.monotonic() - start
    names = contents(step_folder(tmp_path / "undisturbed", 0)).keys()

    num_interrupted, runs = 0, numbers("0:6")
    chance = random.Random(runs.start)
    for number in runs:
        out = tmp_path / f"out{number}"
        final = step_folder(out, 0)
        # a run continues what the last one left, and is killed, too
        for _ in range(chance.choice((1, 1, 2, 3))):
            if not is_killed_while_resharding(source, out, chance.uniform(0, 1.2 * duration_s)):
                break
            num_interrupted += any(final.with_suffix(".tmp").glob("*"))
        reshard(source, out)
        assert checkpoint_error(final) is None
        assert recover(out) == []
        remaining = {path.name for path in out.iterdir() if "run.lock." not in path.name}
        assert remaining == {final.name, "latest"}
        assert contents(final).keys() == names
        tensors = whole_tensors(final)
        assert all(torch.equal(tensors[key], value) for key, value in values.items())
        shutil.rmtree(out)
    assert num_interrupted, "kills came while files were being written"
    assert contents(source) == before

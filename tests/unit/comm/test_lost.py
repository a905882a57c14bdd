"""A rank that hangs is named by those that wait for it in a collective."""

import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from megatron5d.comm import lost
from megatron5d.comm.collectives import all_reduce
from megatron5d.comm.lost import LineLost
from megatron5d.comm.ring import start_shift
from megatron5d.topology.axis import Axis

STARTS = {
    "all_reduce": lambda x, axis: all_reduce(x, axis),
    "shift": lambda x, axis: start_shift(x, axis).wait(),
}


@pytest.mark.parametrize("op", STARTS)
def test_the_rank_that_hangs_is_named(monkeypatch, op):
    monkeypatch.setattr(lost, "PATIENCE_S", 1.0)

    def fn(rank, world):
        axis = Axis("dp", tuple(range(world)), rank, dist.new_group(timeout=timedelta(seconds=2)))
        STARTS[op](torch.zeros(3), axis)  # connects
        if rank == 1:
            time.sleep(4)
            with suppress(LineLost, RuntimeError):  # too late: the others have left
                STARTS[op](torch.zeros(3), axis)
            return None
        with pytest.raises(LineLost) as found:
            STARTS[op](torch.zeros(3), axis)
        return str(found.value)

    first, _, third = run_ranks(fn, 3)
    for message in (first, third):
        assert message.startswith(f"{op} over dp (ranks 0, 1, 2) failed: rank 1 does not answer within 1 s: dead, or")


def test_what_fails_at_once_names_its_axis():
    class Broken:
        def wait(self):
            raise RuntimeError("the backend's own words\nand more")

    with pytest.raises(LineLost, match=r"all_gather over tp \(ranks 0, 1\) failed: .* says: the backend's own words$"):
        lost.finish(Broken(), "all_gather", Axis("tp", (0, 1), 0, None))

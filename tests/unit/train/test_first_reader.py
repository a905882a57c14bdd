"""Megatron's order is built once: no other rank looks for it before rank 0 has."""

import time

from ranks import run_ranks

from megatron5d.config.load import load_config
from megatron5d.topology.grid import resolve
from megatron5d.topology.mesh import build_mesh
from megatron5d.train import data
from megatron5d.train.data import BlankSamples


def test_rank_0_opens_the_files_first_and_its_fault_is_everybodys():
    def fn(rank, world):
        build_mesh(resolve(world), rank)
        opened = []

        def open_files():
            time.sleep(0.5 if rank == 0 else 0)
            opened.append(time.monotonic())
            if len(opened) > 1:
                raise ValueError("a file is short")
            return BlankSamples(8)

        data._opened(config, True, open_files)
        try:
            data._opened(config, rank == 0, open_files)
        except ValueError as error:
            return opened, str(error)

    config = load_config(["data.order=megatron"])
    (first, told), *others = run_ranks(fn, 3)
    assert len(first) == 2 and told == "a file is short"
    for opened, told in others:
        assert len(opened) == 1 and opened[0] >= first[0] and told == "rank 0: a file is short"

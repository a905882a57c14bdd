"""How dk and dv are spread over processors: no processor works much longer than others, for the
shapes of real models."""

import itertools

import numpy as np
import pytest
import torch

from megatron5d.kernels.dispatch import cdiv, jit, next_power_of_2, tl
from megatron5d.kernels.flash_attention.backward_keys import (
    COUNTED_KEYS,
    LEAST_QUERIES,
    _shares,
    in_shares,
)
from megatron5d.kernels.flash_attention.mask import Flags

pytestmark = pytest.mark.alike
PROCESSORS = 132  # an H100's
BLOCK_M, BLOCK_N = 32, 128  # for heads of 128 on Hopper
PLACES = 2 * PROCESSORS  # two programs that take a block each share a processor
HEADS = {"Llama 3 8B": (32, 8), "Llama 3 70B": (64, 8), "Qwen3 30B-A3B": (32, 4)}


@jit(do_not_specialize=["queries", "heads", "blocks"])
def _shares_kernel(
    out_ptr,
    queries,
    heads,
    blocks,
    shares,
    FLAGS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    sizes = queries, queries, heads, 1.0, 0.0, 0
    before, tiles, share = _shares(
        out_ptr, 0, sizes, blocks, 1, shares, FLAGS, BLOCK_M, BLOCK_N, ENTRIES
    )
    tl.store(out_ptr + tl.arange(0, ENTRIES), before + tiles)
    tl.store(out_ptr + ENTRIES, share)


def tiles_of(s: int, t: int, causal: bool, keys: int = BLOCK_N) -> np.ndarray:
    """Tiles of queries, for each block of keys, in which at least one query sees a key."""
    first_key = np.arange(0, t, keys)
    last_query = np.minimum(np.arange(0, s, BLOCK_M) + BLOCK_M, s) - 1
    sees = (last_query[None, :] >= first_key[:, None]) | (not causal)
    return sees.sum(1)


def makespan(jobs, places: int) -> int:
    """Time until all jobs are done, each started where a place becomes free first."""
    busy = np.zeros(places, int)
    for job in jobs:
        busy[busy.argmin()] += job
    return int(busy.max())


def shapes(tokens: int, cp: int) -> list[tuple[int, int, bool]]:
    """Calls of a rank: with zigzag, its own two chunks, and chunks of others that it sees fully."""
    if cp == 1:
        return [(tokens, tokens, True)]
    chunk = tokens // cp // 2
    return [(chunk, chunk, True), (chunk, 2 * chunk, False), (2 * chunk, chunk, False)]


def assert_even(heads: int, kv_heads: int, s: int, t: int, causal: bool) -> None:
    if not in_shares(t, kv_heads, 128, PROCESSORS):
        jobs = np.repeat(tiles_of(s, t, causal, COUNTED_KEYS), kv_heads)
        assert makespan(jobs, PLACES) <= 1.15 * jobs.sum() / PLACES
        return
    tiles, blocks = tiles_of(s, t, causal) * heads, cdiv(t, BLOCK_N)
    entries = next_power_of_2(blocks)
    out = torch.zeros(entries + 1, dtype=torch.int32)
    flags = Flags(causal, False, False, False, False, False, False)
    _shares_kernel[(1,)](out, s, heads, blocks, PROCESSORS, flags, BLOCK_M, BLOCK_N, entries)
    *ends, share = out.tolist()
    assert ends[:blocks] == tiles.cumsum().tolist()
    assert share <= 1.15 * max(tiles.sum() / PROCESSORS, LEAST_QUERIES.value // BLOCK_M)
    assert share * PROCESSORS >= tiles.sum()


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("model", HEADS)
def test_no_processor_works_much_longer_than_others(model, tokens):
    heads, kv_heads = HEADS[model]
    for tp, cp in itertools.product((1, 2, 4, 8), repeat=2):
        for shape in shapes(tokens, cp):
            assert_even(heads // tp, max(kv_heads // tp, 1), *shape)


def test_a_program_per_block_takes_four_times_as_long():
    """What shares replace: Llama 3 8B at tp 8, 8,192 tokens, four query heads over one KV head."""
    tiles = tiles_of(8192, 8192, True) * 4
    assert makespan(tiles, PROCESSORS) > 4 * tiles.sum() / PROCESSORS

"""How dk and dv are spread over processors: none works much longer than the others, for the shapes
of real models."""

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
PROCESSORS = 132  # of an H100
BLOCK_M, BLOCK_N = 32, 128  # heads of 128 on Hopper
AT_ONCE = 2  # programs that take a block each, on a processor
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
    """Tiles of queries of which one at least sees a key of each block."""
    first_key = np.arange(0, t, keys)
    last_query = np.minimum(np.arange(0, s, BLOCK_M) + BLOCK_M, s) - 1
    return (
        (last_query[None, :] >= first_key[:, None]).sum(1)
        if causal
        else np.full(len(first_key), len(last_query))
    )


def makespan(jobs, places: int = PROCESSORS) -> int:
    """Of jobs that are taken one after the other, where one becomes free."""
    free = np.zeros(places, int)
    for job in jobs:
        free[free.argmin()] += job
    return int(free.max())


def shapes(tokens: int, cp: int) -> list[tuple[int, int, bool]]:
    """Calls of a rank: with zigzag, two chunks of its own, and chunks of others that it sees
    whole."""
    if cp == 1:
        return [(tokens, tokens, True)]
    chunk = tokens // cp // 2
    return [(chunk, chunk, True), (chunk, 2 * chunk, False), (2 * chunk, chunk, False)]


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 32768, 65536, 131072])
@pytest.mark.parametrize("model", HEADS)
def test_no_processor_works_longer_than_need_be(model, tokens):
    heads, kv_heads = HEADS[model]
    for tp in (1, 2, 4, 8):
        for cp in (1, 2, 4, 8):
            for s, t, causal in shapes(tokens, cp):
                local, blocks = heads // tp, cdiv(t, BLOCK_N)
                if not in_shares(t, max(kv_heads // tp, 1), 128, PROCESSORS):
                    blocks = np.repeat(tiles_of(s, t, causal, COUNTED_KEYS), max(kv_heads // tp, 1))
                    assert makespan(blocks, AT_ONCE * PROCESSORS) <= 1.15 * blocks.sum() / (
                        AT_ONCE * PROCESSORS
                    )
                    continue
                tiles = tiles_of(s, t, causal) * local
                entries = next_power_of_2(blocks)
                out = torch.zeros(entries + 1, dtype=torch.int32)
                flags = Flags(causal, False, False, False, False, False, False)
                _shares_kernel[(1,)](
                    out, s, local, blocks, PROCESSORS, flags, BLOCK_M, BLOCK_N, entries
                )
                *ends, share = out.tolist()
                assert ends[:blocks] == tiles.cumsum().tolist()
                ideal = max(tiles.sum() / PROCESSORS, LEAST_QUERIES.value // BLOCK_M)
                assert share <= 1.15 * ideal, f"tp {tp}, cp {cp}, {s} queries, {t} keys"
                assert share * PROCESSORS >= tiles.sum()


def test_a_program_a_block_takes_four_times_as_long():
    """What the shares replace: 8,192 tokens of Llama 3 8B at tp 8, one KV head with four heads of
    queries."""
    tiles = tiles_of(8192, 8192, True) * 4
    assert makespan(tiles) > 4 * tiles.sum() / PROCESSORS

"""What context parallelism sends: the closed forms against the ledger of real steps, and whom they
recommend."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from ranks import run_ranks
from whole_stage import WholeStage

from megatron5d.comm.ledger import Ledger
from megatron5d.config.checks.context import advice, choices, hidden_from, recommended, traffic
from megatron5d.config.load import load_config
from megatron5d.config.schema import ParallelConfig, PrecisionConfig
from megatron5d.data.batch import SequenceSharding
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of

LAYOUTS = {
    "ring": {"cp": 4},
    "allgather": {"cp": 4, "cp_method": "allgather"},
    "ulysses": {"cp": 4, "cp_method": "ulysses"},
    "two_level": {"cp": 4, "cp_method": "two_level", "cp_inner": 2},
    "ring, compressed": {"cp": 4, "cp_compress_kv": True},
    "ulysses, compressed": {"cp": 4, "cp_method": "ulysses", "cp_compress_kv": True},
    "two_level, compressed": {
        "cp": 4,
        "cp_method": "two_level",
        "cp_inner": 2,
        "cp_compress_kv": True,
    },
    "ring, tp": {"cp": 2, "tp": 2, "sp": True},
}
B = 2


def sent_on_rank(rank: int, world: int, config):
    """(elements forward, bytes of a whole step) by axis."""
    ledger = Ledger()
    mesh = build_mesh(
        sizes_of(config, world), rank, num_kv_heads=config.model.num_kv_heads, recorder=ledger
    )
    model = GPT(config, mesh)
    model.initialize(1)
    batch = SequenceSharding(config, mesh)(micro_batch(config, make_rows(config, 1)[:B]))
    stage = WholeStage(model.phases[:-1])
    y = stage.forward(0, None, batch)
    forward = {
        axis: sum(t.elements for (name, _), t in ledger.totals.items() if name == axis)
        for axis in mesh
    }
    stage.backward(0, torch.ones_like(y))
    return forward, ledger.bytes_by_axis()


CASES = [(model, layout) for layout in LAYOUTS for model in ("llama_gqa", "mla")]


@pytest.mark.parametrize(
    ("model", "layout"), [c for c in CASES if "mla" in c or "compressed" not in c[1]]
)
def test_the_ledger_counts_what_the_closed_form_says(model, layout):
    config = config_of(model, **LAYOUTS[layout])
    expected, times = traffic(config), B * config.model.num_layers
    inner, outer = expected.num_bytes("fp64")
    for forward, num_bytes in run_ranks(sent_on_rank, 4, config):
        assert (forward["cp_inner"], forward["cp_outer"]) == (
            expected.inner * times,
            expected.outer * times,
        )
        assert num_bytes.get("cp_inner", 0) == inner * times
        assert num_bytes.get("cp_outer", 0) == outer * times


@cache
def named(model: str):
    return load_config([f"model={model}"])


def sized(model: str, tp: int, cp: int, seq_len: int = 131072):
    config = named(model)
    return replace(
        config, parallel=ParallelConfig(tp=tp, cp=cp), train=replace(config.train, seq_len=seq_len)
    )


def test_by_hand():
    """Llama 3 8B, tp 1, 128k over 16: a rank holds 8,192 rows, whose 8 keys and values are 2,048
    features."""
    config = sized("llama3_8b", 1, 16)
    assert traffic(config).outer == 15 * 8192 * 2048
    assert traffic(config).num_bytes("bf16") == (0, 15 * 8192 * 2048 * (2 * 2 + 4))
    ulysses = replace(config, parallel=replace(config.parallel, cp_method="ulysses"))
    # 8 heads repeated for 16 ranks
    assert traffic(ulysses).inner == 8192 * (32 + 16) * 256 * 15 // 16
    two = replace(config, parallel=replace(config.parallel, cp_method="two_level", cp_inner=8))
    assert traffic(two).inner == 8192 * (32 + 8) * 256 * 7 // 8
    # one hop of 8 times the rows and one head of eight
    assert traffic(two).outer == 1 * 8 * 8192 * 256


@pytest.mark.parametrize(
    ("model", "tp", "cp", "expected"),
    [
        # inside a node: heads travel less than seven hops of keys
        ("llama3_8b", 1, 8, ("ulysses", 1)),
        ("llama3_8b", 8, 8, ("ring", 1)),  # tp fills the node, one key head a rank
        # four ranks of a node exchange heads, four nodes turn
        ("llama3_8b", 2, 16, ("two_level", 4)),
        ("gpt2_xl", 1, 2, ("ring", 1)),  # 25 heads do not split
        ("gpt2_xl", 1, 5, ("ulysses", 1)),
    ],
)
def test_recommended(model, tp, cp, expected):
    assert recommended(sized(model, tp, cp)) == expected


def test_the_recommended_method_sends_least_between_nodes():
    """Brute force over every legal inner size: nothing that stays inside a node of eight sends less
    between nodes."""
    for model in ("llama3_8b", "llama3_70b", "llama2_7b"):
        for tp in (1, 2, 4, 8):
            for cp in (2, 4, 8, 16, 64):
                config = sized(model, tp, cp, 1 << 20)
                sizes = [n for n in (1, 2, 4, 8) if n * tp <= 8 and cp % n == 0]
                heads = config.model.num_heads // tp, config.model.num_kv_heads // tp
                legal = [
                    n
                    for n in sizes
                    if heads[0] % n == 0 and (heads[1] % n == 0 or n % heads[1] == 0)
                ]
                rows = (1 << 20) // cp
                between = {
                    n: (cp // n - 1) * rows * max(heads[1], n) * 2 * config.model.head_dim
                    for n in legal
                }
                method, inner = recommended(config)
                inner = {"ring": 1, "ulysses": cp, "two_level": inner}[method]
                if cp * tp > 8:
                    assert between[inner] == min(between.values()), (model, tp, cp)


@pytest.mark.parametrize("compressed", [False, True])
def test_choices_are_the_traffic_of_each_method(compressed):
    config = sized("deepseek_v3", 4, 8)
    config = replace(config, parallel=replace(config.parallel, cp_compress_kv=compressed))
    found = choices(config, 8)
    assert [(each.method, each.cp_inner) for each in found] == [("two_level", 2), ("ring", 1)]
    for each in found:
        layout = replace(config.parallel, cp_method=each.method, cp_inner=each.cp_inner)
        sent = traffic(replace(config, parallel=layout)).num_bytes(config.precision.dtype)
        assert (each.inside, each.between) == sent


def test_advice_is_a_command_line():
    assert advice(sized("llama3_8b", 2, 16)) == "parallel.cp_method=two_level parallel.cp_inner=4"
    assert advice(sized("gpt2_xl", 1, 2)) == "parallel.cp_method=ring"


def test_the_document_tells_what_the_closed_form_says():
    """docs/long_context.md: GB per rank and layer at 131,072 tokens, tp 4, cp 8."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "long_context.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (`.*) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for model, methods, inside, around in rows:
        config = load_config(
            [f"model={model}", "parallel.tp=4", "parallel.cp=8", "train.seq_len=131072"]
        )
        for method in re.findall(r"`(\w+)`", methods):
            layout = replace(
                config.parallel,
                cp_method=method,
                cp_inner=2 if "cp_inner" in methods else 1,
                cp_compress_kv="latents" in methods,
            )
            sent = traffic(replace(config, parallel=layout)).num_bytes("bf16")
            assert [value / 1e9 for value in sent] == pytest.approx(
                [float(inside), float(around)], abs=5.1e-4
            )


@pytest.mark.parametrize(
    ("model", "method", "cp", "inner", "expected"),
    [
        ("llama3_8b", "ring", 8, 1, 8 * 2 * 8 / 32 * 8000),  # outer · bytes · g/a · FLOP a byte
        ("llama3_8b", "two_level", 64, 8, 8 * 2 * 8 / 32 * 8000),
        ("llama3_8b", "two_level", 32, 16, 2 * 2 * 16 / 32 * 8000),  # keys repeated for 16 ranks
        ("llama2_7b", "ring", 2, 1, 2 * 2 * 1 * 8000),  # as many key as query heads
        ("llama3_8b", "ulysses", 8, 1, 0),
    ],
)
def test_from_which_length_on_hops_are_hidden(model, method, cp, inner, expected):
    config = sized(model, 1, cp, 1 << 17)
    layout = replace(config.parallel, cp_method=method, cp_inner=inner)
    assert (
        hidden_from(replace(config, parallel=layout, precision=PrecisionConfig("bf16"))) == expected
    )

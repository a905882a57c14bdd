"""Traffic of context parallelism: closed forms against the ledger of real steps, and advice."""

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
from megatron5d.config.schema import PrecisionConfig
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
    """(elements sent forward, bytes sent forward and backward) by axis."""
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
    ("model", "layout"), [case for case in CASES if "mla" in case or "compressed" not in case[1]]
)
def test_ledger_counts_the_closed_form(model, layout):
    config = config_of(model, **LAYOUTS[layout])
    elements, layers = traffic(config), B * config.model.num_layers
    inner, outer = elements.num_bytes("fp64")
    for forward, num_bytes in run_ranks(sent_on_rank, 4, config):
        sent = forward["cp_inner"], forward["cp_outer"]
        assert sent == (elements.inner * layers, elements.outer * layers)
        assert num_bytes.get("cp_inner", 0) == inner * layers
        assert num_bytes.get("cp_outer", 0) == outer * layers


@cache
def preset(model: str):
    return load_config([f"model={model}"])


def with_layout(config, **layout):
    return replace(config, parallel=replace(config.parallel, **layout))


def sized(model: str, tp: int, cp: int, seq_len: int = 131072):
    config = with_layout(preset(model), tp=tp, cp=cp)
    return replace(config, train=replace(config.train, seq_len=seq_len))


def test_by_hand():
    """Llama 3 8B, tp 1, 128k over 16: a rank has 8,192 rows, whose keys and values are 2,048."""
    config = sized("llama3_8b", 1, 16)
    assert traffic(config).outer == 15 * 8192 * 2048
    assert traffic(config).num_bytes("bf16") == (0, 15 * 8192 * 2048 * (2 * 2 + 4))
    ulysses = traffic(with_layout(config, cp_method="ulysses"))
    # 8 heads repeated for 16 ranks
    assert ulysses.inner == 8192 * (32 + 16) * 256 * 15 // 16
    two_level = traffic(with_layout(config, cp_method="two_level", cp_inner=8))
    assert two_level.inner == 8192 * (32 + 8) * 256 * 7 // 8
    # one hop of 8 times the rows and one head of eight
    assert two_level.outer == 1 * 8 * 8192 * 256


@pytest.mark.parametrize(
    ("model", "tp", "cp", "expected"),
    [
        # inside a node: heads are less than seven hops of keys
        ("llama3_8b", 1, 8, ("ulysses", 1)),
        ("llama3_8b", 8, 8, ("ring", 1)),  # tp fills the node, one key head per rank
        # four ranks of a node exchange heads, four nodes form the ring
        ("llama3_8b", 2, 16, ("two_level", 4)),
        ("gpt2_xl", 1, 2, ("ring", 1)),  # 25 heads do not split
        ("gpt2_xl", 1, 5, ("ulysses", 1)),
    ],
)
def test_recommended(model, tp, cp, expected):
    assert recommended(sized(model, tp, cp)) == expected


@pytest.mark.parametrize("model", ["llama3_8b", "llama3_70b", "llama2_7b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [2, 4, 8, 16, 64])
def test_recommended_method_sends_least_between_nodes(model, tp, cp):
    """Brute force over all inner sizes that stay inside a node of eight."""
    config = sized(model, tp, cp, 1 << 20)
    heads, kv_heads = config.model.num_heads // tp, config.model.num_kv_heads // tp
    row_features = (1 << 20) // cp * 2 * config.model.head_dim
    between_nodes = {
        n: (cp // n - 1) * row_features * max(kv_heads, n)
        for n in (1, 2, 4, 8)
        if n * tp <= 8 and cp % n == heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    }
    method, inner = recommended(config)
    inner = {"ring": 1, "ulysses": cp, "two_level": inner}[method]
    assert cp * tp <= 8 or between_nodes[inner] == min(between_nodes.values())


@pytest.mark.parametrize("compressed", [False, True])
def test_choices_are_the_traffic_of_each_method(compressed):
    config = with_layout(sized("deepseek_v3", 4, 8), cp_compress_kv=compressed)
    options = choices(config, 8)
    methods = [(option.method, option.cp_inner) for option in options]
    assert methods == [("two_level", 2), ("ring", 1)]
    for option in options:
        sent = traffic(with_layout(config, cp_method=option.method, cp_inner=option.cp_inner))
        assert (option.inside, option.between) == sent.num_bytes(config.precision.dtype)


def test_advice_is_a_command_line():
    assert advice(sized("llama3_8b", 2, 16)) == "parallel.cp_method=two_level parallel.cp_inner=4"
    assert advice(sized("gpt2_xl", 1, 2)) == "parallel.cp_method=ring"


def test_documented_traffic():
    """docs/long_context.md: GB per rank and layer at 131,072 tokens, tp 4, cp 8."""
    text = (Path(__file__).resolve().parents[3] / "docs" / "long_context.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (`.*) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 8
    for model, methods, inside, between in rows:
        for method in re.findall(r"`(\w+)`", methods):
            config = with_layout(
                sized(model, 4, 8),
                cp_method=method,
                cp_inner=2 if "cp_inner" in methods else 1,
                cp_compress_kv="latents" in methods,
            )
            gigabytes = [count / 1e9 for count in traffic(config).num_bytes("bf16")]
            assert gigabytes == pytest.approx([float(inside), float(between)], abs=5.1e-4)


@pytest.mark.parametrize(
    ("model", "method", "cp", "inner", "expected"),
    [
        ("llama3_8b", "ring", 8, 1, 8 * 2 * 8 / 32 * 8000),  # outer · bytes · g/a · FLOPs per byte
        ("llama3_8b", "two_level", 64, 8, 8 * 2 * 8 / 32 * 8000),
        ("llama3_8b", "two_level", 32, 16, 2 * 2 * 16 / 32 * 8000),  # keys repeated for 16 ranks
        ("llama2_7b", "ring", 2, 1, 2 * 2 * 1 * 8000),  # as many key as query heads
        ("llama3_8b", "ulysses", 8, 1, 0),
    ],
)
def test_length_from_which_hops_are_hidden(model, method, cp, inner, expected):
    config = with_layout(sized(model, 1, cp), cp_method=method, cp_inner=inner)
    assert hidden_from(replace(config, precision=PrecisionConfig("bf16"))) == expected

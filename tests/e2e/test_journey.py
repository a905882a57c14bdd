"""The table "A tensor's journey" of docs/architecture.md against a run: shapes and collectives.

Rows read `| file | [in] → [out] | forward / backward |`. Letters are bound to the sizes of one
small run on 8 ranks (tp 2 with sp, cp 2, dp 2, ep 4; a dense block and a mixture); each row must be
seen in the calls that its file made. A MoEState counts as its residual.
"""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts import make_rows, micro_batch
from parity_configs import config_of
from ranks import run_ranks
from whole_stage import WholeStage

import megatron5d.model.attention as attention_module
import megatron5d.model.embedding_head as ends_module
from megatron5d.context_parallel.attention import ContextAttention
from megatron5d.data.batch import SequenceSharding
from megatron5d.expert_parallel.experts import Experts
from megatron5d.expert_parallel.router import Router
from megatron5d.model.attention import SelfAttention
from megatron5d.model.embedding_head import Head
from megatron5d.model.gpt import GPT
from megatron5d.model.mlp import MLP
from megatron5d.model.moe import MoECombine, MoEDispatch, MoEExperts
from megatron5d.model.norm import Norm
from megatron5d.tensor_parallel.embedding import VocabParallelEmbedding
from megatron5d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import sizes_of

GUIDE = Path(__file__).parents[2] / "docs" / "architecture.md"
DENSE = config_of("llama_gqa", tp=2, sp=True, cp=2, mbs=2, ep=4, etp=1)
MIXTURE = {"num_experts": 8, "top_k": 2, "moe_ffn_hidden_size": 16, "first_k_dense": 1}
CONFIG = replace(
    DENSE, model=replace(DENSE.model, **MIXTURE), moe=replace(DENSE.moe, force_balanced=True)
)
SYMBOLS = {
    "b": 2,
    "s": 16,
    "h": 32,
    "a": 4,
    "g": 2,
    "d": 8,
    "f": 48,
    "v": 256,
    "tp": 2,
    "cp": 2,
    "E": 8,
    "k": 2,
    "n": 8,
}
MODULES = {
    VocabParallelEmbedding: "tensor_parallel/embedding.py",
    Norm: "model/norm.py",
    ColumnParallelLinear: "tensor_parallel/linear.py",
    RowParallelLinear: "tensor_parallel/linear.py",
    SelfAttention: "model/attention.py",
    MLP: "model/mlp.py",
    MoEDispatch: "model/moe.py",
    Experts: "expert_parallel/experts.py",
    MoEExperts: "model/moe.py",
    MoECombine: "model/moe.py",
    Head: "model/embedding_head.py",
}


class Journal:
    """Records (file, shape in, shape out, collectives inside) and, as an axis's recorder, every
    collective."""

    def __init__(self):
        self.calls, self.ops = [], []

    def record(self, axis, op, num_elements, element_bytes):
        self.ops.append(f"{op} {axis}")

    def wait(self, axis, act):
        return act()

    def note(self, file, x, y, before):
        x = x[0] if isinstance(x, tuple) else x  # a MoEState: its residual
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else None
        self.calls.append((file, shape, tuple(y.shape), Counter(self.ops[before:])))

    def wrap(self, file, fn):
        def recorded(x, *args, **kwargs):
            before = len(self.ops)
            y = fn(x, *args, **kwargs)
            self.note(file, x, y[0] if isinstance(y, tuple) else y, before)
            return y

        return recorded

    def watch(self, model):
        for module in model.modules():
            file = MODULES.get(type(module))
            if file:
                module.forward = self.wrap(file, module.forward)
            if isinstance(module, Router):
                module.logits = self.wrap("expert_parallel/router.py", module.logits)


def travel(rank, world):
    journal = Journal()
    mesh = build_mesh(sizes_of(CONFIG, world), rank, num_kv_heads=2, recorder=journal)
    model = GPT(CONFIG, mesh)
    model.initialize(0)
    journal.watch(model)
    attention_module.apply_rope = journal.wrap("kernels/rope.py", attention_module.apply_rope)
    ends_module.vocab_parallel_cross_entropy = journal.wrap(
        "tensor_parallel/cross_entropy.py", ends_module.vocab_parallel_cross_entropy
    )
    ContextAttention.__call__, plain = (
        lambda self, q, *rest, **more: journal.wrap(
            "context_parallel/attention.py", lambda x: plain(self, x, *rest, **more)
        )(q),
        ContextAttention.__call__,
    )
    whole = micro_batch(CONFIG, make_rows(CONFIG, 1)[:2])
    local = journal.wrap("data/batch.py", lambda _: (SequenceSharding(CONFIG, mesh)(whole)).tokens)(
        whole.tokens
    )
    stage = WholeStage(model.phases)
    sums = stage.forward(0, None, SequenceSharding(CONFIG, mesh)(whole))
    forward = len(journal.ops)
    stage.backward(0, torch.ones_like(sums) / 32)
    assert local.shape == (2, 8)
    return journal.calls, Counter(journal.ops[forward:])


def rows_of_the_table():
    """(file, shape in, shape out, forward collectives, backward collectives, times a model calls
    it)."""
    section = GUIDE.read_text().split("A tensor's journey", 1)[1]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        shapes = re.findall(r"`\[([^\]]*)\]`", line)
        if line.startswith("| `") and len(shapes) == 2 and len(cells) >= 3:
            forward, _, backward = cells[2].partition(" / ")
            file = re.match(r"`([^`]*)`", cells[0]).group(1)
            found.append((file, *map(evaluated, shapes), named(forward), named(backward)))
    return found


def evaluated(shape):
    expressions = [part.replace("·", "*") for part in shape.split(",")]
    expressions = [re.sub(r"(\d)([a-z(])", r"\1*\2", each) for each in expressions]
    return tuple(int(eval(each, {"__builtins__": {}}, dict(SYMBOLS))) for each in expressions)  # noqa: S307


def named(text):
    """`all_gather tp, 2 reduce_scatter tp` -> a Counter; a dash or "none" is nothing."""
    counter = Counter()
    for times, op, axis in re.findall(r"(?:(\d)× )?([a-z_]+) (tp|cp_outer|ep_etp|ep)\b", text):
        counter[f"{op} {axis}"] += int(times or 1)
    return counter


@pytest.fixture(scope="module")
def journey():
    return run_ranks(travel, 8)


def test_every_row_of_the_table_really_happens(journey):
    calls, _ = journey[0]
    rows = rows_of_the_table()
    assert len(rows) >= 15, "the table is missing or unreadable"
    for file, shape_in, shape_out, forward, _ in rows:
        seen = [call for call in calls if call[0] == file]
        assert (file, shape_in, shape_out, forward) in seen, (
            f"{file}: the table says {shape_in} -> {shape_out} with {dict(forward)}, the run did "
            f"{seen}"
        )


def test_the_backward_column_adds_up(journey):
    """Each kind of row, as often as the model calls it, gives exactly the collectives of the real
    backward."""
    calls, backward = journey[0]
    expected = Counter()
    for file, shape_in, shape_out, forward, ops in rows_of_the_table():
        times = sum(call == (file, shape_in, shape_out, forward) for call in calls)
        for op, count in ops.items():
            expected[op] += count * times
    assert expected == backward


def test_all_ranks_make_the_same_journey(journey):
    assert all(calls == journey[0][0] for calls, _ in journey)

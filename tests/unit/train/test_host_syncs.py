"""A step makes the host wait for the device once, to agree on its figures; under ep once more for
every dispatch.

Without a GPU: every call that would wait on one is noted with the function that makes it. Plain
paths of `kernels/` are left out; a GPU takes others.
"""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron5d.config.schema import (
    Config,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
)
from megatron5d.data.batch import make_micro_batch
from megatron5d.topology.process import Process
from megatron5d.train.build import build_run
from megatron5d.train.pipeline_layout import pipeline_layout

ROOT = Path(__file__).parents[3]
LAYERS, MICROBATCHES = 2, 3
AGREE, SPLITS, NODES = (
    ("step.py", "sum_over_ranks"),
    ("dispatcher.py", "_counted_state"),
    ("hierarchical_dispatcher.py", "dispatch"),
)
READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.cpu,
    Tensor.numpy,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    torch.equal,
    torch.allclose,
}
SHAPED_BY_VALUES = {
    Tensor.nonzero,
    torch.nonzero,
    Tensor.masked_select,
    torch.masked_select,
    torch.unique,
    Tensor.unique,
    torch.repeat_interleave,
    Tensor.repeat_interleave,
}
# from the host's memory, and waited for
COPIES = {torch.tensor, torch.as_tensor, Tensor.new_tensor}


class Waits(TorchFunctionMode):
    """Notes the functions of this repository that would wait: (file, function) -> how often."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # what has been waited for once is there
        fetched = any(getattr(each, "fetched", False) for each in args)
        if would_wait(func, args, kwargs) and not fetched:
            frame = sys._getframe(1)
            while (
                not frame.f_code.co_filename.startswith(str(ROOT))
                or "/.venv/" in frame.f_code.co_filename
            ):
                frame = frame.f_back
            path = Path(frame.f_code.co_filename).resolve()
            if ROOT / "kernels" not in path.parents:
                self.found[path.name, frame.f_code.co_name] += 1
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (fetched or func is Tensor.cpu):
            result = result.view_as(result)  # on a CPU it would be what it was asked of
            result.fetched = True
        return result


def would_wait(func, args, kwargs) -> bool:
    """Whether a call waits for the device where its tensors lie on one."""
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            isinstance(i, list) or isinstance(i, Tensor) and i.dtype == torch.bool for i in index
        )
    if func is Tensor.to:  # to another device
        places = any(
            isinstance(each, (torch.device, str)) for each in (*args[1:], *kwargs.values())
        )
        return places and not kwargs.get("non_blocking")
    if func is torch.where:
        return len(args) == 1
    return func in READS | COPIES or func in SHAPED_BY_VALUES and "output_size" not in kwargs


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x[x > 0], True),
        (lambda x: x[[0, 1]], True),
        (lambda x: float(x[0]), True),
        (lambda x: 1 if x[0] > 0 else 0, True),
        (lambda x: x.new_tensor([1.0]), True),
        (lambda x: x.to("cpu"), True),
        (lambda x: x.repeat_interleave(x.long()), True),
        (lambda x: x.repeat_interleave(x.long(), output_size=4), False),
        (lambda x: x.to("cpu", non_blocking=True), False),
        (lambda x: x[x.long()], False),
        (lambda x: torch.where(x > 0, x, 0), False),
    ],
)
def test_what_would_wait_is_noted(call, waits):
    x = torch.ones(4)
    with Waits() as noted:
        call(x)
    assert (sum(noted.found.values()) > 0) == waits


MODEL = ModelConfig(
    num_layers=LAYERS,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=48,
    vocab_size=64,
)
EXPERTS = replace(MODEL, num_experts=4, top_k=2, moe_ffn_hidden_size=16)


def step(rank: int, world: int, model: ModelConfig, parts: dict) -> Counter[tuple[str, str]]:
    """What the second step of a tiny run waits for; the first one makes what is kept."""
    train = TrainConfig(gbs=MICROBATCHES * world, mbs=1, seq_len=16)
    config = Config(model=model, train=train, precision=PrecisionConfig(dtype="fp32"), **parts)
    run = build_run(
        config, Process(rank, world, rank, torch.device("cpu")), pipeline_layout(config, world)
    )
    batches = [make_micro_batch(row[None]) for row in torch.randint(64, (MICROBATCHES, 17))]
    run.trainer.step(batches, 1e-3)
    with Waits() as noted:
        run.trainer.step(batches, 1e-3)
    return noted.found


BALANCED = MoeConfig(balance=("aux", "bias"))


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        (MODEL, {"optim": OptimConfig(clip=1e-3)}),
        (MODEL, {"optim": OptimConfig(implementation="kernel", clip=1e-3)}),
        (EXPERTS, {"moe": BALANCED}),
        (EXPERTS, {"moe": replace(BALANCED, capacity_factor=1.0)}),
    ],
)
def test_a_step_waits_for_its_figures_alone(model, parts):
    found = step(0, 1, model, parts)
    assert found.pop(AGREE) == 1
    assert not found


@pytest.mark.parametrize(
    ("world", "parts", "waits"),
    [
        (2, {"parallel": ParallelConfig(ep=2)}, {SPLITS: 1}),
        (2, {"parallel": ParallelConfig(ep=2), "recompute": RecomputeConfig("full")}, {SPLITS: 2}),
        # to nodes, and inside them
        (4, {"parallel": ParallelConfig(ep=4, ep_inner=2)}, {SPLITS: 1, NODES: 1}),
    ],
)
def test_under_ep_the_host_learns_the_splits_once_for_every_send(world, parts, waits):
    for found in run_ranks(step, world, EXPERTS, {"moe": BALANCED, **parts}):
        assert found == {AGREE: 1} | {
            place: count * LAYERS * MICROBATCHES for place, count in waits.items()
        }

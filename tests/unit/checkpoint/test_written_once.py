"""Every element of a checkpoint is written by one rank, whichever ranks hold copies of it.

DCP would drop what two ranks write alike, after both have planned, copied and announced it: no file
would show it.
"""

import dataclasses
from math import prod

import torch
from parity_configs import config_of
from ranks import run_ranks

from megatron5d.checkpoint.layout import slices
from megatron5d.config.schema import MoeConfig
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import pipeline_layout
from megatron5d.train.state import run_tensors

EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16}
LAYOUTS = [
    {"tp": 2, "sp": True, "zero": 0},  # copies over tp (norms) and over dp (everything)
    {"tp": 2, "zero": 1},
    {"dp_replicate": 2, "zero": 3},
    # an expert on a half, routers and their biases on all
    {"ep": 2, "zero": 1, "tp": 2, "sp": True},
]


def rectangles(config, rank, world, **which):
    """(key, global shape, first index, extent) of what a rank writes, reads, or holds."""
    mesh, plan = build_mesh(sizes_of(config, world), rank), pipeline_layout(config, world)
    model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
    model.initialize(1)
    sync, optimizer, _ = build_trainer(config, mesh, model, plan)
    tensors = run_tensors(sync, optimizer, model.weights(), **which)
    return [
        (key, tuple(tensor.shape), offset, tuple(view.shape))
        for key, tensor in tensors.items()
        for offset, view in tensor.shards.items()
    ]


def test_every_element_is_written_by_one_rank():
    def on_rank(rank, world):
        ways = ({"writing": True}, {"writing": False, "shared": True}, {"writing": False})
        return [[rectangles(config, rank, world, **way) for way in ways] for config in configs]

    configs = []
    for layout in LAYOUTS:
        config = config_of("llama_gqa", **layout)
        if "ep" in layout:
            model = dataclasses.replace(config.model, **EXPERTS)
            config = dataclasses.replace(config, model=model, moe=MoeConfig(balance=["bias"]))
        configs.append(config)
    ranks = run_ranks(on_rank, 4)
    for number, layout in enumerate(LAYOUTS):
        written: dict[str, torch.Tensor] = {}
        for rank in ranks:
            for key, shape, offset, extent in rank[number][0]:
                times = written.setdefault(key, torch.zeros(shape, dtype=torch.int32))
                times[slices(offset, extent)] += 1
        kinds = {key.split(".")[1] for key in written if key.startswith("optim.")}
        assert kinds == {"exp_avg", "exp_avg_sq"}, (layout, kinds)
        assert any("router.bias" in key for key in written) == ("ep" in layout)
        for key, times in written.items():
            assert bool((times == 1).all()), (
                f"{layout}: {key} is written {times.unique().tolist()} times"
            )
        written_by, read_by, held_by = (
            [numel(rank[number][way]) for rank in ranks] for way in range(3)
        )
        assert sum(held_by) > sum(written_by) and sum(read_by) < 1.1 * sum(written_by), (
            layout,
            read_by,
        )
        if "dp_replicate" in layout:
            assert read_by == written_by and sum(held_by) == 2 * sum(read_by), (
                "replicas share the reading"
            )
            assert max(written_by) < 1.1 * min(written_by), "and the writing"


def numel(rectangles):
    return sum(prod(extent) for _, _, _, extent in rectangles)

"""Every element of a checkpoint is written by one rank, whichever ranks hold copies of it.

DCP would drop what two ranks write alike, after both have planned, copied and announced it: no file would show it.
"""

import dataclasses

import torch
from parity_configs import config_of
from ranks import run_ranks

from megatron5d.config.schema import MoeConfig
from megatron5d.model.gpt import GPT
from megatron5d.topology.mesh import build_mesh
from megatron5d.train.build import build_trainer, sizes_of
from megatron5d.train.pipeline_layout import plan_pipeline
from megatron5d.train.state import run_tensors

EXPERTS = {"num_experts": 4, "top_k": 2, "moe_ffn_hidden_size": 16}
LAYOUTS = [
    {"tp": 2, "sp": True, "zero": 0},  # copies over tp (norms) and over dp (everything)
    {"tp": 2, "zero": 1},
    {"dp_replicate": 2, "zero": 3},
    {"ep": 2, "zero": 1, "tp": 2, "sp": True},  # an expert on a half, routers and their biases on all
]


def rectangles(config, rank, world, writing):
    """(key, global shape, first index, extent) of what a rank writes, or holds."""
    mesh, plan = build_mesh(sizes_of(config, world), rank), plan_pipeline(config, world)
    model = GPT(config, mesh, "cpu", plan.stage_specs(0), plan.shared)
    model.initialize(1)
    sync, optimizer, _ = build_trainer(config, mesh, model, plan)
    tensors = run_tensors(sync, optimizer, model.weights(), writing=writing)
    return [
        (key, tuple(tensor.shape), offset, tuple(view.shape))
        for key, tensor in tensors.items()
        for offset, view in tensor.parts.items()
    ]


def test_every_element_is_written_by_one_rank():
    def on_rank(rank, world):
        return [[rectangles(config, rank, world, writing) for writing in (True, False)] for config in configs]

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
                times[tuple(slice(at, at + size) for at, size in zip(offset, extent))] += 1
        kinds = {key.split(".")[1] for key in written if key.startswith("optim.")}
        assert kinds == {"exp_avg", "exp_avg_sq"}, (layout, kinds)
        assert any("router.bias" in key for key in written) == ("ep" in layout)
        for key, times in written.items():
            assert bool((times == 1).all()), f"{layout}: {key} is written {times.unique().tolist()} times"
        assert sum(map(len, (rank[number][1] for rank in ranks))) > sum(map(len, (rank[number][0] for rank in ranks)))

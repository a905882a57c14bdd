"""The same small stages under torch's pipeline runtime and under ours: a reference for gradients
and host time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from megatron5d.comm.p2p import TensorMeta
from megatron5d.phases.phase import Phase
from megatron5d.phases.stage import Stage
from megatron5d.pipeline_parallel.executor import Executor, open_flows
from megatron5d.pipeline_parallel.program import Program
from megatron5d.tensor_parallel.linear import column_linear
from megatron5d.topology.axis import Axis

# torch's class -> (our name, stages per rank, whether the stages form a V)
SCHEDULES = {
    "ScheduleGPipe": ("gpipe", 1, False),
    "Schedule1F1B": ("1f1b", 1, False),
    "ScheduleInterleaved1F1B": ("interleaved", 2, False),
    "ScheduleLoopedBFS": ("bfs", 2, False),
    "ScheduleInterleavedZeroBubble": ("interleaved_zb", 2, False),
    "ScheduleZBVZeroBubble": ("zb_v", 2, True),
    "ScheduleDualPipeV": ("dualpipe_v", 2, True),
}
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_SENDS_TO_ITSELF = pytest.mark.skipif(
    _TORCH < (2, 12), reason="before 2.12 torch's V sends to its own rank, which gloo cannot"
)
NAMES = [
    pytest.param(name, marks=_SENDS_TO_ITSELF if is_v else ())
    for name, (_, _, is_v) in SCHEDULES.items()
]
HIDDEN = 4
DTYPE = torch.float64
FORM = TensorMeta((2, HIDDEN), DTYPE)
Grads = dict[int, list[Tensor]]
"""Stage -> gradient of each of its layers."""


def weight_of(layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(layer)
    return torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=DTYPE) / 2


def data(num_microbatches: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets `[2·m, h]`, two rows per micro-batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 2 * num_microbatches, HIDDEN, generator=generator, dtype=DTYPE).unbind()


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


class TorchStage(nn.Module):
    """`num_layers` layers of one stage, in plain torch."""

    def __init__(self, stage: int, num_layers: int) -> None:
        super().__init__()
        layers = range(stage * num_layers, (stage + 1) * num_layers)
        self.weights = nn.ParameterList(weight_of(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(nn.functional.linear(x, weight))
        return x

    def grads(self) -> list[Tensor]:
        return [weight.grad for weight in self.weights]


class Layer(Phase):
    """The same layer; its weight gradient is deferred if the schedule has W, else autograd's."""

    def __init__(self, layer: int, split: bool) -> None:
        super().__init__()
        self.weight, self._split = nn.Parameter(weight_of(layer)), split

    def forward(self, x, batch, defer):
        x = batch[0] if x is None else x
        if not self._split:
            return x + torch.tanh(nn.functional.linear(x, self.weight))
        return x + torch.tanh(column_linear(x, self.weight, Axis("tp"), False, defer))


class TorchPipeline:
    """One rank of torch's runtime.

    Args:
        name: class of torch.distributed.pipelining.
        axis: pp.
        num_microbatches: of a step.
        num_layers: of a stage.
    """

    def __init__(self, name: str, axis: Axis, num_microbatches: int, num_layers: int = 1) -> None:
        _, chunks, is_v = SCHEDULES[name]
        num_stages = chunks * axis.size
        local = (
            [axis.rank, 2 * axis.size - 1 - axis.rank]
            if is_v
            else range(axis.rank, num_stages, axis.size)
        )
        self.modules = {stage: TorchStage(stage, num_layers) for stage in local}
        device = torch.device("cpu")
        stages = [
            pipelining.PipelineStage(module, stage, num_stages, device, group=axis.group)
            for stage, module in self.modules.items()
        ]
        arguments = {"n_microbatches": num_microbatches, "loss_fn": loss, "scale_grads": False}
        self.schedule = getattr(pipelining, name)(stages if chunks > 1 else stages[0], **arguments)
        x, target = data(num_microbatches)
        self._inputs = (x,) if 0 in self.modules else ()
        self._targets = {"target": target} if num_stages - 1 in self.modules else {}

    def step(self) -> None:
        self.schedule.step(*self._inputs, **self._targets)

    def grads(self) -> Grads:
        return {stage: module.grads() for stage, module in self.modules.items()}


class OurPipeline:
    """One rank of our executor over the same layers."""

    def __init__(self, program: Program, axis: Axis, num_layers: int = 1) -> None:
        chunks = program.placement.stages_of(axis.rank)
        split = any(action.op == "W" for slot in program.ranks[axis.rank] for action in slot)
        self._phases = {
            stage: [Layer(stage * num_layers + i, split) for i in range(num_layers)]
            for stage in {stage for _, stage in chunks}
        }
        stages = {(direction, stage): Stage(self._phases[stage]) for direction, stage in chunks}
        self.executor = Executor(program, axis.rank, stages, open_flows(program.placement, axis))
        m = program.num_microbatches
        x, target = data(m)
        self._batches = list(zip(x.chunk(m), target.chunk(m)))
        self._forms = [FORM] * program.num_stages

    def step(self) -> None:
        self.executor.run(self._batches, lambda batch, y: 2 * (y - batch[1]), self._forms)

    def grads(self) -> Grads:
        return {
            stage: [phase.weight.grad for phase in phases] for stage, phases in self._phases.items()
        }


def unchecked_axis(rank: int, world: int) -> Axis:
    """The pp axis over all ranks, in a group without torch's checks, which would be measured
    too."""
    dist.set_debug_level(dist.DebugLevel.OFF)
    return Axis("pp", tuple(range(world)), rank, dist.new_group(list(range(world))))


def serial_grads(num_stages: int, num_microbatches: int, num_layers: int = 1) -> Grads:
    """The gradients of all stages, by plain autograd in one process."""
    modules = [TorchStage(stage, num_layers) for stage in range(num_stages)]
    x, target = data(num_microbatches)
    for module in modules:
        x = module(x)
    loss(x, target).backward()
    return {stage: module.grads() for stage, module in enumerate(modules)}

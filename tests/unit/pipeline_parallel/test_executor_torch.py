"""torch's runtime and ours give the same gradients on the same stages, and torch's schedules run in
our executor."""

import pytest
import torch
from ranks import run_ranks
from torch_pipelining import (
    NAMES,
    SCHEDULES,
    OurPipeline,
    TorchPipeline,
    serial_grads,
    unchecked_axis,
)

from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.schedule_csv import read_program, write_program
from megatron5d.pipeline_parallel.verify import verify

PP, M, LAYERS = 4, 8, 2


def csv_of(schedule, path):
    """The order that torch writes itself; GPipe and 1F1B keep it in a method."""
    if hasattr(schedule, "_dump_csv"):
        schedule._dump_csv(path)
        return path.read_text()
    order = schedule._get_pipeline_order()
    return "\n".join(
        ",".join("" if action is None else str(action) for action in order[rank]) for rank in order
    )


def assert_grads(grads, expected):
    for stage, layers in grads.items():
        for grad, reference in zip(layers, expected[stage], strict=True):
            assert (grad - reference).abs().max() < 1e-13 * reference.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_same_gradients_as_torch_on_the_same_stages(name, tmp_path):
    ours, chunks, _ = SCHEDULES[name]

    def on_rank(rank, world):
        axis = unchecked_axis(rank, world)
        torchs = TorchPipeline(name, axis, M, LAYERS)
        pipelines = [torchs, OurPipeline(build_program(ours, PP, M), axis, LAYERS)]
        torchs.step()
        torchs.schedule.__dict__.setdefault("pipeline_order", None)
        # torch's CSV, if complete: that of 1F1B lacks the last rank's first forward
        if chunks > 1 or name == "ScheduleGPipe":
            text = csv_of(torchs.schedule, tmp_path / f"{rank}.csv")
            program = read_program(text, f"{name}.csv", PP, M)
            verify(program)
            pipelines.append(OurPipeline(program, axis, LAYERS))
        for pipeline in pipelines[1:]:
            pipeline.step()
        return [pipeline.grads() for pipeline in pipelines]

    expected = serial_grads(chunks * PP, M, LAYERS)
    for grads_of_pipelines in run_ranks(on_rank, PP):
        for grads in grads_of_pipelines:
            assert_grads(grads, expected)


@pytest.mark.parametrize("schedule", schedule_names())
def test_a_program_written_and_read_runs_the_same(schedule):
    """Through the CSV and back, also for two directions, which torch does not have."""
    program = read_program(write_program(build_program(schedule, PP, M)), "read.csv")

    def on_rank(rank, world):
        pipeline = OurPipeline(program, unchecked_axis(rank, world), LAYERS)
        pipeline.step()
        return pipeline.grads()

    expected = serial_grads(program.num_stages, M, LAYERS)
    summed = {stage: [torch.zeros_like(grad) for grad in expected[stage]] for stage in expected}
    for grads in run_ranks(on_rank, PP):
        for stage, layers in grads.items():
            for total, grad in zip(summed[stage], layers, strict=True):
                total += 0 if grad is None else grad
    assert_grads(summed, expected)

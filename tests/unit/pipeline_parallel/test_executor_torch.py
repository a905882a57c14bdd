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
    """torch's order as it writes it itself; GPipe and 1F1B keep it in a method."""
    if hasattr(schedule, "_dump_csv"):
        schedule._dump_csv(path)
        return path.read_text()
    order = schedule._get_pipeline_order()
    return "\n".join(
        ",".join("" if action is None else str(action) for action in order[rank]) for rank in order
    )


def worst(grads, truth):
    return max(
        (mine - theirs).abs().max().item() / theirs.abs().max().item()
        for stage, layers in grads.items()
        for mine, theirs in zip(layers, truth[stage], strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_same_gradients_as_torch_on_the_same_stages(name, tmp_path):
    ours, chunks, _ = SCHEDULES[name]

    def on_rank(rank, world):
        axis = unchecked_axis(rank, world)
        theirs = TorchPipeline(name, axis, M, LAYERS)
        theirs.step()
        named = OurPipeline(build_program(ours, PP, M), axis, LAYERS)
        named.step()
        # its CSV, if it is whole: torch's picture of 1F1B lacks the last rank's first forward
        path = tmp_path / f"{rank}.csv"
        theirs.schedule.__dict__.setdefault("pipeline_order", None)
        text = csv_of(theirs.schedule, path) if chunks > 1 or name == "ScheduleGPipe" else None
        grads = [theirs.grads(), named.grads()]
        if text is not None:
            program = read_program(text, f"{name}.csv", PP, M)
            verify(program)
            from_csv = OurPipeline(program, axis, LAYERS)
            from_csv.step()
            grads.append(from_csv.grads())
        return grads

    truth = serial_grads(chunks * PP, M, LAYERS)
    for found in run_ranks(on_rank, PP):
        for grads in found:
            assert worst(grads, truth) < 1e-13


@pytest.mark.parametrize("schedule", schedule_names())
def test_a_program_written_and_read_runs_the_same(schedule):
    """Through the CSV and back, also for two directions, which torch does not have."""
    program = build_program(schedule, PP, M)
    again = read_program(write_program(program), "again.csv")

    def on_rank(rank, world):
        pipeline = OurPipeline(again, unchecked_axis(rank, world), LAYERS)
        pipeline.step()
        return pipeline.grads()

    truth = serial_grads(program.num_stages, M, LAYERS)
    summed = {}
    for grads in run_ranks(on_rank, PP):
        for stage, layers in grads.items():
            for i, grad in enumerate(layers):
                summed[stage, i] = summed.get((stage, i), 0) + (0 if grad is None else grad)
    for stage, layers in truth.items():
        for i, grad in enumerate(layers):
            torch.testing.assert_close(summed[stage, i], grad, rtol=1e-12, atol=1e-13)

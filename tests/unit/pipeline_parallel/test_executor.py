"""The executor: its errors, and what it keeps and for how long."""

import os
import signal
import weakref

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure, run_ranks
from timed_stages import FORMS, last_gradient, run_timed, timed_executor
from torch_pipelining import OurPipeline, unchecked_axis

from megatron5d.comm.failures import P2PError
from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.executor import Executor, PipelineError, forward_only
from megatron5d.pipeline_parallel.messages import Flow, completed_sends, input_of, output_of
from megatron5d.pipeline_parallel.program import Action, loop_placement, make_program
from megatron5d.pipeline_parallel.registry import build_program, schedule_names
from megatron5d.pipeline_parallel.verify import verify
from megatron5d.topology.axis import Axis

PP, M = 4, 8


def axis_of(rank, world):
    return Axis("pp", tuple(range(world)), rank, dist.group.WORLD)


@pytest.mark.parametrize("schedule", schedule_names())
def test_every_value_reaches_its_stage_and_peaks_are_the_simulators(schedule):
    """Timed stages check where each value comes from and count their activations."""
    program = build_program(schedule, PP, M)

    def on_rank(rank, world):
        executor, record = timed_executor(program, axis_of(rank, world), Costs(), 0.001)
        for _ in range(2):
            timeline = run_timed(executor, record)
        return record.peak, record.activations, sorted(timing.action for timing in timeline)

    peaks, activations, actions = zip(*run_ranks(on_rank, PP))
    assert peaks == pytest.approx(verify(program).peak_activations)
    assert activations == pytest.approx([0] * PP, abs=1e-9)
    assert list(actions) == [sorted(sum(line, ())) for line in program.ranks]


def test_forwards_alone_run_through_the_same_stages():
    program = forward_only(build_program("dualpipe", PP, M))
    assert {action.op for line in program.ranks for slot in line for action in slot} == {"F"}

    def on_rank(rank, world):
        outputs = []

        def note(batch, y):
            outputs.append((batch, y[:2].tolist()))

        axis = axis_of(rank, world)
        executor, record = timed_executor(program, axis, Costs(), 0.001, training=False)
        executor.run(range(M), note, FORMS)
        assert record.activations == 0
        return outputs

    outputs = sum(run_ranks(on_rank, PP), [])
    assert sorted(outputs) == [(batch, [PP - 1, batch]) for batch in range(M)]


@pytest.mark.parametrize(("schedule", "limit"), [("1f1b", 3), ("interleaved", 5), ("bfs", 8 * M)])
def test_forwards_alone_hold_few_outputs_however_many_micro_batches_there_are(schedule, limit):
    """No backward proves that they have arrived, so ranks wait for sends; but not where all would
    wait."""
    program = forward_only(build_program(schedule, 3, 4 * M))

    def on_rank(rank, world):
        outputs, num_alive = [], []

        def count(task, y, *rest):
            outputs.append(weakref.ref(y))
            pass_on(task, y, *rest)
            num_alive.append(sum(output() is not None for output in outputs))

        executor, _ = timed_executor(program, axis_of(rank, world), Costs(), 0.0005, training=False)
        pass_on, executor._pass_on = executor._pass_on, count
        executor.run(range(4 * M), lambda *_: None, FORMS)
        return max(num_alive)

    assert max(run_ranks(on_rank, 3)) <= limit


def replace_stages(executor, make, first=0):
    for tasks in executor._slots[first:]:
        for task in tasks:
            task.stage = make(task.stage)


class Broken:
    """A stage whose backward of one micro-batch fails."""

    def __init__(self, stage):
        self.stage = stage

    def __getattr__(self, name):
        return getattr(self.stage, name)

    def begin(self, op, microbatch, x, batch, split):
        if op in "BI" and microbatch == 3:
            raise ValueError("the gradient of a broken stage")
        return self.stage.begin(op, microbatch, x, batch, split)


def test_an_error_names_rank_action_stage_and_micro_batch():
    program = build_program("zb_h1", PP, M)

    def on_rank(rank, world):
        executor, record = timed_executor(program, axis_of(rank, world), Costs(), 0.001)
        if rank == 2:
            replace_stages(executor, Broken)
        run_timed(executor, record)

    error = "ValueError: the gradient of a broken stage"
    with pytest.raises(RankFailure, match=r"^rank 2:") as failure:
        run_ranks(on_rank, PP)
    message = f"pipeline rank 2, action 2I3 (stage 2, micro-batch 3): {error}"
    assert message in str(failure.value)


class Deadly:
    """A stage that kills its process."""

    def __init__(self, stage):
        pass

    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_the_other_ranks_name_a_rank_that_dies(schedule, tmp_path, over_gloo):
    """Each survivor loses a neighbor and leaves as soon as it has reported: all name the dead
    rank."""
    program = build_program(schedule, PP, M)

    def on_rank(rank, world):
        executor, record = timed_executor(program, unchecked_axis(rank, world), Costs(), 0.005)
        run_timed(executor, record)
        if rank == 2:
            replace_stages(executor, Deadly, first=9)
        try:
            run_timed(executor, record)
        except PipelineError as error:
            assert isinstance(error.__cause__, P2PError)
            (tmp_path / f"{rank}").write_text(str(error))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="killed by SIGKILL"):
        run_ranks(on_rank, PP)
    reports = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert reports, "no rank noticed"
    for rank, text in reports.items():
        assert "rank 2 is gone" in text, f"rank {rank} reported: {text}"


@pytest.mark.parametrize(
    "ops, error", [("0F0 0B0 0F1", "values were never used"), ("0F0 0I0", "without a backward")]
)
def test_a_step_that_leaves_something_behind_is_rejected(ops, error):
    """A Program without its last backward: the executor itself notices."""
    slots = [(Action(text[1], 0, int(text[2])),) for text in ops.split()]
    m = ops.count("F")
    program = make_program("unfinished", loop_placement(1), [0] * m, [slots])
    executor, _ = timed_executor(program, Axis("pp"), Costs(), 0.0)
    with pytest.raises(AssertionError, match=error):
        executor.run(range(m), last_gradient, FORMS)


def places_of(program, message_of):
    """Rank and position of the slot with each message."""
    return {
        message: (rank, position)
        for rank, line in enumerate(program.ranks)
        for position, slot in enumerate(line)
        for action in slot
        if (message := message_of(program, action))
    }


@pytest.mark.parametrize("schedule", schedule_names())
def test_completed_sends_hold_in_every_possible_order(schedule):
    """By brute force: a proven send's consumer must have run before the message that proves it."""
    program = build_program(schedule, PP, M)
    senders, consumers = places_of(program, output_of), places_of(program, input_of)
    before = happened_before(program, senders)
    num_proven = 0
    for rank in range(PP):
        sent = {}
        for slot in program.ranks[rank]:
            for message in filter(None, (output_of(program, action) for action in slot)):
                sent.setdefault(message.flow, []).append(message)
        for action, proofs in completed_sends(program, rank).items():
            source, position = senders[input_of(program, action)]
            for flow, count in proofs:
                assert isinstance(flow, Flow) and flow.source == rank
                for message in sent[flow][:count]:
                    consumer, consumed = consumers[message]
                    assert before[source][position].get(consumer, -1) >= consumed
                num_proven += count
    assert num_proven > 0


def happened_before(program, senders):
    """`[rank][position]` -> rank -> the last position that has run entirely when this slot begins
    to send."""
    clocks = [[None] * len(line) for line in program.ranks]

    def clock(rank, position):
        if clocks[rank][position] is None:
            merged = {**clock(rank, position - 1), rank: position - 1} if position else {}
            for action in program.ranks[rank][position]:
                if message := input_of(program, action):
                    for other, last in clock(*senders[message]).items():
                        merged[other] = max(merged.get(other, -1), last)
            clocks[rank][position] = merged
        return clocks[rank][position]

    for rank, line in enumerate(program.ranks):
        for position in range(len(line)):
            clock(rank, position)
    return clocks


def test_sent_tensors_are_freed_during_the_step():
    """1F1B with many micro-batches: the pipeline's depth bounds the tensors in flight."""

    def on_rank(rank, world):
        pipeline = OurPipeline(build_program("1f1b", 2, 24), unchecked_axis(rank, world))
        sent, peak = [], 0
        for channel in pipeline.executor._channels.values():
            if hasattr(channel, "send"):

                def send(x, original=channel.send):
                    nonlocal peak
                    original(x)
                    sent.append(weakref.ref(x))
                    peak = max(peak, sum(tensor() is not None for tensor in sent))

                channel.send = send
        pipeline.step()
        return peak, sum(tensor() is not None for tensor in sent)

    for peak, num_alive in run_ranks(on_rank, 2):
        assert peak <= 4 and num_alive == 0


def test_an_executor_rejects_the_wrong_end_of_a_channel():
    with pytest.raises(AssertionError, match="needs a SendChannel"):
        Executor(build_program("1f1b", 2, 2), 0, {(0, 0): None}, {Flow(0, 1, "F", 0): None})


def test_two_overlapped_actions_interleave():
    pair = (Action("F", 0, 1), Action("B", 0, 0))
    slots = [(Action("F", 0, 0),), pair, (Action("B", 0, 1),)]
    program = make_program("pair", loop_placement(1), [0, 0], [slots])
    log = []

    class LoggedStage:
        num_in_flight, phases = 0, "abc"

        def prefetch(self, op):
            pass

        def begin(self, op, microbatch, x, batch, split):
            return LoggedPass(op, microbatch)

    class LoggedPass:
        def __init__(self, op, microbatch):
            self.steps = [f"{op}{microbatch}{phase}" for phase in ("abc" if op == "F" else "cba")]
            self.state = torch.zeros(1) if op == "F" else None

        def advance(self):
            log.append(self.steps.pop(0))
            return bool(self.steps)

    Executor(program, 0, {(0, 0): LoggedStage()}, {}).run([0, 1], lambda batch, y: y, FORMS)
    assert log[3:9] == ["F1a", "B0c", "F1b", "B0b", "F1c", "B0a"]

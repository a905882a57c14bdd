"""The executor on its own: what it says when something breaks, what it keeps, and for how long."""

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
    """Timed stages check where each value comes from and count what they hold."""
    program = build_program(schedule, PP, M)

    def on_rank(rank, world):
        executor, held = timed_executor(program, axis_of(rank, world), Costs(), 0.001)
        for _ in range(2):
            timeline = run_timed(executor, held)
        return held.peak, [timing.action for timing in timeline], held.now

    found = run_ranks(on_rank, PP)
    assert [peak for peak, _, _ in found] == pytest.approx(
        verify(program).peak_activations.tolist()
    )
    assert [now for _, _, now in found] == pytest.approx([0] * PP, abs=1e-9)
    for rank, (_, actions, _) in enumerate(found):
        assert sorted(actions) == sorted(action for slot in program.ranks[rank] for action in slot)


def test_forwards_alone_run_through_the_same_stages():
    program = forward_only(build_program("dualpipe", PP, M))
    assert {action.op for line in program.ranks for slot in line for action in slot} == {"F"}

    def on_rank(rank, world):
        outputs = []

        def note(batch, y):
            outputs.append((batch, y[:2].tolist()))

        executor, held = timed_executor(
            program, axis_of(rank, world), Costs(), 0.001, training=False
        )
        executor.run(range(M), note, FORMS)
        return outputs, held.now

    found = run_ranks(on_rank, PP)
    assert sorted(batch for outputs, _ in found for batch, _ in outputs) == list(range(M))
    assert all(y == [PP - 1, batch] for outputs, _ in found for batch, y in outputs)
    assert all(now == 0 for _, now in found)


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 3), ("interleaved", 5), ("bfs", 8 * M)])
def test_forwards_alone_hold_few_outputs_however_many_micro_batches_there_are(schedule, most):
    """No backward tells that they have arrived: ranks wait, two messages behind; but not where all
    would wait."""
    program = forward_only(build_program(schedule, 3, 4 * M))

    def on_rank(rank, world):
        outputs, alive = [], []

        def count(task, y, *rest):
            outputs.append(weakref.ref(y))
            pass_on(task, y, *rest)
            alive.append(sum(each() is not None for each in outputs))

        executor, _ = timed_executor(program, axis_of(rank, world), Costs(), 0.0005, training=False)
        pass_on, executor._pass_on = executor._pass_on, count
        executor.run(range(4 * M), lambda *_: None, FORMS)
        return max(alive)

    assert max(run_ranks(on_rank, 3)) <= most


class Breaks:
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
    def on_rank(rank, world):
        executor, held = timed_executor(
            build_program("zb_h1", PP, M), axis_of(rank, world), Costs(), 0.001
        )
        if rank == 2:
            for passes in executor._slots:
                for each in passes:
                    each.stage = Breaks(each.stage)
        run_timed(executor, held)

    with pytest.raises(RankFailure) as failure:
        run_ranks(on_rank, PP)
    text = str(failure.value)
    assert text.startswith("rank 2:")
    assert (
        "pipeline rank 2, action 2I3 (stage 2, micro-batch 3): ValueError: the gradient of a broken stage"
        in text
    )


class Deadly:
    """A stage that takes its process with it."""

    def __getattr__(self, name):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe"])
def test_a_rank_that_dies_is_named_by_the_others(schedule, tmp_path, over_gloo):
    """Each survivor loses a neighbour, and leaves as soon as it has said so: the dead one is named
    all the same."""

    def on_rank(rank, world):
        executor, held = timed_executor(
            build_program(schedule, PP, M), unchecked_axis(rank, world), Costs(), 0.005
        )
        run_timed(executor, held)
        if rank == 2:
            for passes in executor._slots[9:]:
                for each in passes:
                    each.stage = Deadly()
        try:
            run_timed(executor, held)
        except PipelineError as error:
            assert isinstance(error.__cause__, P2PError)
            (tmp_path / f"{rank}").write_text(str(error))
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailure, match="killed by SIGKILL"):
        run_ranks(on_rank, PP)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said, "nobody noticed"
    for rank, text in said.items():
        assert "rank 2 is gone" in text, f"rank {rank} said: {text}"


def test_a_step_that_leaves_something_behind_is_refused():
    """A Program without its last backward: the executor itself notices."""
    lines = [[(Action("F", 0, 0),), (Action("B", 0, 0),), (Action("F", 0, 1),)]]
    program = make_program("unfinished", loop_placement(1), [0, 0], lines)
    executor, held = timed_executor(program, Axis("pp"), Costs(), 0.0)
    with pytest.raises(AssertionError, match="values were never used"):
        executor.run(range(2), last_gradient, FORMS)
    lines = [[(Action("F", 0, 0),), (Action("I", 0, 0),)]]
    program = make_program("unfinished", loop_placement(1), [0], lines)
    executor, held = timed_executor(program, Axis("pp"), Costs(), 0.0)
    with pytest.raises(AssertionError, match="without a backward"):
        executor.run(range(1), last_gradient, FORMS)


@pytest.mark.parametrize("schedule", schedule_names())
def test_send_completions_hold_in_every_possible_order(schedule):
    """By brute force: what a send completion proves must have happened before its message
    arrived."""
    program = build_program(schedule, PP, M)
    before = happened_before(program)
    told = 0
    for rank in range(PP):
        sent = {}
        for slot in program.ranks[rank]:
            for action in slot:
                message = output_of(program, action)
                if message is not None:
                    sent.setdefault(message.flow, []).append(message)
        consumers = {
            input_of(program, action): (there, position)
            for there, line in enumerate(program.ranks)
            for position, slot in enumerate(line)
            for action in slot
        }
        for action, proofs in completed_sends(program, rank).items():
            source, position = sender_of(program, input_of(program, action))
            known = before[source][position]
            for flow, count in proofs:
                assert isinstance(flow, Flow) and flow.source == rank
                for message in sent[flow][:count]:
                    there, at = consumers[message]
                    assert known.get(there, -1) >= at
                told += count
    assert told > 0


def sender_of(program, message):
    return next(
        (rank, position)
        for rank, line in enumerate(program.ranks)
        for position, slot in enumerate(line)
        if any(output_of(program, action) == message for action in slot)
    )


def happened_before(program):
    """`[rank][position]` -> for every rank, the last position that has run entirely when this one
    begins to send."""
    clocks = [[None] * len(line) for line in program.ranks]
    senders = {
        output_of(program, action): (rank, position)
        for rank, line in enumerate(program.ranks)
        for position, slot in enumerate(line)
        for action in slot
    }

    def clock(rank, position):
        if clocks[rank][position] is None:
            merged = dict(clock(rank, position - 1)) if position else {}
            if position:
                merged[rank] = position - 1
            for action in program.ranks[rank][position]:
                message = input_of(program, action)
                if message is not None:
                    for other, at in clock(*senders[message]).items():
                        merged[other] = max(merged.get(other, -1), at)
            clocks[rank][position] = merged
        return clocks[rank][position]

    for rank, line in enumerate(program.ranks):
        for position in range(len(line)):
            clock(rank, position)
    return clocks


def test_sent_tensors_are_freed_during_the_step():
    """1F1B with many micro-batches: tensors in flight are bounded by the pipeline's depth, not by
    the step."""

    def on_rank(rank, world):
        pipeline = OurPipeline(build_program("1f1b", 2, 24), unchecked_axis(rank, world))
        alive, most = [], 0
        senders = [end for end in pipeline.executor._channels.values() if hasattr(end, "send")]
        for sender in senders:

            def send(x, whole=sender.send):
                nonlocal most
                whole(x)
                alive.append(weakref.ref(x))
                most = max(most, sum(each() is not None for each in alive))

            sender.send = send
        pipeline.step()
        return most, sum(each() is not None for each in alive)

    for most, left in run_ranks(on_rank, 2):
        assert most <= 4
        assert left == 0


def test_an_executor_refuses_a_channel_of_the_wrong_end():
    program = build_program("1f1b", 2, 2)
    flow = Flow(0, 1, "F", 0)
    with pytest.raises(AssertionError, match="needs a SendChannel"):
        Executor(program, 0, {(0, 0): None}, {flow: None})


def test_two_overlapped_actions_take_turns():
    program = make_program(
        "pair",
        loop_placement(1),
        [0, 0],
        [[(Action("F", 0, 0),), (Action("F", 0, 1), Action("B", 0, 0)), (Action("B", 0, 1),)]],
    )
    log = []

    class Logged:
        num_in_flight, phases = 0, "abc"

        def prefetch(self, op):
            pass

        def begin(self, op, microbatch, x, batch, split):
            return Logs(op, microbatch)

    class Logs:
        def __init__(self, op, microbatch):
            self.left = [f"{op}{microbatch}{phase}" for phase in ("abc" if op == "F" else "cba")]
            self.state = torch.zeros(1) if op == "F" else None

        def advance(self):
            log.append(self.left.pop(0))
            return bool(self.left)

    Executor(program, 0, {(0, 0): Logged()}, {}).run([0, 1], lambda batch, y: y, FORMS)
    assert log[3:9] == ["F1a", "B0c", "F1b", "B0b", "F1c", "B0a"]

"""Schedules with controllable memory: a V of two chunks whose repeated building block fixes how long activations live.

Every micro-batch repeats one block of six passes (two chunks × F, I, W) in a period of six units. How many units a pass
moves from one rank to the next (its *offset*) decides how long a rank holds the activation, and so its memory. A list
scheduler then runs the passes: each rank takes, of the passes that are ready and fit its memory, the one that the
blocks would run first, and a weight gradient where none is ready.

Source: Qi et al. 2024, Pipeline Parallelism with Controllable Memory (2405.15362), §3 and §4.
"""

import heapq
from collections import deque
from typing import NamedTuple

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import OPS, Action, Program, Slot, make_program, zigzag_placement
from megatron5d.pipeline_parallel.registry import schedule
from megatron5d.pipeline_parallel.simulate import simulate

PERIOD = 6
TICKS = 1_000_000
"""Ticks of one unit of time: integers, so that what is ready at the same time compares equal."""
PASSES = (("F", 0), ("F", 1), ("I", 0), ("I", 1))


class Block(NamedTuple):
    """A building block, and how strictly the list scheduler keeps to its order."""

    offsets: tuple[
        int, int, int, int
    ]  # units from rank to rank: F of chunk 0, F of chunk 1, I of chunk 1, I of chunk 0
    pauses: tuple[int, int, int]  # units between these four, where the V turns
    ahead: int  # a pass may overtake another that the blocks put at most this many units earlier


class Memory(NamedTuple):
    """How many activations a rank may hold, in chunks (half a rank's layers)."""

    total: int
    first_chunk: list[int]


@schedule("v_half", chunks=2, uses_costs=True)
def v_half(num_ranks: int, num_microbatches: int, chunks: int, costs: Costs) -> Program:
    """Return V-Half: half of 1F1B's memory, and no more than half of its bubble where F = I = W.

    Bubble (p − 1)(F + B)/2 at most, B = I + W; activations p/2 + 1.
    Source: Qi et al. 2024 (2405.15362), §3.2, Table 1. The paper orders warm-up and cool-down by a search as well; ours
    keeps the best of three blocks under the given costs.
    """
    offsets = (1, 2, 1, 2)
    blocks = [Block(offsets, (0, 2, 0), 2), Block(offsets, (3, 1, 1), 1), Block(offsets, (3, 4, 1), 2)]
    first_chunk = [num_ranks - rank // 2 + 2 for rank in range(num_ranks)]
    return _best("v_half", num_ranks, num_microbatches, blocks, Memory(num_ranks + 2, first_chunk), costs)


@schedule("v_min", chunks=2, uses_costs=True)
def v_min(num_ranks: int, num_microbatches: int, chunks: int, costs: Costs) -> Program:
    """Return V-Min: a third of 1F1B's memory, and two thirds of its bubble where F = I = W.

    Bubble 2(p − 1)(F + B)/3 at most, B = I + W; activations p/3 + 1, rounded up to half ones. Nothing slack is left in
    its period: where F, I and W differ, or a message takes time, every micro-batch waits.
    Source: Qi et al. 2024 (2405.15362), §3.2, Table 1.
    """
    blocks = [Block((1, 1, 1, 1), (0, 2, 0), 3), Block((1, 1, 1, 1), (2, 0, 2), 3)]
    first_chunk = [-(-(2 * num_ranks - rank) // 3) + 1 for rank in range(num_ranks)]
    return _best("v_min", num_ranks, num_microbatches, blocks, Memory(-(-2 * num_ranks // 3) + 2, first_chunk), costs)


def _best(
    name: str, num_ranks: int, num_microbatches: int, blocks: list[Block], memory: Memory, costs: Costs
) -> Program:
    """Return the Program of the block that is fastest at no more than two rounds of micro-batches."""
    tried = min(num_microbatches, 2 * num_ranks)
    pilots = [(_list_schedule(name, num_ranks, tried, block, memory, costs), block) for block in blocks]
    _, block = min(((simulate(pilot, costs).makespan, block) for pilot, block in pilots), key=lambda found: found[0])
    return _list_schedule(name, num_ranks, num_microbatches, block, memory, costs)


def _block_times(num_ranks: int, block: Block) -> list[list[int]]:
    """Return `[rank][pass]` when the first micro-batch's passes run, in units and in the order of PASSES."""
    last = num_ranks - 1
    down, up, back, home = block.offsets
    turn = down * last + 1 + block.pauses[0]
    end = turn + up * last + 1 + block.pauses[1]
    return_turn = end + back * last + 1 + block.pauses[2]
    return [
        [down * rank, turn + up * (last - rank), return_turn + home * (last - rank), end + back * rank]
        for rank in range(num_ranks)
    ]


class _Rank:
    """One rank while it is being scheduled."""

    def __init__(self, stages: tuple[int, int], times: list[int], num_microbatches: int) -> None:
        self.stages = stages
        self.times = times
        self.num_microbatches = num_microbatches
        self.done = [0] * len(PASSES)
        self.held = [0, 0]
        self.free = 0
        self.deferred: deque[Action] = deque()
        self.slots: list[Slot] = []

    def choose(self, ahead: int, caps: tuple[int, int], arrival: dict[Action, int], now: int) -> Action | None:
        """Return what to run now, and count it: the first pass by the blocks' order that is ready and fits, else a W.

        Args:
            ahead: How many units a pass may overtake another by.
            caps: Chunks of activations that this rank may hold, in all and of its chunk 0.
            arrival: When each pass's input is there.
            now: The time.
        """
        left = [k for k, done in enumerate(self.done) if done < self.num_microbatches]
        order = sorted((self.times[k] + PERIOD * self.done[k], k) for k in left)
        for due, k in order:
            if due > order[0][0] + ahead:
                break
            op, chunk = PASSES[k]
            action = Action(op, self.stages[chunk], self.done[k])
            full = op == "F" and (sum(self.held) >= caps[0] or (chunk == 0 and self.held[0] >= caps[1]))
            if full or arrival.get(action, now + 1) > now:
                continue
            self.done[k] += 1
            if op == "F":
                self.held[chunk] += 1
            else:
                self.deferred.append(action._replace(op="W"))
            return action
        if not self.deferred:
            return None
        weight = self.deferred.popleft()
        self.held[self.stages.index(weight.stage)] -= 1
        return weight


def _list_schedule(
    name: str, num_ranks: int, num_microbatches: int, block: Block, memory: Memory, costs: Costs
) -> Program:
    """Return the Program in which every rank, when free, takes the first ready pass in the order of the blocks."""
    placement = zigzag_placement(num_ranks)
    stage_costs = costs.of(placement)
    ticks = dict(zip(OPS, (stage_costs.plain() * TICKS).round().astype(int).tolist()))
    latency = round(stage_costs.comm * TICKS)
    ranks = [
        _Rank((rank, 2 * num_ranks - 1 - rank), times, num_microbatches)
        for rank, times in enumerate(_block_times(num_ranks, block))
    ]
    arrival = {Action("F", 0, i): 0 for i in range(num_microbatches)}
    events = [(0, rank) for rank in range(num_ranks)]
    while events:
        now, rank = heapq.heappop(events)
        one = ranks[rank]
        caps = memory.total, memory.first_chunk[rank]
        action = one.choose(block.ahead, caps, arrival, now) if one.free <= now else None
        if action is None:
            continue
        one.slots.append((action,))
        one.free = now + ticks[action.op][action.stage]
        heapq.heappush(events, (one.free, rank))
        following = _next_pass(action, placement.num_stages)
        if following:
            receiver = placement.route[0][following.stage]
            arrival[following] = one.free + (latency if receiver != rank else 0)
            heapq.heappush(events, (arrival[following], receiver))
    return make_program(name, placement, [0] * num_microbatches, [one.slots for one in ranks])


def _next_pass(action: Action, num_stages: int) -> Action | None:
    """Return the pass that the output of `action` goes to."""
    if action.op == "F" and action.stage == num_stages - 1:
        return action._replace(op="I")
    if action.op == "W" or (action.op == "I" and action.stage == 0):
        return None
    return action._replace(stage=action.stage + (1 if action.op == "F" else -1))

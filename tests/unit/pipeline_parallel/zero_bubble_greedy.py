"""The zero-bubble paper's algorithm that makes a Program for given times and memory: its ZB-1p and
ZB-2p.

All ranks advance by rounds: in each a rank runs one forward at most and one input gradient. Weight
gradients fill the time in which it would wait, and free memory when it is short. The algorithm
shortens the longest time between a rank's first and last action: ranks may begin and end one after
the other.

Source: Qi et al. 2023, Zero Bubble Pipeline Parallelism (2401.10241), §3.1; details that the text
    leaves open (when a forward gives way, what happens in the last rounds) from the authors'
    implementation, sail-sg/zero-bubble-pipeline-parallelism. Their eight variants differ in three
    choices; this is the one that reaches all rates that they publish.
"""

from megatron5d.pipeline_parallel.costs import Costs
from megatron5d.pipeline_parallel.program import Action, Program, loop_placement, make_program


class Ranks:
    """The clocks, actions and memory of all ranks.

    Args:
        num_ranks: one stage per rank.
        num_microbatches: of each rank.
        costs: times of F, I and W and of a message.
        stash: share of a micro-batch's activations that W still needs after I.
        memory: the most that a rank may hold, in micro-batches.
    """

    def __init__(
        self, num_ranks: int, num_microbatches: int, costs: Costs, stash: float, memory: float
    ) -> None:
        self.num_ranks, self.num_microbatches, self.comm = num_ranks, num_microbatches, costs.comm
        self.time = {"F": costs.F, "I": costs.I, "W": costs.W}
        self.allocates = {"F": 1.0, "I": stash - 1.0, "W": -stash}
        self.memory = memory
        self.lines: list[list[tuple[Action]]] = [[] for _ in range(num_ranks)]
        self.ends: dict[str, list[list[float]]] = {
            op: [[] for _ in range(num_ranks)] for op in "FIW"
        }
        self.clock, self.held, self.idle = ([0.0] * num_ranks for _ in range(3))

    def count(self, op: str, rank: int) -> int:
        return len(self.ends[op][rank])

    def pending(self, rank: int) -> int:
        """Number of weight gradients that could run."""
        return self.count("I", rank) - self.count("W", rank)

    def arrival(self, op: str, rank: int) -> float:
        """When the input of the rank's next F or I arrives."""
        source = rank - 1 if op == "F" else rank + 1
        if not 0 <= source < self.num_ranks:
            return 0.0
        return self.ends[op][source][self.count(op, rank)] + self.comm

    def fits(self, op: str, rank: int, extra: float = 0.0) -> bool:
        return self.held[rank] + self.allocates[op] + extra <= self.memory + 1e-9

    def run(self, op: str, rank: int) -> None:
        begin = self.clock[rank] if op == "W" else max(self.clock[rank], self.arrival(op, rank))
        self.idle[rank] += begin - self.clock[rank] if self.lines[rank] else 0.0
        self.lines[rank].append((Action(op, rank, self.count(op, rank)),))
        self.clock[rank] = begin + self.time[op]
        self.ends[op][rank].append(self.clock[rank])
        self.held[rank] += self.allocates[op]

    def spare(self, rank: int) -> float:
        """How long the rank may wait until it is the one that has waited longest."""
        return max(self.idle) - self.idle[rank]

    def fill(self, op: str, rank: int) -> None:
        """Runs the weight gradients that come before the rank's next F or I."""
        while not self.fits(op, rank):
            assert self.pending(rank), "the memory does not suffice"
            self.run("W", rank)
        arrival = self.arrival(op, rank)
        while self.pending(rank) and self.clock[rank] + self.time["W"] <= arrival:
            self.run("W", rank)
        if self.pending(rank) and arrival - self.clock[rank] > self.spare(rank):
            self.run("W", rank)

    def gives_way(self, rank: int) -> bool:
        """Whether the rank, two or more forwards before the next rank, leaves its forward out."""
        if rank + 1 == self.num_ranks or self.count("F", rank) < self.count("F", rank + 1) + 2:
            return False
        backward = self.clock[rank + 1] + self.time["F"] + self.time["I"] + self.comm
        wait = backward - self.clock[rank]
        weights = 0
        while weights < self.pending(rank) and not self.fits(
            "F", rank, weights * self.allocates["W"]
        ):
            weights += 1
        if wait <= 0:
            return True
        return self.time["F"] + weights * self.time["W"] > wait + 1e-9 and wait <= self.spare(rank)


def warm_up(ranks: Ranks) -> None:
    """Runs the first forward everywhere, and those that fit before the first backward arrives."""
    for rank in range(ranks.num_ranks):
        ranks.run("F", rank)
    extra = [0] * ranks.num_ranks
    backward = 0.0  # end of the first I on the next rank
    for rank in reversed(range(ranks.num_ranks)):
        clock = ranks.clock[rank]
        if rank + 1 < ranks.num_ranks:
            while (
                extra[rank] + 1 < ranks.num_microbatches
                and ranks.fits("F", rank, extra[rank])
                and clock + ranks.time["F"] <= backward + ranks.comm
            ):
                extra[rank] += 1
                clock += ranks.time["F"]
            clock = max(clock, backward + ranks.comm)
        backward = clock + ranks.time["I"]
    for rank in range(ranks.num_ranks):
        if rank and extra[rank] + 1 < ranks.num_microbatches:
            extra[rank] = min(extra[rank], max(extra[rank - 1] - 1, 0))
        for _ in range(extra[rank]):
            ranks.run("F", rank)


def forwards(ranks: Ranks) -> list[int]:
    """The ranks that run a forward in this round: none whose next rank runs none."""
    running: list[int] = []
    for rank in range(ranks.num_ranks):
        if ranks.count("F", rank) == ranks.num_microbatches:
            continue
        if ranks.gives_way(rank):
            running.clear()
        else:
            running.append(rank)
    return running


def zero_bubble_greedy(
    num_ranks: int, num_microbatches: int, costs: Costs, stash: float, memory: float
) -> Program:
    """The Program that the paper's algorithm makes; arguments as those of `Ranks`."""
    ranks = Ranks(num_ranks, num_microbatches, costs, stash, memory)
    warm_up(ranks)
    for round_ in range(num_microbatches):
        for rank in forwards(ranks) if round_ else ():
            ranks.fill("F", rank)
            ranks.run("F", rank)
        for rank in reversed(range(num_ranks)):
            ranks.fill("I", rank)
            while rank == 0 and ranks.count("F", 0) == num_microbatches and ranks.pending(0):
                ranks.run("W", 0)
            ranks.run("I", rank)
    for rank in range(num_ranks):
        while ranks.pending(rank):
            ranks.run("W", rank)
    placement = loop_placement(num_ranks)
    return make_program("zero_bubble_greedy", placement, [0] * num_microbatches, ranks.lines)

"""Time of a step on a cluster: prices the work of the layers (work.py), then simulates the Program.

One pass of one stage takes, by kind:

    gemms       FLOPs / (peak · gemms) + bytes / (bandwidth · memory) + a launch, for each GEMM:
                small ones reach less
    attention   FLOPs / (peak · attention)
    memory      2 · bytes of all tensors made / (bandwidth · memory), written once and read once,
                and a launch for each
    tp          collectives inside the layers, less the part that runs under GEMMs (HIDDEN_TP)
    cp          hops of a ring, less the attention that they run under; all other exchanges
    host        copies of `recompute.offload` in both directions, beyond the time of the pass
    dp          ZeRO-2 and 3: gathering weights and reducing gradients, beyond the time of the pass

The simulator receives the experts' all-to-alls and the messages, which overlapped actions hide. It
gives the makespan; the bubble is the part of it outside the busiest rank's passes. The end of the
step follows: reductions that its last backward does not hide, the optimizer, and the gathering that
the next forward does not hide.

The bytes that a rank sends in a step are computed by axis, too, as the run's ledger counts them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron5d.config.schema import Config
from megatron5d.pipeline_parallel.costs import StageCosts
from megatron5d.pipeline_parallel.program import OPS, Program
from megatron5d.pipeline_parallel.simulate import Simulation, idle_fractions, simulate
from megatron5d.planning.clusters import Cluster
from megatron5d.planning.time.dp_traffic import (
    Sharding,
    gathered_bytes,
    mean_gathered,
    offload_bytes,
    rounds,
    update_bytes,
)
from megatron5d.planning.time.work import Unit, Work, message_bytes, total_work
from megatron5d.topology.mesh import NO_SHARED_RANKS, Mesh
from megatron5d.train.pipeline_layout import PipelineLayout


def pass_counts(program: Program) -> np.ndarray:
    """Number of passes by rank, op and stage: `[num_ranks, len(OPS), num_stages]`."""
    table = program.table
    counts = np.zeros((program.num_ranks, len(OPS), program.num_stages), dtype=int)
    np.add.at(counts, (table.rank, table.op, table.stage), 1)
    return counts


def used_ops(program: Program) -> str:
    """The ops of a Program, such as FB."""
    return "".join(op for op in OPS if (program.table.op == OPS.index(op)).any())


def sent_bytes(
    messages: Sequence[int], sharding: Sharding, program: Program, stages: Sequence[Sequence[Unit]]
) -> tuple[Mapping[str, int], ...]:
    """For each pipeline rank, axis -> bytes that it sends in a step.

    Args:
        messages: bytes that each stage sends to the next.
        sharding: of weights and gradients.
        program: of a step.
        stages: units of every stage.
    """
    counts = pass_counts(program)
    ranks = []
    for rank in range(program.num_ranks):
        sums = _sent_by_passes(messages, sharding, program, stages, rank, counts[rank])
        units = [unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]]
        muon = [muon_round.sent(sharding.weight) for muon_round in rounds(units, sharding)]
        for sent in (sharding.reduced(units), sharding.gathered(units), *muon):
            for (axis, _), num_bytes in sent.items():
                sums[axis] += round(num_bytes)
        ranks.append({axis: num_bytes for axis, num_bytes in sums.items() if num_bytes})
    return tuple(ranks)


def _sent_by_passes(
    messages: Sequence[int],
    sharding: Sharding,
    program: Program,
    stages: Sequence[Sequence[Unit]],
    rank: int,
    counts: np.ndarray,
) -> Counter[str]:
    """Axis -> bytes that a rank's passes send, given their counts `[len(OPS), num_stages]`."""
    sums, last = Counter[str](), program.num_stages - 1
    gathered = gathered_bytes(program, rank, stages, sharding) if sharding.gathers_each else {}
    for index, stage in np.argwhere(counts).tolist():
        op, times, units = OPS[index], int(counts[index, stage]), stages[stage]
        for (axis, _), traffic in total_work(unit.passes[op] for unit in units).sent.items():
            sums[axis] += times * traffic.num_bytes
        of_pass = sharding.sent_in_pass(units, op, gathered.get((op, stage)))
        for (axis, _), num_bytes in of_pass.items():
            sums[axis] += round(times * num_bytes)
        neighbor = stage + 1 if op == "F" else stage - 1
        if op != "W" and 0 <= neighbor <= last:
            routes = [route for route in program.placement.route if route[stage] == rank]
            num_sent = sum(route[neighbor] != rank for route in routes)
            sums["pp"] += messages[min(stage, neighbor)] * num_sent * times // len(routes)
    return sums


KINDS = ("products", "attention", "memory", "tp", "cp", "host", "dp")  # of a pass
EXPERTS = ("ep", "ep_outer", "ep_inner", "ep_etp", "ep_inner_etp")  # axes of all-to-alls
# Shares of tp's bytes that are sent under GEMMs, (with sp, without). A column-parallel layer
# gathers its input under dx, and reduces the gradient of its input under dW if that runs in the
# same pass (tensor_parallel/linear.py).
HIDDEN_TP = {"F": (0.0, 0.0), "B": (2 / 3, 1.0), "I": (1 / 3, 0.0), "W": (0.0, 0.0)}


_LABELS = {
    "products": "GEMMs",
    "attention": "attention between queries, keys and values",
    "memory": "memory-bound operations: norms, activations, copies",
    "tp": "exposed communication of tp",
    "cp": "exposed communication of cp",
    "ep": "exposed all-to-alls of ep",
    "p2p": "waits for messages between stages",
    "bubble": "bubble of the pipeline",
    "dp": "exposed reductions and gathers of dp and ZeRO",
    "host": "exposed copies to the host and back",
    "optimizer": "optimizer",
    "muon": "Muon's iterations on full matrices",
    "muon_sent": "Muon's all-to-alls, to full matrices and back",
}


@dataclass(frozen=True)
class StepCost:
    """Predicted cost of one step.

    Args:
        seconds: kind -> seconds of the busiest pipeline rank; their sum is `step_s`.
        tokens_per_s_per_gpu: of all tokens of the global batch.
        tflops_per_gpu: of the model (model/flops.py), without recomputation.
        mfu: these FLOPs relative to the device's peak in 16 bits.
        sent: for each pipeline rank, axis -> bytes that it sends in a step.
        bubble: for each pipeline rank, `idle_fractions` of the step's Program.
        program: of the step.
        costs: seconds of its passes, and bytes of activations of a micro-batch on each stage.
        simulation: of the Program under these costs.
    """

    seconds: Mapping[str, float]
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    sent: tuple[Mapping[str, int], ...]
    bubble: tuple[float, ...]
    program: Program
    costs: StageCosts
    simulation: Simulation

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def record(self) -> dict[str, Any]:
        """The cost as a JSON object, in seconds and bytes."""
        names = ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        rates = {name: getattr(self, name) for name in names}
        seconds, sent = dict(self.seconds), [dict(sent) for sent in self.sent]
        return {"step_time_s": self.step_s, **rates, "seconds": seconds, "sent_bytes": sent}

    def table(self, cluster: Cluster) -> str:
        """Time by kind on the busiest pipeline rank, and bytes that a rank sends, as text."""
        lines = [f"{'a step of':<56}{self.step_s:>9.3f} s"]
        for kind, label in _LABELS.items():
            if (seconds := self.seconds[kind]) > 0:
                lines.append(f"  {label:<54}{seconds:>9.3f} s{seconds / self.step_s:>8.1%}")
        axes = sorted({axis for sent in self.sent for axis in sent})
        if axes:
            most = {axis: max(sent.get(axis, 0) for sent in self.sent) for axis in axes}
            sizes = ", ".join(f"{axis} {most[axis] / 1e9:,.2f}" for axis in axes)
            lines.append(f"GB that a rank sends in a step, at most: {sizes}")
        rates = f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        rates += f", {self.tflops_per_gpu:,.0f} TFLOP/s/GPU"
        peak = f"{cluster.flops / 1e12:,.0f} TFLOP/s on {cluster.name}"
        lines.append(f"{rates}, MFU {self.mfu:.1%} of {peak}, {cluster.node} in a node")
        return "\n".join(lines)


class Prices:
    """Times of the passes of one layout.

    Args:
        cluster: hardware.
        config: of the run.
        mesh: axes of rank 0.
        layout: of the pipeline; None suffices for passes of single units.
    """

    def __init__(
        self, cluster: Cluster, config: Config, mesh: Mesh, layout: PipelineLayout | None = None
    ) -> None:
        self.cluster, self.config = cluster, config
        self.messages = message_bytes(config, layout.specs) if layout else []
        self.groups = {name: cluster.group(axis.ranks) for name, axis in mesh.items()}
        self.neighbors = cluster.group(mesh["pp"].ranks[:2])
        self.sharding = Sharding(config, mesh, layout.shared if layout else NO_SHARED_RANKS)

    def compute(self, work: Work) -> tuple[float, float, float]:
        """Seconds of GEMMs, of attention, and of memory-bound operations."""
        cluster, share = self.cluster, self.cluster.efficiency
        memory = cluster.memory_rate * share.memory
        gemms = 0.0
        for gemm in work.gemms:
            peak = cluster.flops_8bit if gemm.fp8 else cluster.flops
            gemms += share.kernel_s + gemm.flops / (peak * share.gemms) + gemm.num_bytes / memory
        attention = work.core_flops / (cluster.flops * share.attention)
        return gemms, attention, 2 * work.made_bytes / memory + work.num_made * share.kernel_s

    def stage(
        self, units: Sequence[Unit], op: str, gathered: tuple[float, float] | None = None
    ) -> tuple[dict[str, float], float]:
        """Seconds of a pass of a stage by kind, and of its all-to-alls.

        Args:
            gathered: as in `Sharding.sent_in_pass`.
        """
        work = total_work(unit.passes[op] for unit in units)
        gemms, attention, memory = self.compute(work)
        sent_s = defaultdict[str, float](float)
        for (axis, name), sent in work.sent.items():
            seconds = self.cluster.seconds(self.groups[axis], name, sent.calls, sent.num_bytes)
            sent_s[_kind_of_collective(axis, name)] += seconds
        spent = {
            "products": gemms,
            "attention": attention,
            "memory": memory,
            "tp": self._exposed_tp(op, sent_s["tp"], gemms),
            "cp": sent_s["cp"] + max(0.0, sent_s["ring"] - attention),
        }
        copies_s = work.host_bytes / (self.cluster.host_rate * self.cluster.efficiency.links)
        spent["host"] = max(0.0, copies_s - sum(spent.values()))
        zero_sends = self.sharding.sent_in_pass(units, op, gathered)
        spent["dp"] = max(0.0, self.transfers(zero_sends, len(units)) - sum(spent.values()))
        return spent, sent_s["ep"]

    def _exposed_tp(self, op: str, seconds: float, gemms: float) -> float:
        parallel = self.config.parallel
        share = HIDDEN_TP[op][not parallel.sp]
        if parallel.tp_overlap != "none" and op != "W":
            share = 1 - 1 / parallel.tp
        return seconds - min(share * seconds, gemms)

    def transfers(self, sent: Mapping[tuple[str, str], float], calls: int) -> float:
        """Seconds of collectives of data parallelism, one after the other."""
        return sum(
            self.cluster.seconds(self.groups[axis], name, calls, num_bytes)
            for (axis, name), num_bytes in sent.items()
            if num_bytes  # the experts' axes of a dense model send nothing
        )

    def message_seconds(self) -> np.ndarray:
        """Seconds of the message from each stage to the next, `[num_stages]`."""
        seconds = [self.cluster.seconds(self.neighbors, "send", 1, n) for n in self.messages]
        return np.array(seconds)


def _kind_of_collective(axis: str, name: str) -> str:
    if axis in EXPERTS:
        return "ep"
    if not axis.startswith("cp") or axis == "cp_tp":
        return "tp"
    return "ring" if name == "shift" else "cp"


def step_cost(
    prices: Prices,
    program: Program,
    stages: Sequence[Sequence[Unit]],
    world: int,
    token_flops: float,
) -> StepCost:
    """Predicted cost of a step.

    Args:
        prices: of the layout.
        program: a verified Program.
        stages: units of every stage.
        world: number of ranks.
        token_flops: FLOPs of a step per token, as the run's own MFU counts them.
    """
    train, cluster = prices.config.train, prices.cluster
    spent, costs = _stage_costs(prices, program, stages)
    simulation = simulate(program, costs)
    busiest = int(simulation.work.argmax())
    seconds = dict(zip(KINDS, (spent * pass_counts(program)[busiest]).sum((1, 2)).tolist()))
    seconds |= _waiting(simulation, busiest)
    ends = []
    for rank in range(program.num_ranks):
        units = [unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]]
        ends.append(_end_of_step(prices, units, *_through_rank(spent.sum(0), program, rank)))
    for kind in ends[0]:
        seconds[kind] = seconds.get(kind, 0.0) + max(end[kind] for end in ends)
    rate = train.gbs * train.seq_len / sum(seconds.values()) / world
    flops = rate * token_flops
    return StepCost(
        seconds,
        rate,
        flops / 1e12,
        flops / cluster.flops,
        sent_bytes(prices.messages, prices.sharding, program, stages),
        tuple(idle_fractions(program, simulation)),
        program,
        costs,
        simulation,
    )


def _stage_costs(
    prices: Prices, program: Program, stages: Sequence[Sequence[Unit]]
) -> tuple[np.ndarray, StageCosts]:
    """Seconds of passes by kind `[len(KINDS), len(OPS), num_stages]`, and costs to simulate."""
    spent = np.zeros((len(KINDS), len(OPS), program.num_stages))
    a2a = np.zeros((len(OPS), program.num_stages))
    gathered: Mapping[tuple[str, int], tuple[float, float]] = {}
    if prices.sharding.gathers_each:
        gathered = mean_gathered(program, stages, prices.sharding)
    for stage, units in enumerate(stages):
        for op in used_ops(program):
            kinds, a2a[OPS.index(op), stage] = prices.stage(units, op, gathered.get((op, stage)))
            spent[:, OPS.index(op), stage] = [kinds[kind] for kind in KINDS]
    saved_bytes = np.array([sum(unit.passes["F"].kept_bytes for unit in units) for units in stages])
    messages, no_stash = prices.message_seconds(), np.zeros(program.num_stages)
    return spent, StageCosts(spent.sum(0), a2a, messages, saved_bytes, no_stash)


def _waiting(simulation: Simulation, rank: int) -> dict[str, float]:
    """Seconds of the makespan in which a rank runs no pass, by kind."""
    ep, p2p = float(simulation.exposed_a2a[rank]), float(simulation.exposed_p2p[rank])
    idle = simulation.makespan - float(simulation.work[rank]) - ep - p2p
    return {"ep": ep, "p2p": p2p, "bubble": max(0.0, idle)}  # rounding may make it negative


def _through_rank(spent: np.ndarray, program: Program, rank: int) -> tuple[float, float]:
    """Seconds of one micro-batch's forward and backward through all stages of a rank."""
    stages = sorted({stage for _, stage in program.placement.stages_of(rank)})
    backward = spent[OPS.index("B")]
    if not backward.any():
        backward = spent[[OPS.index("I"), OPS.index("W")]].sum(0)
    return float(spent[OPS.index("F")][stages].sum()), float(backward[stages].sum())


def _end_of_step(
    prices: Prices, units: Sequence[Unit], forward: float, backward: float
) -> dict[str, float]:
    """Seconds by kind that data parallelism and the optimizer add to a step of a rank.

    Reductions start as the last backward makes gradients; that of its last unit is exposed. Weights
    are gathered in the order in which the next forward reads them.
    """
    sharding = prices.sharding
    reduced, gathered = sharding.reduced(units), sharding.gathered(units)
    last = [prices.transfers(sharding.reduced([unit], last=True), 1) for unit in units]
    exposed = max(max(last, default=0.0), prices.transfers(reduced, len(units)) - backward)
    exposed += max(0.0, prices.transfers(gathered, len(units)) - forward)
    return {"dp": exposed, **_update_seconds(prices, units)}


def _update_seconds(prices: Prices, units: Sequence[Unit]) -> dict[str, float]:
    """Seconds of the optimizer by kind: memory, Muon's iterations and all-to-alls, the host."""
    cluster, sharding, share = prices.cluster, prices.sharding, prices.cluster.efficiency
    num_bytes = update_bytes(units, sharding) / share.memory
    seconds = {"optimizer": num_bytes / cluster.memory_rate}
    seconds |= dict.fromkeys(("muon", "muon_sent", "host"), 0.0)
    if prices.config.optim.offload:
        seconds["optimizer"] = num_bytes / cluster.host_memory_rate
        seconds["host"] = offload_bytes(units, sharding) / (cluster.host_rate * share.links)
    for muon_round in rounds(units, sharding):
        seconds["muon"] += sum(prices.compute(muon_round.matrices[0].work))
        seconds["muon_sent"] += prices.transfers(muon_round.sent(sharding.weight), 2)
    return seconds

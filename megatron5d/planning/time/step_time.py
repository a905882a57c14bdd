"""How long a step takes on a cluster: what the layers do (work.py), priced, and the Program that
runs it, simulated.

Of one pass of one stage, by kind:

    gemms       each: FLOPs / (peak · gemms) + bytes / (bandwidth · memory), and a kernel: small ones reach less
    attention   its FLOPs / (peak · attention)
    memory      2 · bytes of all tensors made / (bandwidth · memory), and a kernel for each: written once, read once
    tp          collectives inside the layers, less what runs under GEMMs (HIDDEN_TP)
    cp          hops of a ring less the attention they run under; all of what is exchanged before or after it
    host        copies of `recompute.offload` there and back, as far as they take longer than the pass itself
    dp          ZeRO-2 and 3: what gathering weights and reducing gradients take longer than the pass itself

All-to-alls of experts go to the simulator, which lets an overlapped action hide them, as messages
do. It gives the makespan; what the busiest rank's passes leave of it is the bubble. Then comes what
ends a step: the reduction that its last backward did not hide, the optimiser, and the gathering
that the next forward will not hide.

The bytes that a rank sends in a step are told, too, by axis: what the run's ledger will count.
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
    passed_bytes,
    rounds,
)
from megatron5d.planning.time.work import Unit, Work, message_bytes, together
from megatron5d.topology.mesh import NO_SHARED_RANKS, Mesh
from megatron5d.train.pipeline_layout import PipelineLayout


def pass_counts(program: Program) -> np.ndarray:
    """Returns `[num_ranks, len(OPS), num_stages]` how often a rank runs an operation of a stage."""
    table = program.table
    counts = np.zeros((program.num_ranks, len(OPS), program.num_stages), dtype=int)
    np.add.at(counts, (table.rank, table.op, table.stage), 1)
    return counts


def used_ops(program: Program) -> str:
    """Returns the operations that a Program has, such as FB."""
    return "".join(op for op in OPS if (program.table.op == OPS.index(op)).any())


def sent_bytes(
    messages: Sequence[int], sharding: Sharding, program: Program, stages: Sequence[Sequence[Unit]]
) -> tuple[Mapping[str, int], ...]:
    """Returns, for each pipeline rank, axis -> bytes that it sends in a step.

    Args:
        messages: bytes that each stage sends to the next.
        sharding: of weights and gradients.
        program: of a step.
        stages: units of every stage.
    """
    counts = pass_counts(program)
    ranks = []
    for rank in range(program.num_ranks):
        sums = _of_passes(messages, sharding, program, stages, rank, counts[rank])
        units = [unit for _, stage in program.placement.stages_of(rank) for unit in stages[stage]]
        muon = [each.sent(sharding.weight) for each in rounds(units, sharding)]
        for sent in (sharding.reduced(units), sharding.gathered(units), *muon):
            for (axis, _), num_bytes in sent.items():
                sums[axis] += round(num_bytes)
        ranks.append({axis: num_bytes for axis, num_bytes in sums.items() if num_bytes})
    return tuple(ranks)


def _of_passes(
    messages: Sequence[int],
    sharding: Sharding,
    program: Program,
    stages: Sequence[Sequence[Unit]],
    rank: int,
    counts: np.ndarray,
) -> Counter[str]:
    """Axis -> bytes that a rank's passes send, whose `[len(OPS), num_stages]` counts are given."""
    sums, last = Counter[str](), program.num_stages - 1
    gathered = gathered_bytes(program, rank, stages, sharding) if sharding.gathers_each else {}
    for index, stage in np.argwhere(counts).tolist():
        op, times, units = OPS[index], int(counts[index, stage]), stages[stage]
        for (axis, _), each in together(unit.passes[op] for unit in units).sent.items():
            sums[axis] += times * each.num_bytes
        for (axis, _), num_bytes in sharding.beside(units, op, gathered.get((op, stage))).items():
            sums[axis] += round(times * num_bytes)
        neighbour = stage + 1 if op == "F" else stage - 1
        if op != "W" and 0 <= neighbour <= last:
            routes = [line for line in program.placement.route if line[stage] == rank]
            away = sum(line[neighbour] != rank for line in routes)
            sums["pp"] += messages[min(stage, neighbour)] * away * times // len(routes)
    return sums


KINDS = ("products", "attention", "memory", "tp", "cp", "host", "dp")  # of a pass
EXPERTS = ("ep", "ep_outer", "ep_inner", "ep_etp", "ep_inner_etp")  # axes over which tokens travel
# Shares of tp's bytes in flight under GEMMs, (with sp, without): a column's input is gathered under
# dx, and its gradient is summed under dW where that runs in the same pass
# (tensor_parallel/linear.py).
HIDDEN_TP = {"F": (0.0, 0.0), "B": (2 / 3, 1.0), "I": (1 / 3, 0.0), "W": (0.0, 0.0)}


_TOLD = {
    "products": "GEMMs",
    "attention": "attention between queries, keys and values",
    "memory": "what passes through memory: norms, activations, copies",
    "tp": "exposed communication of tp",
    "cp": "exposed communication of cp",
    "ep": "exposed all-to-alls of ep",
    "p2p": "waits for messages between stages",
    "bubble": "bubble of the pipeline",
    "dp": "exposed reductions and gathers of dp and ZeRO",
    "host": "exposed copies to the host and back",
    "optimizer": "optimiser",
    "muon": "Muon's iterations on whole matrices",
    "muon_sent": "Muon's all-to-alls, to whole matrices and back",
}


@dataclass(frozen=True)
class StepCost:
    """What one step is expected to take.

    Args:
        seconds: kind -> seconds of the busiest pipeline rank; they add up to `step_s`.
        tokens_per_s_per_gpu: of all tokens of the global batch.
        tflops_per_gpu: of the model (model/flops.py), recomputation not counted.
        mfu: those of the device's peak in 16 bits.
        sent: for each pipeline rank, axis -> bytes that it sends in a step.
        bubble: for each pipeline rank, `idle_fractions` of the step's Program.
        program: of the step.
        costs: seconds of its passes, and bytes of activations that a micro-batch keeps of each
            stage.
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
        """Returns the cost as a JSON object, in seconds and bytes."""
        rates = {
            name: getattr(self, name) for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        }
        seconds, sent = dict(self.seconds), [dict(sent) for sent in self.sent]
        return {"step_time_s": self.step_s, **rates, "seconds": seconds, "sent_bytes": sent}

    def table(self, cluster: Cluster) -> str:
        """Returns the time by kind on the busiest pipeline rank, and the bytes that a rank sends,
        as text."""
        lines = [f"{'a step of':<56}{self.step_s:>9.3f} s"]
        for kind, told in _TOLD.items():
            if self.seconds[kind] > 0:
                lines.append(
                    f"  {told:<54}{self.seconds[kind]:>9.3f} s{self.seconds[kind] / self.step_s:>8.1%}"
                )
        most = {
            axis: max(each.get(axis, 0) for each in self.sent)
            for each in self.sent
            for axis in each
        }
        if most:
            sizes = ", ".join(f"{axis} {most[axis] / 1e9:,.2f}" for axis in sorted(most))
            lines.append(f"GB that a rank sends in a step, at most: {sizes}")
        lines.append(
            f"{self.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {self.tflops_per_gpu:,.0f} TFLOP/s/GPU, MFU "
            f"{self.mfu:.1%} of {cluster.flops / 1e12:,.0f} TFLOP/s on {cluster.name}, {cluster.node} in a node"
        )
        return "\n".join(lines)


class Prices:
    """Times of the passes of one layout.

    Args:
        cluster: on which.
        config: of the run.
        mesh: axes of rank 0.
        layout: of the pipeline; None = only passes of single units are asked about.
    """

    def __init__(
        self, cluster: Cluster, config: Config, mesh: Mesh, layout: PipelineLayout | None = None
    ) -> None:
        self.cluster, self.config = cluster, config
        self.messages = message_bytes(config, layout.specs) if layout else []
        self.groups = {name: cluster.group(axis.ranks) for name, axis in mesh.items()}
        self.neighbours = cluster.group(mesh["pp"].ranks[:2])
        self.sharding = Sharding(config, mesh, layout.shared if layout else NO_SHARED_RANKS)

    def compute(self, work: Work) -> tuple[float, float, float]:
        """Returns seconds of GEMMs, of attention, and of what passes through memory."""
        cluster, share = self.cluster, self.cluster.efficiency
        memory = cluster.memory_rate * share.memory
        gemms = 0.0
        for each in work.gemms:
            peak = cluster.flops_8bit if each.fp8 else cluster.flops
            gemms += share.kernel_s + each.flops / (peak * share.gemms) + each.num_bytes / memory
        attention = work.core_flops / (cluster.flops * share.attention)
        return gemms, attention, 2 * work.made_bytes / memory + work.made * share.kernel_s

    def stage(
        self, units: Sequence[Unit], op: str, gathered: tuple[float, float] | None = None
    ) -> tuple[dict[str, float], float]:
        """Returns seconds of a pass of a stage by kind, and of its all-to-alls; `gathered` as in
        Sharding.beside."""
        work = together(unit.passes[op] for unit in units)
        gemms, attention, memory = self.compute(work)
        taken = defaultdict[str, float](float)
        for (axis, name), sent in work.sent.items():
            kind = (
                "ep"
                if axis in EXPERTS
                else "cp"
                if axis.startswith("cp") and axis != "cp_tp"
                else "tp"
            )
            if (kind, name) == ("cp", "shift"):
                kind = "ring"
            taken[kind] += self.cluster.seconds(self.groups[axis], name, sent.calls, sent.num_bytes)
        spent = {
            "products": gemms,
            "attention": attention,
            "memory": memory,
            "tp": self._exposed_tp(op, taken["tp"], gemms),
            "cp": taken["cp"] + max(0.0, taken["ring"] - attention),
        }
        copied = work.host_bytes / (self.cluster.host_rate * self.cluster.efficiency.links)
        spent["host"] = max(0.0, copied - sum(spent.values()))
        beside = self.sharding.beside(units, op, gathered)  # what ZeRO-2 and 3 send
        spent["dp"] = max(0.0, self.transfers(beside, len(units)) - sum(spent.values()))
        return spent, taken["ep"]

    def _exposed_tp(self, op: str, seconds: float, gemms: float) -> float:
        parallel = self.config.parallel
        share = HIDDEN_TP[op][not parallel.sp]
        if parallel.tp_overlap != "none" and op != "W":
            share = 1 - 1 / parallel.tp
        return seconds - min(share * seconds, gemms)

    def transfers(self, sent: Mapping[tuple[str, str], float], calls: int) -> float:
        """Returns seconds of collectives of data parallelism, one after the other."""
        return sum(
            self.cluster.seconds(self.groups[axis], name, calls, num_bytes)
            for (axis, name), num_bytes in sent.items()
            if num_bytes  # a dense model has experts' axes, and nothing to send there
        )

    def message_seconds(self) -> np.ndarray:
        """Returns `[num_stages]` seconds of what each stage sends to the next."""
        return np.array(
            [self.cluster.seconds(self.neighbours, "send", 1, each) for each in self.messages]
        )


def step_cost(
    prices: Prices,
    program: Program,
    stages: Sequence[Sequence[Unit]],
    world: int,
    token_flops: float,
) -> StepCost:
    """Returns the time of a step.

    Args:
        prices: of the layout.
        program: a verified Program.
        stages: units of every stage.
        world: number of ranks.
        token_flops: FLOPs of a step per token, as the run's own MFU counts them.
    """
    config, cluster = prices.config, prices.cluster
    used = used_ops(program)
    spent = np.zeros((len(KINDS), len(OPS), program.num_stages))
    a2a = np.zeros((len(OPS), program.num_stages))
    gathered = (
        mean_gathered(program, stages, prices.sharding) if prices.sharding.gathers_each else {}
    )
    for stage, units in enumerate(stages):
        for op in used:
            kinds, a2a[OPS.index(op), stage] = prices.stage(units, op, gathered.get((op, stage)))
            spent[:, OPS.index(op), stage] = [kinds[kind] for kind in KINDS]
    kept = np.array([sum(unit.passes["F"].kept_bytes for unit in units) for units in stages])
    costs = StageCosts(
        spent.sum(0), a2a, prices.message_seconds(), kept, np.zeros(program.num_stages)
    )
    found = simulate(program, costs)
    busiest = int(found.work.argmax())
    seconds = dict(zip(KINDS, (spent * pass_counts(program)[busiest]).sum((1, 2)).tolist()))
    seconds |= _waiting(found, busiest)
    held = [
        [stages[stage] for _, stage in program.placement.stages_of(rank)]
        for rank in range(program.num_ranks)
    ]
    ends = [
        _end(prices, mine, *_passing(spent.sum(0), program, rank)) for rank, mine in enumerate(held)
    ]
    for kind in ends[0]:
        seconds[kind] = seconds.get(kind, 0.0) + max(end[kind] for end in ends)
    rate = config.train.gbs * config.train.seq_len / sum(seconds.values()) / world
    flops = rate * token_flops
    sent = sent_bytes(prices.messages, prices.sharding, program, stages)
    waiting = tuple(idle_fractions(program, found))
    return StepCost(
        seconds, rate, flops / 1e12, flops / cluster.flops, sent, waiting, program, costs, found
    )


def _waiting(found: Simulation, rank: int) -> dict[str, float]:
    """Returns the part of the makespan in which a rank runs no pass."""
    ep, p2p = float(found.exposed_a2a[rank]), float(found.exposed_p2p[rank])
    idle = found.makespan - float(found.work[rank]) - ep - p2p
    return {"ep": ep, "p2p": p2p, "bubble": max(0.0, idle)}  # below 0 by rounding


def _passing(spent: np.ndarray, program: Program, rank: int) -> tuple[float, float]:
    """Returns seconds of one micro-batch's forward, and backward, through what a rank holds."""
    stages = sorted({stage for _, stage in program.placement.stages_of(rank)})
    whole = (
        spent[OPS.index("B")]
        if spent[OPS.index("B")].any()
        else spent[[OPS.index("I"), OPS.index("W")]].sum(0)
    )
    return float(spent[OPS.index("F")][stages].sum()), float(whole[stages].sum())


def _end(
    prices: Prices, held: Sequence[Sequence[Unit]], forward: float, backward: float
) -> dict[str, float]:
    """Returns seconds by kind that data parallelism and the optimiser add to a step of a rank.

    Reductions start as the last backward makes gradients, whose last unit nothing follows; weights
    are gathered in the order in which the next forward wants them.
    """
    units = [unit for stage in held for unit in stage]
    sharding = prices.sharding
    reduced, gathered = sharding.reduced(units), sharding.gathered(units)
    last = max(
        (prices.transfers(sharding.reduced([unit], last=True), 1) for unit in units), default=0.0
    )
    exposed = max(last, prices.transfers(reduced, len(units)) - backward)
    exposed += max(0.0, prices.transfers(gathered, len(units)) - forward)
    return {"dp": exposed, **_update(prices, units)}


def _update(prices: Prices, units: Sequence[Unit]) -> dict[str, float]:
    """Seconds of the optimiser by kind: its passes, Muon's iterations and all-to-alls, and what the
    host adds."""
    cluster, sharding, share = prices.cluster, prices.sharding, prices.cluster.efficiency
    passed = passed_bytes(units, sharding) / share.memory
    found = {"optimizer": passed / cluster.memory_rate, "muon": 0.0, "muon_sent": 0.0, "host": 0.0}
    if prices.config.optim.offload:
        found["optimizer"] = passed / cluster.host_memory_rate
        found["host"] = offload_bytes(units, sharding) / (cluster.host_rate * share.links)
    for each in rounds(units, sharding):
        found["muon"] += sum(prices.compute(each.matrices[0].work))
        found["muon_sent"] += prices.transfers(each.sent(sharding.weight), 2)
    return found

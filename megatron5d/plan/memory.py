"""How many bytes a rank needs, by kind, and whether a device has them.

What stays from step to step (weights, gradients, optimiser state) and what comes and goes (activations, messages,
workspace) is counted elsewhere (train/forecast.py, trace.py, peak.py); here it is added up, held against a device and
told. Two moments of a step compete: the worst of its passes, and the reduction, update and gathering at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron5d.plan.peak import Peak

GIB = 2**30
ALLOCATOR_BLOCK = 512  # bytes: what torch's CUDA allocator hands out is a multiple of it
GEMM_WORKSPACE = {"sm_80": 8 * 2**20 + 2**18, "sm_90": 32 * 2**20, "sm_100": 32 * 2**20}  # cuBLAS, once per stream
CONTEXT_BYTES = 600 * 2**20  # the CUDA context with its loaded kernels, outside of torch's allocator
COMMUNICATOR_BYTES = 100 * 2**20  # NCCL's buffers of one communicator, outside as well
FRAGMENTATION = 0.05  # of what is allocated: segments that the allocator holds and cannot use


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in bytes.

    Args:
        weights: of the model, in its dtype.
        gradients: main gradients.
        optimizer: master weights and moments.
        buffers: what else is there from the beginning: figures of routers, step counts.
        inputs: tokens, labels, positions and masks of all micro-batches of a step.
        peak: the worst moment of the passes.
        end_of_step: reduced slices, wide copies and slices on their way at the end of a step, beside what stays.
        setup: the most while everything is put together; counts where it is more than training needs.
        library: workspace that the vendor's libraries take from the allocator.
        boxes: what other ranks write into (`parallel.tp_overlap=fused`); the allocator does not see it.
        outside: what it does not see either: context and communicators.
        host_optimizer: in the host's memory, pinned: master weights, moments and gradients of `optim.offload`; what
            activations take there is the peak's.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int = 0
    inputs: int = 0
    peak: Peak = field(default_factory=Peak)
    end_of_step: int = 0
    setup: int = 0
    library: int = 0
    boxes: int = 0
    outside: int = 0
    host_optimizer: int = 0

    @property
    def host(self) -> int:
        """The most that waits in the host's memory; none of what the device needs."""
        return self.host_optimizer + self.peak.host

    @property
    def resident(self) -> int:
        """Bytes that stay from step to step."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.library

    @property
    def allocated(self) -> int:
        """The most that tensors take at once: what `torch.cuda.max_memory_allocated` tells after some steps."""
        return max(self.resident + self.inputs + max(self.peak.total, self.end_of_step), self.setup)

    @property
    def moment(self) -> str:
        """When that is, in words; empty where nobody has walked through a step."""
        if self.resident + self.inputs + max(self.peak.total, self.end_of_step) < self.setup:
            return "while everything is put together"
        if self.peak.total < self.end_of_step:
            return "at the end of a step"
        return "" if self.peak.action is None else f"in action {self.peak.action}"

    @property
    def margin(self) -> int:
        """Bytes that fragmentation may take on top."""
        return round(FRAGMENTATION * self.allocated)

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.allocated + self.margin + self.boxes + self.outside

    def kinds(self) -> dict[str, int]:
        """Bytes by kind at the worst moment, in the order in which they are told; they add up to `needed`."""
        kinds = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "buffers": self.buffers,
            "inputs": self.inputs,
        }
        if self.peak.total >= self.end_of_step:
            kinds |= {f"activations/{kind}": count for kind, count in self.peak.activations.items()}
            kinds |= {
                "stash": self.peak.stash,
                "messages": self.peak.messages,
                "units": self.peak.units,
                "workspace": self.peak.workspace,
            }
        else:
            kinds["end of step"] = self.end_of_step
        kinds["libraries"] = self.library
        kinds["setup"] = self.allocated - sum(kinds.values())
        kinds |= {"fragmentation": self.margin, "boxes": self.boxes, "outside": self.outside}
        return {kind: count for kind, count in kinds.items() if count}

    def record(self) -> dict[str, Any]:
        """Every kind and the sums in bytes, for programs to read."""
        sums = {name: getattr(self, name) for name in ("resident", "allocated", "needed", "host")}
        action = self.peak.action
        worst = {"action": None if action is None else str(action), "in_flight": self.peak.in_flight}
        return {"bytes": self.kinds(), **sums, "end_of_step": self.end_of_step, "setup": self.setup, "peak": worst}


def outside_bytes(num_communicators: int) -> int:
    """Bytes of a GPU that a rank takes outside of torch's allocator."""
    return CONTEXT_BYTES + num_communicators * COMMUNICATOR_BYTES


def gigabytes(num_bytes: int) -> str:
    """`12.34 GiB`, or MiB where it is little."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.2f} MiB"


_ORDER = (
    *("weights", "gradients", "optimizer", "buffers", "inputs"),
    *("activations", "stash", "messages", "units", "workspace"),
    *("end of step", "libraries", "setup", "fragmentation", "boxes", "outside"),
)


def _place(kind: str) -> tuple[int, str]:
    """Where a kind stands in a table, whichever rank it was met on first."""
    return _ORDER.index(kind.split("/")[0]), kind if "/" in kind else ""


def table(ranks: Mapping[int, RankMemory], limit: int = 8) -> str:
    """A table with a line for each kind and a column for each pipeline rank; the one that needs most is marked.

    Args:
        ranks: pipeline rank -> its memory.
        limit: columns; of more ranks the first, the last and the most loaded are shown.
    """
    worst = max(ranks, key=lambda rank: ranks[rank].needed)
    shown = sorted(ranks)
    if len(shown) > limit:
        shown = sorted({*shown[: limit // 2], *shown[-(limit // 2) + 1 :], worst})
    columns = {rank: ranks[rank].kinds() for rank in shown}
    kinds = sorted({kind: None for column in columns.values() for kind in column}, key=_place)
    unit, size = ("GiB", GIB) if ranks[worst].needed >= GIB else ("MiB", 2**20)
    rows = [[unit, *(f"pp {rank}{' *' if rank == worst else ''}" for rank in shown)]]
    for kind in kinds:
        rows.append([kind, *(f"{columns[rank].get(kind, 0) / size:.3f}" for rank in shown)])
    for name in ("allocated", "needed", *(["host"] if any(each.host for each in ranks.values()) else [])):
        rows.append([f"= {name}", *(f"{getattr(ranks[rank], name) / size:.3f}" for rank in shown)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
    return "\n".join(lines)

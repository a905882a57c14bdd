"""The memory that a rank needs, in bytes by kind, and tables of it.

forecast.py, trace.py and peak.py count resident memory (weights, gradients, optimizer state) and
temporary memory (activations, messages, workspace); this file adds them up. The peak of a step may
be in its passes, or in the reduction, update and gathering at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron5d.pipeline_parallel.program import Action

GIB = 2**30
ALLOCATOR_BLOCK = 512  # bytes: torch's CUDA allocator rounds sizes up to a multiple of it
CONTEXT_BYTES = 600 * 2**20  # the CUDA context with its loaded kernels, outside torch's allocator
COMMUNICATOR_BYTES = 100 * 2**20  # NCCL's buffers of one communicator, also outside the allocator
FRAGMENTATION = 0.05  # share of the allocated bytes that the allocator reserves without use


@dataclass(frozen=True)
class Peak:
    """The memory of a rank at the worst moment of a step, in bytes.

    Args:
        activations: class of phase -> tensors kept between forward and backward of micro-batches.
        stash: tensors that deferred weight gradients keep between I and W.
        messages: of the pipeline, received or being sent.
        units: temporary buffers of data parallelism: under ZeRO-2 and 3 gathered weights, and
            gradients that are computed or reduced; under ZeRO-1 reduced slices.
        workspace: temporary tensors of the running phase, and gradients in transit through the
            stage.
        action: the running action, if any.
        in_flight: number of (stage, micro-batch) with live activations.
        host: peak of activations in host memory, at any moment; not part of `total`.
    """

    activations: dict[str, int] = field(default_factory=dict)
    stash: int = 0
    messages: int = 0
    units: int = 0
    workspace: int = 0
    action: Action | None = None
    in_flight: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        temporary = self.stash + self.messages + self.units + self.workspace
        return sum(self.activations.values()) + temporary


@dataclass(frozen=True)
class RankMemory:
    """One rank's memory in bytes.

    Args:
        weights: of the model, in its dtype.
        gradients: main gradients.
        optimizer: master weights and moments.
        buffers: other resident tensors, such as statistics of routers and step counts.
        inputs: tokens, labels, positions and masks of all micro-batches of a step.
        peak: the worst moment of the passes.
        end_of_step: temporary tensors of the reduction, update and gathering at the end of a step.
        setup: peak while the run is built, if that is more than training needs.
        library: workspace that the vendor's libraries take from the allocator.
        symmetric: symmetric-memory buffers of `parallel.tp_overlap=fused`, outside the allocator;
            `boxes` in JSON.
        outside: CUDA context and communicators, outside the allocator.
        host_optimizer: pinned host memory for `optim.offload`: master weights, moments and
            gradients. `peak` has that of offloaded activations.
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
    symmetric: int = 0
    outside: int = 0
    host_optimizer: int = 0

    @property
    def host(self) -> int:
        """Peak bytes of host memory; not part of `needed`."""
        return self.host_optimizer + self.peak.host

    @property
    def resident(self) -> int:
        """Bytes that remain from step to step."""
        return self.weights + self.gradients + self.optimizer + self.buffers + self.library

    @property
    def allocated(self) -> int:
        """Peak bytes of tensors, as `torch.cuda.max_memory_allocated` measures them."""
        return max(self.resident + self.inputs + max(self.peak.total, self.end_of_step), self.setup)

    @property
    def moment(self) -> str:
        """When the peak occurs, in words; "" where the peak has no action."""
        if self.resident + self.inputs + max(self.peak.total, self.end_of_step) < self.setup:
            return "while the run is built"
        if self.peak.total < self.end_of_step:
            return "at the end of a step"
        return "" if self.peak.action is None else f"in action {self.peak.action}"

    @property
    def margin(self) -> int:
        """Bytes that fragmentation may need in addition."""
        return round(FRAGMENTATION * self.allocated)

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.allocated + self.margin + self.symmetric + self.outside

    def kinds(self) -> dict[str, int]:
        """Bytes by kind at the peak, in the order of the table; their sum is `needed`."""
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
        kinds |= {"fragmentation": self.margin, "boxes": self.symmetric, "outside": self.outside}
        return {kind: count for kind, count in kinds.items() if count}

    def record(self) -> dict[str, Any]:
        """All kinds and sums in bytes, for JSON output."""
        sums = {name: getattr(self, name) for name in ("resident", "allocated", "needed", "host")}
        action = self.peak.action
        name = None if action is None else str(action)
        return {
            "bytes": self.kinds(),
            **sums,
            "end_of_step": self.end_of_step,
            "setup": self.setup,
            "peak": {"action": name, "in_flight": self.peak.in_flight},
        }


def gemm_workspace(architecture: str | None) -> int:
    """Bytes of the cuBLAS or hipBLAS workspace, once per stream; 0 on a CPU.

    Source: ATen's cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize.
    """
    if architecture is None:
        return 0
    if architecture.startswith("gfx"):
        return 128 * 2**20 if architecture.startswith(("gfx94", "gfx95")) else 32 * 2**20
    generation = int(architecture.removeprefix("sm_")) // 10
    return 32 * 2**20 if generation >= 9 else 8 * 2**20 + 128 * 2**10


def outside_bytes(num_communicators: int) -> int:
    """Bytes of a GPU that a rank uses outside torch's allocator."""
    return CONTEXT_BYTES + num_communicators * COMMUNICATOR_BYTES


def minimum_needed(allocated: float) -> float:
    """Smallest memory of a GPU, in bytes, for tensors that take `allocated` at once."""
    return allocated * (1 + FRAGMENTATION) + CONTEXT_BYTES


def gigabytes(num_bytes: float) -> str:
    """A size as text, such as `12.34 GiB`; in MiB below a tenth of a GiB."""
    if num_bytes < GIB // 10:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


_ORDER = (
    *("weights", "gradients", "optimizer", "buffers", "inputs"),
    *("activations", "stash", "messages", "units", "workspace"),
    *("end of step", "libraries", "setup", "fragmentation", "boxes", "outside"),
)


def _table_order(kind: str) -> tuple[int, str]:
    """Sort key of a kind in a table."""
    return _ORDER.index(kind.split("/")[0]), kind if "/" in kind else ""


def table(ranks: Mapping[int, RankMemory], limit: int = 8) -> str:
    """Table with a line for each kind and a column for each pipeline rank; marks the largest.

    Args:
        ranks: pipeline rank -> its memory.
        limit: largest number of columns; of more ranks the first, the last and the largest appear.
    """
    largest = max(ranks, key=lambda rank: ranks[rank].needed)
    shown = sorted(ranks)
    if len(shown) > limit:
        shown = sorted({*shown[: limit // 2], *shown[-(limit // 2) + 1 :], largest})
    columns = {rank: ranks[rank].kinds() for rank in shown}
    kinds = sorted({kind for column in columns.values() for kind in column}, key=_table_order)
    unit, size = ("GiB", GIB) if ranks[largest].needed >= GIB else ("MiB", 2**20)
    rows = [[unit, *(f"pp {rank}{' *' if rank == largest else ''}" for rank in shown)]]
    for kind in kinds:
        rows.append([kind, *(f"{columns[rank].get(kind, 0) / size:.3f}" for rank in shown)])
    sums = ["allocated", "needed"]
    if any(memory.host for memory in ranks.values()):
        sums.append("host")
    for name in sums:
        rows.append([f"= {name}", *(f"{getattr(ranks[rank], name) / size:.3f}" for rank in shown)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )

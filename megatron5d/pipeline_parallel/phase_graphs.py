"""CUDA graphs of phases (`train.cuda_graph=phases`): each replay costs the host one launch,
whatever the phase contains.

A slot is the memory of one micro-batch in flight: its static inputs, and a memory pool in which the
graphs of its phases are captured in the order of their passes, forward, backward, weight gradients.
Memory that one graph frees is reused by a later one; this stays correct because every micro-batch
passes the slot in that same order, and the slot takes the next one only after the last weight
gradient. So micro-batches whose backward is split (I, W) have separate slots. A rank has as
many slots as its schedule has micro-batches in flight.

The first step with a new signature of micro-batches runs without graphs: it compiles kernels and
connects communicators, neither of which may happen in a capture. Hooks run between the graphs as
usual: weights are gathered, gradients reduced. Under ZeRO-2 and 3 both have the same addresses in
every step (data_parallel/temporary_buffer.py). A collective that a phase starts and a later phase
would await ends with the first phase's graph instead.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron5d.comm.collectives import CAPTURE
from megatron5d.comm.ledger import Ledger, Traffic
from megatron5d.phases.phase import MicroBatch, Phase
from megatron5d.phases.saved_phase import SavedMicroBatch, SavedPhase, Step
from megatron5d.precision.gemm import forget_copies
from megatron5d.topology.shard_spec import state_of

Replay = Callable[[], None]
Signature = tuple[Any, ...]
"""What micro-batches of one slot share: split backward or not, shapes, dtypes, absent fields."""


class GraphPool(Protocol):
    """Captures graphs that share memory."""

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        """Runs `work` without executing what it launches.

        Returns:
            Its result, whose values each replay computes, and the replay.
        """

    def release(self) -> None:
        """Destroys the graphs, which NCCL requires before it closes their communicators."""


class CudaGraphPool:
    """A memory pool of the caching allocator, and the CUDA graphs in it."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # A phase may only pass on its input.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        graph = torch.cuda.CUDAGraph()
        # thread_local, because other threads pin batches and watch collectives meanwhile, which a
        # global capture would forbid
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            with suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        self._graphs.append(graph)
        return result, graph.replay

    def release(self) -> None:
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


class PhaseGraphs:
    """The slots of one stage.

    Args:
        ledger: counts what graphs send, at each replay.
        new_pool: makes the memory of a slot.
    """

    def __init__(self, ledger: Ledger, new_pool: Callable[[], GraphPool] = CudaGraphPool) -> None:
        self.ledger, self._new_pool = ledger, new_pool
        self._pools: list[GraphPool] = []
        self._seen: set[Signature] = set()  # in this step or an earlier one
        self._warm: set[Signature] = set()  # in an earlier step, and so ready for capture
        self._free: defaultdict[Signature, list[GraphSlot]] = defaultdict(list)
        self._num_microbatches = 0

    def new_pool(self) -> GraphPool:
        """Makes the memory of a slot, which `release` will free."""
        self._pools.append(self._new_pool())
        return self._pools[-1]

    def release(self) -> None:
        """Destroys all graphs, as must be done before the process group is destroyed."""
        for pool in self._pools:
            pool.release()
        self._pools.clear()
        self._free.clear()

    @property
    def captures(self) -> bool:
        """Whether the next micro-batches of a known signature will be captured."""
        return bool(self._warm - self._free.keys())

    def start_step(self, num_microbatches: int, eager: bool = False) -> None:
        """Begins a step.

        Args:
            num_microbatches: of the step. Phases compute with it, and addresses depend on it: a new
                number destroys all graphs, and its first step runs without graphs.
            eager: this step runs without graphs.
        """
        if num_microbatches != self._num_microbatches:
            self.release()
            self._num_microbatches, eager = num_microbatches, True
        self._warm = set() if eager else self._warm | self._seen
        self._seen = self._seen | self._warm
        # A capture cannot use blocks that eager steps have left. Returning them to CUDA waits for
        # the device: later in the step that might wait for a message of a peer that waits here.
        if self.captures:
            torch.cuda.empty_cache()

    def open(self, phases: Sequence[Phase], batch: MicroBatch, split: bool) -> SavedMicroBatch:
        """Makes the state of a micro-batch: in a slot, or without graphs if its signature is new.

        Args:
            phases: of the stage.
            batch: a batch that context parallelism has planned individually gets no graphs.
            split: its backward runs as I and W.
        """
        if batch.context is not None and batch.context.documents is not None:
            return SavedMicroBatch(batch, len(phases))
        signature = (split, *_signature(batch))
        self._seen.add(signature)
        if signature not in self._warm:
            return SavedMicroBatch(batch, len(phases))
        free = self._free[signature]
        if not free:
            return GraphSlot(self, batch, len(phases), free)
        slot = free.pop()
        slot.take(batch)
        return slot


class GraphSlot(SavedMicroBatch):
    """The memory and the graphs of one micro-batch in flight.

    Args:
        graphs: of the stage.
        batch: the first micro-batch; graphs read the static copy of it.
        num_phases: of the stage.
        free: the free slots with this signature.
    """

    def __init__(
        self, graphs: PhaseGraphs, batch: MicroBatch, num_phases: int, free: list[GraphSlot]
    ) -> None:
        tensors = {
            name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        super().__init__(replace(batch, **tensors), num_phases)
        # the fields alone, before phases add results to the batch's cache
        self._static_fields = tuple(vars(self.batch).values())
        self._graphs, self._free, self._pool = graphs, free, graphs.new_pool()
        self._runs: dict[tuple[str, int], _Run] = {}
        self._last: _Run | None = None
        # a copy with a separate cache, for phases without graphs
        self._uncaptured = copy(self.batch)

    def take(self, batch: MicroBatch) -> None:
        """Takes the next micro-batch."""
        _fill(self._static_fields, tuple(vars(batch).values()))
        self._uncaptured = copy(self.batch)

    def batch_for(self, phase: Phase) -> MicroBatch | None:
        return self.batch if phase.capturable else self._uncaptured

    def open(self, step: Step) -> SavedPhase:
        if not step.phase.capturable:
            return super().open(step)
        if self.phases[step.position] is None:
            self.phases[step.position] = _GraphedPhase(self, step)
        return self.saved_phase(step)

    def evaluate(self, step: Step, x: Any) -> Any:
        if not step.phase.capturable:
            return super().evaluate(step, x)
        return self.run("evaluate", step, lambda x: super(GraphSlot, self).evaluate(step, x), x)

    def finish(self, op: str, state: Any) -> Any:
        """Frees the slot after the last action; copies the state that leaves the stage.

        Its reader may run when the slot already has another micro-batch.
        """
        if op in "BW":
            self._free.append(self)
            self.phases = [
                saved if isinstance(saved, _GraphedPhase) else None for saved in self.phases
            ]
        return state.clone() if isinstance(state, Tensor) else state

    def run(self, kind: str, step: Step, work: Callable[[Any], Any], state: Any) -> Any:
        """Replays `work(state)`; captures it the first time."""
        run = self._runs.get((kind, step.position))
        if run is None:
            run = self._runs[kind, step.position] = self._capture(step, work, state)
        elif state is not run.static_input:
            _fill(run.static_input, state)
        run.replay()
        self._graphs.ledger.add(run.traffic)
        self._last = run
        return run.result

    def _capture(self, step: Step, work: Callable[[Any], Any], state: Any) -> _Run:
        before, ledger = self._last, self._graphs.ledger
        follows = before is not None and before.result is state
        is_result = follows or any(run.result is state for run in self._runs.values())
        static_input = state if is_result else _copied(state)
        weights = list(step.phase.parameters())
        # The graph must quantize the weights itself: existing FP8 copies are those of this step.
        forget_copies(weights, gathered=False)
        with ledger.recording() as traffic:
            result, replay = self._pool.capture(lambda: CAPTURE.run(lambda: work(static_input)))
        forget_copies(weights, gathered=False)
        if follows and before is not None and not step.starts_group and state is not None:
            # The state stays inside the pool, so no tensor need be kept for it.
            static_input = before.result = _InPool()
        return _Run(static_input, result, replay, traffic)

    def run_wgrad(self, step: Step, work: Callable[[Any], Any]) -> None:
        """As `run`, for weight gradients: in B the gradient passes from phase to phase around
        them."""
        last = self._last
        self.run("wgrad", step, work, None)
        self._last = last


class _InPool:
    """Represents a state that one graph leaves to the next, in memory that later graphs reuse."""


@dataclass(slots=True)
class _Run:
    """A captured graph."""

    static_input: Any
    result: Any
    replay: Replay
    traffic: dict[tuple[str, str], Traffic]


class _GraphedPhase(SavedPhase):
    """A phase in a slot. B replays the graphs of I and W."""

    __slots__ = ("_slot", "_step", "_defers", "_allocators")

    def __init__(self, slot: GraphSlot, step: Step) -> None:
        super().__init__(step.phase, slot.batch)
        self._slot, self._step, self._defers = slot, step, False
        # of its buckets' gradients
        self._allocators = {
            state_of(parameter).allocate_main_grad for parameter in step.phase.parameters()
        }

    def forward(self, x: Any) -> Any:
        return self._slot.run("forward", self._step, super().forward, x)

    def backward(self, grad: Any, split: bool) -> Any:
        if self.phase.adds_grads_at_once:
            self._allocate()
        grad = self._slot.run(
            "backward", self._step, lambda g: super(_GraphedPhase, self).backward(g, True), grad
        )
        if not split:
            self.run_wgrad()
        return grad

    def run_wgrad(self) -> None:
        self._defers = self._defers or bool(self.weight_grads.closures)
        if self._defers:
            self._allocate()
            self._slot.run_wgrad(self._step, lambda _: super(_GraphedPhase, self).run_wgrad())

    def _allocate(self) -> None:
        """Allocates and zeroes gradients before the capture, whose replays would else zero them."""
        for allocate in self._allocators:
            if allocate is not None:
                allocate()


def _signature(batch: MicroBatch) -> Signature:
    return tuple(
        (value.shape, value.dtype) if isinstance(value, Tensor) else id(value)
        for value in vars(batch).values()
    )


def _copied(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_copied, state))
    return state.clone() if isinstance(state, Tensor) else state


def _fill(static: Any, state: Any) -> None:
    """Copies a state into the memory that graphs read."""
    if isinstance(static, tuple):
        for target, source in zip(static, state, strict=True):
            _fill(target, source)
    elif isinstance(static, Tensor):
        static.copy_(state)
    else:
        assert static is state, f"a graph was captured with {static}, but replayed with {state}"

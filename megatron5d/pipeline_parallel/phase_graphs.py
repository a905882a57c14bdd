"""CUDA graphs of phases (`train.cuda_graph=phases`): each replay costs the host one launch,
whatever the phase holds.

A slot is the memory of one micro-batch in flight: its static inputs, and a memory pool in which the
graphs of its phases are captured in the order of their passes, forward, backward, weight gradients.
What one graph frees, a later one uses again; this stays right because every micro-batch passes the
slot in that same order, and the slot takes the next one only after the last weight gradient. So
micro-batches whose backward is split (I, W) have slots of their own. A rank has as many slots as
its schedule has micro-batches in flight, whichever schedule that is.

The first step that meets a form of micro-batch runs without graphs: it compiles kernels and
connects communicators, neither of which may happen in a capture. Between the graphs hooks run as
ever: weights are gathered, gradients reduced. Under ZeRO-2 and 3 both have the same addresses in
every step (data_parallel/temporary_buffer.py). Collectives that a phase leaves under way for the
next one end with its graph instead.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
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
Form = tuple[Any, ...]
"""What micro-batches of one slot have in common: how the backward runs, shapes, dtypes, what is missing."""


class GraphPool(Protocol):
    """Captures graphs that share memory."""

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        """Runs `work` without doing what it launches; returns its result, whose values each
        `Replay` makes."""

    def release(self) -> None:
        """Destroys the graphs. NCCL waits for that of every graph in which it sends before it ends
        a communicator."""


class CudaGraphPool:
    """A memory pool of the caching allocator, and the CUDA graphs in it."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        # a phase may only pass on what it is given
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Replay]:
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held to a capture's rules: others pin batches and watch
        # collectives meanwhile.
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
        self._met: set[Form] = set()  # in this step
        self._warm: set[Form] = set()  # in earlier ones
        self._free: defaultdict[Form, list[Slot]] = defaultdict(list)
        self._num_microbatches = 0

    def new_pool(self) -> GraphPool:
        """Returns the memory of a slot."""
        self._pools.append(self._new_pool())
        return self._pools[-1]

    def release(self) -> None:
        """Destroys all graphs; before the process group is destroyed, too."""
        for pool in self._pools:
            pool.release()
        self._pools.clear()
        self._free.clear()

    @property
    def captures(self) -> bool:
        """Whether the next micro-batches of a form that has been met are captured."""
        return bool(self._warm - self._free.keys())

    def start_step(self, num_microbatches: int, eager: bool = False) -> None:
        """Begins a step.

        Args:
            num_microbatches: of the step. Phases compute with it, and addresses depend on it:
                graphs of steps with another number are dropped, and the first step with a new one
                runs without.
            eager: this step runs without graphs.
        """
        if num_microbatches != self._num_microbatches:
            self.release()
            self._num_microbatches, eager = num_microbatches, True
        self._warm = set() if eager else self._warm | self._met
        self._met = self._met | self._warm
        # What eager steps have left no capture can use. To give it back waits for the device: later
        # in the step that might wait for a message of a peer that waits here.
        if self.captures:
            torch.cuda.empty_cache()

    def open(self, phases: Sequence[Phase], batch: MicroBatch, split: bool) -> SavedMicroBatch:
        """Returns where a micro-batch is kept: in a slot, or without graphs where its form is new.

        Args:
            batch: what they read; one that context parallelism has planned for itself alone gets no
                graphs.
            split: its backward runs as I and W.
        """
        if batch.context is not None and batch.context.documents is not None:
            return SavedMicroBatch(batch, len(phases))
        form = (split, *_form(batch))
        self._met.add(form)
        if form not in self._warm:
            return SavedMicroBatch(batch, len(phases))
        free = self._free[form]
        if not free:
            return Slot(self, batch, len(phases), free)
        slot = free.pop()
        slot.take(batch)
        return slot


class Slot(SavedMicroBatch):
    """The memory and the graphs of one micro-batch in flight.

    Args:
        batch: the first micro-batch; the static copy of it is what graphs read.
        free: the slots of this form that are free.
    """

    def __init__(
        self, graphs: PhaseGraphs, batch: MicroBatch, num_phases: int, free: list[Slot]
    ) -> None:
        tensors = {
            name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)
        }
        super().__init__(replace(batch, **tensors), num_phases)
        # before phases add to it what they make `once`
        self.given = tuple(vars(self.batch).values())
        self._graphs, self._free, self._pool = graphs, free, graphs.new_pool()
        self._runs: dict[tuple[str, int], _Run] = {}
        self._last: _Run | None = None
        # what phases without graphs have worked out from it goes with it
        self._uncaptured = copy(self.batch)

    def take(self, batch: MicroBatch) -> None:
        """Takes the next micro-batch."""
        _fill(self.given, tuple(vars(batch).values()))
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
        return self.run("evaluate", step, lambda x: super(Slot, self).evaluate(step, x), x)

    def finish(self, op: str, state: Any) -> Any:
        """Returns what leaves the stage in memory of its own, which is read when the slot may hold
        another one's."""
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
        elif state is not run.given:
            _fill(run.given, state)
        run.replay()
        self._graphs.ledger.add(run.traffic)
        self._last = run
        return run.result

    def _capture(self, step: Step, work: Callable[[Any], Any], state: Any) -> _Run:
        before, ledger = self._last, self._graphs.ledger
        follows = before is not None and before.result is state
        given = (
            state
            if follows or any(run.result is state for run in self._runs.values())
            else _copied(state)
        )
        weights = list(step.phase.parameters())
        # FP8 copies, which the graph makes anew: others would be those of the capture's step
        forget_copies(weights, gathered=False)
        with ledger.recording() as traffic:
            result, replay = self._pool.capture(lambda: CAPTURE.run(lambda: work(given)))
        forget_copies(weights, gathered=False)
        if follows and before is not None and not step.starts_group and state is not None:
            given = before.result = _Passed()  # from graph to graph: no tensor need be kept for it
        return _Run(given, result, replay, traffic)


class _Passed:
    """Stands for a state that one graph leaves to the next one, in memory that later graphs use
    again."""


class _Run:
    """A captured graph, what it reads, and what it leaves."""

    __slots__ = ("given", "result", "replay", "traffic")

    def __init__(
        self, given: Any, result: Any, replay: Replay, traffic: dict[tuple[str, str], Traffic]
    ) -> None:
        self.given, self.result, self.replay, self.traffic = given, result, replay, traffic


class _GraphedPhase(SavedPhase):
    """A phase in a slot. B replays what I and W would."""

    __slots__ = ("_slot", "_step", "_defers", "_allocate_grads")

    def __init__(self, slot: Slot, step: Step) -> None:
        super().__init__(step.phase, slot.batch)
        self._slot, self._step, self._defers = slot, step, False
        found = {state_of(each).allocate_main_grad for each in step.phase.parameters()}
        # of its buckets
        self._allocate_grads = [allocate for allocate in found if allocate is not None]

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
            last = self._slot._last
            self._slot.run(
                "wgrad", self._step, lambda _: super(_GraphedPhase, self).run_wgrad(), None
            )
            self._slot._last = last  # in B the gradient passes by

    def _allocate(self) -> None:
        """Allocates and zeroes the gradients before the graph, which would else hold the zeroing
        and repeat it."""
        for allocate in self._allocate_grads:
            allocate()


def _form(batch: MicroBatch) -> Form:
    fields = vars(batch).values()
    return tuple(
        (each.shape, each.dtype) if isinstance(each, Tensor) else id(each) for each in fields
    )


def _copied(state: Any) -> Any:
    if isinstance(state, tuple):
        return tuple(map(_copied, state))
    return state.clone() if isinstance(state, Tensor) else state


def _fill(static: Any, state: Any) -> None:
    """Copies a state into the memory that graphs read."""
    if isinstance(static, tuple):
        for to, source in zip(static, state, strict=True):
            _fill(to, source)
    elif isinstance(static, Tensor):
        static.copy_(state)
    else:
        assert static is state, f"a graph was captured with {static}, and is replayed with {state}"

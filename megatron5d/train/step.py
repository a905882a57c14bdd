"""One optimiser step: micro-batches forward and backward through the pipeline, one reduction, one
update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from megatron5d.comm.collectives import Pending, all_reduce, start_all_reduce
from megatron5d.config.schema import OptimConfig
from megatron5d.context_parallel.block_attention import imbalance
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.embedding_head import Term
from megatron5d.optim.optimizer import Optimizer, clip_coefficient, global_square_sum
from megatron5d.phases.phase import MicroBatch
from megatron5d.pipeline_parallel.executor import Pipeline
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.train.guard import Guard, StepSamples

if TYPE_CHECKING:
    from megatron5d.expert_parallel.dispatcher import SendCapacity
    from megatron5d.expert_parallel.load_balancing import Balancer


def sum_over_ranks(vectors: Sequence[torch.Tensor], world: Axis) -> list[list[float]]:
    """Sums fp64 vectors over all ranks in one collective, and waits for the device.

    Comm: all_reduce world of their elements.
    """
    totals = all_reduce(torch.cat(list(vectors)), world).tolist()
    starts = accumulate((len(vector) for vector in vectors), initial=0)
    return [totals[start : start + len(vector)] for start, vector in zip(starts, vectors)]


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, the same on every rank unless they say otherwise."""

    # of the global batch: means over target tokens (loss, z_loss), NaN of none; the routers' losses
    losses: dict[str, float]
    grad_norm: float  # before clipping
    num_targets: int  # target tokens of the global batch
    stop: bool  # some rank was asked to stop
    cp_balance: float = 1.0  # block_attention.imbalance, mean over dp; 1 = even
    # what the routers did, layer by layer, if asked for
    layers: dict[str, float] = field(default_factory=dict)
    # this rank: seconds in which it waited for weights and did nothing else
    zero_exposed_s: float = 0.0
    # this rank: share of the passes' time in which it waited for its pipeline neighbours
    bubble: float = 0.0
    skipped: str | None = None  # why the update was left out; None = it was made
    # forward and backward were run once more, with counted rows (moe.exchange=planned)
    repeated: bool = False


class Trainer:
    """Runs steps over the local stages of a model.

    Args:
        pipeline: this rank's stages; the last stage of the model returns the sums of `terms`.
        terms: what the last stage's sums are for.
        config: the largest gradient norm, and what is done with steps that are not finite.
        balancer: of the MoE layers here; None = a dense model.
        send_capacity: of rows sent to experts; None = they are counted.
        check_overlap: raises if another rank has not sent what this step was computed from
            (tp_overlap=fused).
        masked_by: what may leave a global batch without a target, for the message.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sync: GradSync,
        optimizer: Optimizer,
        mesh: Mesh,
        terms: Sequence[Term],
        config: OptimConfig,
        balancer: Balancer | None = None,
        send_capacity: SendCapacity | None = None,
        *,
        check_overlap: Callable[[], None],
        masked_by: str,
    ) -> None:
        self.pipeline, self.sync, self.optimizer, self.mesh = pipeline, sync, optimizer, mesh
        self.terms, self.clip = tuple(terms), config.clip
        self.balancer, self.send_capacity = balancer, send_capacity
        self.check_overlap = check_overlap
        self.guard = Guard(config, mesh, sync.buckets, masked_by)
        self._kinds: set[frozenset[str]] = set()  # of the micro-batches so far

    def step(
        self,
        batches: Sequence[MicroBatch],
        lr: float,
        stop: bool = False,
        watched: bool = False,
        where: StepSamples | None = None,
    ) -> StepResult:
        """Runs forward and backward of all micro-batches, reduces gradients, and updates the
        weights once.

        Args:
            batches: this rank's micro-batches `[b, s/cp]`, the same number on every rank; without
                any no step is made, nothing is computed, and nothing moves.
            stop: this rank was asked to stop; all ranks learn of it in the step's reduction.
            watched: collect what the routers do, layer by layer.
            where: the step's number and samples, for messages.

        Raises:
            FloatingPointError: the guard stops the run.
            TimeoutError: under tp_overlap=fused another rank has not sent its share; nothing was
                updated here.

        Comm: beside the layers' and the pipeline's: all_reduce dp_cp of the number of targets
            (where the loss is computed, before the first backward), gradient reduction, all_reduce
            world of a few numbers, what the optimiser sends (muon), all_gather of the weights (left
            pending); with experts all_reduce of counts over the stage, and over the world on a
            watched step.
        """
        if not batches:
            losses = {term.name: math.nan for term in self.terms}
            return StepResult(
                losses, math.nan, 0, stop=False, skipped=f"data.skip_steps leaves out {where}"
            )
        if self.send_capacity is not None:
            self.send_capacity.start_step()
        result, runs = None, 0
        # once more, with counted rows, where some rank had no room for its tokens
        while result is None:
            sums, runs = self.accumulate(batches, watched), runs + 1
            self.sync.finish_reduce()  # the owned slices now hold the mean gradient
            result = self._agree(sums, stop, imbalance_of(batches), where)
        result = replace(result, repeated=runs > 1)
        if result.skipped is None:
            self.optimizer.step(lr, clip_coefficient(result.grad_norm, self.clip))
            self.sync.start_gather()
            if self.balancer is not None:
                self.balancer.finish_step()
                if watched:
                    result = replace(result, layers=self.balancer.layer_figures(self.mesh["world"]))
        return result

    def _agree(
        self, sums: torch.Tensor, stop: bool, cp_balance: float, where: StepSamples | None
    ) -> StepResult | None:
        """Returns the step's figures, the same on every rank, from each rank's share of them; None
        without room for all rows.

        Args:
            sums: as `accumulate` returned them.
            stop: this rank was asked to stop.
            cp_balance: of this rank's micro-batches (`imbalance_of`).
            where: as in `step`.

        Comm: all_reduce world of a few numbers; more where the guard finds one that is not finite.
        """
        names, values = (
            ((), sums[:0]) if self.balancer is None else (self.balancer.names, self.balancer.values)
        )
        # not copied from the host, which would wait for the device
        stops, balances = sums.new_full((1,), float(stop)), sums.new_full((1,), cp_balance)
        capacity = self.send_capacity
        exceeded = sums.new_zeros(1) if capacity is None else capacity.exceeded
        grad_squares = global_square_sum(self.sync.buckets).view(1)
        self.pipeline.memory.start_check(self.mesh["world"])
        (square_sum,), router_losses, sum_totals, (num_stops,), (balance_sum,), (num_exceeded,) = (
            sum_over_ranks(
                (grad_squares, values, sums, stops, balances, exceeded), self.mesh["world"]
            )
        )
        self.pipeline.memory.finish_check()
        self.check_overlap()
        if capacity is not None and capacity.finish_step(num_exceeded):
            return None
        num_targets = round(sum_totals[len(self.terms)])
        losses = self.means(sum_totals) | dict(zip(names, router_losses))
        grad_norm = math.sqrt(square_sum)
        return StepResult(
            losses=losses,
            grad_norm=grad_norm,
            num_targets=num_targets,
            stop=num_stops > 0,
            cp_balance=balance_sum / self.mesh["world"].size,
            zero_exposed_s=self.sync.weights.exposure.take(),
            bubble=self.pipeline.take_bubble(),
            skipped=self.guard.refuses(losses["loss"], grad_norm, sums, num_targets, where),
        )

    def accumulate(self, batches: Sequence[MicroBatch], watched: bool = False) -> torch.Tensor:
        """Runs forward and backward of all micro-batches; once reduced, the owned slices hold the
        mean gradient.

        Args:
            batches: this rank's micro-batches of the step, on the host.
            watched: as in `step`.

        Returns:
            fp64 `[terms + counts]`: this rank's share of the sums over target tokens, then of the
            numbers of targets. Added up over the world they are those of the global batch.

        Comm: that of the layers, the pipeline and the reduction of gradients; all_reduce dp_cp of
            the numbers of
        targets, where the loss is computed.
        """
        device = self.sync.buckets[0].weights.device
        graphs = [stage.graphs for stage in self.pipeline.stages if stage.graphs is not None]
        self.sync.start_step(self.pipeline.passes(len(batches)), with_graphs=bool(graphs))
        loss = _SummedLoss(self.terms, device)
        if self.pipeline.has_loss:
            loss.start_counting(batches, self.mesh)
        batches = [batch.to(device) for batch in batches]
        eager = False  # whatever phases have been captured
        if self.balancer is not None:
            self._start_balancing(self.balancer, batches, watched)
            eager = watched  # such a step computes more
        if self.send_capacity is not None and not self.send_capacity.is_planned:
            eager = True  # counted rows are read on the host
        for each in graphs:
            each.start_step(len(batches), eager)
        executor = self.pipeline.executor(len(batches))
        is_new = (
            self._may_be_new(batches) or watched or eager or any(each.captures for each in graphs)
        )
        may_wait = is_new or self.pipeline.memory.is_short
        with self.pipeline.timed():
            executor.run(batches, loss, self.pipeline.forms, host_may_wait=may_wait)
        return self._counted_once(loss.sums)

    def _start_balancing(
        self, balancer: Balancer, batches: Sequence[MicroBatch], watched: bool
    ) -> None:
        """Sets the scale of the auxiliary losses; if one needs the choices of the whole batch,
        makes these first.

        Its gradient depends on counts that no micro-batch knows alone. One more forward makes it
        exact on any layout, for a third more compute.
        """
        num_tokens = torch.stack([batch.num_tokens for batch in batches]).sum()
        balancer.start_step(
            len(batches) * self.mesh["dp"].size, num_tokens, self.mesh["dp_cp"], watched
        )
        if any(stage.graphs is not None for stage in self.pipeline.stages):
            balancer.settle()
        if balancer.counts_ahead:
            balancer.start_counting()
            self.pipeline.evaluate(batches, lambda *_: None)
            balancer.finish_counting()

    def _may_be_new(self, batches: Sequence[MicroBatch]) -> bool:
        """Says whether micro-batches may need kernels that none before them has needed.

        Those of another kind do, and so may any whose tensors are as large as the data have it,
        because torch has kernels for sizes: of experts' rows that are counted, of documents that
        context parallelism divides.
        """
        kinds, self._kinds = self._kinds, self._kinds | {batch.kind for batch in batches}
        counted = (
            self.balancer is not None and self.send_capacity is None and self.mesh["ep"].size > 1
        )
        divided = any(
            batch.context is not None and batch.context.documents is not None for batch in batches
        )
        return counted or divided or self._kinds != kinds

    def release_graphs(self) -> None:
        """Destroys the CUDA graphs: those that communicate would let NCCL wait for ever where it
        ends."""
        for stage in self.pipeline.stages:
            if stage.graphs is not None:
                stage.graphs.release()

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Runs the forward of micro-batches on the host; returns what `accumulate` returns.

        Comm: that of the layers' forward and the pipeline.
        """
        device = self.sync.buckets[0].weights.device
        loss = _SummedLoss(self.terms, device)
        # without sample numbers nothing is random
        batches = [replace(batch, samples=None) for batch in batches]
        self.pipeline.evaluate([batch.to(device) for batch in batches], loss)
        return self._counted_once(loss.sums)

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """Returns the sums of `accumulate` or `evaluate`, totalled, as means by name; NaN of no
        target."""
        counts = totals[len(self.terms) :]
        held = [
            (term.name, total, counts[term.count_index]) for term, total in zip(self.terms, totals)
        ]
        found = {}
        for name in dict.fromkeys(term.name for term in self.terms):
            sums = [(total, count) for own, total, count in held if own == name and count]
            found[name] = (
                sum(1 / len(sums) * total / count for total, count in sums) if sums else math.nan
            )
        return found

    def _counted_once(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the sums on the first tp rank, zeros on the others: all tp ranks have computed
        the same loss."""
        return sums * (self.mesh["tp"].rank == 0)


def imbalance_of(batches: Sequence[MicroBatch]) -> float:
    """Returns how much longer attention takes than with equal work on cp ranks; 1 = equal, or whole
    sequences."""
    plans = [batch.context for batch in batches if batch.context is not None]
    return imbalance(plans) if plans else 1.0


class _SummedLoss:
    """Adds up what the last stage returns on this rank, and gives the gradient of their mean over
    the global batch."""

    def __init__(self, terms: Sequence[Term], device: torch.device) -> None:
        self._terms, num_counts = terms, max(term.count_index for term in terms) + 1
        self.sums = torch.zeros(len(terms) + num_counts, dtype=torch.float64, device=device)
        self._counting: Pending | None = None
        self._grad: torch.Tensor | None = None

    def start_counting(self, batches: Sequence[MicroBatch], mesh: Mesh) -> None:
        """Starts counting the targets of the global batch. Comm: all_reduce dp_cp of one number per
        kind of target."""
        targets = torch.stack([batch.target_counts for batch in batches]).sum(0)
        if self.sums.is_cuda:
            targets = targets.pin_memory()  # the copy is not waited for
        targets = targets.to(self.sums.device, non_blocking=True)
        self._counting = start_all_reduce(targets, mesh["dp_cp"])

    def __call__(self, batch: MicroBatch, y: torch.Tensor) -> torch.Tensor | None:
        # y: [terms], sums over this micro-batch's tokens
        self.sums += torch.cat((y.double(), batch.target_counts))
        if self._counting is not None:
            self._grad = self._gradient(self._counting.wait()).to(y.dtype)
            self._counting = None
        return self._grad

    def _gradient(self, counts: torch.Tensor) -> torch.Tensor:
        """Computes fp64 `[terms]`, the gradients of the sums, from the global batch's numbers of
        targets."""
        some = (counts > 0).to(counts.dtype)
        found = []
        for term in self._terms:
            alike = [some[other.count_index] for other in self._terms if other.name == term.name]
            num_alike = torch.stack(alike).sum().clamp(min=1)
            found.append(term.coefficient / num_alike / counts[term.count_index].clamp(min=1))
        return torch.stack(found)

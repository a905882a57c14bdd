"""One optimizer step: forward and backward of all micro-batches, one reduction, one update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron5d.comm.collectives import Pending, all_reduce, start_all_reduce
from megatron5d.config.derived import batch_schedule
from megatron5d.config.schema import Config, OptimConfig
from megatron5d.context_parallel.block_attention import imbalance
from megatron5d.data.batch import Loader
from megatron5d.data_parallel.grad_sync import GradSync
from megatron5d.model.embedding_head import Term
from megatron5d.optim.lr_schedule import learning_rate
from megatron5d.optim.optimizer import Optimizer, clip_coefficient, global_square_sum
from megatron5d.phases.phase import MicroBatch
from megatron5d.pipeline_parallel.executor import Pipeline
from megatron5d.topology.axis import Axis
from megatron5d.topology.mesh import Mesh
from megatron5d.train.guard import Guard, StepSamples
from megatron5d.train.state import Progress

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
    """Figures of one step, the same on every rank unless they say otherwise.

    Args:
        losses: of the global batch: means over target tokens (loss, z_loss; NaN without a target)
            and the losses of the routers.
        grad_norm: before clipping.
        num_targets: target tokens of the global batch.
        stop: some rank was asked to stop.
        cp_balance: `block_attention.imbalance`, mean over dp; 1 = even.
        layers: figures of the routers by layer, if requested.
        zero_exposed_s: seconds in which this rank only waited for weights.
        bubble: share of the passes' time in which this rank waited for pipeline neighbors.
        skipped: why there was no update; None = the weights were updated.
        repeated: forward and backward ran again, with counted rows (moe.exchange=planned).
    """

    losses: dict[str, float]
    grad_norm: float
    num_targets: int
    stop: bool
    cp_balance: float = 1.0
    layers: dict[str, float] = field(default_factory=dict)
    zero_exposed_s: float = 0.0
    bubble: float = 0.0
    skipped: str | None = None
    repeated: bool = False


class Trainer:
    """Runs steps over the local stages of a model.

    Args:
        pipeline: this rank's stages; the last stage of the model returns the sums of `terms`.
        terms: of the loss, in the order of the last stage's sums.
        config: clipping, and the policy for steps that are not finite.
        balancer: of this rank's MoE layers; None = a dense model.
        send_capacity: of rows sent to experts; None = they are counted.
        check_overlap: raises if an input of this step never arrived (tp_overlap=fused).
        masked_by: names what can mask all targets of a global batch, for the message.
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
        self._kinds: set[frozenset[str]] = set()  # of all micro-batches so far

    def step(
        self,
        batches: Sequence[MicroBatch],
        lr: float,
        stop: bool = False,
        watched: bool = False,
        samples: StepSamples | None = None,
    ) -> StepResult:
        """Runs forward and backward of all micro-batches, and updates the weights once.

        Args:
            batches: this rank's micro-batches `[b, s/cp]`, the same number on every rank; an empty
                list skips the step without any computation.
            stop: this rank was asked to stop; the step's reduction tells all ranks.
            watched: collect figures of the routers by layer.
            samples: the step's number and samples, for messages.

        Raises:
            FloatingPointError: the guard stops the run.
            TimeoutError: under tp_overlap=fused another rank has not sent its share; no weight was
                updated here.

        Comm: that of the layers and the pipeline; all_reduce dp_cp of the number of targets (where
            the loss is computed, before the first backward); gradient reduction; all_reduce world
            of a few numbers; that of the optimizer (muon); all_gather of the weights (left
            pending). With experts, all_reduce of counts over the stage, on a watched step over the
            world.
        """
        if not batches:
            losses = {term.name: math.nan for term in self.terms}
            reason = f"data.skip_steps skips {samples}"
            return StepResult(losses, math.nan, 0, stop=False, skipped=reason)
        if self.send_capacity is not None:
            self.send_capacity.start_step()
        result, runs = None, 0
        # Repeats the step with counted rows if some rank's send capacity was too small.
        while result is None:
            sums, runs = self.accumulate(batches, watched), runs + 1
            self.sync.finish_reduce()  # owned slices now hold the mean gradient
            result = self._agree(sums, stop, imbalance_of(batches), samples)
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
        self, sums: torch.Tensor, stop: bool, cp_balance: float, samples: StepSamples | None
    ) -> StepResult | None:
        """The step's figures from each rank's share of them; None = the step must be repeated.

        Args:
            sums: as `accumulate` returned them.
            stop: this rank was asked to stop.
            cp_balance: of this rank's micro-batches (`imbalance_of`).
            samples: as in `step`.

        Comm: all_reduce world of a few numbers; more where the guard finds one that is not finite.
        """
        balancer = self.balancer
        names, values = (balancer.loss_names, balancer.loss_values) if balancer else ((), sums[:0])
        # Filled on the device: a copy from the host would wait for it.
        stops, balances = sums.new_full((1,), float(stop)), sums.new_full((1,), cp_balance)
        capacity = self.send_capacity
        exceeded = sums.new_zeros(1) if capacity is None else capacity.exceeded
        grad_squares = global_square_sum(self.sync.buckets).view(1)
        terms = (grad_squares, values, sums, stops, balances, exceeded)
        self.pipeline.memory.start_check(self.mesh["world"])
        totals = sum_over_ranks(terms, self.mesh["world"])
        [square_sum], router_losses, sum_totals, [num_stops], [balance_sum], [num_exceeded] = totals
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
            skipped=self.guard.refuses(losses["loss"], grad_norm, sums, num_targets, samples),
        )

    def accumulate(self, batches: Sequence[MicroBatch], watched: bool = False) -> torch.Tensor:
        """Runs forward and backward of all micro-batches and accumulates their gradients.

        Args:
            batches: this rank's micro-batches of the step, on the host.
            watched: as in `step`.

        Returns:
            fp64 `[terms + counts]`: this rank's share of the sums over target tokens, then of the
            numbers of targets. Their sums over the world are those of the global batch.

        Comm: that of the layers, the pipeline and the reduction of gradients; all_reduce dp_cp of
            the numbers of targets, where the loss is computed.
        """
        device = self.sync.buckets[0].weights.device
        graphs = [stage.graphs for stage in self.pipeline.stages if stage.graphs is not None]
        self.sync.start_step(self.pipeline.passes(len(batches)), with_graphs=bool(graphs))
        loss = _SummedLoss(self.terms, device)
        if self.pipeline.has_loss:
            loss.start_counting(batches, self.mesh)
        batches = [batch.to(device) for batch in batches]
        eager = False  # run without graphs, even if phases have been captured
        if self.balancer is not None:
            self._start_balancing(self.balancer, batches, watched)
            eager = watched  # a watched step computes additional figures
        if self.send_capacity is not None and not self.send_capacity.is_planned:
            eager = True  # the host reads counted rows
        for stage_graphs in graphs:
            stage_graphs.start_step(len(batches), eager)
        executor = self.pipeline.executor(len(batches))
        captures = any(stage_graphs.captures for stage_graphs in graphs)
        is_new = self._may_be_new(batches) or watched or eager or captures
        may_wait = is_new or self.pipeline.memory.is_short
        with self.pipeline.timed():
            executor.run(batches, loss, self.pipeline.forms, host_may_wait=may_wait)
        return self._counted_once(loss.sums)

    def _start_balancing(
        self, balancer: Balancer, batches: Sequence[MicroBatch], watched: bool
    ) -> None:
        """Sets the scale of the auxiliary losses, and counts the batch's choices if one needs them.

        The gradient of such a loss depends on counts of the whole batch. One more forward makes it
        exact on any layout, for a third more compute.
        """
        num_tokens = torch.stack([batch.num_tokens for batch in batches]).sum()
        balancer.start_step(
            len(batches) * self.mesh["dp"].size, num_tokens, self.mesh["dp_cp"], watched
        )
        if any(stage.graphs is not None for stage in self.pipeline.stages):
            balancer.wait_for_scale()
        if balancer.needs_counts_first:
            balancer.start_counting()
            self.pipeline.evaluate(batches, lambda *_: None)
            balancer.finish_counting()

    def _may_be_new(self, batches: Sequence[MicroBatch]) -> bool:
        """Whether micro-batches may need kernels that no earlier one has needed.

        Micro-batches of a new kind do. So may those whose tensor sizes depend on the data, because
        torch has kernels for sizes: counted rows of experts, documents under context parallelism.
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
        """Destroys the CUDA graphs: NCCL would hang at its end on those with collectives."""
        for stage in self.pipeline.stages:
            if stage.graphs is not None:
                stage.graphs.release()

    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Runs the forward of micro-batches that are on the host.

        Returns:
            Sums and counts, as of `accumulate`.

        Comm: that of the layers' forward and the pipeline.
        """
        device = self.sync.buckets[0].weights.device
        loss = _SummedLoss(self.terms, device)
        # Without sample numbers the forward has no randomness.
        batches = [replace(batch, samples=None) for batch in batches]
        self.pipeline.evaluate([batch.to(device) for batch in batches], loss)
        return self._counted_once(loss.sums)

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """Means by name from totals of `accumulate` or `evaluate`; NaN without a target."""
        counts = totals[len(self.terms) :]
        pairs: dict[str, list[tuple[float, float]]] = {term.name: [] for term in self.terms}
        for term, total in zip(self.terms, totals):
            if count := counts[term.count_index]:
                pairs[term.name].append((total, count))
        return {
            name: sum(1 / len(sums) * total / count for total, count in sums) if sums else math.nan
            for name, sums in pairs.items()
        }

    def _counted_once(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums on the first tp rank, else zeros: all tp ranks have computed the same loss."""
        return sums * (self.mesh["tp"].rank == 0)


def imbalance_of(batches: Sequence[MicroBatch]) -> float:
    """How much longer attention takes than with equal work on cp ranks; 1 = equal, or no cp."""
    plans = [batch.context for batch in batches if batch.context is not None]
    return imbalance(plans) if plans else 1.0


class NextStep(NamedTuple):
    """Arguments of one `Trainer.step`.

    Args:
        batches: gbs/(mbs·dp) micro-batches of `[mbs, s/cp]` tokens; none in data.skip_steps.
        lr: learning rate.
        watched: collect figures of the routers by layer.
        samples: number of the step and of its samples.
    """

    batches: list[MicroBatch]
    lr: float
    watched: bool
    samples: StepSamples

    def run(self, trainer: Trainer, stop: bool = False) -> StepResult:
        """Makes the step; `stop`, errors and communication are those of `Trainer.step`."""
        return trainer.step(self.batches, self.lr, stop, self.watched, self.samples)


def next_step(config: Config, loader: Loader, progress: Progress) -> NextStep:
    """The step after `progress`, of which the loader reads the data."""
    step, first = progress.step + 1, loader.consumed_samples
    lr = learning_rate(config.optim, step, config.train.steps, batch_schedule(config))
    batches = next(loader)
    samples = StepSamples(step, range(first, loader.consumed_samples))
    return NextStep(batches, lr, step == 1 or is_due(step, config.moe.log_every), samples)


def advance(progress: Progress, result: StepResult, samples: StepSamples, in_a_row: int) -> None:
    """Counts a step that was made.

    Args:
        in_a_row: skipped steps since the last update.
    """
    progress.step += 1
    progress.skipped += result.skipped is not None
    progress.skipped_in_a_row = in_a_row
    progress.consumed_samples = samples.samples.stop
    progress.tokens += result.num_targets


def is_due(step: int, every: int) -> bool:
    """Whether what happens every `every` steps (0 = never) happens after this one."""
    return every > 0 and step % every == 0


class _SummedLoss:
    """Sums of this rank's last stage, and the gradient of their mean over the global batch."""

    def __init__(self, terms: Sequence[Term], device: torch.device) -> None:
        self._terms, num_counts = terms, max(term.count_index for term in terms) + 1
        self.sums = torch.zeros(len(terms) + num_counts, dtype=torch.float64, device=device)
        self._counting: Pending | None = None
        self._grad: torch.Tensor | None = None

    def start_counting(self, batches: Sequence[MicroBatch], mesh: Mesh) -> None:
        """Starts counting the targets of the global batch.

        Comm: all_reduce dp_cp of one number per kind of target.
        """
        targets = torch.stack([batch.target_counts for batch in batches]).sum(0)
        if self.sums.is_cuda:
            targets = targets.pin_memory()  # so that the host does not wait for the copy
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
        """Gradients of the sums, fp64 `[terms]`, from the global batch's numbers of targets."""
        has_targets = (counts > 0).to(counts.dtype)
        gradients = []
        for term in self._terms:
            # Terms of one name (depths of multi-token prediction) are averaged over those with
            # targets.
            of_name = [t.count_index for t in self._terms if t.name == term.name]
            num_terms = torch.stack([has_targets[i] for i in of_name]).sum().clamp(min=1)
            count = counts[term.count_index].clamp(min=1)
            gradients.append(term.coefficient / num_terms / count)
        return torch.stack(gradients)

"""The work of one pass through a layer: GEMMs, attention, tensors made, bytes sent.

step_time.py turns work into time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Protocol

from torch import nn

from megatron5d.comm.ledger import Traffic
from megatron5d.config.schema import Config
from megatron5d.model.attention import AttentionBranch
from megatron5d.model.flops import core_flops
from megatron5d.model.partition import StageSpec
from megatron5d.phases.phase import Phase
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.precision.gemm import ExpertGemms, Gemms, expert_gemms_of, gemms_of
from megatron5d.topology.shard_spec import spec_of, state_of
from megatron5d.train.pipeline_layout import boundary_form

Sent = Mapping[tuple[str, str], Traffic]
"""(axis, collective) -> calls, elements and bytes, as the ledger counts them."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM, or a grouped one.

    Args:
        rows: tokens in total.
        inputs: features of the weight.
        outputs: features of the weight.
        stack: number of experts, each with a weight.
        fp8: the operands are in FP8.
        summed: a weight gradient, added to the main gradient in fp32.
    """

    rows: float
    inputs: int
    outputs: int
    stack: int = 1
    fp8: bool = False
    summed: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs

    @property
    def num_bytes(self) -> float:
        """Smallest number of bytes that device memory reads and writes."""
        width = 1 if self.fp8 else 2
        tokens = self.rows * (self.inputs + self.outputs)
        weights = self.stack * self.inputs * self.outputs
        return tokens * width + weights * (8 if self.summed else width)


class Message(NamedTuple):
    """One collective of a phase, as the ledger counts it."""

    axis: str
    operation: str
    num_bytes: int  # sent by one rank, in a ring
    after_gemms: int  # number of GEMMs of the phase that ran before


class Step(NamedTuple):
    """One pass of one phase of a unit."""

    kind: str  # of phases/phase.py
    phase: str
    num_gemms: int
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Work:
    """One pass (F, B, I or W) of one or several units of one micro-batch, on one rank.

    Args:
        gemms: GEMM calls.
        core_flops: of attention between queries, keys and values.
        made_bytes: of tensors that the pass makes.
        num_made: number of these tensors.
        sent: by axis and collective.
        host_bytes: of tensors copied to the host or back.
        kept_bytes: new on the device after the pass; for a forward, what its backward needs.
        steps: passes of its phases in order, with their messages.
    """

    gemms: tuple[Gemm, ...] = ()
    core_flops: float = 0.0
    made_bytes: float = 0.0
    num_made: int = 0
    sent: Sent = field(default_factory=dict)
    host_bytes: float = 0.0
    kept_bytes: float = 0.0
    steps: tuple[Step, ...] = ()

    @property
    def flops(self) -> float:
        return sum(gemm.flops for gemm in self.gemms) + self.core_flops

    def times(self, sequences: int, layers: int = 1) -> Work:
        """Work on a micro-batch of several sequences: more rows and bytes, the same calls.

        Args:
            layers: layers that are recomputed together and keep, or offload, one input.
        """
        sent = {
            key: Traffic(t.calls, t.elements * sequences, t.num_bytes * sequences)
            for key, t in self.sent.items()
        }
        return Work(
            tuple(replace(gemm, rows=gemm.rows * sequences) for gemm in self.gemms),
            self.core_flops * sequences,
            self.made_bytes * sequences,
            self.num_made,
            sent,
            self.host_bytes * sequences / layers,
            self.kept_bytes * sequences / layers,
            tuple(
                step._replace(
                    messages=tuple(
                        m._replace(num_bytes=m.num_bytes * sequences) for m in step.messages
                    )
                )
                for step in self.steps
            ),
        )


@dataclass(frozen=True)
class Matrix:
    """A parameter whose update Muon orthogonalizes, as a full matrix on one rank.

    Args:
        elements: of this rank's part.
        expert: whether it belongs to routed experts.
        work: the iteration on the full matrix.
    """

    elements: int
    expert: bool
    work: Work


class Elements(NamedTuple):
    """A figure for each kind of parameters.

    Dense ones are replicated over dp and cp, experts over edp; tied ones are an embedding's on
    several pipeline ranks.
    """

    dense: Any = 0
    expert: Any = 0
    tied: Any = 0


@dataclass(frozen=True)
class Unit:
    """Parameters that are reduced, sharded and gathered together: embedding, block, or head.

    Args:
        passes: op -> its work for one micro-batch.
        params: number of parameters on this rank, by kind.
        frozen: those that are never updated (optim.freeze).
        fp8: those that are multiplied in FP8.
        read: name -> elements of parameters that other units read, too (the embedding, the head's
            matrix).
        borrowed: names of these that an earlier unit counts.
        fixed: names of these that are frozen.
        copied: axis -> elements whose copies on its ranks have partial gradients (norms under sp).
        matrices: those that Muon updates.
    """

    passes: Mapping[str, Work]
    params: Elements = Elements()
    frozen: Elements = Elements()
    fp8: Elements = Elements()
    read: Mapping[str, int] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    copied: Mapping[str, int] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()

    @property
    def trained(self) -> Elements:
        """Number of parameters that are updated."""
        return Elements(*(total - frozen for total, frozen in zip(self.params, self.frozen)))

    def borrowed_elements(self, *, trained: bool = False) -> int:
        """Elements that this unit reads and an earlier one counts; all, or those updated."""
        names = self.borrowed - self.fixed if trained else self.borrowed
        return sum(self.read[name] for name in names)

    @property
    def lent_elements(self) -> int:
        """Elements that this unit counts and other units read."""
        return sum(self.read.values()) - self.borrowed_elements()

    def times(self, sequences: int, layers: int = 1) -> Unit:
        """The unit with its work on several sequences; arguments as of `Work.times`."""
        passes = {op: work.times(sequences, layers) for op, work in self.passes.items()}
        return replace(self, passes=passes)


def total_work(works: Iterable[Work]) -> Work:
    """Sum of the work of several passes, or of the phases of one."""
    works = list(works)
    sent: dict[tuple[str, str], Traffic] = {}
    for work in works:
        for key, t in work.sent.items():
            total = sent.get(key, Traffic())
            sent[key] = Traffic(
                total.calls + t.calls, total.elements + t.elements, total.num_bytes + t.num_bytes
            )
    return Work(
        tuple(gemm for work in works for gemm in work.gemms),
        sum(work.core_flops for work in works),
        sum(work.made_bytes for work in works),
        sum(work.num_made for work in works),
        sent,
        sum(work.host_bytes for work in works),
        sum(work.kept_bytes for work in works),
        tuple(step for work in works for step in work.steps),
    )


class CoreFlops:
    """FLOPs of attention between queries, keys and values, of one sequence on one rank.

    The backward recomputes the scores: five GEMMs for the forward's two.
    """

    def __init__(self, config: Config) -> None:
        self._config, recompute = config, config.recompute
        recomputes = recompute.mode == "selective" and "attention" in recompute.parts
        backward = 2.5 + recomputes
        self._passes = {"forward": 1.0, "recompute": 1.0, "backward": backward, "wgrad": 0.0}

    def __call__(self, phase: Phase, kind: str) -> float:
        """FLOPs of one phase, run for one of the kinds of phases/phase.py."""
        if phase.kind != "attention":
            return 0.0
        parallel, seq_len = self._config.parallel, self._config.train.seq_len
        # Phases of multi-token prediction are wrapped in `PassThrough`.
        attention: Any = getattr(phase, "phase", phase)
        if not isinstance(attention, AttentionBranch):
            raise ValueError(
                f"the planner requires an attention phase to be an AttentionBranch "
                f"(got {type(attention).__name__})"
            )
        forward = core_flops(self._config.model, seq_len, attention.window) / 3 * seq_len
        return forward / (parallel.tp * parallel.cp) * self._passes[kind]


def message_bytes(config: Config, specs: Sequence[StageSpec]) -> list[int]:
    """Bytes of the hidden states that each stage sends to the next."""
    forms = [boundary_form(config, "meta", spec.num_states) for spec in specs]
    return [prod(form.shape) * form.dtype.itemsize for form in forms]


class Counts(Protocol):
    """An object that counts GEMMs."""

    gemms: list[Gemm]


def count_products(model: nn.Module, counter: Counts) -> None:
    """Replaces the object that multiplies each weight by a copy that counts."""
    copies: dict[int, Gemms | ExpertGemms] = {}
    for parameter in model.parameters():
        expert = spec_of(parameter).expert
        gemms = expert_gemms_of(parameter) if expert else gemms_of(parameter)
        if id(gemms) not in copies:
            counting = copies[id(gemms)] = copy.copy(gemms)
            for name in ("forward", "input_grad", "weight_grad"):
                count = _count_grouped if expert else _count_linear
                setattr(counting, name, count(counter, getattr(gemms, name), name))
        state_of(parameter).gemms = copies[id(gemms)]


def _count_linear(counter: Counts, gemm, name: str):
    """A counted GEMM of a linear layer: (x, weight), (dy, weight) or (weight, dy, x)."""

    def counted(first, second, *args):
        weight, tokens = (first, second[0]) if name == "weight_grad" else (second, first[0])
        features = weight.shape[1] if name == "forward" else weight.shape[0]
        inputs, outputs = weight.shape if name == "input_grad" else weight.shape[::-1]
        rows, summed = tokens.numel() // features, name == "weight_grad"
        counter.gemms.append(Gemm(rows, inputs, outputs, fp8=is_quantized(weight), summed=summed))
        return gemm(first, second, *args)

    return counted


def _count_grouped(counter: Counts, gemm, name: str):
    """A counted grouped GEMM: (x, weights, experts, offsets), (dy, ..) or (weights, dy, x, ..)."""

    def counted(*arguments):
        is_wgrad = name == "weight_grad"
        tokens, weights = arguments[:2][::-1] if is_wgrad else arguments[:2]
        rows, inputs, experts = tokens[0].shape[0], weights.shape[-1], arguments[-2]
        outputs, fp8 = weights.numel() // inputs // experts, is_quantized(weights)
        counter.gemms.append(Gemm(rows, inputs, outputs, experts, fp8, is_wgrad))
        return gemm(*arguments)

    return counted

"""The work of one pass through a layer: GEMMs, attention, tensors made, bytes sent. step_time.py
has times."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple, Protocol

from torch import nn

from megatron5d.comm.ledger import Traffic
from megatron5d.config.schema import Config
from megatron5d.model.flops import core_flops
from megatron5d.model.partition import StageSpec
from megatron5d.phases.phase import Phase
from megatron5d.precision.fp8_recipes import is_quantized
from megatron5d.precision.gemm import ExpertGemms, Gemms, expert_gemms_of, gemms_of
from megatron5d.topology.shard_spec import spec_of, state_of
from megatron5d.train.pipeline_layout import boundary_form

Sent = Mapping[tuple[str, str], Traffic]
"""(axis, operation) -> calls, elements and bytes, as the ledger has them."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM, or a grouped one.

    Args:
        rows: tokens, in all.
        inputs, outputs: of the weight.
        stack: experts, each with a weight.
        fp8: the operands are in FP8.
        summed: it is a weight's gradient, added to what is there in fp32.
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
        """Bytes that the device's memory reads and writes, at least."""
        width = 1 if self.fp8 else 2
        tokens, weights = (
            self.rows * (self.inputs + self.outputs),
            self.stack * self.inputs * self.outputs,
        )
        return tokens * width + weights * (8 if self.summed else width)


@dataclass(frozen=True)
class Work:
    """One pass (F, B, I or W) of one or several units of one micro-batch, on one rank.

    Args:
        gemms: GEMM calls.
        core_flops: of attention between queries, keys and values.
        made_bytes: of tensors that the pass makes.
        made: how many.
        sent: by axis and operation.
        host_bytes: of tensors on their way to the host or back.
        kept_bytes: on the device after the pass that were not there before; of a forward, what its
            backward needs.
    """

    gemms: tuple[Gemm, ...] = ()
    core_flops: float = 0.0
    made_bytes: float = 0.0
    made: int = 0
    sent: Sent = field(default_factory=dict)
    host_bytes: float = 0.0
    kept_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(gemm.flops for gemm in self.gemms) + self.core_flops

    def times(self, sequences: int, layers: int = 1) -> Work:
        """Returns the same of a micro-batch of this many sequences: more rows and bytes, as many
        calls; of a layer whose input is kept or copied to the host once for several layers."""
        sent = {
            key: Traffic(each.calls, each.elements * sequences, each.num_bytes * sequences)
            for key, each in self.sent.items()
        }
        gemms = tuple(
            Gemm(g.rows * sequences, g.inputs, g.outputs, g.stack, g.fp8, g.summed)
            for g in self.gemms
        )
        return Work(
            gemms,
            self.core_flops * sequences,
            self.made_bytes * sequences,
            self.made,
            sent,
            self.host_bytes * sequences / layers,
            self.kept_bytes * sequences / layers,
        )


@dataclass(frozen=True)
class Matrix:
    """A parameter whose update Muon makes orthogonal, whole and on one rank.

    Args:
        elements: of this rank's part.
        expert: it belongs to routed experts.
        work: the iteration of the whole.
    """

    elements: int
    expert: bool
    work: Work


class Elements(NamedTuple):
    """Something of each kind of parameters: those that dp and cp share, routed experts' (edp), an
    embedding's that several pipeline ranks hold."""

    dense: Any = 0
    expert: Any = 0
    tied: Any = 0


@dataclass(frozen=True)
class Unit:
    """What is reduced, sharded and gathered together: the embedding, a block, the head.

    Args:
        passes: op -> its work for one micro-batch.
        held: parameters of this rank.
        frozen: those among them that are never updated (optim.freeze).
        fp8: those among them that are multiplied in FP8.
        read: of what other units read as well (the embedding, the head's matrix) name -> elements.
        borrowed: names among them that an earlier unit counts.
        fixed: names among them that are frozen.
        copied: axis -> those of which its ranks hold copies whose gradients are added up (norms
            under sp).
        matrices: those that Muon updates.
    """

    passes: Mapping[str, Work]
    held: Elements = Elements()
    frozen: Elements = Elements()
    fp8: Elements = Elements()
    read: Mapping[str, int] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    copied: Mapping[str, int] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()

    @property
    def trained(self) -> Elements:
        """Parameters that are updated."""
        return Elements(*(held - frozen for held, frozen in zip(self.held, self.frozen)))

    def borrowed_elements(self, *, trained: bool = False) -> int:
        """Returns the elements of what it reads and an earlier unit counts; all, or those that are
        updated."""
        return sum(
            self.read[name] for name in self.borrowed if not (trained and name in self.fixed)
        )

    @property
    def lent_elements(self) -> int:
        """Elements of what it counts and other units read."""
        return sum(self.read.values()) - self.borrowed_elements()

    def times(self, sequences: int, layers: int = 1) -> Unit:
        """Returns the unit with its work on a micro-batch of a number of sequences; `layers` as in
        `Work.times`."""
        return replace(
            self, passes={op: work.times(sequences, layers) for op, work in self.passes.items()}
        )


def total_work(works: Iterable[Work]) -> Work:
    """Returns the work of several passes, or phases of one, done one after the other."""
    works = list(works)
    sent: dict[tuple[str, str], Traffic] = {}
    for work in works:
        for key, each in work.sent.items():
            known = sent.get(key, Traffic())
            sent[key] = Traffic(
                known.calls + each.calls,
                known.elements + each.elements,
                known.num_bytes + each.num_bytes,
            )
    return Work(
        tuple(gemm for work in works for gemm in work.gemms),
        sum(work.core_flops for work in works),
        sum(work.made_bytes for work in works),
        sum(work.made for work in works),
        sent,
        sum(work.host_bytes for work in works),
        sum(work.kept_bytes for work in works),
    )


class CoreFlops:
    """FLOPs of attention between queries, keys and values, of one sequence on one rank.

    Its backward makes the scores again: five GEMMs for the forward's two.
    """

    def __init__(self, config: Config) -> None:
        self._config, recompute = config, config.recompute
        again = recompute.mode == "selective" and "attention" in recompute.parts
        self._passes = {"forward": 1.0, "recompute": 1.0, "backward": 2.5 + again, "wgrad": 0.0}

    def __call__(self, phase: Phase, kind: str) -> float:
        """Returns those of one phase, run for one of the kinds of phases/phase.py."""
        if phase.kind != "attention":
            return 0.0
        parallel, seq_len = self._config.parallel, self._config.train.seq_len
        # Carrying wraps those of multi-token prediction
        attention: Any = getattr(phase, "phase", phase)
        whole = core_flops(self._config.model, seq_len, attention.core.window) / 3 * seq_len
        return whole / (parallel.tp * parallel.cp) * self._passes[kind]


def message_bytes(config: Config, specs: Sequence[StageSpec]) -> list[int]:
    """Returns bytes of the hidden states that each stage sends to the next."""
    forms = [boundary_form(config, "meta", spec.sent) for spec in specs]
    return [prod(form.shape) * form.dtype.itemsize for form in forms]


class Counts(Protocol):
    """What counts GEMMs."""

    gemms: list[Gemm]


def count_products(model: nn.Module, counter: Counts) -> None:
    """Hangs on every weight a copy of the object that multiplies it, which counts."""
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
    """Returns a GEMM of a linear layer that is counted: (x, weight), (dy, weight) or (weight, dy,
    x)."""

    def counted(first, second, *rest):
        weight, tokens = (first, second[0]) if name == "weight_grad" else (second, first[0])
        features = weight.shape[1] if name == "forward" else weight.shape[0]
        shape = (
            (weight.shape[0], weight.shape[1])
            if name == "input_grad"
            else (weight.shape[1], weight.shape[0])
        )
        rows, summed = tokens.numel() // features, name == "weight_grad"
        counter.gemms.append(Gemm(rows, *shape, fp8=is_quantized(weight), summed=summed))
        return gemm(first, second, *rest)

    return counted


def _count_grouped(counter: Counts, gemm, name: str):
    """Returns the same of experts: (x, weights, experts, offsets), (dy, ...) or (weights, dy, x,
    experts, offsets)."""

    def counted(*given):
        place = 0 if name == "weight_grad" else 1
        weights, tokens, experts = given[place], given[1 - place][0], given[-2]
        inputs, outputs = weights.shape[-1], weights.numel() // weights.shape[-1] // experts
        summed = name == "weight_grad"
        counter.gemms.append(
            Gemm(tokens.shape[0], inputs, outputs, experts, is_quantized(weights), summed)
        )
        return gemm(*given)

    return counted

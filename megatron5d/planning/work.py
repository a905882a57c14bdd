"""The work of one pass through a layer: GEMMs, attention, tensors made, bytes sent. step_time.py has times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from megatron5d.comm.ledger import Traffic

Sent = Mapping[tuple[str, str], Traffic]
"""(axis, operation) -> calls, elements and bytes, as the ledger has them."""


@dataclass(frozen=True)
class Product:
    """One call that multiplies matrices.

    Args:
        rows: tokens, in all.
        inputs, outputs: of the weight.
        stack: experts, each with a weight.
        eight_bits: the operands are.
        summed: it is a weight's gradient, added to what is there in fp32.
    """

    rows: float
    inputs: int
    outputs: int
    stack: int = 1
    eight_bits: bool = False
    summed: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs

    @property
    def num_bytes(self) -> float:
        """Bytes that the device's memory reads and writes, at least."""
        width = 1 if self.eight_bits else 2
        tokens, weights = self.rows * (self.inputs + self.outputs), self.stack * self.inputs * self.outputs
        return tokens * width + weights * (8 if self.summed else width)


@dataclass(frozen=True)
class Work:
    """One pass (F, B, I or W) of one or several units of one micro-batch, on one rank.

    Args:
        products: calls that multiply matrices.
        core_flops: of attention between queries, keys and values.
        made_bytes: of tensors that the pass makes.
        made: how many.
        sent: by axis and operation.
        host_bytes: of tensors on their way to the host or back.
        kept_bytes: on the device after the pass that were not there before; of a forward, what its backward needs.
    """

    products: tuple[Product, ...] = ()
    core_flops: float = 0.0
    made_bytes: float = 0.0
    made: int = 0
    sent: Sent = field(default_factory=dict)
    host_bytes: float = 0.0
    kept_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products) + self.core_flops

    def times(self, sequences: int) -> Work:
        """The same of a micro-batch of so many sequences: more rows and bytes, as many calls."""
        sent = {
            key: Traffic(each.calls, each.elements * sequences, each.num_bytes * sequences)
            for key, each in self.sent.items()
        }
        products = tuple(replace(product, rows=product.rows * sequences) for product in self.products)
        return Work(products, self.core_flops * sequences, self.made_bytes * sequences, self.made, sent,
                    self.host_bytes * sequences, self.kept_bytes * sequences)  # fmt: skip


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


@dataclass(frozen=True)
class Unit:
    """What is reduced, sharded and gathered together: the embedding, a block, the head.

    Args:
        passes: op -> its work for one micro-batch.
        dense: parameters of this rank that dp and cp share.
        expert: those of routed experts, which edp shares.
        tied: those of a tied embedding that the mirrored pipeline rank holds too.
        read: of what other units read as well (the embedding, the head's matrix) name -> elements.
        borrowed: names among them that an earlier unit counts.
        copied: axis -> those of which its ranks hold copies whose gradients are added up (norms under sp).
        matrices: among them those that Muon updates.
        eight_bits: elements of dense and experts' matrices that are multiplied in 8 bits.
    """

    passes: Mapping[str, Work]
    dense: int
    expert: int
    tied: int = 0
    read: Mapping[str, int] = field(default_factory=dict)
    borrowed: frozenset[str] = frozenset()
    copied: Mapping[str, int] = field(default_factory=dict)
    matrices: tuple[Matrix, ...] = ()
    eight_bits: tuple[int, int] = (0, 0)

    @property
    def borrowed_elements(self) -> int:
        """Elements of what it reads and an earlier unit counts."""
        return sum(self.read[name] for name in self.borrowed)

    @property
    def lent_elements(self) -> int:
        """Elements of what it counts and other units read."""
        return sum(self.read.values()) - self.borrowed_elements

    def times(self, sequences: int) -> Unit:
        return replace(self, passes={op: work.times(sequences) for op, work in self.passes.items()})


def together(works: Iterable[Work]) -> Work:
    """The work of several passes, or phases of one, done one after the other."""
    works = list(works)
    sent: dict[tuple[str, str], Traffic] = {}
    for work in works:
        for key, each in work.sent.items():
            known = sent.get(key, Traffic())
            sent[key] = Traffic(
                known.calls + each.calls, known.elements + each.elements, known.num_bytes + each.num_bytes
            )
    return Work(
        tuple(product for work in works for product in work.products),
        sum(work.core_flops for work in works),
        sum(work.made_bytes for work in works),
        sum(work.made for work in works),
        sent,
        sum(work.host_bytes for work in works),
        sum(work.kept_bytes for work in works),
    )

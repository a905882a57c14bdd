"""What the optimiser adds to a step: passes over the elements that a rank owns, Muon's whole matrices, the host's part.

Under Muon a rank makes one matrix of each round orthogonal (optim/matrix_gather.py), and every round takes as long as its
largest matrix. With `optim.offload` gradients travel to the host, which updates, and weights back; nothing hides that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron5d.planning.dp_traffic import Sharding, Transfers
from megatron5d.planning.work import Matrix, Unit

# Bytes that an update reads and writes an element, with masters in fp32 and weights in 16 bits.
# AdamW, one kernel: gradient twice (its norm), master and two moments read and written, the weight written.
ADAMW_BYTES = 34
# Muon, line by line: gradient's norm 4, momentum 20, direction 18, six copies on the way to the whole matrix and back
# 24, decay 8, update 10, weight 6.
MUON_BYTES = 90


@dataclass(frozen=True)
class Round:
    """Matrices that the ranks of two axes make orthogonal side by side, one a rank, the largest first.

    Args:
        shard, cut: axes: ranks that share a local parameter, ranks that each have one.
        size: of `shard`, in ranks; 1 where nothing is sharded.
        matrices: at most as many as there are ranks.
    """

    shard: str
    cut: str
    size: int
    matrices: Sequence[Matrix]

    def sent(self, cut_size: int, width: int) -> Transfers:
        """(axis, operation) -> bytes that the first rank sends, which has a matrix in every round.

        Args:
            cut_size: ranks of `cut`.
            width: bytes of an element on its way.
        """
        share = sum(matrix.elements for matrix in self.matrices) / self.size
        local = sum(matrix.elements for matrix in self.matrices[:: self.size])
        return {
            (self.shard, "all_to_all"): (share + local) * (self.size - 1) / self.size * width,
            (self.cut, "all_to_all"): 2 * local * (cut_size - 1) / cut_size * width,
        }


def rounds(units: Sequence[Unit], sharding: Sharding) -> Iterator[Round]:
    """The rounds in which Muon assembles the matrices of a rank's units."""
    for expert, cut in ((False, "tp"), (True, "etp")):
        shard = sharding.shards[expert]
        matrices = [matrix for unit in units for matrix in unit.matrices if matrix.expert is expert]
        matrices.sort(key=lambda matrix: -matrix.elements)
        size = sharding.sizes[shard]
        together = size * sharding.sizes[cut]
        for start in range(0, len(matrices), together):
            yield Round(shard, cut, size, matrices[start : start + together])


def assembled(units: Sequence[Unit], sharding: Sharding) -> Transfers:
    """What assembling Muon's matrices, and sending the updates back, sends in a step."""
    sent = defaultdict[tuple[str, str], float](float)
    for each in rounds(units, sharding):
        for key, num_bytes in each.sent(sharding.sizes[each.cut], sharding.weight).items():
            sent[key] += num_bytes
    return sent


def passed_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes that a rank's update reads and writes, without Muon's iteration."""
    muon = sharding.owned_matrices(units)
    return (sharding.owned(units) - muon) * ADAMW_BYTES + muon * MUON_BYTES


def carried_bytes(units: Sequence[Unit], sharding: Sharding) -> float:
    """Bytes between device and host with `optim.offload`: gradients there and weights back; for Muon's matrices also
    what is orthogonalised, and the result."""
    muon = sharding.owned_matrices(units)
    return sharding.owned(units) * (sharding.grad + sharding.weight) + muon * 2 * sharding.weight

"""How many rows travel where a forecast runs on the meta device, whose tensors have no values to count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron5d.topology.axis import Axis


@dataclass
class PlannedLoad:
    """What is assumed of the rows that a rank receives.

    Args:
        load: rows that it receives, in even shares.
        limit: rows that it may receive at most, in even shares (the experts' capacity).
        sent: fraction of the choices that is sent at all.
    """

    load: float = 1.0
    limit: float = math.inf
    sent: float = 1.0

    def counts(self, num_choices: int, ep: Axis, etp: Axis, num_local: int) -> Tensor:
        """Counts of rows from every rank to every expert, in which this rank receives `load` times an even share.

        No rank receives more than all choices, or than its experts' capacity; the others receive less as this one
        receives more.

        Args:
            num_choices: n·k of one rank.
            ep, etp: axes of the expert view.
            num_local: E/ep.

        Returns:
            int64 `[ep, etp, ep, E/ep]`: source ep, source etp, target ep, its expert.
        """
        choices = num_choices * self.sent
        sent = round(choices * min(1.0, self.limit))
        most = min(sent, math.ceil(choices / ep.size * min(self.limit, ep.size)))
        mine = min(most, round(choices / ep.size * self.load))
        rows = [mine if rank == ep.rank else min(most, (sent - mine) // max(1, ep.size - 1)) for rank in range(ep.size)]
        after = (ep.rank + 1) % ep.size
        rows[after] += min(sent - sum(rows), most - rows[after])
        split = torch.tensor([[n // num_local + (e < n % num_local) for e in range(num_local)] for n in rows])
        return split.expand(ep.size, etp.size, ep.size, num_local)

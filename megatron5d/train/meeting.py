"""The ranks meet before any process group is made: all continue, with rank 0's configuration, or
all end and say why.

Each rank composes and checks its configuration by itself. What it finds may be true of its node
alone (a data file, a GPU, a variable of its environment), so a rank that cannot continue tells the
others instead of leaving them waiting.
"""

import json
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from megatron5d.config.convert import from_dict, leaves, to_dict, value_of
from megatron5d.config.errors import REFUSED, ConfigError, Fault, message
from megatron5d.config.schema import Config
from megatron5d.topology.launcher import MET, Environment
from megatron5d.topology.process import allow_connections, choose_device
from megatron5d.topology.rendezvous import Hello, Troubled, meet

Check = Callable[[Config, int], Sequence[Fault]]
_SHOWN = 4  # keys that differ


class Meeting:
    """This rank on its way to the others.

    Args:
        check: what is wrong with a configuration on this node; asked of rank 0's, where this rank's
            is another.
    """

    def __init__(self, environment: Environment, check: Check) -> None:
        self.environment, self.check = environment, check
        self.store: dist.Store | None = None
        self.notes: list[str] = []
        self.config: Config | None = None

    def agree(self, config: Config) -> Config:
        """Waits for the others and returns rank 0's configuration, which is usually that of this
        rank, too.

        Comm: that of `meet`; none at world 1 and where the ranks have met already.

        Raises SystemExit: on every rank, if one of them cannot continue. Raises OSError,
        TimeoutError, ValueError: as `meet`.
        """
        if not self._needed:
            return config
        self.config = config
        try:
            choose_device(self.environment.local_rank)
            allow_connections(self.environment)
        except ValueError as error:
            self.refuse([Fault("device", (), str(error), "see above", local=True)])
        try:
            met = meet(self.environment, Hello(json.dumps(to_dict(config)), self._review))
        except Troubled as error:
            self._end(error.troubles)
        self.store = met.store
        self.notes += [met.remark] if met.remark else []
        return self.config

    def refuse(self, faults: Sequence[Fault]) -> None:
        """Tells the others why this rank refuses its configuration, and ends it. Raises SystemExit:
        always, with code 2."""
        said = message(faults)
        if self.environment.rank == 0:
            print(said, file=sys.stderr, flush=True)
        self._tell(said, REFUSED)

    def crash(self, error: Exception) -> None:
        """Tells the others that this rank ends with an error, which the caller raises again."""
        with suppress(SystemExit):
            self._tell(f"{type(error).__name__}: {error}", 1)

    @property
    def _needed(self) -> bool:
        return self.environment.world > 1 and self.environment.meeting != MET

    def _tell(self, said: str, code: int) -> None:
        if not self._needed:
            raise SystemExit(code)
        try:
            meet(self.environment, Hello(trouble=self._trouble(said, code)))
        except Troubled as error:
            self._end(error.troubles)
        except (
            OSError,
            ValueError,
        ):  # nobody to be told: the others have ended, or cannot be reached
            if self.environment.rank and self.environment.local_rank == 0:
                print(f"{self._who}: {said}", file=sys.stderr, flush=True)
        raise SystemExit(code)

    @property
    def _who(self) -> str:
        return f"rank {self.environment.rank} on {socket.gethostname()}"

    def _trouble(self, said: str, code: int) -> str:
        return json.dumps([self.environment.rank, self._who, said, code])

    def _review(self, word: str) -> tuple[str, str]:
        """Takes rank 0's configuration over; (trouble, remark)."""
        mine, theirs = self.config, from_dict(json.loads(word))
        assert mine is not None
        self.config = theirs
        differ = [key for key in leaves() if value_of(mine, key) != value_of(theirs, key)]
        shown = [
            f"{key} = {value_of(theirs, key)}, {value_of(mine, key)} on {self._who}"
            for key in differ[:_SHOWN]
        ]
        more = f" and {len(differ) - _SHOWN} more keys" if len(differ) > _SHOWN else ""
        remark = f"not the same on all ranks: {'; '.join(shown)}{more}; all take rank 0's"
        try:
            faults = list(self.check(theirs, self.environment.world))
        except ConfigError as error:
            faults = list(error.faults)
        return (self._trouble(f"{remark}; {message(faults)}", REFUSED) if faults else ""), remark

    def _end(self, troubles: Sequence[str]) -> None:
        """Prints on rank 0 each fault once; ends every rank with the worst code."""
        told = sorted(map(json.loads, troubles))
        if self.environment.rank == 0:
            mine = {said for rank, _, said, _ in told if rank == 0}
            others: dict[str, list[str]] = {}
            for rank, who, said, _ in told:
                if rank and said not in mine:
                    others.setdefault(said, []).append(who)
            for said, (first, *rest) in others.items():
                more = f" (and {len(rest)} more rank{'s' if len(rest) > 1 else ''})" if rest else ""
                print(f"{first}{more}: {said}", file=sys.stderr, flush=True)
        raise SystemExit(min(code for *_, code in told))

"""Agreement of all ranks on one configuration, before any process group is made.

Each rank composes and checks its configuration by itself. Its faults may concern its node alone (a
data file, a GPU, an environment variable), so a rank that cannot continue reports this to the
others. Either all ranks continue, with rank 0's configuration, or all of them end and say why.
"""

import json
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from megatron5d.config.convert import from_dict, leaves, to_dict, value_of
from megatron5d.config.errors import REFUSED, ConfigError, Fault, message
from megatron5d.config.schema import Config
from megatron5d.topology.launcher import INITIALIZED, Environment
from megatron5d.topology.process import check_connections, choose_device
from megatron5d.topology.rendezvous import RankReport, RanksFailed, meet

Check = Callable[[Config, int], Sequence[Fault]]
_SHOWN_KEYS = 4  # of those that differ


class ConfigAgreement:
    """Agrees on one configuration before process groups exist.

    Args:
        check: checks a configuration on this node, given the number of ranks; called with rank 0's
            configuration where this rank's differs.

    Attributes:
        store: the store that all ranks share, once they have agreed; None where none is needed.
        warnings: keys whose values differed between ranks, as text for the log.
    """

    def __init__(self, environment: Environment, check: Check) -> None:
        self.environment, self.check = environment, check
        self.store: dist.Store | None = None
        self.warnings: list[str] = []
        self._config: Config | None = None

    def agree(self, config: Config) -> Config:
        """Waits for the other ranks.

        Args:
            config: this rank's configuration.

        Returns:
            Rank 0's configuration, which is usually the same.

        Raises:
            SystemExit: on every rank, if one of them cannot continue.
            OSError, TimeoutError, ValueError: as `meet`.

        Comm: that of `meet`; none at world 1 or where a process group exists already.
        """
        if not self._has_peers:
            return config
        self._config = config
        try:
            choose_device(self.environment.local_rank)
            check_connections(self.environment)
        except ValueError as error:
            self._refuse([Fault("device", (), str(error), "see above", local=True)])
        try:
            rendezvous = meet(
                self.environment, RankReport(json.dumps(to_dict(config)), self._take_over)
            )
        except RanksFailed as failed:
            self._end_all(failed.errors)
        self.store = rendezvous.store
        self.warnings += [rendezvous.warning] if rendezvous.warning else []
        return self._config

    def withdraw(self, error: Exception) -> None:
        """Reports to the other ranks that this one has no configuration; the caller raises `error`.

        Raises:
            SystemExit: 2, in place of a ConfigError.
        """
        if isinstance(error, ConfigError):
            self._refuse(error.faults)
        with suppress(SystemExit):
            self._report(f"{type(error).__name__}: {error}", 1)

    @property
    def _has_peers(self) -> bool:
        return self.environment.world > 1 and self.environment.init_method != INITIALIZED

    @property
    def _name(self) -> str:
        return f"rank {self.environment.rank} on {socket.gethostname()}"

    def _refuse(self, faults: Sequence[Fault]) -> NoReturn:
        text = message(faults)
        if self.environment.rank == 0:
            print(text, file=sys.stderr, flush=True)
        self._report(text, REFUSED)

    def _report(self, text: str, code: int) -> NoReturn:
        """Sends an error to the other ranks and ends this one."""
        if not self._has_peers:
            raise SystemExit(code)
        try:
            meet(self.environment, RankReport(error=self._error(text, code)))
        except RanksFailed as failed:
            self._end_all(failed.errors)
        except (OSError, ValueError):
            # the others have ended or cannot be reached, so rank 0 does not print this error
            if self.environment.rank and self.environment.local_rank == 0:
                print(f"{self._name}: {text}", file=sys.stderr, flush=True)
        raise SystemExit(code)

    def _error(self, text: str, code: int) -> tuple[int, str, str, int]:
        return self.environment.rank, self._name, text, code

    def _take_over(self, payload: str) -> tuple[Any, str]:
        """Replaces this rank's configuration by rank 0's, which differs; (error, warning)."""
        config, self._config = self._config, from_dict(json.loads(payload))
        assert config is not None
        values = {key: (value_of(self._config, key), value_of(config, key)) for key in leaves()}
        differences = [
            f"{key} = {rank_0_value}, {value} on {self._name}"
            for key, (rank_0_value, value) in values.items()
            if value != rank_0_value
        ]
        num_hidden = len(differences) - _SHOWN_KEYS
        more = f" and {num_hidden} more keys" if num_hidden > 0 else ""
        shown = "; ".join(differences[:_SHOWN_KEYS])
        warning = f"not the same on all ranks: {shown}{more}; all take rank 0's"
        try:
            faults = self.check(self._config, self.environment.world)
        except ConfigError as refusal:
            faults = refusal.faults
        error = self._error(f"{warning}; {message(faults)}", REFUSED) if faults else None
        return error, warning

    def _end_all(self, errors: Sequence[tuple[int, str, str, int]]) -> NoReturn:
        """Ends every rank with the worst code; rank 0 prints each error once."""
        errors = sorted(errors)
        if self.environment.rank == 0:
            printed = {text for rank, _, text, _ in errors if rank == 0}
            names_by_text: dict[str, list[str]] = {}
            for _, name, text, _ in errors:
                if text not in printed:
                    names_by_text.setdefault(text, []).append(name)
            for text, (name, *more_names) in names_by_text.items():
                plural = "s" if len(more_names) > 1 else ""
                more = f" (and {len(more_names)} more rank{plural})" if more_names else ""
                print(f"{name}{more}: {text}", file=sys.stderr, flush=True)
        raise SystemExit(min(code for *_, code in errors))

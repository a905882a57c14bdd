"""The command line of a tool that plans or checks a run: its options, and overrides anywhere between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron5d.config.arguments import FLAGS
from megatron5d.config.fault import closest


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser, with subcommands or without, whose overrides need not come last or stand together."""

    _takes_overrides = False

    def add_overrides(self) -> None:
        """Adds `overrides`: what pretrain.py takes, folders of the user's own groups among it."""
        self.add_argument(
            "--config-dir", action="append", default=[], metavar="DIR", help=FLAGS["--config-dir"].removeprefix("DIR ")
        )
        self.add_argument("overrides", nargs="*", metavar="key=value", help="of the configuration")
        self._takes_overrides = True

    def parse_known_args(  # type: ignore[override]  # whose overloads tell what a given namespace becomes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Takes overrides behind later options too, which argparse leaves over."""
        found, left = super().parse_known_args(args, namespace)
        if not self._takes_overrides:
            return found, left
        for word in left:
            if word.startswith("-"):
                near = closest(word.partition("=")[0], self._option_string_actions, 0.6)
                self.error(f"{word} is no option" + (f"; did you mean {near}?" if near else ""))
        found.overrides = [*(f"--config-dir={folder}" for folder in found.config_dir), *found.overrides, *left]
        return found, []

"""Command lines of tools: options, with positional words such as overrides anywhere between them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron5d.config.command_line import FLAGS
from megatron5d.config.errors import closest


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser whose positional words may be anywhere on the command line; also with subcommands."""

    _words: argparse.Action | None = None
    _takes_overrides = False

    def add_words(self, name: str, **options: Any) -> None:
        """Adds a positional argument of several words; takes the options of `add_argument`."""
        self._words = self.add_argument(name, **options)

    def add_overrides(self) -> None:
        """Adds overrides of the configuration as pretrain.py takes them, and `--config-dir`."""
        self.add_argument(
            "--config-dir", action="append", default=[], metavar="DIR", help=FLAGS["--config-dir"].removeprefix("DIR ")
        )
        self.add_words("overrides", nargs="*", metavar="key=value", help="of the configuration")
        self._takes_overrides = True

    def parse_known_args(  # type: ignore[override]  # whose overloads tell what a given namespace becomes
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Also takes words after later options, which argparse does not."""
        found, left = super().parse_known_args(args, namespace)
        if self._words is None:
            return found, left
        for word in left:
            if word.startswith("-"):
                near = closest(word.partition("=")[0], self._option_string_actions, 0.6)
                self.error(f"{word} is no option" + (f"; did you mean {near}?" if near else ""))
        words = [*getattr(found, self._words.dest), *map(self._words.type or str, left)]  # type: ignore[arg-type]
        folders = found.config_dir if self._takes_overrides else []
        setattr(found, self._words.dest, [*(f"--config-dir={folder}" for folder in folders), *words])
        return found, []

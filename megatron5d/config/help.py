"""The text of `--help`: flags, the options of each group, and the YAML files with every key and its unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron5d.config.command_line import FLAGS

_HEAD = """\
pretrain.py [flags] [group=option ...] [key=value ...]

A group chooses a file of conf/, a key one value in it; later words win. Examples:
    bash launch/local.sh 16 experiment=quickstart train.steps=400
    python pretrain.py model=llama3_8b parallel.tp=8 parallel.sp=true data.train='[0.7 /d/web, 0.3 /d/code]'
Exit codes: 0 finished, 2 configuration refused, 75 stopped on a signal with a checkpoint saved.
"""


def groups_in(folders: Sequence[Path]) -> dict[str, list[str]]:
    """The groups of some config folders, each with the options it offers."""
    found: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/**/*.yaml"):
            group, *name = file.relative_to(folder).with_suffix("").parts
            found.setdefault(group, set()).add("/".join(name))
    return {group: sorted(options) for group, options in sorted(found.items())}


def help_text(folders: Sequence[Path]) -> str:
    """The text of `--help`.

    Args:
        folders: config folders, ours first.
    """
    groups = groups_in(folders)
    parts = [_HEAD, "Flags:", *(f"    {flag:14} {what}" for flag, what in FLAGS.items()), "", "Groups:"]
    parts += [f"    {group:14} {', '.join(options)}" for group, options in groups.items()]
    for group in groups:
        listing = folders[0] / group / "default.yaml"
        if listing.is_file():
            parts += ["", f"{group}:", *("    " + line for line in listing.read_text().splitlines())]
    return "\n".join(parts) + "\n"
